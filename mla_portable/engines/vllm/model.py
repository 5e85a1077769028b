# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""From vLLM's configuration to an AttentionSpec and the route that serves it, or to every reason why none does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from mla_portable.attention import AttentionSpec, RouteDecision, SparseMLAAttention, StepBuffers, UnsupportedRoute
from mla_portable.choose import get_registry
from mla_portable.contracts import DeviceFacts, InvalidArgument, MLAPortableError
from mla_portable.engines.common.routing import decide_route
from mla_portable.engines.vllm import compat, settings
from mla_portable.engines.vllm.context_parallel import context_share
from mla_portable.engines.vllm.writer import Writer, choose_writer
from mla_portable.kit.defaults import neutral_defaults
from mla_portable.layouts import BF16, BF16_NOPE, FP8_DS_MLA, LAYOUTS
from mla_portable.planner import PlannerConfig
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL

BLOCK_SIZE: Final = 64
"""Tokens of a cache block, that of the indexer's cache beside ours. vLLM cuts larger blocks into these. With an indexer of
pools of keys, blocks of both are multiples of it."""

LAYOUT_OF_DTYPE: Final = {None: "bf16", "auto": "bf16", "bfloat16": "bf16", "fp8": "fp8_ds_mla", "fp8_ds_mla": "fp8_ds_mla"}
"""vLLM's names of cache formats. `fp8` is what users write; vLLM turns it into `fp8_ds_mla` before a layer is built."""
_WITHOUT_ROPE: Final = {BF16.name: (BF16_NOPE.name, False), FP8_DS_MLA.name: (FP8_DS_MLA.name, True)}
"""By the layout of a model with a rotary part: the layout of one without (GLM-5.3-Flash), and whether its rows have one all the
same, which is then zeros."""
HEAD_SIZES: Final = tuple(sorted({LAYOUTS[name].key_width for name in (*_WITHOUT_ROPE, BF16_NOPE.name)}))

_ATTENTION: Final = (SPARSE_DECODE, SPARSE_PREFILL)


@dataclass(frozen=True, slots=True)
class Resolved:
    """How layers will be served: their spec (`graph` only where the route can be captured), route, and the cache's writer."""

    spec: AttentionSpec
    decision: RouteDecision
    writer: Writer

    @property
    def gathers(self) -> bool:
        """The route wants the bf16 prefill workspace."""
        return self.decision.verdict.part("gather") is not None


@neutral_defaults()
def resolve(
    vllm_config: Any,
    device: torch.device,
    *,
    kv_cache_dtype: str | None,
    head_size: int | None = None,
    num_heads: int | None = None,
    softmax_scale: float | None = None,
    block_size: int = BLOCK_SIZE,
    block_gap: int | None = 0,
    need_lse: bool = False,
    attn_sink: bool = False,
    probe: bool = True,
) -> Resolved:
    """The spec of the model's layers and the route that serves them on `device`.

    Args:
        head_size: numbers of a key, 576 or, without a rotary part, 512; None for the model's.
        probe: implementations that were not tried before are, and vLLM's operator for the cache; with False nothing is
            computed, and the cache counts as written by that operator with the scales that most readers take.
    Where vLLM would capture graphs but no route can be captured, one that runs outside of graphs is taken. `block_gap` is
    what compat.block_gap says of the cache.
    Raises: UnsupportedRoute with the reasons against every route; InvalidArgument for a configuration that is not served.
    """
    settings.adopt(vllm_config.additional_config)
    layout, nope = LAYOUT_OF_DTYPE.get(kv_cache_dtype), False
    if layout is None:
        expected = f"one of {', '.join(name for name in LAYOUT_OF_DTYPE if name)}"
        raise InvalidArgument("vLLM", "kv_cache_dtype", got=repr(kv_cache_dtype), expected=expected)
    if (compat.head_size(vllm_config) if head_size is None else head_size) == LAYOUTS[layout].value_width:
        layout, nope = _WITHOUT_ROPE[layout]
    model, scheduler, topk = vllm_config.model_config, vllm_config.scheduler_config, compat.selection_width(vllm_config)
    if topk is None:
        raise InvalidArgument("vLLM", "index_topk", got="nothing in the model's config", expected="a sparse-MLA model")
    if refused := compat.unsupported_features(vllm_config):
        raise InvalidArgument("vLLM", "configuration", got="; ".join(refused), expected="what this backend supports")
    share = context_share(vllm_config)
    if attn_sink and share.size > 1:
        got, expected = f"attention sinks with decode context parallelism {share.size}", "1: each rank would count the sink"
        raise InvalidArgument("vLLM", "sinks", got=got, expected=expected, remedy="Set decode_context_parallel_size=1.")
    decode_query_len, captured = compat.decode_query_len(vllm_config), compat.capture_sizes(vllm_config)
    writer = choose_writer(layout, device, vllm_config, nope=nope) if probe else Writer("vllm", _likely_scales())
    spec = AttentionSpec(
        # vLLM gathers the query heads of the ranks that share a sequence
        num_heads=share.size * (num_heads or model.get_num_attention_heads(vllm_config.parallel_config)),
        softmax_scale=softmax_scale or compat.nominal_scale(vllm_config),
        max_num_tokens=max(scheduler.max_num_batched_tokens, captured),
        max_num_reqs=max(scheduler.max_num_seqs, captured),
        # Drafts may be verified past the last position that is kept.
        max_model_len=model.max_model_len + decode_query_len,
        kv_layout=layout,
        block_size=block_size,
        topk=topk,
        scale_format=writer.scale_format if LAYOUTS[layout].is_quantized else None,
        contiguous_blocks=_is_contiguous(layout, block_gap),
        decode_query_len=decode_query_len,
        prefill_workspace_tokens=compat.workspace_rows(vllm_config),
        route=settings.route(),
        need_lse=need_lse or share.size > 1,
        attn_sink=attn_sink,
        concat_query=share.size == 1,
        nope=nope,
        share=share,
        graph=compat.wants_full_graphs(vllm_config),
        batch_invariant=compat.wants_batch_invariance(),
    )
    decision = decide_route(spec, device, registry=get_registry(), probe=probe)
    if decision.chosen is None:
        raise UnsupportedRoute(decision)
    return Resolved(decision.spec, decision, writer)


