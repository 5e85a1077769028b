# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's tile schedule, computed on the host: which thread-block group reads which blocks of which row.

FlashMLA's own planner kernel deals the rows out to `num_sm_parts` parts in order. A row costs its blocks of 64 indices plus
a fixed overhead of 5 blocks; a part has the same payload as every other, takes rows while they fit, and splits the one
that does not. Laid end to end on a line of costs, that is one cut per part:

    cut[p + 1] = max(cut[p] + payload - overhead, start of the row that cut[p] + payload falls in)

so only the cuts are sequential, at most one per multiprocessor, and every field of the schedule follows from them.
Rules as in FlashMLA's `get_decoding_sched_meta` and `sparse_decode.h` (deepseek-ai/FlashMLA, 9241ae3).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mla_portable.contracts import InvalidArgument, TileSchedule
from mla_portable.layouts import KV_LORA_RANK

__all__ = ["METADATA_WORDS", "TileSchedules", "Tiles", "accumulator_bytes", "num_sm_parts", "tile_schedule"]

METADATA_WORDS: Final = 8
"""int32 words of a part's entry."""
_BLOCK_TOPK: Final = 64
_OVERHEAD_BLOCKS: Final = 5
_HEADS_PER_GROUP: Final = 64
_CAPACITY: Final = 1024
"""Schedules kept per planner; one takes 32 bytes a part and 4 a row, below 6 KiB on 132 multiprocessors by default."""


class Tiles(NamedTuple):
    """A schedule on the host.

    payload: blocks a part may spend. metadata: [parts, 8] int32, as in TileSchedule. num_splits: [B + 1] int32, cumulative.
    """

    payload: int
    metadata: npt.NDArray[np.int32]
    num_splits: npt.NDArray[np.int32]


