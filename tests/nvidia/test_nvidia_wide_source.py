# SPDX-License-Identifier: Apache-2.0
"""The source of the kernel for many heads on a CPU: layouts of its products, barriers, copies, merges."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch_reference as reference
from sm90_model import EmulatedSm90
from source_on_cpu import COMPILER
from test_nvidia_native import SCALE, cache, problem

from mla_portable.layouts import FP8_DS_MLA, FP8_NOPE
from mla_portable_nvidia.native.build_choice import BUILDS, MANY
from mla_portable_nvidia.native.sparse_decode import FP8_IDLE_ROPE, Tensors, layout_name, prepare

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def test_nan_codes_are_nan_in_a_row_that_is_named_and_nothing_in_others():
    torch.manual_seed(0)
    kv, (q, indices) = cache(5, 16), problem(2, 1, 64, 150, 80)
    kv[:, 1::2] = 0xFF
    indices = indices & ~1
    named = kv.view(-1, 656)[4]
    assert (indices[1] == 4).any()
    indices[0][indices[0] == 4] = 6
    named[130] = 0x7F
    out, lse = torch.zeros(2, 1, 64, 512).bfloat16(), torch.zeros(2, 1, 64)
    lengths, sink = torch.full((2, 1), 150, dtype=torch.int32), torch.full((64,), -math.inf)
    launch = prepare(EmulatedSm90(0, MANY), MANY, Tensors(q, kv, indices, out, lse, lengths), cluster=1, whole=0)
    launch(*[each.data_ptr() for each in (out, lse, q, kv, indices, lengths, sink)], 0, 0, 0, SCALE * math.log2(math.e))
    assert out[1].isnan().all() and lse[1].isnan().all()
    wanted, wanted_lse = reference.sparse_decode(q[:1], kv, indices[:1], softmax_scale=SCALE)
    torch.testing.assert_close(out[:1].float(), wanted.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse[:1], wanted_lse, rtol=1e-3, atol=2e-3)


def check(lengths, *, heads=64, topk=None, cluster=1, whole=0, stride=0, far=False, rows_read=FP8_DS_MLA.name, second=None):
    """A row for each length, in such a cut. second: as many lengths of a second list."""
    torch.manual_seed(0)
    rows, topk = len(lengths), topk or max(1, *lengths)
    layout = layout_name(rows_read)
    kv = cache(5, 16, layout=layout)
    if rows_read == FP8_IDLE_ROPE:
        kv[..., 528:] = 0xFF
    q, indices = problem(rows, 1, heads, topk, 80, width=576 if rows_read == FP8_DS_MLA.name else 512)
    if far:
        q[:, :, 1] *= 2.0**30
    of_rows, sink = torch.tensor(lengths, dtype=torch.int32).view(rows, 1), torch.randn(heads)
    out, lse = torch.full((rows, 1, heads, 512), math.nan).bfloat16(), torch.full((rows, 1, heads), math.nan)
    options = {"lengths": of_rows, "attn_sink": sink}
    extra = (None, None, None)
    if second:
        extra_kv, (_, extra_indices) = cache(9, 4, gap=656, layout=layout), problem(rows, 1, heads, max(second), 36)
        if rows_read == FP8_IDLE_ROPE:
            extra_kv[..., 528:] = 0xFF
        extra = (extra_kv, extra_indices, torch.tensor(second, dtype=torch.int32).view(rows, 1))
        options |= dict(zip(("extra_kv_cache", "extra_indices", "extra_lengths"), extra, strict=True))
    build = next(each for each in BUILDS[rows_read] if each.kernel == MANY.kernel)
    build = replace(build, lists=2 if second else 1)
    tensors = Tensors(q, kv, indices, out, lse, of_rows, *extra)
    launch = prepare(EmulatedSm90(stride, build), build, tensors, cluster=cluster, whole=whole)
    addresses = [0 if each is None else each.data_ptr() for each in (out, lse, q, kv, indices, of_rows, sink, *extra)]
    launch(*addresses, SCALE * math.log2(math.e))
    wanted, wanted_lse = reference.sparse_decode(q, kv, indices, softmax_scale=SCALE, **options)
    error = (out.float() - wanted.float()).abs().amax(-1) / wanted.float().abs().amax(-1).clamp_min(1e-6)
    assert error.max() < 1.5e-2
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("rows_read", [FP8_IDLE_ROPE, FP8_NOPE.name])
@pytest.mark.parametrize("second", [None, [90, 0, 33]])
def test_queries_without_rope_and_a_second_list(second, rows_read):
    """The rope of the rows is NaN, or there is none. Lists that end within a tile, one that is empty, both."""
    check([150, 5, 0], heads=50, rows_read=rows_read, second=second)


@pytest.mark.parametrize("whole", [0, 1])
def test_blocks_of_a_cluster_share_the_keys_of_two_lists(whole):
    check([200, 130, 0], topk=300, heads=128, cluster=2, whole=whole, stride=77, second=[40, 129, 70])


@pytest.mark.parametrize("far", [False, True])
def test_what_the_source_computes(far):
    check([150], heads=50, far=far)


@pytest.mark.parametrize("stride", [0, 77])
def test_rows_of_any_length(stride):
    """Rows without a key, of less than a ring's stages and of more."""
    check([140, 0, 5, 270, 128], stride=stride)


@pytest.mark.parametrize("whole", [0, 1])
def test_blocks_of_a_cluster_share_a_row_or_have_one_each(whole):
    """A split without a key takes part in a merge."""
    check([200, 130, 300], topk=300, heads=128, cluster=2, whole=whole, stride=77)


@pytest.mark.parametrize("stride", [0, 77])
def test_scores_that_grow_along_a_row_set_the_level_again(stride):
    """For some heads in each 64 tokens, by 2^20 and more; for the others the first tokens count for all."""
    torch.manual_seed(0)
    keys, heads = 400, 64
    latent = torch.ones(1, 512) * torch.linspace(0.2, 8.0, keys).view(-1, 1) + torch.randn(keys, 512) * 0.05
    kv = FP8_DS_MLA.pack(latent, torch.zeros(keys, 64), "pow2").view(-1, 16, 656)
    q = torch.full((1, 1, heads, 576), 1.0) * torch.linspace(0.1, 0.4, heads).view(1, 1, -1, 1)
    q[:, :, ::3] *= -1
    q, indices = q.bfloat16(), torch.arange(keys, dtype=torch.int32).view(1, 1, -1)
    out, lse = torch.zeros(1, 1, heads, 512).bfloat16(), torch.zeros(1, 1, heads)
    launch = prepare(EmulatedSm90(stride, MANY), MANY, Tensors(q, kv, indices, out, lse, None), cluster=1)
    launch(*[each.data_ptr() for each in (out, lse, q, kv, indices)], 0, 0, 0, 0, 0, SCALE * math.log2(math.e))
    wanted, wanted_lse = reference.sparse_decode(q, kv, indices, softmax_scale=SCALE)
    torch.testing.assert_close(out.float(), wanted.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=2e-3)
