# SPDX-License-Identifier: Apache-2.0
"""Split-KV schedules: their bounds, their scratch, and what they refuse."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from mla_portable.contracts import PlanMismatch, ScheduleLimits
from mla_portable.kit.split_kv import ProgramShape, SplitSchedules, split_kv
from mla_portable.layouts import KV_LORA_RANK


def make_splits(
    num_heads: int,
    topk: int,
    num_sms: int,
    max_scratch_bytes: int = 64 << 20,
    max_num_rows: int = 300,
    batch_invariant: bool = False,
) -> SplitSchedules:
    limits = ScheduleLimits(
        device=torch.device("cpu"),
        num_heads=num_heads,
        topk=topk,
        max_num_rows=max_num_rows,
        num_sms=num_sms,
        max_scratch_bytes=max_scratch_bytes,
        batch_invariant=batch_invariant,
    )
    return SplitSchedules(limits)


def share(topk: int, num_splits: int) -> int:
    """Indices of a split: kernels share a row in steps of 64."""
    return -(-topk // (64 * num_splits)) * 64


@pytest.mark.parametrize("tile", [32, 64])
@pytest.mark.parametrize("num_sms", [0, 1, 78, 108, 132, 160])
def test_every_split_has_keys_within_the_scratch(num_sms: int, tile: int):
    for heads, topk, bound in product((1, 8, 16, 32, 64, 128), (1, 64, 100, 512, 2000, 2048, 2049), (0, 4 << 20, 64 << 20)):
        for rows in range(301):
            num_splits = split_kv(
                num_rows=rows,
                num_heads=heads,
                topk=topk,
                num_sms=num_sms,
                program=ProgramShape(tile=tile),
                max_scratch_bytes=bound,
            )
            shape = (rows, heads, topk, bound, num_splits)
            assert num_splits >= 1 and (num_splits - 1) * share(topk, num_splits) < topk, shape
            if num_splits > 1:
                assert num_splits * rows * heads * (KV_LORA_RANK + 1) * 4 <= bound, shape
                assert num_splits * rows * -(-heads // 16) <= 2 * num_sms, shape


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("most", "num_sms", "heads", "topk"), [(1, 132, 16, 2048), (7, 132, 64, 2048), (300, 78, 8, 1000)])
def test_the_scratch_holds_the_most_demanding_row_count_and_little_more(
    most: int, num_sms: int, heads: int, topk: int, batch_invariant: bool
):
    schedules = make_splits(heads, topk, num_sms, 64 << 20, most, batch_invariant)
    cuts = {rows: schedules.get(rows) for rows in range(1, most + 1)}
    needed = [rows * cut.num_splits * heads * (KV_LORA_RANK + 1) * 4 for rows, cut in cuts.items() if cut.num_splits > 1]
    held = next(cut.partial_out for cut in cuts.values() if cut.partial_out is not None).untyped_storage().nbytes()
    assert 0 < max(needed) <= held <= min(64 << 20, 1.2 * max(needed))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("num_heads", "topk"), [(1, 1), (16, 64), (16, 2048), (64, 2049), (128, 2048)])
@pytest.mark.parametrize(("num_sms", "scratch"), [(0, 64 << 20), (8, 100_000), (132, 0), (132, 4 << 20), (132, 64 << 20)])
def test_every_split_of_a_schedule_has_keys_within_the_bound(
    num_heads: int, topk: int, num_sms: int, scratch: int, batch_invariant: bool
):
    rows = (1, 2, 20, 64, 300)
    schedules = make_splits(num_heads, topk, num_sms, scratch, batch_invariant=batch_invariant)
    for num_rows in rows:
        schedule = schedules.get(num_rows)
        assert schedules.get(num_rows) is schedule
        assert (schedule.num_rows, schedule.num_heads, schedule.topk) == (num_rows, num_heads, topk)
        assert (schedule.num_splits - 1) * share(topk, schedule.num_splits) < topk
        schedule.check("sparse_decode", num_rows, 1, num_heads, topk, torch.device("cpu"))
        if schedule.num_splits == 1:
            assert schedule.partial_out is schedule.partial_lse is None
            continue
        assert schedule.partial_out is not None
        assert schedule.partial_lse is not None
        end = schedule.partial_out.data_ptr() + schedule.partial_out.nbytes
        assert end == schedule.partial_lse.data_ptr(), "the two lie apart"
        assert (
            schedule.partial_out.nbytes + schedule.partial_lse.nbytes
            <= schedule.partial_out.untyped_storage().nbytes()
            <= scratch
        )


def test_split_schedules_share_one_scratch():
    schedules = make_splits(16, 2048, 132)
    one, four = schedules.get(1), schedules.get(4)
    assert one.num_splits > 1
    assert one.partial_out is not None
    assert four.partial_out is not None
    assert one.partial_out.data_ptr() == four.partial_out.data_ptr()
    assert schedules.get(300).num_splits == 1, "enough rows fill the device by themselves"
    with pytest.raises(PlanMismatch, match="4 rows, 16 heads"):
        one.check("sparse_decode", 4, 1, 16, 2048, -1)
