# SPDX-License-Identifier: Apache-2.0
"""Split-KV schedules: into how many splits each row is cut, over one block of scratch for all row counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from mla_portable.contracts.schedule import (
    DEFAULT_SCRATCH_BYTES,
    DecodeSchedule,
    ScheduleKind,
    ScheduleLimits,
    refuse_schedule,
)
from mla_portable.contracts.values import INT32_MAX, check_fields, refuse
from mla_portable.kit.rules import check_tensor, extent
from mla_portable.layouts import KV_LORA_RANK, LAYOUTS

if TYPE_CHECKING:
    from mla_portable.contracts.request import Request

_LEAST_SPLIT: Final = 64
"""Merging shorter splits takes longer than they save. H200, 4 BF16 rows of 16 heads: 32 splits of 64 indices take 19.4 us, 64
splits of 32 take 23.4."""
_INVARIANT_LENGTH: Final = 256
"""Shortest split of batch-invariant schedules: 256 indices are 164 KiB of FP8 rows, and their partial result for 16 heads,
written once and read once, is 64 KiB."""
_LEAST_ONE: Final = (1, INT32_MAX)


@dataclass(frozen=True, slots=True, eq=False)
class SplitSchedule(DecodeSchedule):
    """Every row is cut into `num_splits` splits; kind "split_kv". A kernel shares the keys that a row has among them.

    Attributes:
        num_rows: B * S. num_heads: H. topk: K. These three it was made for, and extra_topk: that of a second cache, 0 where
            there is none. num_splits: of a row, at least 1; with two caches the tiles of the first list are followed by those
            of the second, and splits cut them all together.
        partial_out: [num_splits, num_rows, H, value_width] float32 scratch, contiguous; None when num_splits is 1.
        partial_lse: [num_splits, num_rows, H] float32 scratch, contiguous; None when num_splits is 1.
        value_width: of the cache's layout.
    """

    num_rows: int
    num_heads: int
    topk: int
    num_splits: int
    partial_out: Tensor | None = None
    partial_lse: Tensor | None = None
    value_width: int = KV_LORA_RANK
    extra_topk: int = 0

    def __post_init__(self) -> None:
        counts = (self.num_rows, self.num_heads, self.topk, self.num_splits)
        # A call without a schedule makes one, and check_fields takes 2 us.
        if set(map(type, counts)) != {int} or counts[0] < 0 or min(counts[1:]) < 1:
            check_fields(self, dict.fromkeys(("num_heads", "topk", "num_splits"), _LEAST_ONE))

    def check(self, where: str, batch: int, query_len: int, num_heads: int, topk: int, device: torch.device) -> None:
        """See DecodeSchedule."""
        given, made_for = (batch * query_len, num_heads, topk), (self.num_rows, self.num_heads, self.topk)
        if made_for != given:
            refuse_schedule(where, given, made_for)
        if self.num_splits == 1:
            return
        lse_shape = (self.num_splits, self.num_rows, num_heads)
        for name, scratch, shape, axes in (
            ("partial_out", self.partial_out, (*lse_shape, self.value_width), f"[num_splits, B * S, H, {self.value_width}]"),
            ("partial_lse", self.partial_lse, lse_shape, "[num_splits, B * S, H]"),
        ):
            check_tensor(where, f"schedule.{name}", scratch, torch.float32, shape, device, axes)
            if scratch is not None and not scratch.is_contiguous():
                refuse(where, f"schedule.{name}", f"strides {list(scratch.stride())}", "contiguous scratch")

    def scratch(self, where: str, value_width: int) -> Mapping[str, tuple[int, int]]:
        """See DecodeSchedule."""
        if self.partial_out is None or self.partial_lse is None or self.num_splits == 1:
            return {}
        if self.value_width != value_width:
            expected = f"{value_width}, the width of the call's results"
            refuse(where, "schedule.value_width", self.value_width, expected, "Plan for the layout of the cache.")
        ranges = {"schedule.partial_out": extent(self.partial_out), "schedule.partial_lse": extent(self.partial_lse)}
        (begin, end), (other_begin, other_end) = ranges.values()
        if max(begin, other_begin) < min(end, other_end):
            refuse(where, "schedule.partial_lse", "memory that overlaps schedule.partial_out", "memory of its own")
        return ranges


@dataclass(frozen=True, slots=True)
class ProgramShape:
    """What one thread block of a split-KV kernel does.

    Attributes:
        heads: query heads that it computes. tile: indices of an inner step, of which a split has a whole number.
        per_sm: blocks that a multiprocessor is meant to run at once.
    """

    heads: int = 16
    tile: int = 64
    per_sm: int = 2

    def __post_init__(self) -> None:
        check_fields(self, dict.fromkeys(("heads", "tile", "per_sm"), _LEAST_ONE))


def split_kv(
    *,
    num_rows: int,
    num_heads: int,
    topk: int,
    num_sms: int,
    extra_topk: int = 0,
    value_width: int = KV_LORA_RANK,
    program: ProgramShape = ProgramShape(),
    max_scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
) -> int:
    """Choose `num_splits` for a decode call, from shapes alone.

    Splits fill the device while rows alone do not: the largest count for which all blocks run at once, bounded by the scratch
    and by 64 indices in a split. One split needs no scratch, so every batch fits.

    Args:
        num_rows, num_heads, topk: B * S, H, K. extra_topk: K of a second cache, 0 for none. num_sms: multiprocessors, 0 (a CPU)
            means no splitting.
        value_width: of the cache's layout. program: of the kernel that is called.
        max_scratch_bytes: bound on float32 [num_splits, num_rows, H, value_width + 1].
    """
    tile = -(-_LEAST_SPLIT // program.tile) * program.tile
    num_tiles = max(1, _tiles(topk, extra_topk, tile))
    programs = num_rows * -(-num_heads // program.heads)
    if programs == 0 or num_sms == 0:
        return 1
    affordable = max_scratch_bytes // (num_rows * num_heads * _head_bytes(value_width))
    wanted = min(program.per_sm * num_sms // programs, affordable, num_tiles)
    if wanted <= 1:
        return 1
    tiles_per_split = -(-num_tiles // wanted)
    return -(-num_tiles // tiles_per_split)


def _tiles(topk: int, extra_topk: int, tile: int) -> int:
    """Of a row: no tile has indices of both lists."""
    return -(-topk // tile) - (-extra_topk // tile)


def _head_bytes(value_width: int) -> int:
    """Of the partial result of one row, head and split: out and lse."""
    return 4 * (value_width + 1)


class SplitSchedules:
    """The SchedulePlanner of kind "split_kv".

    The scratch is allocated here, once, for every row count, never above `max_scratch_bytes`. Every schedule is a view of its
    beginning, so calls on one stream may follow each other, calls on two streams may not overlap.

    Batch-invariant schedules cut a row into as many splits for every row count, so that its sums have the same order in every
    batch: splits of 256 indices, or the shortest whose partial results of `max_num_rows` rows fit the scratch.
    """

    def __init__(self, limits: ScheduleLimits, program: ProgramShape = ProgramShape()) -> None:
        self._limits, self._program = limits, program
        kv_layout = None if limits.request is None else limits.request.kv_layout
        self._value_width = KV_LORA_RANK if kv_layout is None else LAYOUTS[kv_layout].value_width
        self._known: dict[int, SplitSchedule] = {}
        self._invariant = self._one_cut() if limits.batch_invariant else None
        needed = self._most_splits() * limits.num_heads * (self._value_width + 1)
        self._scratch: Tensor | None = torch.empty(needed, dtype=torch.float32, device=limits.device) if needed else None

    def get(self, batch: int, query_len: int = 1) -> SplitSchedule:
        """The schedule of batch * query_len rows, up to `max_num_rows`; the same object each time."""
        num_rows = batch * query_len
        schedule = self._known.get(num_rows)
        if schedule is None:
            schedule = self._known[num_rows] = self._make(num_rows)
        return schedule

    def invalidate(self) -> None:
        """See SchedulePlanner. Scratch holds nothing from one call to the next."""

    def _one_cut(self) -> int:
        """`num_splits` for every row count."""
        limits, tile = self._limits, self._program.tile
        num_tiles = _tiles(limits.topk, limits.extra_topk, tile)
        affordable = limits.max_scratch_bytes // (limits.max_num_rows * limits.num_heads * _head_bytes(self._value_width))
        if limits.num_sms == 0 or affordable <= 1:
            return 1
        tiles = min(num_tiles, max(-(-_INVARIANT_LENGTH // tile), -(-num_tiles // affordable)))
        return -(-num_tiles // tiles)

    def _most_splits(self) -> int:
        """Bound on rows * num_splits over all row counts that are split, 0 where none is."""
        limits, program = self._limits, self._program
        if self._split(1) == 1:  # more rows are never cut into more splits
            return 0
        if self._invariant is not None:
            return limits.max_num_rows * self._invariant
        blocks = program.per_sm * limits.num_sms // -(-limits.num_heads // program.heads)
        affordable = limits.max_scratch_bytes // (limits.num_heads * _head_bytes(self._value_width))
        return min(blocks, affordable, limits.max_num_rows * self._split(1))

    def _split(self, num_rows: int) -> int:
        if self._invariant is not None:
            return self._invariant
        limits = self._limits
        return split_kv(
            num_rows=num_rows,
            num_heads=limits.num_heads,
            topk=limits.topk,
            extra_topk=limits.extra_topk,
            num_sms=limits.num_sms,
            value_width=self._value_width,
            program=self._program,
            max_scratch_bytes=limits.max_scratch_bytes,
        )

    def _make(self, num_rows: int) -> SplitSchedule:
        num_heads = self._limits.num_heads
        num_splits = self._split(num_rows)
        partial_out = partial_lse = None
        if num_splits > 1:
            assert self._scratch is not None  # sized for every row count in __init__
            lse_words = num_splits * num_rows * num_heads
            out_words = lse_words * self._value_width
            partial_out = self._scratch[:out_words].view(num_splits, num_rows, num_heads, self._value_width)
            partial_lse = self._scratch[out_words : out_words + lse_words].view(num_splits, num_rows, num_heads)
        return SplitSchedule(
            num_rows=num_rows,
            num_heads=num_heads,
            topk=self._limits.topk,
            num_splits=num_splits,
            partial_out=partial_out,
            partial_lse=partial_lse,
            value_width=self._value_width,
            extra_topk=self._limits.extra_topk,
        )


def _schedules(limits: ScheduleLimits, *, program: Callable[[Request], ProgramShape]) -> SplitSchedules:
    return SplitSchedules(limits, ProgramShape() if limits.request is None else program(limits.request))


def split_kv_kind(program: Callable[[Request], ProgramShape]) -> ScheduleKind:
    """The kind "split_kv" of a kernel whose thread blocks do what `program` says for the request it is bound for."""
    return ScheduleKind("split_kv", SplitSchedule, partial(_schedules, program=program))


SPLIT_KV: Final = ScheduleKind("split_kv", SplitSchedule, SplitSchedules)
"""Of kernels with the default ProgramShape."""
