# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's tile schedules, computed on the host: which thread-block group reads which blocks of which row.

FlashMLA's own planner kernel deals the rows out to `num_sm_parts` parts in order. A row costs its blocks of 64 indices plus
a fixed overhead of 5 blocks; a part has the same payload as every other, takes rows while they fit, and splits the one
that does not. Laid end to end on a line of costs, that is one cut per part:

    cut[p + 1] = max(cut[p] + payload - overhead, start of the row that cut[p] + payload falls in)

so only the cuts are sequential, at most one per multiprocessor, and every field of the schedule follows from them.
Rules as in FlashMLA's `get_decoding_sched_meta` and `sparse_decode.h` (deepseek-ai/FlashMLA, 9241ae3).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mla_portable.contracts import DecodeSchedule, InvalidArgument, ScheduleKind, ScheduleLimits, refuse_schedule
from mla_portable.contracts.values import INT32_MAX, check_fields
from mla_portable.kit.rules import check_tensor
from mla_portable.layouts import KV_LORA_RANK
from mla_portable_common.flash_mla.head_padding import kernel_heads

_METADATA_WORDS: Final = 8
"""int32 words of a part's entry."""
_BLOCK_TOPK: Final = 64
_OVERHEAD_BLOCKS: Final = 5
_HEADS_PER_GROUP: Final = 64
_CAPACITY: Final = 2048
"""Schedules kept per planner; one takes 32 bytes a part and 4 a row, below 6 KiB on 132 multiprocessors by default."""
_LEAST_ONE: Final = (1, INT32_MAX)


@dataclass(frozen=True, slots=True, eq=False)
class TileSchedule(DecodeSchedule):
    """FlashMLA's tile schedule in closed form; kind "flashmla_tiles".

    A kernel call allocates float32 accumulators for B + num_sm_parts rows. Where that would pass the planner's bound, the
    rows are served by several calls of `rows_per_call` rows, which share one schedule, and a shorter last one.

    Attributes:
        num_rows: B batch rows. query_len: S. num_heads: H after padding. topk: K. extra_topk: K of a second cache, or 0.
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
    extra_topk: int = 0

    def __post_init__(self) -> None:
        check_fields(self, dict.fromkeys(("query_len", "num_heads", "topk", "num_sm_parts", "rows_per_call"), _LEAST_ONE))

    def check(self, where: str, batch: int, query_len: int, num_heads: int, topk: int, device: torch.device) -> None:
        """See DecodeSchedule; more heads than the call's are padding."""
        if (self.num_rows, self.query_len, self.topk) != (batch, query_len, topk) or self.num_heads < num_heads:
            made_for = (self.num_rows * self.query_len, self.num_heads, self.topk)
            refuse_schedule(where, (batch * query_len, num_heads, topk), made_for)
        metadata, parts = self.tile_scheduler_metadata, (self.num_sm_parts, _METADATA_WORDS)
        check_tensor(where, "schedule.tile_scheduler_metadata", metadata, torch.int32, parts, device, "[parts, 8]")
        rows = min(batch, self.rows_per_call or batch)
        check_tensor(where, "schedule.num_splits", self.num_splits, torch.int32, (rows + 1,), device, "[rows of a call + 1]")


class Tiles(NamedTuple):
    """A schedule on the host.

    payload: blocks a part may spend. metadata: [parts, 8] int32, as in TileSchedule. num_splits: [B + 1] int32, cumulative.
    """

    payload: int
    metadata: npt.NDArray[np.int32]
    num_splits: npt.NDArray[np.int32]


