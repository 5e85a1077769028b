# SPDX-License-Identifier: Apache-2.0
"""Which build of a native kernel a shape gets, and into how many splits: for any device, and at the shapes of an H200."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_portable_nvidia.native.choice import (
    BF16_LARGE,
    BF16_SMALL,
    BF16_WIDE,
    BUILDS,
    FEW,
    LARGE,
    MANY,
    SMALL,
    WIDE,
    builds,
    choose,
)


def clusters_of(parts):
    """What a device holds whose multiprocessors come in `parts`: a cluster lies within one."""
    return lambda build, splits: sum(size * build.blocks_per_sm // splits for size in parts)


devices = st.lists(st.integers(1, 20), min_size=1, max_size=9)
shapes = {
    "layout": st.sampled_from(sorted(BUILDS)),
    "rows": st.integers(1, 9000),
    "num_heads": st.integers(1, 128),
    "topk": st.integers(0, 5000),
}


@given(parts=devices, **shapes)
def test_splits_cover_a_row_in_whole_tiles_and_none_is_idle(parts, layout, rows, num_heads, topk):
    cut = choose(layout, rows=rows, num_heads=num_heads, topk=topk, num_sms=sum(parts), clusters=clusters_of(parts))
    assert cut.build in builds(layout, num_heads) and (cut.build is not MANY or num_heads > FEW)
    assert cut.split_len % cut.build.tile == 0 and cut.split_len > 0
    assert (cut.num_splits - 1) * cut.split_len < max(topk, 1) <= cut.num_splits * cut.split_len


@given(parts=devices, **shapes)
def test_blocks_that_share_a_row_all_run_at_once(parts, layout, rows, num_heads, topk):
    for held in (clusters_of(parts), lambda build, splits: rows * 8):  # a device that says it holds any number
        _check_that_all_run_at_once(held, parts, layout, rows, num_heads, topk)


def _check_that_all_run_at_once(held, parts, layout, rows, num_heads, topk):
    cut = choose(layout, rows=rows, num_heads=num_heads, topk=topk, num_sms=sum(parts), clusters=held)
    blocks = rows * math.ceil(num_heads / cut.build.heads)
    if cut.num_splits > 1:
        assert cut.num_splits <= 16
        assert blocks * cut.num_splits <= sum(parts) * cut.build.blocks_per_sm
        assert held(cut.build, cut.num_splits) >= blocks


@given(parts=devices, more=st.integers(1, 500), **shapes)
def test_more_rows_are_never_split_further_by_the_same_build(parts, more, layout, rows, num_heads, topk):
    cuts = [
        choose(layout, rows=count, num_heads=num_heads, topk=topk, num_sms=sum(parts), clusters=clusters_of(parts))
        for count in (rows, rows + more)
    ]
    assert cuts[0].build != cuts[1].build or cuts[0].num_splits >= cuts[1].num_splits


@given(parts=devices, **shapes)
def test_the_device_is_asked_once_for_a_count_and_never_for_one_block(parts, layout, rows, num_heads, topk):
    asked = Counter()

    def clusters(build, splits):
        asked[splits] += 1
        return clusters_of(parts)(build, splits)

    choose(layout, rows=rows, num_heads=num_heads, topk=topk, num_sms=sum(parts), clusters=clusters)
    assert asked[1] == 0 and set(asked.values()) <= {1, 0}


@pytest.mark.parametrize(
    ("layout", "num_heads", "rows", "build", "splits"),
    [
        *(("fp8_ds_mla", 16, rows, SMALL, 16) for rows in (1, 4, 8)),
        *(("fp8_ds_mla", 16, rows, LARGE, splits) for rows, splits in ((16, 8), (32, 4), (64, 2), (66, 2), (100, 1), (132, 1))),
        *(("fp8_ds_mla", 16, rows, SMALL, 1) for rows in (133, 256, 4096)),
        *(("fp8_ds_mla", 32, rows, LARGE, splits) for rows, splits in ((16, 4), (32, 2), (33, 2))),
        *(("fp8_ds_mla", 32, rows, WIDE, splits) for rows, splits in ((34, 3), (64, 2), (67, 1), (128, 1))),
        *(("fp8_ds_mla", 64, rows, LARGE, splits) for rows, splits in ((3, 8), (8, 4))),
        *(("fp8_ds_mla", 64, rows, MANY, splits) for rows, splits in ((9, 8), (16, 8), (32, 4), (64, 2), (67, 1), (256, 1))),
        *(("fp8_ds_mla", 128, rows, MANY, splits) for rows, splits in ((16, 4), (64, 1), (4096, 1))),
        *(("bf16", 16, rows, BF16_SMALL, splits) for rows, splits in ((1, 16), (4, 16), (133, 1), (4096, 1))),
        *(("bf16", 16, rows, BF16_LARGE, splits) for rows, splits in ((5, 16), (16, 8), (32, 4), (64, 2), (67, 1), (132, 1))),
        *(("bf16", 32, rows, BF16_LARGE, splits) for rows, splits in ((4, 16), (16, 4), (32, 2))),
        *(("bf16", 32, rows, BF16_WIDE, splits) for rows, splits in ((64, 2), (128, 1))),
    ],
)
def test_what_an_h200_runs_at_2048_indices(layout, num_heads, rows, build, splits):
    """With as many clusters as its 132 multiprocessors would hold if they lay in one part."""
    cut = choose(layout, rows=rows, num_heads=num_heads, topk=2048, num_sms=132, clusters=clusters_of([132]))
    assert (cut.build, cut.num_splits) == (build, splits)


@pytest.mark.parametrize("layout", BUILDS)
def test_a_device_that_holds_no_large_cluster_gets_smaller_ones(layout):
    def at_most_8(build, splits):
        return 16 if splits <= 8 else 0

    shape = {"rows": 1, "num_heads": 16, "topk": 2048, "num_sms": 132}
    assert choose(layout, **shape, clusters=at_most_8).num_splits == 8
    assert choose(layout, **shape, clusters=lambda build, splits: 0).num_splits == 1
