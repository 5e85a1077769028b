# SPDX-License-Identifier: Apache-2.0
"""The cache layouts on the Triton kernels, against the oracle: cache_write, and a layer on each route without a rotary part."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_steps import BATCHES, ROUTES, SPEC, assert_matches, make_step, plan_for

from mla_portable.attention import SparseMLAAttention
from mla_portable.choose import Registry
from mla_portable.layouts import LAYOUTS as CACHE_LAYOUTS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REGISTRY = Registry(environ={})


def layer_of(layout: str, **changes) -> SparseMLAAttention:
    scale_format = "amax" if CACHE_LAYOUTS[layout].is_quantized else None
    spec = replace(SPEC, kv_layout=layout, scale_format=scale_format, **changes)
    return SparseMLAAttention(spec, device=DEVICE, registry=REGISTRY, backend="triton")


@pytest.mark.parametrize("layout", ["bf16_nope", "fp8_nope"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_step_without_a_rotary_part_is_the_oracles(route: str, layout: str):
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
