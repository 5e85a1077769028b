# SPDX-License-Identifier: Apache-2.0
"""The cache layouts on the Triton kernels, against the oracle: a layer on each route, and its parts at a model's heads."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attention_steps import BATCHES, BLOCK, ROUTES, SPEC, assert_matches, make_step, plan_for

import mla_portable
from mla_portable.attention import SparseMLAAttention
from mla_portable.choose import Registry
from mla_portable.contracts import Batch
from mla_portable.layouts import LAYOUTS as CACHE_LAYOUTS
from mla_portable.models import A_X_K2

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REGISTRY = Registry(environ={})


def layer_of(layout: str, **changes) -> SparseMLAAttention:
    scale_format = "amax" if CACHE_LAYOUTS[layout].is_quantized else None
    spec = replace(SPEC, kv_layout=layout, scale_format=scale_format, **changes)
    return SparseMLAAttention(spec, device=DEVICE, registry=REGISTRY, backend="triton")


@pytest.mark.parametrize("layout", ["bf16_nope", "fp8_nope", "bf16_128_32"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_step_over_rows_of_other_widths_is_the_oracles(route: str, layout: str):
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


def test_a_step_of_a_x_k2_with_its_indexer_is_the_oracles():
    """Its heads and its indexer's: keys are written and selected, then attended to, all by this plugin."""
    model, tokens, length, topk = A_X_K2, 3, 70, 16
    row, generator = CACHE_LAYOUTS[model.layouts[0]], torch.Generator().manual_seed(5)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    latent, rope, index_keys = drawn(length, row.value_width), drawn(length, row.rope_width), drawn(length, 128)
    index_q, weights = drawn(tokens, model.index_heads, 128), torch.randn(tokens, model.index_heads, generator=generator)
    q, table = drawn(tokens, model.heads, row.key_width), torch.randperm(9, generator=generator).to(torch.int32)[None]
    starts, lengths = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    position = torch.arange(length)
    slots = (table[0, position // BLOCK].long() * BLOCK + position % BLOCK).to(DEVICE)
    kv_cache = torch.full((9, BLOCK, row.row_width), math.nan, dtype=torch.bfloat16, device=DEVICE)
    index_cache = torch.full((9, BLOCK, 128), math.nan, dtype=torch.bfloat16, device=DEVICE)
    with mla_portable.use("triton"):
        mla_portable.cache_write(latent.to(DEVICE), rope.to(DEVICE), kv_cache, slots)
        mla_portable.indexer_cache_write(index_keys.to(DEVICE), index_cache, slots)
        pages = index_cache, *(each.to(DEVICE) for each in (starts, lengths, table))
        chosen = mla_portable.indexer_select(index_q.to(DEVICE), weights.to(DEVICE), *pages, topk=topk)
    scores = (torch.einsum("thd,nd->thn", index_q.double(), index_keys.double()).relu() * weights.double()[..., None]).sum(1)
    scores.masked_fill_(position > (length - tokens + torch.arange(tokens))[:, None], -math.inf)
    assert torch.equal(chosen.long().cpu(), scores.topk(topk).indices.sort().values)

    sizes = {"num_heads": model.heads, "softmax_scale": model.softmax_scale, "topk": topk, "max_model_len": 9 * BLOCK}
    layer = layer_of(row.name, **sizes)
    plan = plan_for(layer, Batch(starts.numpy(), lengths.numpy(), table))
    out, lse = layer.forward(q.to(DEVICE), kv_cache, chosen, plan)
    keys = torch.cat([latent, rope], dim=1).double()[chosen.long().cpu()]  # [T, K, 160]
    logits = torch.einsum("thd,tkd->thk", q.double(), keys) * 96**-0.5
    wanted = torch.einsum("thk,tkv->thv", logits.softmax(-1), keys[..., :128])
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-2, atol=8e-3)
    torch.testing.assert_close(lse.cpu().double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
