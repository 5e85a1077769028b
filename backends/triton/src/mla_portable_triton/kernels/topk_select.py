# SPDX-License-Identifier: Apache-2.0
"""topk_select: the positions of the K largest scores of each row, in ascending order.

key       a float32 score as a uint32 that sorts like it; -0.0 is 0.0, and 0 stands for -inf and NaN, which are never chosen
row       of up to SHORT scores: one program holds all keys in registers and finds the K-th largest, bit by bit
longer    guess    a score below which, by a sample of the row, the K largest probably do not lie; about 2 K lie above it
          count    how many do, for each part of the row
          compact  their keys and positions into scratch, in order, for each part at its place
          select   the K-th largest of the candidates. Where the guess was too high, or so low that more than CANDIDATES lie
                   above it, the bisection reads the whole row again for each bit: right for any row, slow for rows of ties

What is chosen depends on the scores alone, never on the guess, so results are the same bits in every run. Traffic: each score
is read twice, and 16 bytes a candidate.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_portable.kit.triton_launcher import TritonLauncher, at_any_address
from mla_portable_triton.aot import AotVariant, variant

SHORT: Final = 4096
"""Scores of a row that a program of `select` holds in registers, however long rows may be."""
_PART: Final = 4096
"""Scores of a program of `count` and `compact`."""
_SAMPLE: Final = 2048
_CANDIDATE_BYTES: Final = 32 << 20
"""Of the candidates of all rows that are chosen from at a time."""
_MANY_ROWS: Final = 128
"""From here on rows fill a device, and fewer warps for each serve more of them at a time."""


@triton.jit
def _key(score):
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    return tl.where(score > float("-inf"), key, 0)


@triton.jit
def _kth(keys, k, BITS: tl.constexpr):
    """The k-th largest of `keys`, k at least 1, rounded down to its upper BITS bits."""
    largest = tl.zeros([], tl.uint32)
    for i in tl.static_range(BITS):
        higher = largest | tl.full([], 1 << (31 - i), tl.uint32)
        largest = tl.where(tl.sum((keys >= higher).to(tl.int32), 0) >= k, higher, largest)
    return largest


@triton.jit
def _bounds(start_ptr, end_ptr, row, num_logits):
    begin = tl.maximum(tl.load(start_ptr + row), 0)
    return begin, tl.maximum(tl.minimum(tl.load(end_ptr + row), num_logits), begin)


@triton.jit(
    do_not_specialize=["num_logits", "logits_stride"], **at_any_address("guess_ptr", "logits_ptr", "start_ptr", "end_ptr")
)
def guess_kernel(
    guess_ptr, logits_ptr, start_ptr, end_ptr, num_logits, logits_stride,
    TOPK: tl.constexpr, SAMPLE: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """One row a program: a key that about 4.5 standard deviations more than K keys of the row reach."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = _bounds(start_ptr, end_ptr, row, num_logits)
    length = end - begin
    if length > SHORT:
        i = tl.arange(0, SAMPLE).to(tl.int64)  # [SAMPLE]
        scores = tl.load(logits_ptr + row * logits_stride + begin + i * length // SAMPLE)
        share = TOPK * SAMPLE / length.to(tl.float32)
        rank = tl.minimum((share + 4.5 * tl.sqrt(share) + 8.0).to(tl.int32), SAMPLE)
        guess = tl.maximum(_kth(_key(scores), rank, 16), 1)
        tl.store(guess_ptr + row, guess.to(tl.int32, bitcast=True))


@triton.jit(
    do_not_specialize=["num_logits", "num_parts", "logits_stride"],
    **at_any_address("count_ptr", "guess_ptr", "logits_ptr", "start_ptr", "end_ptr"),
)
def count_kernel(
    count_ptr, guess_ptr, logits_ptr, start_ptr, end_ptr, num_logits, logits_stride, num_parts,
    PART: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """One part of a row a program."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = _bounds(start_ptr, end_ptr, row, num_logits)
    if end - begin > SHORT:
        guess = tl.load(guess_ptr + row).to(tl.uint32, bitcast=True)
        place = begin + part * PART + tl.arange(0, PART)  # [PART]
        scores = tl.load(logits_ptr + row * logits_stride + place, mask=place < end, other=float("-inf"))
        tl.store(count_ptr + row * num_parts + part, tl.sum((_key(scores) >= guess).to(tl.int32), 0))


@triton.jit(
    do_not_specialize=["num_logits", "num_parts", "logits_stride"],
    **at_any_address("key_ptr", "position_ptr", "total_ptr", "count_ptr", "guess_ptr", "logits_ptr", "start_ptr", "end_ptr"),
)
def compact_kernel(
    key_ptr, position_ptr, total_ptr, count_ptr, guess_ptr,
    logits_ptr, start_ptr, end_ptr, num_logits, logits_stride, num_parts,
    PART: tl.constexpr, PARTS: tl.constexpr, SHORT: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """One part of a row a program."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = _bounds(start_ptr, end_ptr, row, num_logits)
    if end - begin > SHORT:
        i = tl.arange(0, PARTS)  # [PARTS]
        counts = tl.load(count_ptr + row * num_parts + i, mask=i < num_parts, other=0)
        total = tl.sum(counts, 0)
        if part == 0:
            tl.store(total_ptr + row, total)
        if total <= CANDIDATES:
            guess = tl.load(guess_ptr + row).to(tl.uint32, bitcast=True)
            place = begin + part * PART + tl.arange(0, PART)  # [PART]
            scores = tl.load(logits_ptr + row * logits_stride + place, mask=place < end, other=float("-inf"))
            keys = _key(scores)
            kept = keys >= guess
            target = row * CANDIDATES + tl.sum(tl.where(i < part, counts, 0), 0) + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(key_ptr + target, keys.to(tl.int32, bitcast=True), mask=kept)
            tl.store(position_ptr + target, place - begin, mask=kept)


@triton.jit
def _emit(out_ptr, keys, positions, kth, ties, above_before, ties_before):
    """Write the positions whose key is above `kth`, and the first `ties` of those equal to it, behind what is written."""
    above = keys > kth
    tied = (keys == kth) & (keys > 0)
    both = (above.to(tl.int32) << 16) | tied.to(tl.int32)
    before = tl.cumsum(both, 0) - both
    tie = ties_before + (before & 0xFFFF)
    target = above_before + (before >> 16) + tl.minimum(tie, ties)
    tl.store(out_ptr + target, positions, mask=above | (tied & (tie < ties)))
    total = tl.sum(both, 0)
    return above_before + (total >> 16), ties_before + (total & 0xFFFF)


@triton.jit
def _choose(out_row, keys, positions, TOPK: tl.constexpr):
    """Write the positions of the TOPK largest keys above 0. Returns: how many there are."""
    chosen = tl.minimum(tl.sum((keys > 0).to(tl.int32), 0), TOPK)
    kth = tl.zeros([], tl.uint32)
    if chosen == TOPK:
        kth = _kth(keys, TOPK, 32)
    _emit(out_row, keys, positions, kth, chosen - tl.sum((keys > kth).to(tl.int32), 0), 0, 0)
    return chosen


@triton.jit
def _candidates(key_ptr, position_ptr, row, total, i, STRIDE: tl.constexpr):
    keys = tl.load(key_ptr + row * STRIDE + i, mask=i < total, other=0).to(tl.uint32, bitcast=True)
    return keys, tl.load(position_ptr + row * STRIDE + i, mask=i < total, other=0)


@triton.jit
def _choose_by_reading(out_row, scores_ptr, length, TOPK: tl.constexpr, TILE: tl.constexpr):
    """`_choose` of a row that is read again for each bit."""
    i = tl.arange(0, TILE)  # [TILE]
    chosen = 0
    for first in range(0, length, TILE):
        keys = _key(tl.load(scores_ptr + first + i, mask=first + i < length, other=float("-inf")))
        chosen += tl.sum((keys > 0).to(tl.int32), 0)
    chosen = tl.minimum(chosen, TOPK)
    kth = tl.zeros([], tl.uint32)
    for bit in tl.static_range(32):
        higher = kth | tl.full([], 1 << (31 - bit), tl.uint32)
        reached = 0
        for first in range(0, length, TILE):
            keys = _key(tl.load(scores_ptr + first + i, mask=first + i < length, other=float("-inf")))
            reached += tl.sum((keys >= higher).to(tl.int32), 0)
        kth = tl.where(reached >= TOPK, higher, kth)
    ties = chosen
    for first in range(0, length, TILE):
        keys = _key(tl.load(scores_ptr + first + i, mask=first + i < length, other=float("-inf")))
        ties -= tl.sum((keys > kth).to(tl.int32), 0)
    above, tied = 0, 0
    for first in range(0, length, TILE):
        keys = _key(tl.load(scores_ptr + first + i, mask=first + i < length, other=float("-inf")))
        above, tied = _emit(out_row, keys, first + i, kth, ties, above, tied)
    return chosen


@triton.jit(
    do_not_specialize=["num_logits", "logits_stride"], **at_any_address("total_ptr", "logits_ptr", "start_ptr", "end_ptr")
)
def select_kernel(
    out_ptr, key_ptr, position_ptr, total_ptr, logits_ptr, start_ptr, end_ptr, num_logits, logits_stride, out_stride,
    TOPK: tl.constexpr, BLOCK_K: tl.constexpr, SHORT: tl.constexpr, CANDIDATES: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """One row a program. LONG: rows may be longer than SHORT."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = _bounds(start_ptr, end_ptr, row, num_logits)
    length = end - begin
    scores_ptr, out_row = logits_ptr + row * logits_stride + begin, out_ptr + row * out_stride
    i = tl.arange(0, SHORT)  # [SHORT]
    chosen = 0
    if LONG:
        total = 0
        if length > SHORT:
            total = tl.load(total_ptr + row)
        held = length <= SHORT
        if length > SHORT:
            held = (total >= TOPK) & (total <= CANDIDATES)
        if not held:
            chosen = _choose_by_reading(out_row, scores_ptr, length, TOPK, CANDIDATES)
        elif CANDIDATES > SHORT and total > SHORT:
            many = tl.arange(0, CANDIDATES)  # [CANDIDATES]
            every_key, place = _candidates(key_ptr, position_ptr, row, total, many, CANDIDATES)
            chosen = _choose(out_row, every_key, place, TOPK)
        else:
            keys = _key(tl.load(scores_ptr + i, mask=(i < length) & (length <= SHORT), other=float("-inf")))
            positions = i
            if length > SHORT:
                keys, positions = _candidates(key_ptr, position_ptr, row, total, i, CANDIDATES)
            chosen = _choose(out_row, keys, positions, TOPK)
    else:
        keys = _key(tl.load(scores_ptr + i, mask=i < length, other=float("-inf")))
        chosen = _choose(out_row, keys, i, TOPK)
    k = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    tl.store(out_row + k, -1, mask=(k >= chosen) & (k < TOPK))


_guess, _count, _compact, _select = map(TritonLauncher, (guess_kernel, count_kernel, compact_kernel, select_kernel))


def candidates(num_logits: int, topk: int) -> int:
    """Scores above the guess that a row may have: SHORT where that leaves 5 standard deviations to spare, else twice that."""
    share = topk * _SAMPLE / max(num_logits, 1)
    rank = share + 4.5 * math.sqrt(share) + 8
    return SHORT if (rank + 5 * math.sqrt(rank)) * num_logits <= SHORT * _SAMPLE else 2 * SHORT


def rows_at_a_time(num_rows: int, num_logits: int, topk: int) -> int:
    """Rows that share the scratch."""
    return min(num_rows, _CANDIDATE_BYTES // (8 * candidates(num_logits, topk))) if num_logits > SHORT else num_rows


def scratch_bytes(num_rows: int, num_logits: int, topk: int) -> int:
    """What `launch` allocates for rows of up to `num_logits` scores: 33 MiB, or a little more for rows of millions."""
    if num_logits <= SHORT:
        return 0
    rows = rows_at_a_time(num_rows, num_logits, topk)
    return 4 * rows * (2 + triton.cdiv(num_logits, _PART) + 2 * candidates(num_logits, topk))


def launch(out: Tensor, logits: Tensor, row_starts: Tensor, row_ends: Tensor) -> None:
    """Write `out` [T, K]. Allocates `scratch_bytes` where rows may be longer than SHORT; may be captured in a CUDA graph.

    Rows of logits and out may lie apart; everything else is contiguous.
    """
    num_rows, num_logits = logits.shape
    topk, long = out.shape[1], num_logits > SHORT
    parts = triton.cdiv(num_logits, _PART)
    key = position = total = out
    held, step = candidates(num_logits, topk), max(rows_at_a_time(num_rows, num_logits, topk), 1)
    if long:
        rows = min(num_rows, step)
        key, position = torch.empty((2, rows, held), dtype=torch.int32, device=out.device)
        total, guess = torch.empty((2, rows), dtype=torch.int32, device=out.device)
        count = torch.empty((rows, parts), dtype=torch.int32, device=out.device)
    sizes = {"SHORT": SHORT, "CANDIDATES": held}
    warps = 32 if long and num_rows < _MANY_ROWS else 16
    for first in range(0, num_rows, step):
        some = slice(first, first + step)
        each = logits[some], row_starts[some], row_ends[some], num_logits, logits.stride(0)
        rows = each[0].shape[0]
        if long:
            _guess((rows,), guess, *each, TOPK=topk, SAMPLE=_SAMPLE, SHORT=SHORT, num_warps=4)
            _count((rows, parts), count, guess, *each, parts, PART=_PART, SHORT=SHORT, num_warps=8)
            _compact(
                (rows, parts), key, position, total, count, guess, *each, parts,
                PART=_PART, PARTS=triton.next_power_of_2(parts), **sizes, num_warps=8,
            )  # fmt: skip
        _select(
            (rows,), out[some], key, position, total, *each, out.stride(0),
            TOPK=topk, BLOCK_K=triton.next_power_of_2(topk), **sizes, LONG=long, num_warps=warps,
        )  # fmt: skip


def aot_variants(arch: str = "default") -> list[AotVariant]:
    """K of DeepSeek-V3.2, long rows."""
    rows = {"logits_ptr": "*fp32", "start_ptr": "*i32", "end_ptr": "*i32", "num_logits": "i32", "logits_stride": "i32"}
    guess, count = {"guess_ptr": "*i32"}, {"count_ptr": "*i32"}
    kept = {"key_ptr": "*i32", "position_ptr": "*i32", "total_ptr": "*i32"}
    short, part, parts = {"SHORT": SHORT}, {"PART": _PART}, {"num_parts": "i32"}
    sizes = {**short, "CANDIDATES": 2 * SHORT}
    return [
        variant(guess_kernel, "topk_select-guess", 4, **guess, **rows, TOPK=2048, SAMPLE=_SAMPLE, **short),
        variant(count_kernel, "topk_select-count", 8, **count, **guess, **rows, **parts, **part, **short),
        variant(compact_kernel, "topk_select-compact", 8, **kept, **count, **guess, **rows, **parts, **part, **sizes, PARTS=64),
        variant(
            select_kernel, "topk_select-select", 32, out_ptr="*i32", **kept, **rows, out_stride="i32",
            TOPK=2048, BLOCK_K=2048, **sizes, LONG=True,
        ),
    ]  # fmt: skip
