# SPDX-License-Identifier: Apache-2.0
"""What layers of models, and an indexer, ask for in an engine under its default limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mla_portable.attention import AttentionSpec
from mla_portable.contracts import DeviceFacts, Request
from mla_portable.models import DEEPSEEK_V4, DEEPSEEK_V32, Model
from mla_portable.primitives import INDEXER_CACHE_WRITE, INDEXER_SELECT, NORM_ROPE_WRITE, ROPE_QUANTIZE_QUERIES


def layer_spec(
    model: Model,
    layout: str,
    num_heads: int,
    *,
    topk: int | None = None,
    max_model_len: int | None = None,
    scale_format: str | None = None,
) -> AttentionSpec:
    """What a layer with one cache asks for under an engine's default limits.

    Args:
        num_heads: of a rank. topk, max_model_len: None for the model's.
    """
    return AttentionSpec(
        num_heads=num_heads,
        softmax_scale=model.softmax_scale,
        max_num_tokens=8192,
        max_num_reqs=256,
        max_model_len=max_model_len or model.max_model_len,
        kv_layout=layout,
        topk=topk or model.topk,
        scale_format=scale_format,
        need_lse=False,
        attn_sink=model.sinks,
    )


def v4_layer_spec(num_heads: int) -> AttentionSpec:
    """What a layer of DeepSeek-V4 with selected tokens asks for: those of a window, and selected ones that stand for four."""
    model = DEEPSEEK_V4
    return replace(
        layer_spec(model, model.layouts[0], num_heads, scale_format="pow2"),
        concat_query=False,
        extra_topk=model.extra_topk,
        extra_block_size=64,
    )


def indexer_requests(facts: DeviceFacts, topk: int = DEEPSEEK_V32.topk, *, ordered: bool = False) -> tuple[Request, Request]:
    """What the indexer of vLLM's fused path asks for: its selection, and the writer of its keys where vLLM's does not work.

    To be captured in a graph, except where the device has none: vLLM then runs attention outside of them.

    Args:
        ordered: positions ascend, as vLLM asks for under batch invariance.
    """
    layout: dict[str, Any] = {"kv_layout": "index_fp8", "block_size": 64, "graph": facts.graph_capture is not False}
    return (
        Request(
            INDEXER_SELECT, facts, num_heads=DEEPSEEK_V32.index_heads, topk=topk, ordered=ordered, whole_tables=True, **layout
        ),
        Request(INDEXER_CACHE_WRITE, facts, scale_format="pow2", **layout),
    )


def layer_requests(facts: DeviceFacts) -> tuple[Request, Request]:
    """What a layer of DeepSeek-V3.2 with an indexer and an FP8 cache asks for between its projections."""
    model = DEEPSEEK_V32
    layout: dict[str, Any] = {"kv_layout": "fp8_ds_mla", "index_layout": "index_fp8", "block_size": 64, "scale_format": "pow2"}
    captured = facts.graph_capture is not False
    return (
        Request(NORM_ROPE_WRITE, facts, graph=captured, **layout),
        Request(ROPE_QUANTIZE_QUERIES, facts, num_heads=model.heads, graph=captured),
    )
