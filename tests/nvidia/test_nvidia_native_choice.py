# SPDX-License-Identifier: Apache-2.0
"""Which build of a native kernel a shape gets and how its blocks share the rows: for any device, and on an H200."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_portable_nvidia.native.build_choice import BUILDS, FEW, MANY, builds, choose


def clusters_of(parts):
    """What a device holds whose multiprocessors come in `parts`: a cluster lies within one."""
    return lambda build, size: sum(part * build.blocks_per_sm // size for part in parts)


devices = st.lists(st.integers(1, 20), min_size=1, max_size=9)
shapes = {
    "kv_rows": st.sampled_from(sorted(BUILDS)),
    "rows": st.integers(1, 9000),
    "num_heads": st.integers(1, 128),
    "topk": st.integers(0, 5000),
    "extra_topk": st.one_of(st.just(0), st.integers(1, 3000)),
}


@given(parts=devices, uniform=st.booleans(), data=st.fixed_dictionaries(shapes))
def test_a_cut_leaves_no_block_without_work_and_no_cluster_without_a_place(parts, uniform, data):
    held = clusters_of(parts)
    cut = choose(**data, clusters=held, uniform=uniform)
    lists = 2 if data["extra_topk"] else 1
    assert cut.build in builds(data["kv_rows"], data["num_heads"], lists) and cut.build.lists == lists
    assert cut.build.kernel != MANY.kernel or data["num_heads"] > FEW
    units = data["rows"] * math.ceil(data["num_heads"] / cut.build.heads)
    keys = math.ceil(data["topk"] / 32) * 32 + data["extra_topk"] if lists == 2 else data["topk"]
    tiles = max(1, math.ceil(keys / cut.build.tile))
    assert 1 <= cut.cluster <= 16 and held(cut.build, cut.cluster) > 0
    assert (cut.cluster - 1) * math.ceil(tiles / cut.cluster) < tiles
    assert cut.whole == 0 or not uniform
    assert cut.whole == 0 or (cut.cluster > 1 and cut.whole * cut.cluster < units)
    assert cut.whole % held(cut.build, cut.cluster) == 0, "whole rows fill their waves"


@pytest.mark.parametrize("layout", BUILDS)
def test_a_device_that_holds_no_large_cluster_gets_smaller_ones(layout):
    shape = {"rows": 1, "num_heads": 16, "topk": 2048}
    held = clusters_of([132])
    assert choose(layout, **shape, clusters=lambda build, size: held(build, size) if size <= 8 else 0).cluster == 8
    assert choose(layout, **shape, clusters=lambda build, size: held(build, size) if size == 1 else 0).cluster == 1
