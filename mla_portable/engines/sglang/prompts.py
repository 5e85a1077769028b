# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""Prompts over keys of each head, in the extends where that takes less GPU time than the sparse route.

SGLang computes prompts up to the top-k as dense attention on SM90 and SM10x ("one shot"), before the plugin is asked. In all
other extends its layers multiply the query by W_UK (`forward_absorb_prepare`), attend to latent rows and multiply by W_UV
(`forward_absorb_core`). Where the plan of a step says so, both are replaced for that step: the indexer runs as ever, but names
positions in a request in place of slots, and the layer's own up-projection makes keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from mla_portable.attention import AttentionSpec, HeadDims, PromptAttention
from mla_portable.choose import get_registry
from mla_portable.contracts import DeviceFacts
from mla_portable.engines.common.prompt_route import plan_where_faster, prompt_attention
from mla_portable.engines.common.warm_up import warm_prompts
from mla_portable.engines.sglang import model
from mla_portable.engines.sglang.seams import BACKEND_MODULE, LAYER_MODULE
from mla_portable.engines.sglang.settings import logger
from mla_portable.layouts import KV_LORA_RANK
from mla_portable.planner.prompts import PromptPlan
from mla_portable.times.prompts import PromptTimes

PLAIN: Final = ("prepare_attention_output_gate", "learnable_sink_param", "_kimi_split_gguf_kv_b")
"""Attributes of layers that do more than a plain layer's output projection; such layers take the sparse route."""


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """What `forward_absorb_prepare` returns, in a tuple of one, for a layer whose attention is computed here.

    heads: [T, H * V], before the output projection. topk_indices: for layers that have no indexer of their own.
    """

    heads: Tensor
    topk_indices: Tensor | None


class Prompts:
    """Beside BackendLayers: the extends whose prompts are computed over keys of each head.

    Attributes:
        step: the plan of the step that runs, None where it takes the sparse route.
        asks_for_positions: the indexer that runs is to name positions in a request; the selection is a bit mask over them.
    """

    def __init__(self, attention: PromptAttention, times: PromptTimes, context_parallel: Callable[[], bool]) -> None:
        self._attentions = {attention.spec.softmax_scale: attention}
        self._attention, self._times = attention, times
        self._context_parallel = context_parallel
        self.step: PromptPlan | None = None
        self.asks_for_positions = False

    @property
    def served_by(self) -> str:
        """What attends under a selection and without one, for the log."""
        masked, dense = (self._attention.decisions[name].chosen for name in ("masked", "dense"))
        return f"masked_prefill {masked}" if masked == dense else f"masked_prefill {masked}, {dense} without a selection"

    def plan(self, backend: Any, batch: Any) -> None:
        """Decide for a step, from what SGLang's metadata have on the host: called after `init_forward_metadata`."""
        self.step = None
        if not batch.forward_mode.is_extend_without_speculative() or backend.use_mha or _in_graph():
            return
        spec_info = getattr(batch, "spec_info", None)
        if getattr(spec_info, "dsa_seed_topk_capture", None) is not None or self._context_parallel():
            return  # a draft is given slots of this step; contexts lie on several ranks
        if batch.extend_seq_lens_cpu is None or batch.seq_lens_cpu is None:
            return
        query_lens = np.asarray(batch.extend_seq_lens_cpu, dtype=np.int32)
        seq_lens = np.asarray(batch.seq_lens_cpu, dtype=np.int32)
        if not len(query_lens) or int(query_lens.sum()) > self._attention.spec.max_num_tokens:
            return
        table = backend.forward_metadata.real_page_table
        topk = self._attention.spec.topk
        self.step = plan_where_faster(self._attention, self._times, query_lens, seq_lens, table, topk=topk)

    def prepare(self, layer: Any, backend: Any, positions: Tensor, hidden: Any, batch: Any, previous: Any) -> Computed:
        """A layer's attention in a planned step, with its projections, as SGLang's `forward_absorb_prepare` begins.

        hidden: what the layer was given, for its indexer. previous: what the indexer of an earlier layer selected.
        """
        assert self.step is not None
        plan, rank = self.step, layer.kv_lora_rank
        methods = import_module(LAYER_MODULE)
        latent = methods.get_attn_tp_context().fetch_qkv_latent()
        q, latent = latent.split([layer.q_lora_rank, rank + layer.qk_rope_head_dim], dim=-1)
        q_lora = layer.q_a_layernorm(q)
        kv_c = layer.kv_a_layernorm(latent[..., :rank])
        q = layer.q_b_proj(q_lora)[0].view(-1, layer.num_local_heads, layer.qk_head_dim)
        if layer.should_run_indexer(previous):
            self.asks_for_positions = True
            try:
                topk = layer.indexer(x=hidden, q_lora=q_lora, positions=positions, forward_batch=batch, layer_id=layer.layer_id)
            finally:
                self.asks_for_positions = False
        else:
            topk = methods.maybe_capture_indexer_topk(layer.layer_id, previous)
        k_pe = latent[..., rank:].unsqueeze(1)
        if layer.rotary_emb is not None:
            q_pe, k_pe = layer.rotary_emb(positions, q[..., layer.qk_nope_head_dim :], k_pe)
            q[..., layer.qk_nope_head_dim :] = q_pe
        backend.token_to_kv_pool.set_mla_kv_buffer(layer.attn_mqa, batch.out_cache_loc, kv_c.unsqueeze(1), k_pe)
        tokens, attention = plan.num_tokens, self._for(layer.attn_mqa.scaling)
        shape = len(q), layer.num_local_heads, layer.v_head_dim
        out = q.new_empty(shape) if len(q) == tokens else q.new_zeros(shape)  # SGLang pads rows at the end
        attention.forward(
            q[:tokens],
            kv_c[:tokens],
            k_pe.flatten(1)[:tokens],
            lambda rows: layer.kv_b_proj(rows)[0],
            _cache(backend, layer),
            topk,
            plan,
            out=out[:tokens],
        )
        return Computed(out.flatten(1), topk)

    def _for(self, scale: float) -> PromptAttention:
        """For layers that scale by `scale`; all of a model's do so by the same mostly."""
        found = self._attentions.get(scale)
        if found is None:
            spec = replace(self._attention.spec, softmax_scale=scale)
            found = PromptAttention(spec, self._attention.head_dims, device=self._attention.device)
            self._attentions[scale] = found
        return found