def num_sm_parts(arch: str, *, num_sms: int, query_len: int, num_heads: int) -> int:
    """Thread-block groups of a sparse decode call, 576 wide or, on Hopper, 512.

    Hopper gives each of the `num_heads` / 64 head tiles and `query_len` tokens a block of its own; Blackwell runs 128 heads
    as two launches of 64. Raises: InvalidArgument for an architecture without such a kernel.
    """
    if arch in ("sm90", "sm90a"):
        return max(num_sms // query_len // (num_heads // _HEADS_PER_GROUP), 1)
    if arch.startswith("sm10"):
        return max(num_sms // query_len, 1)
    raise InvalidArgument(
        "num_sm_parts",
        "arch",
        got=repr(arch),
        expected="sm90 or sm10x, for which FlashMLA's rule is known",
        remedy="Plan with schedule_kind=None where the decode kernel is not FlashMLA's.",
    )


def accumulator_bytes(query_len: int, num_heads: int) -> int:
    """Bytes of float32 partial output and lse that a call allocates per batch row and per part."""
    return 4 * query_len * num_heads * (KV_LORA_RANK + 1)


def tile_schedule(
    lens: Sequence[int] | npt.NDArray[np.integer],
    *,
    num_sm_parts: int,
) -> Tiles:
    """The schedule of a decode call whose row i has `lens[i]` indices (topk, or its topk_length).

    Args:
        lens: one entry per batch row, at least one row; a length below 1 counts as 1.
        num_sm_parts: parts to deal out to.
    Returns: Tiles. A part with nothing to do begins at row B.
    """
    if len(lens) < 1:
        raise InvalidArgument("tile_schedule", "lens", got="no rows", expected="at least one row")
    if num_sm_parts < 1:
        raise InvalidArgument("tile_schedule", "num_sm_parts", got=num_sm_parts, expected="1 or more")
    blocks = -(-np.maximum(np.asarray(lens, dtype=np.int64), 1) // _BLOCK_TOPK)  # [B]
    starts = np.zeros(len(blocks) + 1, dtype=np.int64)  # [B + 1], where each row begins on the line of costs
    np.cumsum(blocks + _OVERHEAD_BLOCKS, out=starts[1:])
    total = int(starts[-1])
    payload = -(-total // num_sm_parts) + _OVERHEAD_BLOCKS

    row_starts: list[int] = starts.tolist()
    cuts = [0]
    last = 0
    for _ in range(num_sm_parts):
        reach = last + payload
        row_start = row_starts[bisect_right(row_starts, reach) - 1]
        last = reach - _OVERHEAD_BLOCKS
        if last < row_start:
            last = row_start
        cuts.append(last)
    cut = np.minimum(np.array(cuts, dtype=np.int64), total)  # [parts + 1]
    row = np.searchsorted(starts, cut, side="right") - 1  # [parts + 1], B once everything is dealt
    taken = cut - starts[row]  # [parts + 1], blocks of that row already dealt
    inside = taken > 0

    # The first cut inside a row is its split 1; cuts at or before the row's start do not count.
    first_inside = np.searchsorted(cut, starts[row], side="right")
    split = np.where(inside, np.arange(num_sm_parts + 1) - first_inside + 1, 0)
    begin_row, begin_block = row[:-1], taken[:-1]
    end_row = np.where(inside[1:], row[1:], row[1:] - 1)
    end_block = np.where(inside[1:], taken[1:], blocks[end_row])
    first_is_split = begin_block != 0
    last_is_split = end_block != blocks[end_row]
    either = (begin_row == end_row) & (first_is_split | last_is_split)
    columns = (begin_row, end_row, begin_block, end_block, split[:-1], first_is_split | either, last_is_split | either)
    metadata = np.zeros((num_sm_parts, _METADATA_WORDS), dtype=np.int32)
    metadata[:, : len(columns)] = np.stack(columns, axis=1)
    num_splits = np.zeros(len(blocks) + 1, dtype=np.int32)
    np.cumsum(1 + np.bincount(row[inside], minlength=len(blocks)), out=num_splits[1:])
    return Tiles(payload, metadata, num_splits)


class TileSchedules:
    """The SchedulePlanner of kind "flashmla_tiles".

    With fixed widths of both lists a schedule depends on (rows, query length) alone. A shape that was not seen lately costs a
    schedule on the host and a copy from page-locked memory; nothing waits for it. When too many are kept all are forgotten;
    whoever captured a graph keeps its plan, and the plan keeps its schedule.
    """

    def __init__(self, limits: ScheduleLimits) -> None:
        """Raises: InvalidArgument for limits that no batch could be planned with."""
        self._limits, self._num_heads = limits, kernel_heads(limits.num_heads)
        self._known: dict[tuple[int, int], TileSchedule] = {}
        where = "PlannerConfig"
        if limits.batch_invariant:
            expected = "False for schedule_kind flashmla_tiles, which cuts rows where a part of the batch ends"
            remedy = "Take an implementation of sparse_decode that offers it."
            raise InvalidArgument(where, "batch_invariant", got=True, expected=expected, remedy=remedy)
        if limits.num_sms < 1:
            raise InvalidArgument(where, "num_sms", got=limits.num_sms, expected="1 or more for schedule_kind flashmla_tiles")
        if self._num_heads % _HEADS_PER_GROUP:
            expected = "at most 128, or a multiple of 64, for schedule_kind flashmla_tiles"
            raise InvalidArgument(where, "num_heads", got=limits.num_heads, expected=expected)
        for query_len in range(1, limits.max_query_len + 1):
            parts = self._parts(query_len)
            needed = (1 + parts) * accumulator_bytes(query_len, self._num_heads)
            if needed > limits.max_scratch_bytes:
                raise InvalidArgument(
                    where,
                    "max_scratch_bytes",
                    got=limits.max_scratch_bytes,
                    expected=f"at least {needed}, the accumulators of one row of {query_len} tokens and {parts} parts",
                    remedy="Raise it, or lower decode_threshold and few_tokens.",
                )

    def get(self, batch: int, query_len: int) -> TileSchedule:
        """The schedule of `batch` rows of `query_len` tokens; the same object while it is kept."""
        schedule = self._known.get((batch, query_len))
        if schedule is None:
            limit = self.rows_per_call(query_len)
            if batch <= limit:
                schedule = self._one_call(batch, query_len)
            else:
                rest = batch % limit
                tail = self.get(rest, query_len) if rest else None
                schedule = replace(self.get(limit, query_len), num_rows=batch, rows_per_call=limit, tail=tail)
            if len(self._known) >= _CAPACITY:
                self._known.clear()
            self._known[batch, query_len] = schedule
        return schedule

    def invalidate(self) -> None:
        """See SchedulePlanner."""
        self._known.clear()

    def rows_per_call(self, query_len: int) -> int:
        """Batch rows of one kernel call, so that accumulators for them and for every part stay within the bound."""
        return self._limits.max_scratch_bytes // accumulator_bytes(query_len, self._num_heads) - self._parts(query_len)

    def _one_call(self, batch: int, query_len: int) -> TileSchedule:
        limits, parts = self._limits, self._parts(query_len)
        width = limits.topk
        if limits.extra_topk:  # the second list begins with a block of its own
            width = -(-width // _BLOCK_TOPK) * _BLOCK_TOPK + limits.extra_topk
        tiles = tile_schedule(np.full(batch, width), num_sm_parts=parts)
        metadata, num_splits = self._on_device(tiles.metadata), self._on_device(tiles.num_splits)
        made_for = (batch, query_len, self._num_heads, limits.topk)
        return TileSchedule(*made_for, parts, metadata, num_splits, extra_topk=limits.extra_topk)

    def _on_device(self, words: npt.NDArray[np.int32]) -> Tensor:
        tensor, device = torch.from_numpy(words), self._limits.device
        # torch's allocator of page-locked memory gives it to nobody else before the copy has been made
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    def _parts(self, query_len: int) -> int:
        limits = self._limits
        return num_sm_parts(limits.arch, num_sms=limits.num_sms, query_len=query_len, num_heads=self._num_heads)


FLASHMLA_TILES: Final = ScheduleKind("flashmla_tiles", TileSchedule, TileSchedules, assumes_topk=True, fused_below_heads=32)
