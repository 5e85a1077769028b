# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""Our layer around vLLM's MLAAttention: projections as vLLM's, and two calls between them in the place of some ten kernels.

A layer that cannot be served runs vLLM's own forward, for a reason that is logged and decided when it is built.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.platforms import current_platform
from vllm.utils.torch_utils import _encode_layer_name

from mla_portable.choose import get_registry
from mla_portable.contracts import InvalidArgument, UnsupportedRequest
from mla_portable.engines.common.metrics import publish
from mla_portable.engines.common.routing import in_words
from mla_portable.engines.vllm import compat, indexer_choice, layer_choice, layer_ops, settings
from mla_portable.engines.vllm.impl import MLAPortableImpl
from mla_portable.engines.vllm.layer_parts import PARTS, IndexerParts, LayerParts
from mla_portable.engines.vllm.writer import try_vllm
from mla_portable.layouts import INDEX_HEAD_SIZE, KV_LORA_RANK, QK_ROPE_HEAD_DIM

_ROTARY: Final = ("RotaryEmbedding", "DeepseekScalingRotaryEmbedding", "YaRNScalingRotaryEmbedding")
"""Classes that rotate by a table of cosines and sines alone, whatever the tokens are."""
_SAME_TABLE: Final = ("rotary_dim", "base", "max_position_embeddings", "dtype", "scaling_factor", "mscale")
_SCALES: Final = "ue8m0"
"""vLLM's name of an indexer's scales that are powers of two."""
_FLAGS: Final = {
    "calculate_kv_scales": "scales of the cache that are measured while serving",
    "is_aiter_triton_fp4_bmm_enabled": "AITER's products with W_UK in FP4",
    "is_aiter_triton_fp8_bmm_enabled": "AITER's products with W_UK in FP8",
    "is_amx_bmm_enabled": "AMX's products with W_UK",
    "hisparse_cache": "HiSparse",
    "use_pcp": "prefill context parallelism",
}
"""Attributes of MLAAttention that are false where its plain path runs."""


class MLAPortableLayer(MultiHeadLatentAttentionWrapper):
    """vLLM's layer with our parts between the projections.

    Attributes:
        reason: why vLLM's own forward runs, "" where ours does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        self.reason = against(self, config) or _prepare(self, config)
        self._serves = not self.reason
        if self.reason:
            layer_choice.log_stock(self.reason)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, llama_4_scaling: Tensor | None = None, *more: Any, **named: Any
    ) -> Tensor:
        """positions: [T] int64. hidden_states: [T, hidden] bf16 -> [T, hidden] bf16.

        Raises: InvalidArgument for a scaling of queries by position in a layer that ours serves.
        """
        if not self._serves:
            return super().forward(positions, hidden_states, llama_4_scaling, *more, **named)
        if llama_4_scaling is not None:
            remedy = f"Set {settings.ENV_LAYER}=off."
            raise InvalidArgument("vLLM", "llama_4_scaling", got="a tensor", expected="None", remedy=remedy)
        operators, layer = torch.ops.mla_portable, self.mla_attn
        name = _encode_layer_name(layer.layer_name)
        indexer = None if self.skip_topk else self.indexer
        qkv = self.fused_qkv_a_proj(hidden_states)[0]
        kw = None if indexer is None else indexer.wk_weights_proj(hidden_states)[0]
        q_c, kv_c, k_pe = operators.vllm_norm_rope_write(positions, qkv, kw, self.q_lora_rank, self.qk_rope_head_dim, name)
        q = self.q_b_proj(q_c)[0].view(-1, self.num_heads, self.qk_head_dim)
        index_q = None if indexer is None else indexer.wq_b(q_c)[0]
        key_width = self.kv_lora_rank + self.qk_rope_head_dim
        query, codes, weights = operators.vllm_rope_queries(positions, q, index_q, kw, key_width, name)
        if indexer is not None and kw is not None:
            indexer.indexer_op(hidden_states, codes, kw[:, :INDEX_HEAD_SIZE], weights)  # the key is written already
        layer.impl.record_logical_topk_ready()
        output = torch.empty(
            (hidden_states.shape[0], self.num_heads * self.v_head_dim), dtype=hidden_states.dtype, device=hidden_states.device
        )
        operators.vllm_attention(q, query, kv_c, k_pe, output, name)
        return self.o_proj(output)[0]


def against(layer: MultiHeadLatentAttentionWrapper, config: Any) -> str:
    """Why vLLM's forward has to run in `layer`, "" where nothing is in the way; kernels are not asked."""
    reasons = [*_against_model(layer, config), *_against_modules(layer), *_against_indexer(layer, config)]
    return "; ".join(filter(None, (layer_choice.against_mode(), *reasons)))


def _against_model(layer: Any, config: Any) -> list[str]:
    model = config.model_config
    shape = layer.q_lora_rank, layer.kv_lora_rank, layer.qk_rope_head_dim
    widths = f"widths of the query, latent and rope {shape} (supports {KV_LORA_RANK} and {QK_ROPE_HEAD_DIM} behind a low rank)"
    found = {
        "attention is dense": not layer.is_sparse,
        widths: not shape[0] or shape[1:] != (KV_LORA_RANK, QK_ROPE_HEAD_DIM),
        "LoRA": getattr(config, "lora_config", None) is not None,
        f"decode context parallelism {compat.context_ranks(config)}": compat.context_ranks(config) > 1,
        "queries replicated over ranks": getattr(layer, "dcp_q_replicate", False),
        "a gate on the output (g_proj)": getattr(layer, "g_proj", None) is not None,
        "queries scaled by position (llama_4_scaling)": getattr(getattr(model, "hf_config", None), "llama_4_scaling", None)
        is not None,
        "VLLM_BATCH_INVARIANT": compat.wants_batch_invariance(),
    }
    return [reason for reason, applies in found.items() if applies]


