# SPDX-License-Identifier: Apache-2.0
"""Decode schedules: FlashMLA's against a block-by-block restatement and known values, split-KV's bounds, what is kept."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_portable.contracts import KV_LORA_RANK, InvalidArgument, PlanMismatch, ProgramShape, TileSchedule, split_kv
from mla_portable.contracts.validate import check_schedule
from mla_portable.planner import num_sm_parts, tile_schedule
from mla_portable.planner.flashmla import TileSchedules, accumulator_bytes
from mla_portable.planner.split import SplitSchedules

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


@settings(max_examples=200, deadline=None, database=None)
@given(
    rows=st.integers(1, 300),
    topk=st.sampled_from([1, 64, 100, 2048, 2049]),
    parts=st.integers(1, 148),
    overhead=st.integers(1, 6),
)
def test_uniform_tiles_are_what_dealing_gives(rows: int, topk: int, parts: int, overhead: int):
    budget, hands = deal([topk] * rows, parts, overhead=overhead)
    tiles = tile_schedule(np.full(rows, topk), num_sm_parts=parts, overhead=overhead)
    assert (tiles.payload, tiles.metadata.tolist(), tiles.num_splits.tolist()) == (
        budget,
        *describe([topk] * rows, hands),
    )


@settings(max_examples=150, deadline=None, database=None)
@given(lens=st.lists(st.integers(0, 3000), min_size=1, max_size=40), parts=st.integers(1, 64))
def test_each_block_is_read_exactly_once(lens: list[int], parts: int):
    rows = [max(1, -(-n // 64)) for n in lens]
    read: Counter[tuple[int, int]] = Counter()
    for begin_row, end_row, begin_block, end_block, *_ in tile_schedule(lens, num_sm_parts=parts).metadata.tolist():
        for row in range(begin_row, end_row + 1):
            first = begin_block if row == begin_row else 0
            end = end_block if row == end_row else rows[row]
            read.update((row, block) for block in range(first, end))
    assert read == Counter((row, block) for row, n in enumerate(rows) for block in range(n))


# parts, rows, payload, parts in use, most blocks of a part, most splits of a row, all splits, balance; topk 2048
GOLDEN = [
    (132, 1, 6, 32, 1, 32, 32, 0.24),
    (132, 2, 6, 64, 1, 32, 64, 0.48),
    (132, 4, 7, 64, 2, 16, 64, 0.48),
    (132, 8, 8, 88, 3, 11, 88, 0.65),
    (132, 16, 10, 112, 5, 7, 112, 0.78),
    (132, 32, 14, 128, 9, 4, 128, 0.86),
    (132, 64, 23, 128, 18, 2, 128, 0.86),
    (132, 74, 26, 130, 21, 3, 185, 0.85),
    (132, 128, 41, 128, 32, 1, 128, 0.97),
    (132, 132, 42, 132, 32, 1, 132, 1.00),
    (132, 148, 47, 130, 37, 2, 259, 0.97),
    (132, 256, 77, 128, 64, 1, 256, 0.97),
    (66, 1, 6, 32, 1, 32, 32, 0.48),
    (66, 8, 10, 56, 5, 7, 56, 0.78),
    (66, 32, 23, 64, 18, 2, 64, 0.86),
    (66, 64, 41, 64, 32, 1, 64, 0.97),
    (66, 74, 47, 65, 37, 2, 129, 0.97),
    (66, 128, 77, 64, 64, 1, 128, 0.97),
    (33, 2, 8, 22, 3, 11, 22, 0.65),
    (33, 64, 77, 32, 64, 1, 64, 0.97),
    (33, 74, 88, 33, 73, 2, 98, 0.98),
    (33, 128, 149, 32, 128, 1, 128, 0.97),
]


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: f"parts{g[0]}-b{g[1]}")
def test_golden_schedules_of_132_multiprocessors(golden: tuple[int, int, int, int, int, int, int, float]):
    parts, rows, payload, used, most_blocks, most_splits, total, balance = golden
    tiles = tile_schedule([2048] * rows, num_sm_parts=parts)
    begin_row, end_row, begin_block, end_block = (tiles.metadata[:, i].astype(int) for i in range(4))
    busy = begin_row < rows
    blocks = ((end_row - begin_row) * 32 + end_block - begin_block)[busy]
    assert tiles.payload == payload
    assert busy.sum() == used
    assert blocks.max() == most_blocks
    assert np.diff(tiles.num_splits).max() == most_splits
    assert tiles.num_splits[-1] == total
    assert round(rows * 32 / (parts * blocks.max()), 2) == balance


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


def adopted(schedules: TileSchedules, num_rows: int, query_len: int) -> tuple[TileSchedule, int]:
    """The schedule as a planner gets it, and how many words had to travel."""
    known = schedules.get(num_rows, query_len)
    if known is not None:
        return known, 0
    words = schedules.missing(num_rows, query_len)
    landing = torch.from_numpy(words.copy())
    schedule = schedules.adopt(num_rows, query_len, landing)
    landing.fill_(-77)  # the next step reuses it
    return schedule, len(words)


def make_tiles(max_scratch_bytes: int = 64 << 20, num_heads: int = 64) -> TileSchedules:
    return TileSchedules(topk=2048, num_heads=num_heads, num_sms=132, arch="sm90", max_scratch_bytes=max_scratch_bytes)


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
    most = schedules.max_words(900, 2)
    for num_rows, query_len in shapes:
        schedule, words = adopted(schedules, num_rows, query_len)
        assert words <= most
        assert (schedule.num_rows, schedule.query_len, schedule.num_heads, schedule.topk) == (num_rows, query_len, 64, 2048)
        parts = 132 // query_len
        first = min(num_rows, schedule.rows_per_call or num_rows)
        assert_is_call(schedule, first, parts)
        assert (first + parts) * query_len * 64 * (512 + 1) * 4 <= scratch
        rest = num_rows % first
        assert (schedule.tail is None) == (rest == 0)
        if schedule.tail is not None:
            assert_is_call(schedule.tail, rest, parts)
        assert adopted(schedules, num_rows, query_len) == (schedule, 0), "a shape seen before is free"
        check_schedule("sparse_decode", schedule, num_rows, query_len, 16, 2048, torch.device("cpu"))


def test_a_call_takes_as_many_rows_as_the_bound_allows():
    schedules = make_tiles(64 << 20)
    limit = schedules.rows_per_call(1)
    assert (limit + 132) * accumulator_bytes(1, 64) <= 64 << 20 < (limit + 133) * accumulator_bytes(1, 64)
    assert adopted(schedules, limit, 1)[0].rows_per_call is None
    assert adopted(schedules, limit + 1, 1)[0].rows_per_call == limit
    assert adopted(schedules, 2 * limit, 1)[0].tail is None


def test_old_tile_schedules_leave_and_come_back_the_same():
    schedules = make_tiles(1 << 30)
    first, _ = adopted(schedules, 1, 1)
    for rows in range(2, 1200):
        adopted(schedules, rows, 1)
    again, words = adopted(schedules, 1, 1)
    assert words > 0
    assert again is not first
    assert again.tile_scheduler_metadata.equal(first.tile_scheduler_metadata)


def test_a_known_tail_survives_the_arrival_of_its_head():
    """The tail is the oldest of a full store when the head arrives: it must not leave while it is in use."""
    schedules = make_tiles(300 << 20)
    limit = schedules.rows_per_call(1)
    assert limit > 1024
    for rows in range(7, 7 + 1024):
        adopted(schedules, rows, 1)
    words = torch.from_numpy(schedules.missing(limit + 7, 1))
    schedule = schedules.adopt(limit + 7, 1, words)
    assert_is_call(schedule, limit, 132)
    assert schedule.tail is not None
    assert_is_call(schedule.tail, 7, 132)


def test_batches_of_known_calls_need_nothing():
    schedules = make_tiles()
    limit = schedules.rows_per_call(1)
    adopted(schedules, limit, 1)
    adopted(schedules, 5, 1)
    schedule, words = adopted(schedules, 3 * limit + 5, 1)
    assert words == 0
    assert (schedule.num_rows, schedule.rows_per_call) == (3 * limit + 5, limit)
    assert schedule.tail is adopted(schedules, 5, 1)[0]


def make_splits(
    num_heads: int,
    topk: int,
    num_sms: int,
    max_scratch_bytes: int = 64 << 20,
    max_num_rows: int = 300,
    batch_invariant: bool = False,
) -> SplitSchedules:
    return SplitSchedules(
        num_heads=num_heads,
        topk=topk,
        num_sms=num_sms,
        max_num_rows=max_num_rows,
        batch_invariant=batch_invariant,
        max_scratch_bytes=max_scratch_bytes,
        device=torch.device("cpu"),
        program=ProgramShape(),
    )


@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("num_sms", [0, 1, 78, 108, 132, 160])
def test_every_cut_covers_the_row_within_the_scratch(num_sms: int, tile: int):
    for heads, topk, bound in product((1, 8, 16, 32, 64, 128), (1, 64, 100, 512, 2000, 2048, 2049), (0, 4 << 20, 64 << 20)):
        for rows in range(301):
            num_splits, split_len = split_kv(
                num_rows=rows,
                num_heads=heads,
                topk=topk,
                num_sms=num_sms,
                program=ProgramShape(tile=tile),
                max_scratch_bytes=bound,
            )
            shape = (rows, heads, topk, bound, num_splits, split_len)
            assert num_splits >= 1 and split_len > 0 and split_len % tile == 0, shape
            assert (num_splits - 1) * split_len < topk <= num_splits * split_len, shape
            assert num_splits == 1 or split_len >= 64, shape
            if num_splits > 1:
                assert num_splits * rows * heads * (KV_LORA_RANK + 1) * 4 <= bound, shape
                assert num_splits * rows * -(-heads // 16) <= 2 * num_sms, shape


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("most", "num_sms", "heads", "topk"), [(1, 132, 16, 2048), (7, 132, 64, 2048), (300, 78, 8, 1000)])
def test_the_scratch_is_what_the_most_demanding_row_count_needs(
    most: int, num_sms: int, heads: int, topk: int, batch_invariant: bool
):
    schedules = make_splits(heads, topk, num_sms, 64 << 20, most, batch_invariant)
    cuts = {rows: schedules.get(rows) for rows in range(1, most + 1)}
    needed = [rows * cut.num_splits * heads * (KV_LORA_RANK + 1) * 4 for rows, cut in cuts.items() if cut.num_splits > 1]
    assert schedules.scratch_bytes == max(needed) > 0


def test_a_planner_of_many_tokens_does_not_look_at_every_row_count(monkeypatch: pytest.MonkeyPatch):
    looked: list[int] = []
    monkeypatch.setattr(
        "mla_portable.planner.split.split_kv", lambda **shape: (looked.append(shape["num_rows"]), split_kv(**shape))[1]
    )
    make_splits(16, 2048, 132, max_num_rows=1_000_000)
    make_splits(16, 2048, 0, max_num_rows=1_000_000)
    assert 0 < len(looked) <= 132


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("num_heads", "topk"), [(1, 1), (16, 64), (16, 2048), (64, 2049), (128, 2048)])
@pytest.mark.parametrize(("num_sms", "scratch"), [(0, 64 << 20), (8, 100_000), (132, 0), (132, 4 << 20), (132, 64 << 20)])
def test_split_schedules_cover_topk_within_the_bound(
    num_heads: int, topk: int, num_sms: int, scratch: int, batch_invariant: bool
):
    rows = (1, 2, 20, 64, 300)
    schedules = make_splits(num_heads, topk, num_sms, scratch, batch_invariant=batch_invariant)
    assert schedules.scratch_bytes <= scratch
    for num_rows in rows:
        schedule = schedules.get(num_rows)
        assert schedules.get(num_rows) is schedule
        assert (schedule.num_rows, schedule.num_heads, schedule.topk) == (num_rows, num_heads, topk)
        assert (schedule.num_splits - 1) * schedule.split_len < topk <= schedule.num_splits * schedule.split_len
        check_schedule("sparse_decode", schedule, num_rows, 1, num_heads, topk, torch.device("cpu"))
        if schedule.num_splits == 1:
            assert schedule.partial_out is schedule.partial_lse is None
            continue
        assert schedule.partial_out is not None
        assert schedule.partial_lse is not None
        end = schedule.partial_out.data_ptr() + schedule.partial_out.nbytes
        assert end == schedule.partial_lse.data_ptr(), "the two lie apart"
        assert schedule.partial_out.nbytes + schedule.partial_lse.nbytes <= schedules.scratch_bytes


def test_split_schedules_share_one_scratch():
    schedules = make_splits(16, 2048, 132)
    one, four = schedules.get(1), schedules.get(4)
    assert one.num_splits > 1
    assert one.partial_out is not None
    assert four.partial_out is not None
    assert one.partial_out.data_ptr() == four.partial_out.data_ptr()
    assert schedules.get(300).num_splits == 1, "enough rows fill the device by themselves"
    with pytest.raises(PlanMismatch, match="4 rows, 16 heads"):
        check_schedule("sparse_decode", one, 4, 1, 16, 2048, -1)