def bind(resolved: Resolved, device: torch.device, buffers: StepBuffers | None) -> SparseMLAAttention:
    """The attention of layers that are served as `resolved`."""
    with neutral_defaults():
        return SparseMLAAttention(
            resolved.spec,
            device=device,
            buffers=buffers,
            join_query=compat.query_joiner(),
            route_decision=resolved.decision,
        )


def planner_config(attention: SparseMLAAttention) -> PlannerConfig:
    """Of the planner of vLLM's steps."""
    # Lengths may be upper bounds, or those of a dummy batch: the block table need not reach that far.
    config = replace(attention.planner_config(), block_size=None)
    if config.schedule_kind is not None and config.schedule_kind.assumes_topk:
        config = replace(config, few_tokens=compat.few_decode_tokens())
    return config


def _likely_scales() -> str | None:
    stated = settings.scale_format() or "pow2"
    return None if stated == "mixed" else stated


def _is_contiguous(layout: str, gap: int | None) -> bool:
    """What AttentionSpec.contiguous_blocks means for the layout; `gap` in bytes, None for whole rows (compat.align_blocks)."""
    if not LAYOUTS[layout].is_quantized:
        return gap == 0
    return gap is None or gap % LAYOUTS[layout].row_bytes == 0


def refusal(
    vllm_config: Any,
    device: torch.device,
    *,
    head_size: int,
    kv_cache_dtype: str | None,
    block_size: int | None,
    attn_sink: bool = False,
) -> str | None:
    """Why the plugin cannot serve this configuration, every reason in one text; None where it can, by what is declared."""
    if head_size not in HEAD_SIZES:
        return (
            f"head_size {head_size} (supports {', '.join(map(str, HEAD_SIZES))}: a latent of 512, with 64 of rope or without)"
        )
    if block_size is not None and block_size % BLOCK_SIZE:
        return f"block_size {block_size} (supports multiples of {BLOCK_SIZE}): start vLLM with --block-size {BLOCK_SIZE}"
    try:
        given: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "head_size": head_size, "attn_sink": attn_sink}
        resolve(vllm_config, device, **given, probe=False)
    except MLAPortableError as error:
        return str(error)
    return None


def facts_of(device: torch.device, capability: Any | None) -> DeviceFacts:
    """Facts of `device`, or of one like it with the CUDA compute capability that vLLM asks about, where that differs.

    Only an NVIDIA device's capability names its architecture; other vendors report what their software pretends to.
    """
    facts = get_registry().facts(device)
    if capability is None or facts.vendor != "nvidia":
        return facts
    arch = f"sm{capability.major}{capability.minor}"
    return facts if facts.arch == arch else replace(facts, arch=arch, name=f"an NVIDIA device of {arch}")


def is_served(facts: DeviceFacts) -> bool:
    """Somebody declares sparse attention for this device. Whether that works is seen when the configuration is known."""
    offered = (i for i in get_registry().implementations() if i.primitive in _ATTENTION)
    return any(not list(i.support.device_reasons(facts)) for i in offered)