def num_sm_parts(arch: str, *, num_sms: int, query_len: int, num_heads: int) -> int:
    """Thread-block groups of a 576-wide sparse decode call.

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
        remedy='Plan with schedule_kind "none" where the decode kernel is not FlashMLA\'s.',
    )


def accumulator_bytes(query_len: int, num_heads: int) -> int:
    """Bytes of float32 partial output and lse that a call allocates per batch row and per part."""
    return 4 * query_len * num_heads * (KV_LORA_RANK + 1)


def tile_schedule(
    lens: Sequence[int] | npt.NDArray[np.integer],
    *,
    num_sm_parts: int,
    block: int = _BLOCK_TOPK,
    overhead: int = _OVERHEAD_BLOCKS,
) -> Tiles:
    """The schedule of a decode call whose row i has `lens[i]` indices (topk, or its topk_length).

    Args:
        lens: one entry per batch row, at least one row; a length below 1 counts as 1.
        num_sm_parts: parts to deal out to. block: indices per block. overhead: blocks a row costs beside its own.
    Returns: Tiles. A part with nothing to do begins at row B.
    """
    if len(lens) < 1:
        raise InvalidArgument("tile_schedule", "lens", got="no rows", expected="at least one row")
    if num_sm_parts < 1:
        raise InvalidArgument("tile_schedule", "num_sm_parts", got=num_sm_parts, expected="1 or more")
    blocks = -(-np.maximum(np.asarray(lens, dtype=np.int64), 1) // block)  # [B]
    starts = np.zeros(len(blocks) + 1, dtype=np.int64)  # [B + 1], where each row begins on the line of costs
    np.cumsum(blocks + overhead, out=starts[1:])
    total = int(starts[-1])
    payload = -(-total // num_sm_parts) + overhead

    row_starts: list[int] = starts.tolist()
    cuts = [0]
    last = 0
    for _ in range(num_sm_parts):
        reach = last + payload
        row_start = row_starts[bisect_right(row_starts, reach) - 1]
        last = reach - overhead
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
    metadata = np.zeros((num_sm_parts, METADATA_WORDS), dtype=np.int32)
    metadata[:, : len(columns)] = np.stack(columns, axis=1)
    num_splits = np.zeros(len(blocks) + 1, dtype=np.int32)
    np.cumsum(1 + np.bincount(row[inside], minlength=len(blocks)), out=num_splits[1:])
    return Tiles(payload, metadata, num_splits)


class TileSchedules:
    """The schedules of one planner, kept on the device by (rows, query length): with a fixed topk they depend on no more.

    A shape that was not seen lately costs a schedule on the host and a place in the step's one copy (`missing`, then
    `adopt`). Old shapes leave; whoever captured a graph keeps its plan, and the plan keeps its schedule.
    """

    def __init__(self, *, topk: int, num_heads: int, num_sms: int, arch: str, max_scratch_bytes: int) -> None:
        self._topk, self._num_heads, self._num_sms, self._arch = topk, num_heads, num_sms, arch
        self._max_scratch_bytes = max_scratch_bytes
        self._calls: OrderedDict[tuple[int, int], TileSchedule] = OrderedDict()
        self._several: OrderedDict[tuple[int, int], TileSchedule] = OrderedDict()  # batches that take several calls

    def clear(self) -> None:
        """Forget every schedule: the device has none of them."""
        self._calls.clear()
        self._several.clear()

    def rows_per_call(self, query_len: int) -> int:
        """Batch rows of one kernel call, so that accumulators for them and for every part stay within the bound."""
        return self._max_scratch_bytes // accumulator_bytes(query_len, self._num_heads) - self._parts(query_len)

    def max_words(self, max_rows: int, max_query_len: int) -> int:
        """int32 words that `missing` may ask for at once, over all batches of up to `max_rows` rows."""
        words = 0
        for query_len in range(1, max_query_len + 1):
            rows = min(max_rows, self.rows_per_call(query_len))
            words = max(words, 2 * (METADATA_WORDS * self._parts(query_len) + _aligned(rows + 1)))
        return words

    def get(self, num_rows: int, query_len: int) -> TileSchedule | None:
        """The schedule of `num_rows` batch rows of `query_len` tokens, None when the device lacks a part of it."""
        key = (num_rows, query_len)
        schedule = _recall(self._calls, key) or _recall(self._several, key)
        if schedule is not None:
            return schedule
        calls = [_recall(self._calls, (rows, query_len)) for rows in self._call_sizes(num_rows, query_len)]
        return None if None in calls else self._compose(num_rows, [call for call in calls if call is not None])

    def missing(self, num_rows: int, query_len: int) -> npt.NDArray[np.int32]:
        """The words that the device lacks before `adopt` can make a schedule that `get` does not have."""
        words: list[npt.NDArray[np.int32]] = []
        for rows in self._call_sizes(num_rows, query_len):
            if _recall(self._calls, (rows, query_len)) is None:  # recalled: it must outlive what adopt adds
                tiles = tile_schedule(np.full(rows, self._topk), num_sm_parts=self._parts(query_len))
                padding = np.zeros(_aligned(rows + 1) - rows - 1, dtype=np.int32)
                words += [tiles.metadata.reshape(-1), tiles.num_splits, padding]
        return np.concatenate(words)

    def adopt(self, num_rows: int, query_len: int, words: Tensor) -> TileSchedule:
        """Make the schedule from the words of `missing`, now [n] int32 on the device, which are copied in stream order."""
        parts = self._parts(query_len)
        calls: list[TileSchedule] = []
        begin = 0
        for rows in self._call_sizes(num_rows, query_len):
            call = _recall(self._calls, (rows, query_len))
            if call is None:
                middle = begin + METADATA_WORDS * parts
                metadata = words[begin:middle].clone().view(parts, METADATA_WORDS)
                num_splits = words[middle : middle + rows + 1].clone()
                call = TileSchedule(rows, query_len, self._num_heads, self._topk, parts, metadata, num_splits)
                _keep(self._calls, call)
                begin = middle + _aligned(rows + 1)
            calls.append(call)
        return calls[0] if calls[0].num_rows == num_rows else self._compose(num_rows, calls)

    def _compose(self, num_rows: int, calls: Sequence[TileSchedule]) -> TileSchedule:
        """One schedule for several calls: equal ones as the first of `calls`, then the second, if there is one."""
        first, *rest = calls
        schedule = replace(first, num_rows=num_rows, rows_per_call=first.num_rows, tail=rest[0] if rest else None)
        _keep(self._several, schedule)
        return schedule

    def _parts(self, query_len: int) -> int:
        return num_sm_parts(self._arch, num_sms=self._num_sms, query_len=query_len, num_heads=self._num_heads)

    def _call_sizes(self, num_rows: int, query_len: int) -> tuple[int, ...]:
        """Rows of the kernel calls that serve `num_rows`, each different size once."""
        limit = self.rows_per_call(query_len)
        if num_rows <= limit:
            return (num_rows,)
        return (limit, num_rows % limit) if num_rows % limit else (limit,)


def _recall(kept: OrderedDict[tuple[int, int], TileSchedule], key: tuple[int, int]) -> TileSchedule | None:
    schedule = kept.get(key)
    if schedule is not None:
        kept.move_to_end(key)
    return schedule


def _keep(kept: OrderedDict[tuple[int, int], TileSchedule], schedule: TileSchedule) -> None:
    """Keep a schedule, and let the one go that was not used for the longest time."""
    kept[schedule.num_rows, schedule.query_len] = schedule
    if len(kept) > _CAPACITY:
        kept.popitem(last=False)


def _aligned(words: int) -> int:
    return -(-words // 4) * 4
