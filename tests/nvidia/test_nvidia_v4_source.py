# SPDX-License-Identifier: Apache-2.0
"""The sources of the kernels of SM90 on rows of `fp8_v4`, on a CPU: scales of 64 columns, bfloat16 values, two lists."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch_reference as reference
from native_model import stand_ins
from simulated_gpu import conforms, registry
from sm90_model import EmulatedSm90
from source_on_cpu import COMPILER
from test_nvidia_native import SCALE, cache, problem

from mla_portable.judge.problems.attention_problem import EDGES, edge_lengths
from mla_portable.layouts import FP8_V4
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_nvidia.native.attention_sm90 import native_implementations
from mla_portable_nvidia.native.build_choice import BUILDS
from mla_portable_nvidia.native.sparse_decode import Build, Tensors, prepare

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

SMALL, LARGE, WIDE, MANY = BUILDS[FP8_V4.name]
EVERY = pytest.mark.parametrize("build", [SMALL, LARGE, WIDE, MANY], ids=lambda build: build.label)


def v4(blocks, page, gap=32):
    return cache(blocks, page, gap, layout=FP8_V4.name)


def launched(build: Build, kv, q, indices, lengths, sink, second=(None, None, None), *, cluster=1, whole=0, stride=0):
    """(out, lse) of a launch. second: cache, indices and lengths."""
    rows, _, heads, _ = q.shape
    out, lse = torch.full((rows, 1, heads, 512), math.nan).bfloat16(), torch.full((rows, 1, heads), math.nan)
    build = replace(build, lists=1 if second[0] is None else 2)
    tensors = Tensors(q, kv, indices, out, lse, lengths, *second)
    launch = prepare(EmulatedSm90(stride, build), build, tensors, cluster=cluster, whole=whole)
    addresses = [0 if each is None else each.data_ptr() for each in (out, lse, q, kv, indices, lengths, sink, *second)]
    launch(*addresses, SCALE * math.log2(math.e))
    return out, lse


def check(build: Build, kv, q, indices, lengths=None, sink=None, second=(None, None, None), **cut):
    out, lse = launched(build, kv, q, indices, lengths, sink, second, **cut)
    options = dict(zip(("extra_kv_cache", "extra_indices", "extra_lengths"), second, strict=True))
    options = {} if second[0] is None else options
    wanted, wanted_lse = reference.sparse_decode(
        q, kv, indices, softmax_scale=SCALE, lengths=lengths, attn_sink=sink, **options
    )  # fmt: skip
    error = (out.float() - wanted.float()).abs().amax(-1) / wanted.float().abs().amax(-1).clamp_min(1e-6)
    assert error.max() < 1.5e-2
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=2e-3)
    return out, wanted


def of_rows(*lengths):
    return torch.tensor(lengths, dtype=torch.int32).view(-1, 1)


@EVERY
def test_rows_of_any_length_with_absent_entries_and_a_sink(build):
    """Threads in another order for each build; fewer heads than a block has."""
    torch.manual_seed(0)
    lengths, heads = of_rows(150, 0, 33), build.heads - 3
    q, indices = problem(3, 1, heads, 150, 80, width=512)
    check(build, v4(5, 16), q, indices, lengths, torch.randn(heads), stride=0 if build is MANY else 77)


@EVERY
def test_two_caches(build):
    """Blocks of other sizes, lists of other lengths that end within a tile: both, one alone, none."""
    torch.manual_seed(0)
    heads = build.heads
    q, indices = problem(4, 1, heads, 70, 80, width=512)
    _, extra_indices = problem(4, 1, heads, 90, 48)
    second = (v4(24, 2, 576 - 16), extra_indices, of_rows(90, 0, 41, 0))
    check(build, v4(5, 16), q, indices, of_rows(70, 33, 0, -1), torch.randn(heads), second)


@EVERY
def test_lengths_may_be_any_int32(build):
    """Of one list; and of either of two, whose keys are those of the other then. Each is found by strides of its own."""
    torch.manual_seed(0)
    heads, rows = build.heads, len(EDGES)
    q, indices = problem(rows, 1, heads, 70, 80, width=512)
    _, extra_indices = problem(rows, 1, heads, 90, 48)
    lengths, apart = edge_lengths(rows, 70, 0).unsqueeze(1), torch.full((rows, 3), 7, dtype=torch.int32)
    apart[:, 1] = edge_lengths(rows, 90, 1)
    check(build, v4(5, 16), q, indices, lengths, torch.randn(heads))
    check(build, v4(5, 16), q, indices, lengths, torch.randn(heads), (v4(24, 2, 576 - 16), extra_indices, apart[:, 1:2]))


@EVERY
@pytest.mark.parametrize("whole", [0, 1])
def test_blocks_of_a_cluster_share_two_lists_or_have_a_row_each(build, whole):
    torch.manual_seed(0)
    heads = 2 * build.heads
    q, indices = problem(2, 1, heads, 200, 80, width=512)
    _, extra_indices = problem(2, 1, heads, 129, 36)
    second = (v4(9, 4, 576), extra_indices, of_rows(40, 129))
    stride = 77 if whole else 0
    check(build, v4(5, 16), q, indices, of_rows(200, 130), torch.randn(heads), second, cluster=2, whole=whole, stride=stride)


@EVERY
def test_each_scale_counts_for_its_own_columns(build):
    """The exponents 0, 1 and 5 others in a row; the eighth byte is 255, which is nobody's. Then one that is NaN."""
    torch.manual_seed(0)
    kv = v4(4, 16)
    rows, scales = FP8_V4.parts(kv)
    rows[..., 448:] = 0
    scales[..., :7] = torch.tensor([0, 1, 118, 121, 126, 124, 127], dtype=torch.uint8)
    scales[..., 7] = 255
    q, indices = problem(1, 1, build.heads, 40, 64, width=512)
    out, lse = launched(build, kv, q, indices, None, None)
    wanted, wanted_lse = reference.sparse_decode(q, kv, indices, softmax_scale=SCALE)
    for group, (got, want) in enumerate(zip(out.double().split(64, -1), wanted.double().split(64, -1), strict=True)):
        least = 1e-30 if group < 2 else 0.0  # 2^-127 is less than the others' rounding
        torch.testing.assert_close(got, want, rtol=0, atol=max(float(want.abs().max()) * 2e-2, least))
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=2e-3)
    for slot, group in ((3, 0), (4, 5), (5, 6)):
        scales[0, slot, group] = 255
    indices = torch.tensor([[[3]], [[4]], [[5]]], dtype=torch.int32)
    out, lse = launched(build, kv, q.expand(3, -1, -1, -1).contiguous(), indices, None, None)
    assert out.isnan().all() and lse.isnan().all(), "the exponent 255 is NaN"


