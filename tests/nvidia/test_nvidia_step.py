# SPDX-License-Identifier: Apache-2.0
"""A whole step, planned and walked by a layer, on stand-ins of FlashMLA: no planner kernel runs in it."""

from __future__ import annotations

import pytest
import torch
from flashmla_standins import installed
from simulated_gpu import registry

from mla_portable.attention import AttentionSpec, SparseMLAAttention
from mla_portable.planner import Planner
from mla_portable.problems.attention import SOFTMAX_SCALE
from mla_portable.tools.bench.inputs import StepShape, make_inputs


def shape(heads: int) -> StepShape:
    return StepShape(num_heads=heads, topk=128, decodes=2, decode_query_len=2, prefills=2, prefill_tokens=5, context=150)


@pytest.mark.parametrize(
    ("generation", "planner_launches"),
    [("vllm 0.33", 0), ("flash_mla 2026", 0), ("sgl_kernel 0.4.5", 0), ("flash_mla 2025", 1)],
)
def test_planning_is_done_on_the_host(generation, planner_launches):
    """A step of two layers. The generation of 2025 has plans of another layout: it makes one for the shape, and keeps it."""
    inputs = make_inputs(shape(16), torch.device("cpu"))
    spec = AttentionSpec(
        num_heads=16, softmax_scale=SOFTMAX_SCALE, max_num_tokens=32, max_num_reqs=8, max_model_len=512, topk=128,
        scale_format="pow2", decode_query_len=2, route="fused",
    )  # fmt: skip
    with installed(generation) as library:
        layer = SparseMLAAttention(spec, device="cpu", registry=registry())
        plan = Planner(layer.planner_config()).plan(inputs.batch)
        library.plans, library.calls = 0, []
        for _ in range(2):
            layer.forward(inputs.q, inputs.kv_cache, inputs.topk_indices, plan)
        assert library.calls == [(14, 1, 64, 128)] * 2
        assert library.plans == planner_launches
