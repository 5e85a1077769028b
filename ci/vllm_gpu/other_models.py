# SPDX-License-Identifier: Apache-2.0
"""Small seeded checkpoints in the shape of GLM-5, GLM-5.3-Flash and hy_v4; the last two as vLLM 0.30 and later load them.

Attention and indexer have the real dimensions. What surrounds them has the kinds of layers that the models have (linear
attention, hyper-connections, gates), as narrow as they may be, and no experts. Names are those of released checkpoints, which
transformers' conversion tables take as sources.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from checkpoint import FEED_FORWARD, HIDDEN, INDEX_DIM, LATENT, Q_RANK, ROPE, TOPK, VOCAB, Weights, drawn, v32_config
from torch import Tensor

_STREAMS: Final = 4
"""Residual streams of the hyper-connections."""
_COMMON: Final[dict[str, Any]] = {
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FEED_FORWARD,
    "q_lora_rank": Q_RANK,
    "kv_lora_rank": LATENT,
    "v_head_dim": 256,
    "index_head_dim": INDEX_DIM,
    "index_topk": TOPK,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "hc_mult": _STREAMS,
    "hc_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "max_position_embeddings": 32_768,
    "num_nextn_predict_layers": 0,
}

# GLM-5

_GLM5_WIDTHS: Final = 192, ROPE, 256, 32
"""Of a head: without rope, with, and of the value; heads of the indexer."""
_GLM5_PATTERN: Final = "FSF"
"""Layers with an indexer of their own (F), and one that attends to the selection of the layer before it (S)."""


def glm5_config(heads: int, *, drafts: bool = False) -> dict[str, Any]:
    """config.json, with the fields that vLLM reads and those of transformers for the same thing.

    rms_norm_eps is 1e-6, which transformers takes for the norms of latents whatever the configuration says. `drafts`: with an
    MTP layer, whose second draft attends to the selection of the first.
    """
    nope, rope, value, index_heads = _GLM5_WIDTHS
    config = v32_config(heads) | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": len(_GLM5_PATTERN),
        "first_k_dense_replace": len(_GLM5_PATTERN) + 1,
        "mlp_layer_types": ["dense"] * len(_GLM5_PATTERN),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "index_n_heads": index_heads,
        "index_topk_pattern": _GLM5_PATTERN,
        "indexer_types": [{"F": "full", "S": "shared"}[kind] for kind in _GLM5_PATTERN],
        "indexer_rope_interleave": True,
        "rope_interleave": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "num_nextn_predict_layers": int(drafts),
        **({"index_share_for_mtp_iteration": True} if drafts else {}),
    }
    return {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}


def glm5_tensors(heads: int, *, drafts: bool = False) -> dict[str, Tensor]:
    """Every parameter. A layer that shares a selection has no indexer; one that drafts has."""
    weights = Weights()
    for number, kind in enumerate(_GLM5_PATTERN + "F" * drafts):
        layer = f"model.layers.{number}"
        weights.attention(f"{layer}.self_attn", heads, *_GLM5_WIDTHS)
        if kind == "S":
            own = f"{layer}.self_attn.indexer."
            weights.found = {name: each for name, each in weights.found.items() if not name.startswith(own)}
        weights.rest(layer)
    if drafts:
        weights.drafting(f"model.layers.{len(_GLM5_PATTERN)}")
    return weights.end()


# GLM-5.3-Flash

_GLM_LAYERS: Final = 4
"""Three of linear attention and one of sparse MLA."""
_GLM_WIDTHS: Final = 256, 0, 256, 32
"""Of a head: without rope, with, and of the value; heads of the indexer."""
_LINEAR_HEADS, _LINEAR_DIM, _CONVOLUTION = 4, 128, 4
_POOL: Final = 4


def glm_config(heads: int) -> dict[str, Any]:
    """config.json; the names of fields that 0.30's own class and transformers' class read."""
    nope, rope, _, index_heads = _GLM_WIDTHS
    return _COMMON | {
        "architectures": ["Glm5NextForCausalLM"],
        "model_type": "glm5_next_text",
        "num_hidden_layers": _GLM_LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "index_n_heads": index_heads,
        "index_kpool": _POOL,
        "index_kpool_always_select_tail": True,
        "indexer_rope_interleave": False,
        "indexer_types": ["full"] * _GLM_LAYERS,
        "mla_use_nope": True,
        "layer_types": ["linear_attention"] * 3 + ["deepseek_sparse_attention"],
        "mlp_layer_types": ["dense"] * _GLM_LAYERS,
        "linear_num_heads": _LINEAR_HEADS,
        "linear_head_dim": _LINEAR_DIM,
        "linear_conv_kernel_dim": _CONVOLUTION,
        "linear_lower_bound": -5.0,
        "mhc": True,
        "hc_sinkhorn_iters": 20,
        "swiglu_limit": 10.0,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
    }


def glm_rank_config(heads: int) -> dict[str, Any]:
    """Of what one of four GPUs holds of GLM-5.3-Flash: all 45 layers of the real widths, about 86 GB in BF16.

    36 experts in BF16 have the bytes of its 72 in FP8. Of the seven that serve a token two are on a GPU.
    """
    layers = 45
    return glm_config(heads) | {
        "num_hidden_layers": layers,
        "hidden_size": 4096,
        "q_lora_rank": 1536,
        "intermediate_size": 3072,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 36,
        "num_experts_per_tok": 2,
        "vocab_size": 16_384,
        "linear_num_heads": 16,
        "indexer_types": ["full"] * layers,
        "layer_types": ["deepseek_sparse_attention" if n % 4 == 3 else "linear_attention" for n in range(layers)],
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
    }


def glm_tensors(heads: int) -> dict[str, Tensor]:
    """Every parameter."""
    weights = Weights()
    for number in range(_GLM_LAYERS):
        layer = f"model.layers.{number}"
        if number < 3:
            _linear_attention(weights, f"{layer}.self_attn")
        else:
            weights.attention(f"{layer}.self_attn", heads, *_GLM_WIDTHS)
            pools = f"{layer}.self_attn.indexer.index_kpool_compress"
            weights.found[f"{pools}_ape"] = 0.1 * drawn(f"{pools}_ape", (_POOL, INDEX_DIM))
            gate = drawn(f"{pools}_gate", (INDEX_DIM, HIDDEN)) / math.sqrt(HIDDEN)
            weights.found[f"{pools}_gate"] = gate.to(torch.bfloat16)
        weights.rest(layer)
        for part in ("attn", "ffn"):
            _connection(weights, f"{layer}.hc_{part}_", (2 + _STREAMS) * _STREAMS, 3)
    return weights.end()


def _linear_attention(weights: Weights, name: str) -> None:
    width = _LINEAR_HEADS * _LINEAR_DIM
    for each in "qkv":
        weights.linear(f"{name}.{each}_proj", width, HIDDEN)
        convolution = drawn(f"{name}.{each}_conv1d", (width, 1, _CONVOLUTION)) / math.sqrt(_CONVOLUTION)
        weights.found[f"{name}.{each}_conv1d.weight"] = convolution.to(torch.bfloat16)
    weights.linear(f"{name}.b_proj", _LINEAR_HEADS, HIDDEN)
    for gate in "fg":
        weights.linear(f"{name}.{gate}_a_proj", _LINEAR_DIM, HIDDEN)
        weights.linear(f"{name}.{gate}_b_proj", width, _LINEAR_DIM)
    weights.found[f"{name}.A_log"] = 0.5 * drawn(f"{name}.A_log", (_LINEAR_HEADS,))
    weights.found[f"{name}.dt_bias"] = 0.5 * drawn(f"{name}.dt_bias", (width,))
    weights.norm(f"{name}.o_norm", _LINEAR_DIM)
    weights.linear(f"{name}.o_proj", HIDDEN, width)


def _connection(weights: Weights, name: str, rows: int, scales: int) -> None:
    """A hyper-connection, float32: `rows` mixing weights of all streams, with a base, and `scales` factors."""
    columns = _STREAMS * HIDDEN
    weights.found[f"{name}fn"] = drawn(f"{name}fn", (rows, columns)) / math.sqrt(columns)
    weights.found[f"{name}base"] = 0.1 * drawn(f"{name}base", (rows,))
    weights.found[f"{name}scale"] = 1.0 + 0.1 * drawn(f"{name}scale", (scales,))


# hy_v4

_HY_LAYERS: Final = 2
_HY_WIDTHS: Final = 192, ROPE, 256, 16


def hy_config(heads: int) -> dict[str, Any]:
    """config.json."""
    nope, rope, _, index_heads = _HY_WIDTHS
    return _COMMON | {
        "architectures": ["HYV4ForCausalLM"],
        "model_type": "hy_v4",
        "num_hidden_layers": _HY_LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "index_n_heads": index_heads,
        "indexer_types": ["full"] * _HY_LAYERS,
        "layer_types": ["deepseek_sparse_attention"] * _HY_LAYERS,
        "mlp_layer_types": ["dense"] * _HY_LAYERS,
        "learnable_sink": True,
        "gated_mla": True,
        "gating_type": "elementwise",
        "enable_ihc": True,
        "hc_magnitude": 2.0,
        "enable_lm_head_fp32": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


def hy_tensors(heads: int) -> dict[str, Tensor]:
    """Every parameter. A sink is as large as the largest of some hundred scores: without it, texts differ."""
    weights = Weights()
    _, _, value, _ = _HY_WIDTHS
    for number in range(_HY_LAYERS):
        layer = f"model.layers.{number}"
        weights.attention(f"{layer}.self_attn", heads, *_HY_WIDTHS)
        sink = f"{layer}.self_attn.learnable_sink_param"
        weights.found[sink] = 5.0 + drawn(sink, (heads,))
        weights.linear(f"{layer}.self_attn.linear_gate", heads * value, HIDDEN)
        weights.rest(layer)
        for part in ("attn", "mlp"):
            _connection(weights, f"{layer}.hc_{part}_layer.hc_pre.hc_", 2 * _STREAMS, 2)
    _connection(weights, "model.hc_head.hc_head_", _STREAMS, 1)
    return weights.end()