def _against_modules(layer: Any) -> list[str]:
    attention, found = layer.mla_attn, []
    if not isinstance(attention.impl, MLAPortableImpl):
        found.append(f"attention is {type(attention.impl).__name__}'s")
    found += [words for name, words in _FLAGS.items() if getattr(attention, name, None)]
    norms = {name: getattr(layer, name) for name in ("q_a_layernorm", "kv_a_layernorm")}
    strange = {name: norm for name, norm in norms.items() if not _is_plain_norm(norm)}
    found += [f"{name} is a {type(norm).__name__}" for name, norm in strange.items()]
    eps = {norm.variance_epsilon for norm in norms.values()} if not strange else set()
    if len(eps) > 1:
        found.append(f"norms of different eps {sorted(eps)}")
    if not _is_plain_rotary(layer.rotary_emb):
        found.append(f"rotary embedding {type(layer.rotary_emb).__name__}")
    return found


def _against_indexer(layer: Any, config: Any) -> list[str]:
    indexer, rotary = layer.indexer, layer.indexer_rope_emb
    if indexer is None:
        return []
    if type(indexer).__name__ != "Indexer" or not hasattr(indexer, "wk_weights_proj"):
        return [f"indexer {type(indexer).__name__} without one projection of key and weights"]
    found = [other] if (other := indexer_choice.other_formats(config)) else []
    if not hasattr(indexer.indexer_op, "skip_k_cache_insert"):
        found.append("vLLM's indexer cannot leave the write of its keys out")
    if (indexer.head_dim, indexer.scale_fmt) != (INDEX_HEAD_SIZE, _SCALES):
        found.append(f"an indexer of {indexer.head_dim} numbers and scales {indexer.scale_fmt}")
    if current_platform.fp8_dtype() != torch.float8_e4m3fn:
        found.append(f"an indexer in {current_platform.fp8_dtype()}")
    if getattr(indexer.k_norm, "bias", None) is None or getattr(indexer.k_norm, "weight", None) is None:
        found.append(f"k_norm is a {type(indexer.k_norm).__name__}")
    same = (getattr(rotary, name, None) == getattr(layer.rotary_emb, name, None) for name in _SAME_TABLE)
    if not _is_plain_rotary(rotary) or not all(same):
        found.append(f"the indexer's rotary embedding, {type(rotary).__name__}, is another one than the layer's")
    return found


def _is_plain_norm(norm: Any) -> bool:
    weight = getattr(norm, "weight", None)
    plain = type(norm).__name__ == "RMSNorm" and getattr(norm, "variance_size_override", None) is None
    return plain and getattr(norm, "has_weight", True) and isinstance(weight, Tensor)


def _is_plain_rotary(rotary: Any) -> bool:
    table = getattr(rotary, "cos_sin_cache", None)
    return type(rotary).__name__ in _ROTARY and isinstance(table, Tensor) and table.shape[-1] == QK_ROPE_HEAD_DIM


def _prepare(layer: Any, config: Any) -> str:
    """Bind what the layer calls and give it the parts. Returns: why not, "" where it did."""
    attention = layer.mla_attn
    resolved = attention.impl.resolved
    if resolved is None:
        return "the layer's configuration was not known when it was built"
    spec, device = resolved.spec, compat.device()
    made = resolved.writer.scale_format or try_vllm(spec.kv_layout, device).scale_format or "pow2"
    parts = LayerParts(
        q_norm=layer.q_a_layernorm,
        kv_norm=layer.kv_a_layernorm,
        eps=layer.kv_a_layernorm.variance_epsilon,
        rotary=layer.rotary_emb,
        rope_style=_style(layer.rotary_emb),
        num_heads=layer.num_heads,
        kv_layout=spec.kv_layout,
        scale_format=made,
        indexer=_indexer_parts(layer),
    )
    try:
        served = parts.bind(device, spec.block_size)
    except UnsupportedRequest as error:
        return str(error).replace("\n", "; ")
    setattr(attention, PARTS, parts)
    if layer.indexer is not None:
        layer.indexer.indexer_op.skip_k_cache_insert = True
    _split_graphs(config)
    here = get_registry().facts(device)
    publish(here.name, served, settings.logger)
    _log_served(f"{here}: {in_words(served)}")
    return ""


def _indexer_parts(layer: Any) -> IndexerParts | None:
    indexer = layer.indexer
    if indexer is None:
        return None
    return IndexerParts(
        name=indexer.k_cache.prefix,
        cache=indexer.k_cache,
        norm=indexer.k_norm,
        rope_style=_style(layer.indexer_rope_emb),
        scale=indexer.softmax_scale * indexer.n_head**-0.5,
    )


def _style(rotary: Any) -> str:
    return "neox" if rotary.is_neox_style else "interleaved"


def _split_graphs(config: Any) -> None:
    """Have vLLM split graphs at our operator of attention where it does at its own.

    vLLM finds compiled models on disk by a hash of its configuration, which therefore says that our layer serves.
    """
    splitting = config.compilation_config.splitting_ops
    if splitting and layer_ops.ATTENTION not in splitting:
        splitting.append(layer_ops.ATTENTION)
    hashed = getattr(config, "additional_config", None)
    if isinstance(hashed, dict):
        hashed["mla_portable_layer"] = "norms, rotary embedding and writes by two operators"


@functools.cache
def _log_served(what: str) -> None:
    settings.logger.info("mla_portable serves the layers around attention on %s", what)
