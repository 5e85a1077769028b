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
typedef unsigned char u8;
typedef long long i64;
#define __device__
#define __forceinline__ inline
#define TILE 32
#define LISTS %d
#define PITCH 1
struct Strides {
    i64 indices_b, indices_s, lengths_b, lengths_s, extra_indices_b, extra_indices_s, extra_lengths_b, extra_lengths_s;
};
static u32 own_place[3];  // of a block: its cluster, its number there, blocks of a cluster
static const int* readable[LISTS][2];
static int __ldg(const int* at) {
    for (auto& list : readable)
        if (at >= list[0] && at < list[1]) return *at;
    return -2;
}
#define READ_INDEX(at) __ldg(at)
static int this_lane;
static int __shfl_sync(u32, int value, int lane) { return lane == this_lane ? value : -9; }  // of each lane its own
%s
struct Stage { int tile; };
static int* read_to;
static void copy_rows(u8* warp, const Stage to, const Cache& cache, int slot, int lane) {
    if (slot != -9) read_to[to.tile * TILE + (int)(size_t)warp * 8 + lane %% 8] = slot < 0 ? slot : slot + cache.num_slots;
}
static void cluster_publish() {}
static void cluster_leave() {}
%s
// What a block reads of its row's lists, in the order of its tiles, plus the number of its list times 10,000; -2: past a list.
extern "C" u32 indices(u32 cluster, u32 block, u32 blocks, int whole_clusters, const int* const* rows, const int* topk,
                       const int* const* lengths, int step, int* read, int* tiles, int* splits, int* begins) {
    own_place[0] = cluster, own_place[1] = block, own_place[2] = blocks;
    List lists[LISTS];
    for (int k = 0; k < LISTS; ++k) {
        lists[k] = {{nullptr, k * 10000, 0, 0}, rows[k], lengths[k], topk[k]};
        readable[k][0] = rows[k], readable[k][1] = rows[k] + topk[k];
    }
    const Work work = own_work(whole_clusters);
    read_to = read;
    for (int warp = 0; warp < 4; ++warp)
        for (this_lane = 0; this_lane < 32; ++this_lane) {
            const Row row = step == 128 ? begin_row<128>(lists, work, true, warp, this_lane)
                                        : begin_row<32>(lists, work, true, warp, this_lane);
            *begins = row.own.begin, *tiles = (row.own.end - row.own.begin + TILE - 1) / TILE;
            int tile = 0;
            produce((u8*)(size_t)warp, lists, row, *tiles, work.splits, warp, this_lane, [&] { return Stage{tile++}; });
        }
    *splits = work.splits;
    return work.unit;
}
"""


@pytest.fixture(scope="module", params=[1, 2], ids=lambda lists: f"{lists} lists")
def indices(request, tmp_path_factory):
    """(lists of a row, the function of LISTED), with the header's functions; the registers that name a block are variables."""
    header = SOURCES["sparse_decode_fp8"]
    text = header[header.index("struct Cache {") : header.index("// ---- copying")]
    text, replaced = re.subn(
        r"asm volatile\(.*?\);", "cluster = own_place[0], block = own_place[1], blocks = own_place[2];", text, flags=re.DOTALL
    )
    assert replaced == 1
    copying = header[header.index("// ---- the warps that copy") : header.index("// ---- q: operand registers of a head")]
    folder = tmp_path_factory.mktemp("work")
    (folder / "work.cpp").write_text(LISTED % (request.param, text, copying), encoding="utf-8")
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", str(folder / "work.so")]
    subprocess.run([str(COMPILER), *options, str(folder / "work.cpp")], check=True)
    function = ctypes.CDLL(str(folder / "work.so")).indices
    function.restype = ctypes.c_uint
    return request.param, function


LIST = st.tuples(st.integers(1, 500), st.one_of(st.none(), st.integers(-3, 600)))
"""The most keys of a list, and its length."""


@settings(deadline=None, max_examples=300)
@given(
    units=st.integers(1, 40),
    cluster=st.integers(1, 16),
    wholes=st.integers(0, 40),
    listed=st.tuples(LIST, LIST),
    step=st.sampled_from([32, 128]),
)
def test_each_index_is_read_by_one_block(indices, units, cluster, wholes, listed, step):
    lists, function = indices
    whole = 0 if cluster == 1 else min(wholes, units // cluster)
    clusters = units - whole * (cluster - 1)
    tops = [topk for topk, _ in listed[:lists]]
    rows = [(ctypes.c_int * topk)(*range(topk)) for topk in tops]
    lengths = [None if length is None else ctypes.pointer(ctypes.c_int(length)) for _, length in listed[:lists]]
    keys = [topk if length is None else max(0, min(topk, length)) for topk, length in listed[:lists]]
    pointers, tops_at = (ctypes.POINTER(ctypes.c_int) * lists)(*rows), (ctypes.c_int * lists)(*tops)
    lengths_at = (ctypes.POINTER(ctypes.c_int) * lists)(*lengths)
    found, blocks_of = Counter(), Counter()
    for x in range(clusters):
        for y in range(cluster):
            read, (tiles, splits, begin) = (ctypes.c_int * 1200)(*[-3] * 1200), (ctypes.c_int() for _ in range(3))
            results = (read, *map(ctypes.byref, (tiles, splits, begin)))
            unit = function(x, y, cluster, whole, pointers, tops_at, lengths_at, step, *results)
            assert splits.value == (1 if x < whole else cluster)
            assert unit == (x * cluster + y if x < whole else whole * cluster + x - whole), "long ones first, in order"
            assert begin.value % step == 0
            blocks_of[unit] += 1
            mine = [index for index in read[: tiles.value * 32] if index != -1]
            assert mine == sorted(mine)
            assert -3 not in mine and -2 not in mine
            of_tiles = [read[tile : tile + 32] for tile in range(0, tiles.value * 32, 32)]
            assert all(len({index // 10_000 for index in tile if index != -1}) <= 1 for tile in of_tiles), "a list of its own"
            found.update((unit, index) for index in mine)
    wanted = [which * 10_000 + index for which, count in enumerate(keys) for index in range(count)]
    assert found == {(unit, index): 1 for unit in range(units) for index in wanted}
    assert blocks_of == {unit: 1 if unit < whole * cluster else cluster for unit in range(units)}
