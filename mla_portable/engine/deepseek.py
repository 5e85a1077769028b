# SPDX-License-Identifier: Apache-2.0
"""What layers of models ask for in an engine, and what would serve DeepSeek-V3.2's; nothing is computed but probes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, Final

from mla_portable.attention import AttentionSpec, RouteDecision
from mla_portable.contracts import DeviceFacts, Request
from mla_portable.contracts.engine import Choice
from mla_portable.engine.routing import served_by
from mla_portable.models import DEEPSEEK_V4, DEEPSEEK_V32, Model
from mla_portable.primitives import INDEXER_CACHE_WRITE, INDEXER_SELECT

DEEP_GEMM_ARCHS: Final = ("sm90", "sm10", "sm12")
"""What engines say of DeepGEMM: it serves Hopper, and both families of Blackwell."""


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


def indexer_requests(facts: DeviceFacts, topk: int = DEEPSEEK_V32.topk) -> tuple[Request, Request]:
    """What the indexer of vLLM's fused path asks for: its selection, and the writer of its keys where vLLM's does not work.

    To be captured in a graph, except where the device has none: vLLM then runs attention outside of them.
    """
    layout: dict[str, Any] = {"kv_layout": "index_fp8", "block_size": 64, "graph": facts.graph_capture is not False}
    return (
        Request(INDEXER_SELECT, facts, num_heads=DEEPSEEK_V32.index_heads, topk=topk, **layout),
        Request(INDEXER_CACHE_WRITE, facts, scale_format="pow2", **layout),
    )


def deep_gemm_serves(facts: DeviceFacts) -> bool:
    """Engines use DeepGEMM there, where it can be imported."""
    return facts.vendor == "nvidia" and facts.arch.startswith(DEEP_GEMM_ARCHS)


def own_indexer(facts: DeviceFacts) -> str | None:
    """What vLLM's indexer runs on there, in words; None where it lacks DeepGEMM, so that the plugin serves it by default."""
    if deep_gemm_serves(facts):
        return "DeepGEMM"
    return "no DeepGEMM on ROCm" if facts.vendor == "amd" else None


def scorer(facts: DeviceFacts, *, ours: str, theirs: str, asked: str) -> str:
    """Who scores the indexer's keys, in words.

    Args:
        ours, theirs: how an engine's plugin calls this project's functions, and the engine's own with DeepGEMM. asked: the
            setting that asks for ours on every device, "" where DeepGEMM comes first.
    """
    if facts.device_type == "cpu":
        return "not known on a CPU; ask on the device that serves"
    if asked:
        return f"{ours}: {asked}"
    if deep_gemm_serves(facts):
        return f"{theirs} for {facts.arch}; where that cannot be imported, {ours}"
    return f"{ours}: DeepGEMM does not support {facts.arch}"


def choices(
    decide: Callable[[AttentionSpec], RouteDecision], named: Callable[[RouteDecision], str] = served_by
) -> tuple[Choice, ...]:
    """One for each cache layout and heads of a rank. decide: the engine's way to a route. named: what serves it, in words."""
    found: list[Choice] = []
    model = DEEPSEEK_V32
    for layout, heads in product(model.layouts, model.rank_heads):
        decision = decide(layer_spec(model, layout, heads))
        found.append(Choice(layout, heads, decision.chosen, named(decision)))
    return tuple(found)