@EVERY
@pytest.mark.parametrize("size", [2.0**-20, 2.0**24])
def test_bfloat16_columns_of_another_size_than_the_codes(build, size):
    """Keys and values; a token that is larger than the others too."""
    torch.manual_seed(0)
    kv = v4(4, 16)
    rows, _ = FP8_V4.parts(kv)
    plain = rows[..., 448:].view(torch.bfloat16)
    plain.mul_(size)
    plain[1, 5] *= 2.0**6
    q, indices = problem(2, 1, build.heads, 70, 64, width=512)
    q[..., 448:] *= min(1.0, 1 / size)
    out, wanted = check(build, kv, q, indices)
    own, want = out[..., 448:].float(), wanted[..., 448:].float()
    assert build is MANY or (own - want).abs().max() <= 2e-2 * want.abs().max(), "their own precision"


@EVERY
def test_rows_that_no_index_names_may_be_nan(build):
    """A code that is NaN in a row that is named is NaN in that query row alone."""
    torch.manual_seed(0)
    kv = v4(5, 16)
    for part in FP8_V4.parts(kv):
        part.view(torch.uint8)[:, 1::2] = 0xFF
    q, indices = problem(2, 1, build.heads, 70, 80, width=512)
    indices = indices & ~1
    check(build, kv, q, indices)
    indices[0][indices[0] == 4] = 6
    assert (indices[1] == 4).any()
    FP8_V4.parts(kv)[0][0, 4, 400] = 0x7F
    out, lse = launched(build, kv, q, indices, None, None)
    assert out[1].isnan().all() and lse[1].isnan().all() and out[0].isfinite().all() and lse[0].isfinite().all()


@EVERY
@pytest.mark.parametrize("column", [70, 500])
def test_a_broken_query_shows_in_its_own_head(build, column):
    torch.manual_seed(0)
    kv = v4(3, 16)
    q, indices = problem(2, 1, build.heads, 40, 48, width=512)
    indices[1] = -1
    q[:, :, 3, column] = math.inf
    q[:, :, 4] *= 2.0**40
    out, lse = launched(build, kv, q, indices, None, None)
    assert out[0, 0, 3].isnan().all() and lse[0, 0, 3].isnan()
    others = torch.arange(build.heads) != 3
    assert not out[1, 0, others].any() and (lse[1, 0, others] == -torch.inf).all()
    wanted, _ = reference.sparse_decode(q[:, :, others], kv, indices, softmax_scale=SCALE)
    torch.testing.assert_close(out[:, :, others].float(), wanted.float(), rtol=2e-2, atol=2e-2)


class Loaded(EmulatedSm90):
    """A build on a device that holds as many clusters as its multiprocessors do."""

    def __init__(self, build: Build, *_launch: object) -> None:
        super().__init__(0, build)
        self._blocks = 132 * build.blocks_per_sm

    def max_clusters(self, size: int) -> int:
        return self._blocks // size


@pytest.mark.parametrize("name", ["nvidia.native", "nvidia.native_wide"])
def test_decode_and_prefill_conform(monkeypatch, name):
    """The suite's cases of the layout at level smoke."""
    offered = [
        replace(each, support=replace(each.support, device_types=("cpu",), kv_layouts=(FP8_V4.name,)), check=lambda facts: ())
        for each in native_implementations()
        if each.name == name
    ]
    assert all(FP8_V4.name in each.support.layouts for each in native_implementations())
    with stand_ins(monkeypatch, Loaded, arch="sm_90a") as loaded:
        words = conforms(registry(offered=offered, probe=False), name, "smoke", SPARSE_DECODE, SPARSE_PREFILL)
    assert {build.rows for build in loaded} == {FP8_V4.name} and "extra_b2" in words, words
