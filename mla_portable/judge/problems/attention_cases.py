# SPDX-License-Identifier: Apache-2.0
"""Which attention cases there are: their axes, how many combinations a level takes, the special scenes, those of the probe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from mla_portable.contracts import (
    DecodeSchedule,
    DeviceFacts,
    Implementation,
    Request,
    ScheduleKind,
    Support,
)
from mla_portable.judge.problems import shapes
from mla_portable.judge.problems.attention_problem import EDGES, AttentionParams, DecodeParams, PrefillParams
from mla_portable.judge.problems.cover import Choice, covering, crossed
from mla_portable.judge.problems.draw import MIXED, PAIR_BLOCK, PATTERNS, SIZES
from mla_portable.judge.problems.published import published_attention
from mla_portable.judge.problems.shapes import MANY_ROWS, WORKSPACE, Storage, accepted, can_capture, can_hold_many, workspace_of
from mla_portable.kit.split_kv import SplitSchedule
from mla_portable.layouts import BF16, LAYOUTS
from mla_portable.primitives import SPARSE_DECODE

_INFINITE: Final = "infinite sinks"
"""The name of the probe's problem with such."""
UNEVEN_ROWS: Final = 148
"""Leaves most of a last wave of blocks idle on GPUs of 100 to 140 multiprocessors; kernels may cut its rows in another way."""
BATCH_ROWS: Final[dict[type[DecodeSchedule] | None, int]] = {None: 300, SplitSchedule: 40}
"""By type of schedule: more rows than any GPU needs to be busy, and so few that a schedule of them has splits."""
FEW_BATCH_ROWS: Final = 6
"""On a CPU."""
INTERPRETED_WORK: Final = 64
"""What a case of the quick level may cost on a CPU, all its calls together, in tiles of 16 x 32: there kernels run in an
interpreter that needs about 15 ms for each. Combinations that cost more are left to GPUs, and to the one case of the largest
shape."""
ROWS_WORK: Final = 16
"""A case has more than two rows up to this cost, likewise in tiles."""


def attention_params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[AttentionParams]:
    """What a level asks of an implementation of sparse_decode or sparse_prefill; blocks are as aligned as it wants them."""
    for params in _level_params(implementation, facts, level):
        yield replace(params, alignment=implementation.support.cache_alignment)


def _level_params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[AttentionParams]:
    axes = _axes(implementation, facts, level)
    if not all(axes.values()):
        return
    budget = INTERPRETED_WORK if facts.device_type == "cpu" and level == "quick" else None

    def allowed(choice: Choice) -> bool:
        return _is_sound(choice, implementation, facts) and _is_affordable(choice, budget)

    seeds = crossed(axes, [name for name in ("storage", "heads", "topk", "query_len") if name in axes])
    choices = covering(axes, strength=1 if level == "smoke" else 2, allowed=allowed, seeds=seeds if level == "full" else [])
    for choice in choices:
        yield _params(implementation, choice, budget)
    yield from _promised(implementation, facts, level, axes, budget)
    yield from _batches(implementation, facts, level, axes)
    yield from _scenes(implementation, facts, level, axes)
    yield from _second_caches(implementation, facts, level, axes, budget)
    yield from _edges(implementation, facts, level, axes)
    yield from _nope(implementation, facts, level, axes, budget)
    yield from _scaled_queries(implementation, facts, level, axes, budget)
    yield from published_attention(implementation, facts, level)


