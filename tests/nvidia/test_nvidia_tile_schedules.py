# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's tile schedules against a block-by-block restatement and known values, and what is kept of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_portable.contracts import InvalidArgument, ScheduleLimits
from mla_portable_common.flash_mla.tile_schedules import (
    TileSchedule,
    TileSchedules,
    accumulator_bytes,
    num_sm_parts,
    tile_schedule,
)

OVERHEAD = 5

Piece = tuple[int, int, int]
"""(row, first block, end block)"""


def deal(lens: list[int], parts: int, block: int = 64, overhead: int = OVERHEAD) -> tuple[int, list[list[Piece]]]:
    """Deal the rows' blocks out to the parts, one after the other: (budget of a part, its pieces)."""
    rows = [max(1, (n + block - 1) // block) for n in lens]
    budget = (sum(rows) + overhead * len(rows) + parts - 1) // parts + overhead
    hands: list[list[Piece]] = []
    row = done = 0
    for _ in range(parts):
        left, hand = budget, []
        while row < len(rows):
            if rows[row] - done + overhead <= left:
                hand.append((row, done, rows[row]))
                left -= rows[row] - done + overhead
                row, done = row + 1, 0
                continue
            if left > overhead:
                hand.append((row, done, done + left - overhead))
                done += left - overhead
            break
        hands.append(hand)
    assert row == len(rows), "the budget always suffices"
    return budget, hands


def describe(lens: list[int], hands: list[list[Piece]], block: int = 64) -> tuple[list[list[int]], list[int]]:
    """(metadata, num_splits) that say who reads what."""
    rows = [max(1, (n + block - 1) // block) for n in lens]
    pieces = [piece for hand in hands for piece in hand]
    of_row = {row: [p for p in pieces if p[0] == row] for row in range(len(rows))}
    metadata = []
    for hand in hands:
        if not hand:
            metadata.append([len(rows), len(rows) - 1, 0, rows[-1], 0, 0, 0, 0])
            continue
        first, last = hand[0], hand[-1]
        cut_before, cut_after = first[1] > 0, last[2] < rows[last[0]]
        if first[0] == last[0]:
            cut_before = cut_after = cut_before or cut_after
        split = of_row[first[0]].index(first)
        metadata.append([first[0], last[0], first[1], last[2], split, int(cut_before), int(cut_after), 0])
    num_splits = [0]
    for row in range(len(rows)):
        num_splits.append(num_splits[-1] + len(of_row[row]))
    return metadata, num_splits


@settings(max_examples=400, deadline=None, database=None)
@given(lens=st.lists(st.integers(-1, 4000), min_size=1, max_size=60), parts=st.integers(1, 150))
def test_tiles_are_what_dealing_block_by_block_gives(lens: list[int], parts: int):
    budget, hands = deal(lens, parts)
    metadata, num_splits = describe(lens, hands)
    tiles = tile_schedule(lens, num_sm_parts=parts)
    assert tiles.payload == budget
    assert tiles.num_splits.tolist() == num_splits
    assert tiles.metadata.tolist() == metadata
    assert tiles.metadata.dtype == tiles.num_splits.dtype == np.int32


@pytest.mark.parametrize(
    ("arch", "num_heads", "query_len", "parts"),
    [
        ("sm90", 64, 1, 132),
        ("sm90", 128, 1, 66),
        ("sm90", 64, 2, 66),
        ("sm90", 128, 2, 33),
        ("sm90", 128, 4, 16),
        ("sm90a", 64, 3, 44),
        ("sm90", 64, 200, 1),
        ("sm100", 64, 1, 132),
        ("sm100", 128, 1, 132),
        ("sm103", 128, 2, 66),
    ],
)
def test_parts_of_132_multiprocessors(arch: str, num_heads: int, query_len: int, parts: int):
    assert num_sm_parts(arch, num_sms=132, query_len=query_len, num_heads=num_heads) == parts


def test_tiles_refuse_what_has_no_meaning():
    with pytest.raises(InvalidArgument, match="arch: got 'sm80', expected sm90 or sm10x"):
        num_sm_parts("sm80", num_sms=108, query_len=1, num_heads=64)
    with pytest.raises(InvalidArgument, match="lens: got no rows"):
        tile_schedule([], num_sm_parts=4)
    with pytest.raises(InvalidArgument, match="num_sm_parts: got 0"):
        tile_schedule([64], num_sm_parts=0)


def make_tiles(max_scratch_bytes: int = 64 << 20, num_heads: int = 64) -> TileSchedules:
    limits = ScheduleLimits(
        torch.device("cpu"), num_heads, 2048, 1024, num_sms=132, arch="sm90", max_scratch_bytes=max_scratch_bytes
    )
    return TileSchedules(limits)


def assert_is_call(schedule: TileSchedule, rows: int, parts: int):
    expected = tile_schedule([2048] * rows, num_sm_parts=parts)
    assert schedule.num_sm_parts == parts
    assert schedule.tile_scheduler_metadata.tolist() == expected.metadata.tolist()
    assert schedule.num_splits.tolist() == expected.num_splits.tolist()


@settings(max_examples=60, deadline=None, database=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 2)), min_size=1, max_size=12),
    scratch=st.integers(40 << 20, 80 << 20),
)
def test_kept_tile_schedules_serve_every_row_within_the_bound(shapes: list[tuple[int, int]], scratch: int):
    schedules = make_tiles(scratch)
    for num_rows, query_len in shapes:
        schedule = schedules.get(num_rows, query_len)
        assert (schedule.num_rows, schedule.query_len, schedule.num_heads, schedule.topk) == (num_rows, query_len, 64, 2048)
        parts = 132 // query_len
        first = min(num_rows, schedule.rows_per_call or num_rows)
        assert_is_call(schedule, first, parts)
        assert (first + parts) * query_len * 64 * (512 + 1) * 4 <= scratch
        rest = num_rows % first
        assert (schedule.tail is None) == (rest == 0)
        if schedule.tail is not None:
            assert_is_call(schedule.tail, rest, parts)
        assert schedules.get(num_rows, query_len) is schedule, "a shape seen before is free"
        schedule.check("sparse_decode", num_rows, query_len, 16, 2048, torch.device("cpu"))


def test_a_call_takes_as_many_rows_as_the_bound_allows():
    schedules = make_tiles(64 << 20)
    limit = schedules.rows_per_call(1)
    assert (limit + 132) * accumulator_bytes(1, 64) <= 64 << 20 < (limit + 133) * accumulator_bytes(1, 64)
    assert schedules.get(limit, 1).rows_per_call is None
    assert schedules.get(limit + 1, 1).rows_per_call == limit
    assert schedules.get(2 * limit, 1).tail is None


def test_old_tile_schedules_leave_and_come_back_the_same():
    schedules = make_tiles(2 << 30)
    first = schedules.get(1, 1)
    for rows in range(2, 2100):
        schedules.get(rows, 1)
    again = schedules.get(1, 1)
    assert again is not first
    assert again.tile_scheduler_metadata.equal(first.tile_scheduler_metadata)
    schedules.invalidate()
    assert schedules.get(1, 1) is not again


def test_batches_of_several_calls_share_the_schedules_of_their_calls():
    schedules = make_tiles()
    limit = schedules.rows_per_call(1)
    schedule = schedules.get(3 * limit + 5, 1)
    assert (schedule.num_rows, schedule.rows_per_call) == (3 * limit + 5, limit)
    assert schedule.tail is schedules.get(5, 1)
    assert schedule.tile_scheduler_metadata is schedules.get(limit, 1).tile_scheduler_metadata
