# SPDX-License-Identifier: Apache-2.0
"""Which indices a block of the native kernels reads, by the header's own functions: each index of a row in one block."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_model import SOURCES
from source_on_cpu import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

LISTED = """
#include <algorithm>
using std::max;
using std::min;
typedef unsigned u32;
#define __device__
#define __forceinline__ inline
#define TN 32
static u32 place_of[3];  // of a block: its cluster, its number there, blocks of a cluster
static const int* readable[2];
static int __ldg(const int* at) { return at >= readable[0] && at < readable[1] ? *at : -2; }
%s
// What a block reads of row[0, topk), in the order of its tiles; -2: past the row. Returns its unit of work.
extern "C" u32 indices(u32 cluster, u32 block, u32 blocks, int whole_clusters, const int* row, int topk, const int* length,
                       int step, int* read, int* tiles, int* splits) {
    place_of[0] = cluster, place_of[1] = block, place_of[2] = blocks;
    readable[0] = row, readable[1] = row + topk;
    const Work work = own_work(whole_clusters);
    const Span all = share(topk, step, work), own = length ? share(min(topk, *length), step, work) : all;
    const int end = (own.end - own.begin + TN - 1) / TN;
    for (int warp = 0; warp < 4; ++warp)
        for (int lane = 0; lane < 32; ++lane) {
            const int known = indices_of(row, all, warp, lane).read();
            Indices listed = indices_of(row, own, warp, lane);
            int index = listed.first(known, own.begin == all.begin);
            for (int first = 0; first < end; first += 4, index = listed.read())
                read[(first + lane / 8) * TN + warp * 8 + lane %% 8] = index;
        }
    *tiles = end, *splits = work.splits;
    return work.unit;
}
"""


@pytest.fixture(scope="module")
def indices(tmp_path_factory):
    """The function of LISTED, with the header's functions; the registers that name a block are variables."""
    header = SOURCES["sparse_decode_fp8"]
    text = header[header.index("// ---- rows") : header.index("// ---- matrices")]
    text, replaced = re.subn(
        r"asm volatile\(.*?\);", "cluster = place_of[0], block = place_of[1], blocks = place_of[2];", text, flags=re.DOTALL
    )
    assert replaced == 1
    folder = tmp_path_factory.mktemp("work")
    (folder / "work.cpp").write_text(LISTED % text, encoding="utf-8")
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", str(folder / "work.so")]
    subprocess.run([str(COMPILER), *options, str(folder / "work.cpp")], check=True)
    function = ctypes.CDLL(str(folder / "work.so")).indices
    function.restype = ctypes.c_uint
    return function


@settings(deadline=None, max_examples=300)
@given(
    units=st.integers(1, 40),
    cluster=st.integers(1, 16),
    wholes=st.integers(0, 40),
    topk=st.integers(1, 900),
    length=st.one_of(st.none(), st.integers(-3, 1000)),
    step=st.sampled_from([32, 128]),
)
def test_each_index_is_read_by_one_block(indices, units, cluster, wholes, topk, length, step):
    whole = 0 if cluster == 1 else min(wholes, units // cluster)
    clusters = units - whole * (cluster - 1)
    row = (ctypes.c_int * topk)(*range(topk))
    keys = topk if length is None else max(0, min(topk, length))
    found, blocks_of = Counter(), Counter()
    for x in range(clusters):
        for y in range(cluster):
            read, tiles, splits = (ctypes.c_int * 1200)(*[-3] * 1200), ctypes.c_int(), ctypes.c_int()
            given_length = None if length is None else ctypes.byref(ctypes.c_int(length))
            unit = indices(x, y, cluster, whole, row, topk, given_length, step, read, ctypes.byref(tiles), ctypes.byref(splits))
            assert splits.value == (1 if x < whole else cluster)
            assert unit == (x * cluster + y if x < whole else whole * cluster + x - whole), "long ones first, in order"
            blocks_of[unit] += 1
            mine = [index for index in read[: tiles.value * 32] if index != -1]
            assert mine == list(range(mine[0], mine[0] + len(mine))) if mine else True
            assert -3 not in mine and -2 not in mine
            assert not mine or mine[0] % step == 0
            found.update((unit, index) for index in mine)
    assert found == {(unit, index): 1 for unit in range(units) for index in range(keys)}
    assert blocks_of == {unit: 1 if unit < whole * cluster else cluster for unit in range(units)}
