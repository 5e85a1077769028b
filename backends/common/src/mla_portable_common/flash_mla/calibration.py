# SPDX-License-Identifier: Apache-2.0
"""Calibration: one tiny call of each of a provider's kernels finds the conventions that no symbol shows.

Keys and queries are zero, so every score is 0 and lse is the logarithm of the number of keys: in which base, one number says.
Whether the closed-form schedule means the same to a provider is seen from the plan it makes for one row of eight blocks,
where every field of eight entries is known. A provider that computes something else is not used. A parameter for a sink says
nothing of whether one is taken: a call shows it. What decode leaves in a row
without keys is checked as well: if it is zero, however the row is split, no pass has to write it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from mla_portable.layouts import BF16, FP8_DS_MLA, FP8_V4, HEAD_SIZE, KV_LORA_RANK, CacheLayout
from mla_portable_common.flash_mla.conventions import DecodeKernel, PrefillKernel, SecondCache
from mla_portable_common.flash_mla.head_padding import KERNEL_HEADS
from mla_portable_common.libraries import REFUSING, NotThisConvention, refused

_PAGE: Final = 64
_DECODE_KEYS: Final = 512
_PREFILL_KEYS: Final = 128
_EIGHT_BLOCKS: Final = [[0, 0, part, part + 1, part, 1, 1, 0] for part in range(8)]
"""Entries of a plan for one row of 8 blocks, 13 parts or more: payload 6, of which 5 are overhead, so a block for each part.
begin_req, end_req, begin_block, end_block, begin_split, first_is_split, last_is_split, 0."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a provider's kernel does.

    Attributes:
        lse_base_2: the returned lse is to base 2.
        zeroes_empty: the head counts of the kernel with which rows that have no valid index come out as zeros; of prefill, by
            indices and by length. zeroes_with_sink: likewise, where the kernel applies a sink.
        takes_plan: of decode; the closed-form schedule is the provider's own, field by field.
        heads: of prefill; the head counts among those asked for that the kernel accepts.
    """

    lse_base_2: bool
    zeroes_empty: tuple[int, ...]
    zeroes_with_sink: tuple[int, ...]
    takes_plan: bool = False
    heads: tuple[int, ...] = ()


def calibrate_decode(
    kernel: DecodeKernel,
    device: torch.device,
    layout: CacheLayout = FP8_DS_MLA,
    *,
    heads: tuple[int, ...] = KERNEL_HEADS,
    topk_multiple: int = _PAGE,
    with_plan: bool = True,
) -> Traits:
    """Three calls on one row of 512 keys, and a few on rows without any; waits for the device.

    `kernel.takes_sink` becomes False where the kernel has the argument and refuses it, or ignores it.

    Of `fp8_v4` the last 64 of the keys are in a second cache, and rows without keys have it too, or not.

    heads: counts that the kernel has. topk_multiple: what the width of its lists must be one of.
    with_plan: whether the closed-form schedule is the provider's own is to be found as well.

    Raises: NotThisConvention when the provider refuses the call or computes something else; device faults as they come.
    """
    q = torch.zeros((1, 1, heads[0], layout.key_width), dtype=torch.bfloat16, device=device)
    kv = _decode_cache(layout, 0.0, device)
    indices = _widened(torch.arange(_DECODE_KEYS, dtype=torch.int32, device=device).view(1, 1, -1), topk_multiple)
    with_extra: dict[str, Any] = {}
    if layout is FP8_V4:
        if not kernel.takes_extra:
            raise NotThisConvention(f"sparse decode has no argument for the second cache that {layout.name} comes with")
        with_extra = {"extra": SecondCache(kv, indices[:, :, -_PAGE:].contiguous())}
        indices = indices[:, :, :-_PAGE].contiguous()
    try:
        out, lse = kernel(q, kv, indices, 1.0, **with_extra)
        base_2 = _base_2("sparse decode", q, out, lse, (1, heads[0], 1), _DECODE_KEYS)
        takes_plan = with_plan and kernel.takes_plan
        if takes_plan:
            metadata, num_splits = kernel.plan(q, kv, indices, **with_extra)
            # the eighth word of a part is padding, which a provider may leave unwritten
            words = [part[:7] for part in metadata[:8].tolist()]
            takes_plan = words == [part[:7] for part in _EIGHT_BLOCKS] and num_splits.tolist() == [0, 8]
    except REFUSING as error:
        raise refused("sparse decode", error) from error
    # of ones: a mean over keys that do not count would show
    kv = _decode_cache(layout, 1.0, device)
    absent = [torch.full((1, 1, keys), -1, dtype=torch.int32, device=device) for keys in (_PAGE, _DECODE_KEYS)]
    absent = [_widened(each, topk_multiple) for each in absent]
    rows = [(indices, dict[str, Any]()) for indices in absent]  # in one part and in several
    if with_extra:
        rows += [(absent[0], {"extra": SecondCache(kv, indices)}) for indices in absent]
    sunk = {"extra": SecondCache(kv, with_extra["extra"].indices)} if with_extra else {}
    kernel.takes_sink = kernel.takes_sink and _applies_sink("sparse decode", kernel, q, kv, indices, sunk)
    zeroes = _zeroes_empty("sparse decode", kernel, kv, (1, 1), heads, rows, layout.key_width)
    return Traits(base_2, *zeroes, takes_plan=takes_plan)


def _decode_cache(layout: CacheLayout, value: float, device: torch.device) -> torch.Tensor:
    """[blocks, 64, 1, row width] of 512 tokens, all of whose numbers are `value`."""
    cache = torch.empty((_DECODE_KEYS // _PAGE, _PAGE, layout.row_width), dtype=layout.dtype)
    row = layout.pack(torch.full((1, layout.value_width), value), torch.full((1, layout.rope_width), value))
    parts = layout.parts(cache)
    for part, of_row in zip(parts, row.split([part.shape[2] for part in parts], dim=1), strict=True):
        part.copy_(of_row)
    return cache.to(device).unsqueeze(2)


def _zeroes_empty(
    what: str,
    kernel: DecodeKernel | PrefillKernel,
    kv: torch.Tensor,
    lead: tuple[int, ...],
    heads: Iterable[int],
    rows: Sequence[tuple[torch.Tensor, dict[str, Any]]],
    width: int = HEAD_SIZE,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The head counts with which rows without keys become zeros; and those where they do under every kind of sink.

    Args:
        lead: of q and out, in front of the heads. width: of q.
        rows: indices that leave a row without keys, and what goes with them.
    """

    def zeroes(count: int, with_sink: bool) -> bool:
        if with_sink and not kernel.takes_sink:
            return False
        q = torch.ones((*lead, count, width), dtype=torch.bfloat16, device=kv.device)
        sinks = torch.tensor([0.0, math.inf, -math.inf, 1.0], device=kv.device).repeat(count // 4)
        for indices, options in rows:
            # a provider that allocates its result is likely to be given this memory
            target = torch.full((*lead, count, KV_LORA_RANK), math.nan, dtype=torch.bfloat16, device=kv.device)
            given = options | ({"out": target} if kernel.takes_out else {}) | ({"attn_sink": sinks} if with_sink else {})
            if not kernel.takes_out:
                del target
            try:
                out, _ = kernel(q, kv, indices, 1.0, **given)
                if not bool((out == 0).all()):
                    return False
            except REFUSING as error:
                refused(f"{what} with {count} heads", error)  # raises what leaves the device unusable
                return False
        return True

    plain, sunk = (tuple(count for count in heads if zeroes(count, with_sink)) for with_sink in (False, True))
    return plain, sunk


def _applies_sink(
    what: str,
    kernel: DecodeKernel | PrefillKernel,
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    options: dict[str, Any],
) -> bool:
    """Whether the kernel takes a sink, and applies it: one with the weight of all keys halves their mean.

    Args:
        q: zeros. kv: ones, of which every key counts. options: what goes with them.
    """
    extra = options.get("extra")
    keys = sum(int((each >= 0).sum()) for each in (indices, *(() if extra is None else (extra.indices,))))
    sink = torch.full((q.shape[-2],), math.log(keys), device=q.device)
    try:
        out, _ = kernel(q, kv, indices, 1.0, attn_sink=sink, **options)
        return bool(((out - 0.5).abs() < 0.05).all())
    except REFUSING as error:
        refused(f"{what} with a sink", error)  # raises what leaves the device unusable
        return False


def _widened(indices: torch.Tensor, multiple: int) -> torch.Tensor:
    """indices [.., K] with absent ones behind them, up to a width that is a multiple of `multiple`."""
    return torch.nn.functional.pad(indices, (0, -indices.shape[-1] % multiple), value=-1)


def calibrate_prefill(
    kernel: PrefillKernel,
    device: torch.device,
    heads: tuple[int, ...],
    layout: CacheLayout = BF16,
    *,
    full_heads: tuple[int, ...] = KERNEL_HEADS,
    topk_multiple: int = _PREFILL_KEYS,
) -> Traits:
    """Two calls on one token of 128 keys for each count in `heads`, and a few on tokens without any; waits for the device.

    `kernel.takes_sink` becomes False where the kernel has the argument and refuses it, or ignores it.
    Rows between those that are asked for are NaN: a build for wider rows would read on into them.

    layout: of the rows, not quantised. full_heads: counts among `heads` of which it is seen whether empty rows become zeros.
    topk_multiple: what the width of the kernel's lists must be one of.

    Raises: NotThisConvention when none is accepted or the provider computes something else; device faults as they come.
    """
    kv = torch.zeros((2 * _PREFILL_KEYS, 1, layout.key_width), dtype=torch.bfloat16, device=device)
    kv[1::2] = math.nan
    indices = _widened(torch.arange(0, 2 * _PREFILL_KEYS, 2, dtype=torch.int32, device=device).view(1, 1, -1), topk_multiple)
    accepted: list[int] = []
    base_2 = False
    refusal = NotThisConvention("no head count was tried")
    for count in heads:
        q = torch.zeros((1, count, layout.key_width), dtype=torch.bfloat16, device=device)
        try:
            out, lse = kernel(q, kv, indices, 1.0)
            base_2 = _base_2("sparse prefill", q, out, lse, (1, count), _PREFILL_KEYS)
        except REFUSING as error:
            refusal = refused(f"sparse prefill with {count} heads", error)
            continue
        accepted.append(count)
    if not accepted:
        raise refusal
    kv = torch.ones_like(kv)  # a mean over keys that do not count would show
    rows: list[tuple[torch.Tensor, dict[str, Any]]] = [(torch.full_like(indices, -1), {})]
    if kernel.takes_lengths:
        rows += [(each, {"lengths": torch.zeros(1, dtype=torch.int32, device=device)}) for each in (indices, rows[0][0])]
    kernel.takes_sink = kernel.takes_sink and all(
        _applies_sink("sparse prefill", kernel, kv.new_zeros((1, count, layout.key_width)), kv, indices, {})
        for count in accepted
    )
    counts = [count for count in full_heads if count in accepted]  # a sink is not applied to padded heads, as fewer may be
    zeroes = _zeroes_empty("sparse prefill", kernel, kv, (1,), counts, rows, layout.key_width)
    return Traits(base_2, *zeroes, heads=tuple(accepted))


def _base_2(
    what: str, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, lse_shape: tuple[int, ...], keys: int
) -> bool:
    """Whether lse, which must be the logarithm of `keys` everywhere, is to base 2; False where there is none."""
    if lse is None:
        if tuple(out.shape) != (*q.shape[:-1], KV_LORA_RANK) or out.any():
            raise ValueError(f"{what} of zeros returned out {list(out.shape)}, expected zeros for q {list(q.shape)}")
        return False
    if tuple(out.shape) != (*q.shape[:-1], KV_LORA_RANK) or tuple(lse.shape) != lse_shape:
        raise ValueError(f"{what} returned out {list(out.shape)} and lse {list(lse.shape)} for q {list(q.shape)}")
    least, greatest = lse.min().item(), lse.max().item()
    for base_2, expected in ((False, math.log(keys)), (True, math.log2(keys))):
        if abs(least - expected) < 1e-2 and abs(greatest - expected) < 1e-2 and not out.any():
            return base_2
    raise ValueError(f"{what} of zeros over {keys} keys: lse {least:g} to {greatest:g}, expected ln {keys} or log2 {keys}")
