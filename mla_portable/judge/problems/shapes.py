# SPDX-License-Identifier: Apache-2.0
"""The values that shapes take: those of a fixed list that a Support accepts; what a device has room and graphs for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from mla_portable.contracts import DeviceFacts, Implementation, Promises, Request, Support
from mla_portable.judge.problems.cover import Choice
from mla_portable.layouts import BF16, LAYOUTS, CacheLayout

HEADS: Final = (1, 8, 16, 24, 32, 64, 128)
TOPKS: Final = (64, 100, 128, 1024, 2048)
BLOCK_SIZES: Final = (1, 16, 53, 64)
QUERY_LENS: Final = (1, 2, 4)
NARROW: Final = 8
_PROMISED: Final[dict[str, Any]] = dict.fromkeys((each.name for each in fields(Promises)), True)
"""What is promised where shapes are asked about: a promise refuses none."""

Storage = tuple[str, str | None]
"""(kv, scale_format): a layout or `workspace_of` one; None for a layout without scales."""
WORKSPACE: Final = "workspace"


def workspace_of(layout: str) -> str:
    """What cases call flat rows of a layout: the name of the storage starts with WORKSPACE."""
    return WORKSPACE if layout == BF16.name else f"{WORKSPACE}_{layout}"


def layout_of_storage(kv: str) -> str:
    """The layout of a storage, which is a paged layout or what `workspace_of` made of one."""
    return BF16.name if kv == WORKSPACE else kv.removeprefix(f"{WORKSPACE}_")


def accepted(implementation: Implementation, facts: DeviceFacts, field: str, candidates: Sequence[Any]) -> list[Any]:
    """The candidates for one field of a Request that the implementation claims, each once, in order."""
    base = Request(implementation.primitive, facts, **_PROMISED)
    return [
        value
        for value in dict.fromkeys(candidates)
        if not any(True for _ in implementation.support.shape_reasons(base.but(**{field: value})))
    ]


def storages(implementation: Implementation) -> list[Storage]:
    """The caches that the implementation claims to read or write."""
    layouts = [LAYOUTS[name] for name in implementation.layouts]
    return [(each.name, scale_format) for each in layouts for scale_format in scales_of(implementation.support, each)]


def scales_of(support: Support, layout: CacheLayout) -> tuple[str | None, ...]:
    """The scale formats of a layout that an implementation claims; (None,) where it has none."""
    if not layout.scale_formats:
        return (None,)
    return layout.scale_formats if support.kv_layouts is None else layout.scale_formats_of(support.scale_formats)


def one_storage_each(storages: Iterable[Storage]) -> list[Storage]:
    """The first storage of each layout: for cases in which the scale format makes no difference."""
    return list({kv: (kv, scale_format) for kv, scale_format in reversed(list(storages))}.values())[::-1]


def heads(implementation: Implementation, facts: DeviceFacts, level: str) -> list[int]:
    """Head counts: the usual ones, those that the implementation names, and one below each count it pads to."""
    support = implementation.support
    named = [*(support.num_heads or ()), *support.padded_heads, *(padded - 1 for padded in support.padded_heads)]
    limit = [support.max_heads] if support.max_heads is not None and support.max_heads <= 256 else []
    found = sorted(accepted(implementation, facts, "num_heads", [n for n in (*HEADS, *named, *limit) if n > 0]))
    return _few(found, near=16) if level == "smoke" else found


def topks(implementation: Implementation, facts: DeviceFacts, level: str) -> list[int]:
    """Widths that make an axis: the usual ones, the multiple that is asked for, the largest that is allowed."""
    found = _topks(implementation, facts)
    wide = [n for n in found if n >= NARROW] or found
    return _few(wide, near=100) if level == "smoke" else wide


def narrow_topks(implementation: Implementation, facts: DeviceFacts) -> list[int]:
    """Widths that are claimed and too narrow for a front, a middle and an end; they get cases of their own."""
    return [n for n in _topks(implementation, facts) if n < NARROW]


def _topks(implementation: Implementation, facts: DeviceFacts) -> list[int]:
    support = implementation.support
    limit = [support.max_topk] if support.max_topk is not None and support.max_topk <= 4096 else []
    listed = [topk for topk in support.topks if topk <= 4096] or support.topks[:1]
    return sorted(accepted(implementation, facts, "topk", (*TOPKS, support.topk_multiple, *limit, *listed)))


def block_sizes(implementation: Implementation, facts: DeviceFacts, level: str) -> list[int]:
    """Block sizes: the usual ones, those that are named, odd multiples of the granule."""
    support = implementation.support
    granule, most = support.block_size_multiple, support.max_block_size
    named = [*(support.block_sizes or ()), *((granule, 3 * granule) if granule > 1 else ())]
    named += [most // granule * granule] if most is not None and granule <= most <= 256 else []
    found = sorted(accepted(implementation, facts, "block_size", (*BLOCK_SIZES, *named)))
    return _few(found, near=64) if level == "smoke" else found


def query_lens(implementation: Implementation, facts: DeviceFacts, level: str) -> list[int]:
    """Query tokens per batch row."""
    limit = implementation.support.max_query_len
    found = sorted(accepted(implementation, facts, "query_len", (*QUERY_LENS, *([limit] if limit and limit <= 8 else []))))
    return found[:2] if level == "smoke" else found


def _few(values: list[int], *, near: int) -> list[int]:
    return sorted(values, key=lambda value: abs(value - near))[:1]


def can_hold_vast(layout_name: str, facts: DeviceFacts, level: str, *, slabs: int = 0) -> bool:
    """A cache of more than 2**31 elements is affordable here: always virtually on a CPU, with room to spare on a GPU.

    bf16 takes twice the bytes of FP8; on a CPU it is left to the full level. A cache in several tensors has no such case.
    slabs: as many caches of more than 2**32 elements instead.
    """
    if LAYOUTS[layout_name].tensors:
        return False
    if level == "smoke" or (level == "quick" and facts.device_type == "cpu" and not LAYOUTS[layout_name].is_quantized):
        return False
    elements = slabs * 2**32 or 2**31
    return facts.device_type == "cpu" or facts.memory_bytes >= 2 * elements * LAYOUTS[layout_name].dtype.itemsize


MANY_ROWS: Final = 70_000
"""More rows than the second and third axis of a CUDA grid can have (65535)."""


def can_hold_many(facts: DeviceFacts, level: str) -> bool:
    """Cases of MANY_ROWS rows are asked for: at level full, on an accelerator with room for them."""
    return level == "full" and facts.device_type != "cpu" and facts.memory_bytes >= 32 << 30


def can_capture(implementation: Implementation, facts: DeviceFacts) -> bool:
    """The implementation claims graphs, and the device is not known to lack them."""
    return implementation.support.graph and facts.device_type != "cpu" and facts.graph_capture is not False


def says_something(choice: Choice) -> bool:
    """A narrow row is full or wholly invalid; no other pattern is to be seen in it."""
    return choice.get("topk", NARROW) >= NARROW or choice.get("pattern", "dense") in ("dense", "absent")


def plain_axes(axes: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """One value of each axis, but every storage: the first, and the largest block."""
    plain = {name: values[:1] for name, values in axes.items()}
    return plain | {"storage": axes["storage"], "block_size": axes["block_size"][-1:]}


def storage_asked(request: Request, usual: CacheLayout, scale_format: str) -> dict[str, Any]:
    """kv and scale_format of a request; what it leaves open is as `usual`, and the scales as `scale_format`, or as the last of
    a layout that has no such."""
    layout = LAYOUTS[request.kv_layout or usual.name]
    if not layout.scale_formats:
        return {"kv": layout.name, "scale_format": None}
    usual_scales = scale_format if scale_format in layout.scale_formats else layout.scale_formats[-1]
    return {"kv": layout.name, "scale_format": request.scale_format or usual_scales}


def unpacked(choice: Choice) -> Choice:
    """The choice with layout and scale format in the place of a storage."""
    rest = {name: value for name, value in choice.items() if name != "storage"}
    return rest | (dict(zip(("kv", "scale_format"), choice["storage"], strict=True)) if "storage" in choice else {})