def _axes(implementation: Implementation, facts: DeviceFacts, level: str) -> dict[str, list[Any]]:
    smoke = level == "smoke"
    is_decode = implementation.primitive is SPARSE_DECODE
    flags = {name: accepted(implementation, facts, name, [False, True]) for name in ("attn_sink", "lengths")}
    sizes: list[int | None] = [*shapes.block_sizes(implementation, facts, level)]
    kinds: list[Storage] = shapes.storages(implementation)
    flat = [] if is_decode else [name for name in implementation.layouts if not LAYOUTS[name].in_place]
    if flat:  # rows without scales come flat; only the FP8 cache is read in place
        paged = [kind for kind in kinds if kind[0] not in flat]
        kinds, sizes = [*((shapes.workspace_of(name), None) for name in flat), *paged], [None, *sizes]
    axes: dict[str, list[Any]] = {
        "storage": kinds,
        "pattern": ["corpus", "absent", "last", "front", "dense"] if smoke else list(PATTERNS),
        "heads": shapes.heads(implementation, facts, level),
        "topk": shapes.topks(implementation, facts, level),
        "block_size": sizes,
        "sink": ["none", "finite", "minus_inf", "plus_inf"] if True in flags["attn_sink"] else ["none"],
        "lengths": flags["lengths"],
        "outputs": ["fresh", "packed", "views"],
        "inputs": ["packed", "views"],
        "blocks": ["packed", "strided"],
        "size": ["plain", "large"],
        "schedule": [None],
        "run": ["once"] if smoke else ["once", "repeat"],
        "amount": ["few"] if level != "full" else ["few", "more"],
    }
    if is_decode:
        axes["query_len"] = shapes.query_lens(implementation, facts, level)
        axes["schedule"] = list(dict.fromkeys([None, implementation.schedule_kind]))
    return axes


def _is_sound(choice: Choice, implementation: Implementation, facts: DeviceFacts) -> bool:
    """A partial choice is claimed, exists, and can be judged by the suite."""
    if implementation.support.accuracy == "low" and choice.get("size", "plain") != "plain":
        return False  # 2^-4 of a score of hundreds says nothing about the kernel
    if not (shapes.says_something(choice) and _kind(implementation).claimed(implementation, facts, choice)):
        return False
    if "storage" not in choice:
        return True
    kv, scale_format = choice["storage"]
    flat = kv.startswith(WORKSPACE)
    if "block_size" in choice and (choice["block_size"] is None) != flat:
        return False
    if flat and choice.get("blocks", "packed") != "packed":
        return False
    # bf16 arithmetic on amax scales is off by 2^-8 of a score; at hundreds that says nothing about the kernel
    rounds = LAYOUTS[shapes.layout_of_storage(kv)].tolerance_of(scale_format) == "amax"
    return not (rounds and choice.get("size") in ("large", "loud_head"))