def finish(layer: Any, computed: Computed) -> Any:
    """The output projection, and what SGLang's `forward_absorb_core` returns beside it."""
    output, _ = layer.o_proj(computed.heads)
    if layer.next_skip_topk is None:
        return output
    return output, (computed.topk_indices if layer.next_skip_topk else None)


def is_plain(layer: Any) -> bool:
    """Nothing but the projections, the indexer and the rotary embedding stands around the layer's attention."""
    has_lora = getattr(getattr(layer, "kv_b_proj", None), "set_lora", False)
    return (
        getattr(layer, "use_dsa", False)
        and layer.q_lora_rank is not None
        and not has_lora
        and all(getattr(layer, name, None) in (None, False) for name in PLAIN)
    )


def prompts(backend: Any, model_runner: Any, spec: AttentionSpec, facts: DeviceFacts) -> Prompts | None:
    """Beside the BackendLayers of a backend object; None where its prompts always take the sparse route.

    Those of models without a rotary part do: their layers see another object, which has this one and a second for its
    layers of linear attention, and an indexer of pools of keys names slots alone. With HiSparse the page tables
    do not name rows of the pool.

    spec: of the rows in SGLang's cache.
    """
    if not spec.layout.rope_width or model.keys_of_pool(backend) > 1 or model.in_host_memory(backend):
        return None
    config = model_runner.model_config
    if getattr(config, "scaling", None) is None:  # not of a model with latent rows
        return None
    dims = HeadDims(config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
    if dims.value == KV_LORA_RANK:  # a model of layers that are given absorbed queries
        return None
    arguments = getattr(model_runner, "server_args", None)
    chunk = getattr(arguments, "chunked_prefill_size", None) or 0
    tokens = chunk if chunk > 0 else getattr(arguments, "max_prefill_tokens", None) or 16384
    wide = replace(spec, max_num_tokens=tokens, max_num_reqs=min(tokens, spec.max_num_reqs), softmax_scale=config.scaling)
    found = prompt_attention(wide, dims, facts, torch.device(model_runner.device), logger)
    parallel = getattr(import_module(BACKEND_MODULE), "is_dsa_enable_prefill_cp", lambda: False)
    if found is None or found.times is None:
        return None
    kind = wide, dims, found.device
    warmed: set[tuple[object, ...]] = get_registry().keep("SGLang's warmed prompts", set)
    if kind not in warmed:  # those of a draft's backend objects are the target's
        warm_prompts(found)
        warmed.add(kind)
    return Prompts(found, found.times, parallel)


def _in_graph() -> bool:
    """The step is captured or replayed, with prompts whose lengths are not those of the plan."""
    from sglang.srt.model_executor.runner_backend_utils import breakable_cuda_graph, tc_piecewise_cuda_graph

    breakable = import_module(f"{breakable_cuda_graph.__name__}.context")
    return tc_piecewise_cuda_graph.is_in_tc_piecewise_cuda_graph() or breakable.is_in_breakable_cuda_graph()


def _cache(backend: Any, layer: Any) -> Tensor:
    """The layer's rows in SGLang's cache, in pages."""
    cache = backend.token_to_kv_pool.get_key_buffer(layer.attn_mqa.layer_id)
    if model.pool_layout(backend) == "bf16":
        return cache.view(-1, model.PAGE, cache.shape[-1])
    return cache.view(torch.uint8).view(-1, model.PAGE, cache.shape[-1] * cache.element_size())
