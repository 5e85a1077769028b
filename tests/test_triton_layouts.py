# SPDX-License-Identifier: Apache-2.0
"""The cache layouts on the Triton kernels, against the oracle: cache_write, and a layer on each route without a rotary part."""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
import torch
from attention_steps import BATCHES, HEADS, LAYOUTS, ROUTES, SPEC, assert_matches, make_step, plan_for

from mla_portable.attention import SparseMLAAttention
from mla_portable.layouts import LAYOUTS as CACHE_LAYOUTS
from mla_portable.registry import Registry

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REGISTRY = Registry(environ={})


def layer_of(layout: str, **changes) -> SparseMLAAttention:
    scale_format = "amax" if CACHE_LAYOUTS[layout].is_quantized else None
    spec = replace(SPEC, kv_layout=layout, scale_format=scale_format, **changes)
    return SparseMLAAttention(spec, device=DEVICE, registry=REGISTRY, backend="triton")


@pytest.mark.parametrize("route", ROUTES)
def test_a_step_without_a_rotary_part_is_the_oracles(route: str):
    layout = "bf16_nope"
    name = "decodes and prefills in chunks"
    layer = layer_of(layout, route=route, decode_query_len=BATCHES[name][1])
    assert {part.decision.chosen for part in layer.route_decision.verdict.parts} == {"triton.portable"}
    step = make_step(name, layout)
    plan = plan_for(layer, step.batch)
    tensors = (tensor.to(DEVICE) for tensor in (step.q, step.kv_cache, step.topk_indices))
    out, lse = layer.forward(*tensors, plan)
    assert out.shape[-1] == CACHE_LAYOUTS[layout].value_width
    assert lse is not None
    assert_matches(step, out.cpu(), lse.cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_write_makes_the_oracles_rows(layout: str, dtype: torch.dtype):
    layer, row = layer_of(layout), CACHE_LAYOUTS[layout]
    generator = torch.Generator().manual_seed(5)
    kv_c, k_pe = (torch.randn(9, n, generator=generator).to(dtype) for n in (row.value_width, row.rope_width))
    cache = torch.full((3, SPEC.block_size, row.row_width), 90, dtype=row.dtype)
    slots = torch.tensor([0, 23, -1, 7, 24, 12, 3, 11, 2])
    want = oracle.cache_write(kv_c, k_pe, cache, slots, scale_format="amax")
    cache = cache.to(DEVICE)
    layer.cache_write(kv_c.to(DEVICE), k_pe.to(DEVICE), cache, slots.to(DEVICE))
    assert torch.equal(cache.cpu().view(torch.uint8), want.view(torch.uint8))


def test_heads_of_several_tiles_share_a_row_without_a_rotary_part():
    """More heads than a tile, split and whole, through the public function."""
    import mla_portable

    generator = torch.Generator().manual_seed(6)
    q = torch.randn(2, 1, 40 + HEADS, 512, generator=generator).bfloat16()
    cache = torch.randn(5, 16, 512, generator=generator).bfloat16()
    indices = torch.randint(-3, 80, (2, 1, 70), generator=generator, dtype=torch.int32)
    want = oracle.sparse_decode(q, cache, indices, softmax_scale=0.06)
    out, lse = mla_portable.sparse_decode(
        q.to(DEVICE), cache.to(DEVICE), indices.to(DEVICE), softmax_scale=0.06, backend="triton"
    )
    torch.testing.assert_close(out.cpu().double(), want[0], rtol=1e-2, atol=8e-3)
    torch.testing.assert_close(lse.cpu().double(), want[1], rtol=1e-5, atol=1e-5)
