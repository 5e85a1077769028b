# SPDX-License-Identifier: Apache-2.0
"""Decode schedules: how the keys of each query row are divided among thread blocks, and the scratch that takes.

The planner makes them once per step; an implementation of sparse_decode names the kind it wants
(`Implementation.schedule_kind`). Both kinds depend on shapes alone, so a step needs no read-back to plan them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from torch import Tensor

from mla_portable.contracts.values import INT32_MAX, check_fields, refuse
from mla_portable.layouts import KV_LORA_RANK

__all__ = [
    "DEFAULT_SCRATCH_BYTES",
    "SCHEDULE_TYPES",
    "DecodeSchedule",
    "ProgramShape",
    "SplitSchedule",
    "TileSchedule",
    "split_kv",
]

DEFAULT_SCRATCH_BYTES: Final = 64 << 20
"""Bound on split-KV scratch where the caller sets none."""
_LEAST_SPLIT: Final = 64
"""Merging shorter splits takes longer than they save. H200, 4 BF16 rows of 16 heads: 32 splits of 64 indices take 19.4 us, 64
splits of 32 take 23.4."""
_LEAST_ONE: Final = (1, INT32_MAX)


@dataclass(frozen=True, slots=True, eq=False)
class SplitSchedule:
    """Every row's K indices cut into `num_splits` runs of `split_len`; kind "split_kv".

    Attributes:
        num_rows: B * S. num_heads: H. topk: K. These three it was made for.
        num_splits: runs per row, at least 1. split_len: indices in a run, a multiple of the tile given to `split_kv`;
            num_splits * split_len >= topk.
        partial_out: [num_splits, num_rows, H, 512] float32 scratch, contiguous; None when num_splits is 1.
        partial_lse: [num_splits, num_rows, H] float32 scratch, contiguous; None when num_splits is 1.
    Raises: InvalidArgument where the runs do not cover the indices.
    """

    num_rows: int
    num_heads: int
    topk: int
    num_splits: int
    split_len: int
    partial_out: Tensor | None = None
    partial_lse: Tensor | None = None

    def __post_init__(self) -> None:
        counts = (self.num_rows, self.num_heads, self.topk, self.num_splits, self.split_len)
        # A call without a schedule makes one, and check_fields takes 2 us.
        if set(map(type, counts)) != {int} or counts[0] < 0 or min(counts[1:]) < 1:
            check_fields(self, dict.fromkeys(("num_heads", "topk", "num_splits", "split_len"), _LEAST_ONE))
        if self.num_splits * self.split_len < self.topk:
            covered = f"{self.num_splits} runs of {self.split_len}, which is {self.num_splits * self.split_len} indices"
            refuse("SplitSchedule", "split_len", covered, f"at least topk ({self.topk}) indices", "Use split_kv().")


@dataclass(frozen=True, slots=True, eq=False)
class TileSchedule:
    """FlashMLA's tile schedule in closed form; kind "flashmla_tiles".

    A kernel call allocates float32 accumulators for B + num_sm_parts rows. Where that would pass the planner's bound, the
    rows are served by several calls of `rows_per_call` rows, which share one schedule, and a shorter last one.

    Attributes:
        num_rows: B batch rows. query_len: S. num_heads: H after padding. topk: K.
        num_sm_parts: thread-block groups that share the work of a call.
        tile_scheduler_metadata: [num_sm_parts, 8] int32 on the device: begin_req, end_req, begin_block, end_block,
            begin_split, first_is_split, last_is_split, 0.
        num_splits: [min(B, rows_per_call) + 1] int32 on the device, cumulative.
        rows_per_call: batch rows of one kernel call; None means that one call serves all.
        tail: the schedule of the last call when it has fewer rows than the others, else None.
    """

    num_rows: int
    query_len: int
    num_heads: int
    topk: int
    num_sm_parts: int
    tile_scheduler_metadata: Tensor
    num_splits: Tensor
    rows_per_call: int | None = None
    tail: TileSchedule | None = None

    def __post_init__(self) -> None:
        check_fields(self, dict.fromkeys(("query_len", "num_heads", "topk", "num_sm_parts", "rows_per_call"), _LEAST_ONE))


DecodeSchedule = SplitSchedule | TileSchedule
SCHEDULE_TYPES: Final[Mapping[str, type[SplitSchedule] | type[TileSchedule]]] = MappingProxyType(
    {"split_kv": SplitSchedule, "flashmla_tiles": TileSchedule}
)
"""`Implementation.schedule_kind` -> what `schedule` must be; "none" is absent, for it ignores any."""


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
    value_width: int = KV_LORA_RANK,
    program: ProgramShape = ProgramShape(),
    max_scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
) -> tuple[int, int]:
    """Choose (num_splits, split_len) for a decode call, from shapes alone.

    Splits fill the device while rows alone do not: the largest count for which all blocks run at once, bounded by the scratch
    and by 64 indices in a split. One split needs no scratch, so every batch fits.

    Args:
        num_rows, num_heads, topk: B * S, H, K. num_sms: multiprocessors, 0 (a CPU) means no splitting.
        value_width: of the cache's layout.
        program: of the kernel that is called, `Implementation.program`.
        max_scratch_bytes: bound on float32 [num_splits, num_rows, H, value_width + 1].
    """
    tile = -(-_LEAST_SPLIT // program.tile) * program.tile
    num_tiles = max(1, -(-topk // tile))
    programs = num_rows * -(-num_heads // program.heads)
    row_bytes = 4 * num_rows * num_heads * (value_width + 1)
    if programs == 0 or num_sms == 0:
        return 1, num_tiles * tile
    wanted = min(program.per_sm * num_sms // programs, max_scratch_bytes // row_bytes, num_tiles)
    if wanted <= 1:
        return 1, num_tiles * tile
    tiles_per_split = -(-num_tiles // wanted)
    return -(-num_tiles // tiles_per_split), tiles_per_split * tile