def _work(rows: int, choice: Choice) -> int:
    """Tiles of 16 heads and 32 indices that a kernel walks over, in both calls of a case that repeats."""
    calls = 2 if choice.get("run") == "repeat" else 1
    return calls * rows * -(-choice.get("heads", 1) // 16) * -(-choice.get("topk", 1) // 32)


def _is_affordable(choice: Choice, budget: int | None) -> bool:
    """A partial choice can be completed within what the level may spend on a case."""
    heads, topk, query_len = choice.get("heads", 1), choice.get("topk", 1), choice.get("query_len", 1)
    if choice.get("amount") == "more" and heads * topk > 32 * 1024:
        return False  # the oracle would take seconds for each
    if budget is None:
        return True
    # a repetition always has two rows, for one alone says nothing of strides
    return _work(max(query_len, 2) if choice.get("run") == "repeat" else query_len, choice) <= budget


def _num_rows(choice: Choice, budget: int | None) -> int:
    """Query rows of a whole choice: a multiple of S, fewer where each is much work."""
    query_len, wanted = choice.get("query_len", 1), 33 if choice["amount"] == "more" else 4
    rows = query_len * max(1, wanted // query_len)
    while budget is not None and rows > query_len and _work(rows, choice) > (ROWS_WORK if rows > 2 else budget):
        rows -= query_len
    return rows


def _params(implementation: Implementation, choice: Choice, budget: int | None = None) -> AttentionParams:
    """The parameters for a whole choice of `_axes`."""
    fixed = {"rows": _num_rows(choice, budget), "query_len": choice.get("query_len"), "with_lse": implementation.support.lse}
    own = {name: value for name, value in choice.items() if name != "amount"}
    return _kind(implementation).of(own | fixed)


def _kind(implementation: Implementation) -> type[AttentionParams]:
    return DecodeParams if implementation.primitive is SPARSE_DECODE else PrefillParams


def _scenes(
    implementation: Implementation, facts: DeviceFacts, level: str, axes: dict[str, list[Any]]
) -> Iterator[AttentionParams]:
    """One or a few cases for each thing that is not an axis."""

    def allowed(choice: Choice) -> bool:
        return _is_sound(choice, implementation, facts)

    def params(chosen: dict[str, list[Any]], strength: int = 1) -> Iterator[AttentionParams]:
        for choice in covering(chosen, strength=strength, allowed=allowed):
            yield _params(implementation, choice)

    plain = {name: values[:1] for name, values in axes.items()} | {
        "storage": axes["storage"],
        "block_size": [None, axes["block_size"][-1]] if None in axes["block_size"] else axes["block_size"][-1:],
        "heads": _near(axes["heads"], 16),
        "topk": _near(axes["topk"], 64),
        "pattern": ["holes"],
    }
    base = list(params(plain))
    yield from (replace(p, rows=0) for p in base)
    if level == "smoke":
        return
    yield from (replace(p, blocks="address") for p in base if shapes.can_hold_vast(p.kv_layout, facts, level))
    once = [p for p in base if (p.kv, p.scale_format) in shapes.one_storage_each(axes["storage"])]
    yield from (replace(p, blocks="slab") for p in once if shapes.can_hold_vast(p.kv_layout, facts, level, slabs=1))
    pair = plain | {"blocks": ["pair"], "block_size": [size for size in axes["block_size"][-1:] if size and size >= PAIR_BLOCK]}
    yield from params(pair) if pair["block_size"] else ()
    narrow = plain | {
        "topk": shapes.narrow_topks(implementation, facts),
        "pattern": ["dense", "absent"],
        "lengths": axes["lengths"],
    }
    yield from params(narrow) if narrow["topk"] else ()
    loud = plain | {
        "size": [size for size in SIZES if size not in axes["size"]],
        "heads": list(dict.fromkeys([*plain["heads"], *_near(axes["heads"], 64)])),
        "topk": _near(axes["topk"], 64 if facts.device_type == "cpu" else 1024),
        "pattern": ["dense"],
    }
    yield from params(loud, strength=2)
    largest = plain | {"storage": axes["storage"][-1:], "heads": axes["heads"][-1:], "topk": axes["topk"][-1:]}
    yield from (replace(p, rows=p.query_len or 1) for p in params(largest))
    if can_hold_many(facts, level):
        fewest = plain | {"heads": axes["heads"][:1]}
        yield from (replace(p, rows=MANY_ROWS * (p.query_len or 1)) for p in params(fewest) if p.heads <= 16)
    if level == "full" and facts.device_type != "cpu":
        uneven = plain | {
            "heads": list(dict.fromkeys(each for wanted in (16, 64, 128) for each in _near(axes["heads"], wanted))),
            "topk": _near(axes["topk"], 512),
            "lengths": axes["lengths"],
        }
        yield from (replace(p, rows=UNEVEN_ROWS) for p in params(uneven) if p.query_len in (None, 1))
    if can_capture(implementation, facts):
        graphed = {name: axes[name] for name in ("sink", "lengths", "blocks", "query_len") if name in axes} | {
            "topk": axes["topk"] if level == "full" else axes["topk"][-1:],
            "heads": axes["heads"] if level == "full" else plain["heads"],
            "pattern": ["holes", "absent", "corpus"],
            "outputs": ["packed"],
            "schedule": axes["schedule"][-1:],
        }
        yield from (replace(p, run="graph") for p in params(plain | graphed))


def _promised(
    implementation: Implementation, facts: DeviceFacts, level: str, axes: dict[str, list[Any]], budget: int | None
) -> Iterator[AttentionParams]:
    """Clean indices are promised and no lse is asked for, as layers do: the less there is to pad, the more may be left out."""
    support, widths = implementation.support, shapes.topks(implementation, facts, "quick")
    kernel_heads = accepted(implementation, facts, "num_heads", support.padded_heads)
    axes = axes | {
        "pattern": ["absent", "holes", "dense"],
        "heads": list(dict.fromkeys([*kernel_heads, *_near(axes["heads"], 16)])),
        "topk": list(dict.fromkeys([*_near(widths, 64), *_near(widths, 1024), *_near(widths, 100)])),
        "block_size": [None, *axes["block_size"][-1:]] if None in axes["block_size"] else axes["block_size"][-1:],
        "outputs": ["packed", "fresh", "views"],
        "blocks": ["packed"],
        "size": ["plain"],
        "schedule": axes["schedule"][::-1],
        "run": ["once", "graph"] if can_capture(implementation, facts) else ["once"],
        "amount": ["few"],
    }

    def allowed(choice: Choice) -> bool:
        in_graph = choice.get("run") == "graph" and choice.get("outputs") == "fresh"
        return not in_graph and _is_sound(choice, implementation, facts) and _is_affordable(choice, budget)

    smoke, least = level == "smoke", {"sink": "none", "inputs": "packed", "outputs": "packed"}
    seeds = [least | choice for choice in crossed(axes, ["heads", "topk", "run"])]
    for choice in covering(axes, strength=1 if smoke else 2, allowed=allowed, seeds=[] if smoke else seeds):
        yield replace(_params(implementation, choice, budget), promised=True, with_lse=False)


def _second_caches(
    implementation: Implementation, facts: DeviceFacts, level: str, axes: dict[str, list[Any]], budget: int | None
) -> Iterator[AttentionParams]:
    """Rows attend to two caches: a list, or both, may be empty, and the blocks of the caches differ."""
    if not implementation.support.extra_cache:
        return
    smoke, full = level == "smoke", level == "full"
    widths = shapes.topks(implementation, facts, "quick")
    heads = axes["heads"] if full else list(dict.fromkeys(each for near in (8, 16, 64) for each in _near(axes["heads"], near)))
    sizes = accepted(implementation, facts, "extra_block_size", (2, 53, 64, 256)) or [None]
    axes = axes | {
        "heads": _near(axes["heads"], 16) if smoke else heads,
        "topk": list(dict.fromkeys(each for wanted in (128, 64, 512) for each in _near(widths, wanted))),
        "extra_topk": accepted(implementation, facts, "extra_topk", (64, 100, 512, 1024) if full else (64, 100, 512)),
        "block_size": [size for size in (None, 64, 16, 1) if size in axes["block_size"]] or axes["block_size"],
        "extra_block_size": [None, *sizes] if None in axes["block_size"] else sizes,
        "pattern": ["dense", "holes", "absent", "corpus", "first"],
        "extra_pattern": ["holes", "absent", "dense", "last"],
        "extra_lengths": axes["lengths"],
        "size": ["plain", "large"],
        "run": ["once", "repeat"] if full else ["once"],
        "amount": ["few"],
    }

    def allowed(choice: Choice) -> bool:
        flat = ("block_size" in choice and choice["block_size"] is None, choice.get("extra_block_size", 0) is None)
        if {"block_size", "extra_block_size"} <= choice.keys() and flat[0] != flat[1]:
            return False
        total = choice.get("topk", 1) + choice.get("extra_topk", 1)
        return _is_sound(choice, implementation, facts) and _is_affordable(choice | {"topk": total}, budget)

    for choice in covering(axes, strength=1 if smoke else 2, allowed=allowed) if all(axes.values()) else ():
        yield _params(implementation, choice, budget)
    graphed = {name: values[:1] for name, values in axes.items()} | {
        **{name: axes[name] for name in ("storage", "block_size", "extra_block_size", "sink", "lengths", "extra_lengths")},
        "outputs": ["packed"],
        "schedule": axes["schedule"][-1:],
    }
    if can_capture(implementation, facts) and all(graphed.values()):
        for choice in covering(graphed, strength=1, allowed=allowed):
            yield replace(_params(implementation, choice, budget), run="graph")
    kinds = shapes.one_storage_each(axes["storage"])
    slabs = {name: values[:1] for name, values in axes.items()} | {
        "storage": [each for each in kinds if shapes.can_hold_vast(shapes.layout_of_storage(each[0]), facts, level, slabs=2)],
        "block_size": [size for size in axes["block_size"] if size is not None][:1],
        "extra_block_size": sizes[:1],
        "pattern": ["holes"],
    }
    for choice in covering(slabs, strength=1, allowed=allowed) if all(slabs.values()) else ():
        yield replace(_params(implementation, choice, budget), blocks="slab")


def _edges(
    implementation: Implementation, facts: DeviceFacts, level: str, axes: dict[str, list[Any]]
) -> Iterator[AttentionParams]:
    """Lengths at the edges of int32, of one list, and of each of two beside a list that has all of its keys."""
    if level == "smoke" or True not in axes["lengths"]:
        return
    wanted = (16,) if facts.device_type == "cpu" else (16, 64, 128)
    axes = {name: values[:1] for name, values in axes.items()} | {
        "storage": shapes.one_storage_each(axes["storage"]),
        "block_size": [size for size in (None, 64) if size in axes["block_size"]] or axes["block_size"][-1:],
        "heads": list(dict.fromkeys(each for heads in wanted for each in _near(axes["heads"], heads))),
        "topk": _near(shapes.topks(implementation, facts, "quick"), 100),
        "pattern": ["holes"],
        "lengths": [True],
        "schedule": axes["schedule"][-1:],
    }

    def allowed(choice: Choice) -> bool:
        return _is_sound(choice, implementation, facts)

    for choice in covering(axes, strength=2, allowed=allowed):
        params = _params(implementation, choice)
        params = replace(params, limits="edges", rows=-(-len(EDGES) // (params.query_len or 1)) * (params.query_len or 1))
        yield params
        if implementation.support.extra_cache:
            extra_topk = _near(accepted(implementation, facts, "extra_topk", (100, 512)), 100)
            yield replace(
                params, extra_topk=extra_topk[0], extra_block_size=params.block_size, extra_pattern="holes", extra_lengths=True
            )


def _nope(
    implementation: Implementation, facts: DeviceFacts, level: str, axes: dict[str, list[Any]], budget: int | None
) -> Iterator[AttentionParams]:
    """Queries without a rotary part over rows that have one."""
    if not implementation.support.nope:
        return
    names = ("pattern", "sink", "lengths", "outputs", "inputs", "blocks", "schedule", "query_len", "block_size")
    axes = {name: values[:1] for name, values in axes.items()} | {
        **{name: axes[name] for name in names if name in axes},
        "storage": [kind for kind in axes["storage"] if _has_idle_rope(shapes.layout_of_storage(kind[0]))],
        "heads": list(dict.fromkeys(each for wanted in (8, 64) for each in _near(axes["heads"], wanted))),
        "topk": _near(axes["topk"], 100),
    }

    def allowed(choice: Choice) -> bool:
        return _is_sound(choice, implementation, facts) and _is_affordable(choice, budget)

    for choice in covering(axes, strength=1, allowed=allowed) if all(axes.values()) else ():
        yield replace(_params(implementation, choice, budget), nope=True)


def _scaled_queries(
    implementation: Implementation, facts: DeviceFacts, level: str, axes: dict[str, list[Any]], budget: int | None
) -> Iterator[AttentionParams]:
    """Queries in e4m3 that have a scale."""
    if not implementation.support.q_scale:
        return
    names = ("storage", "pattern", "sink", "lengths", "outputs", "inputs", "blocks", "schedule", "query_len", "block_size")
    axes = {name: values[:1] for name, values in axes.items()} | {
        **{name: axes[name] for name in names if name in axes},
        "heads": list(dict.fromkeys(each for wanted in (8, 64) for each in _near(axes["heads"], wanted))),
        "topk": _near(axes["topk"], 100),
    }

    def allowed(choice: Choice) -> bool:
        return _is_sound(choice, implementation, facts) and _is_affordable(choice, budget)

    for choice in covering(axes, strength=1, allowed=allowed) if all(axes.values()) else ():
        yield replace(_params(implementation, choice, budget), scaled=True)


def _has_idle_rope(layout: str) -> bool:
    """Rows of the layout have a rotary part that queries may leave out."""
    return LAYOUTS[layout].is_quantized and LAYOUTS[layout].rope_width > 0


def _batches(
    implementation: Implementation, facts: DeviceFacts, level: str, axes: dict[str, list[Any]]
) -> Iterator[AttentionParams]:
    """Rows of batches of several sizes, with K so wide that a row by itself invites splits; only where that is promised."""
    if level == "smoke" or not implementation.support.batch_invariant:
        return
    on_cpu = facts.device_type == "cpu"
    axes = {name: values[:1] for name, values in axes.items()} | {
        **{name: axes[name] for name in ("storage", "block_size", "sink", "lengths", "query_len") if name in axes},
        "schedule": [kind for kind in axes["schedule"] if _schedule_type(kind) in BATCH_ROWS],
        "heads": axes["heads"] if level == "full" else _near(axes["heads"], 16),
        "topk": _near(shapes.topks(implementation, facts, "quick"), 128 if on_cpu else 1024),
        "pattern": ["dense", "holes"],
        "run": ["batches"],
    }

    def allowed(choice: Choice) -> bool:
        return _is_sound(choice, implementation, facts)

    for choice in covering(axes, strength=1, allowed=allowed):
        query_len = choice.get("query_len", 1)
        rows = FEW_BATCH_ROWS if on_cpu else BATCH_ROWS[_schedule_type(choice["schedule"])]
        yield replace(_params(implementation, choice), rows=-(-rows // query_len) * query_len)


def _schedule_type(kind: ScheduleKind | None) -> type[DecodeSchedule] | None:
    return None if kind is None else kind.schedule_type


def _near(values: list[int], wanted: int) -> list[int]:
    return [min(values, key=lambda value: abs(value - wanted))]


def attention_variants(request: Request, support: Support) -> Iterator[tuple[str, Request]]:
    """What to try: a plain call, every feature at once, sinks without bounds, the call that `SparseMLAAttention` binds, and
    a second cache."""
    plain = request.but(lse=support.lse)
    yield "holes", plain
    features = {"lengths": support.lengths, "sink": support.attn_sink}
    if any(features.values()):
        asked = plain.but(lengths=support.lengths, attn_sink=support.attn_sink)
        yield " and ".join(word for word, on in features.items() if on), asked
        if support.attn_sink:
            yield _INFINITE, asked
    if support.extra_cache:
        flat = request.block_size is None and request.primitive is not SPARSE_DECODE
        second = {"extra_topk": request.topk or 64, "extra_block_size": None if flat else request.block_size}
        yield "second cache", plain.but(**second, lengths=support.lengths, extra_lengths=support.lengths)
    if support.nope and _has_idle_rope(request.kv_layout or BF16.name):
        yield "nope", plain.but(nope=True)
    if support.q_scale:
        yield "q_scale", plain.but(q_scale=True)
    promised = request.but(lengths=support.lengths, clean_indices=True, clean_lengths=support.lengths)
    yield "promises", promised.but(follows_in_order=request.primitive is SPARSE_DECODE)


def attention_of_request(request: Request, name: str) -> AttentionParams:
    """A call of the request's sizes and features, with outputs given; infinite sinks where the name asks for them."""
    decode = request.primitive is SPARSE_DECODE
    layout = LAYOUTS[request.kv_layout or BF16.name]
    flat = not decode and not layout.in_place
    heads = request.num_heads or 1
    infinite = name == _INFINITE or (heads >= 3 and name.startswith("request"))
    return (DecodeParams if decode else PrefillParams)(
        kv=workspace_of(layout.name) if flat else layout.name,
        scale_format=(request.scale_format or layout.scale_formats[-1]) if layout.scale_formats else None,
        heads=heads,
        topk=request.topk or 1,
        block_size=None if flat else request.block_size or 16,
        query_len=(request.query_len or 1) if decode else None,
        rows=request.rows or 4,
        pattern=MIXED,
        sink=("plus_inf" if infinite else "finite") if request.attn_sink else "none",
        lengths=request.lengths,
        outputs="packed",
        with_lse=request.lse,
        promised=request.clean_indices,
        extra_topk=request.extra_topk,
        extra_block_size=None if flat or request.extra_topk is None else request.extra_block_size or 2,
        extra_pattern=MIXED if request.extra_topk is not None else "dense",
        extra_lengths=request.extra_lengths,
        nope=request.nope,
        scaled=request.q_scale,
        alignment=request.cache_alignment,
    )
