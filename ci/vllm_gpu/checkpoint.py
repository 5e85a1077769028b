# SPDX-License-Identifier: Apache-2.0
"""A small seeded checkpoint in the shape of DeepSeek-V3.2: attention and indexer have the real dimensions, the rest is tiny.

Weights are random and large enough that attention decides which token comes next: with small ones a wrong kernel would go
unnoticed. Two layers carry a rounding of attention on, and with an FP8 cache amplify it, to 2 % of the final hidden state;
the gain of the output layer is such that this moves log-probabilities by 0.03 to 0.08, and one key left out of hundreds by
more than 0.5, so that a tolerance of 0.1 lies between the two (tests/test_vllm_gpu_model.py).

Every tensor is drawn from its own seed, so checkpoints of different head counts share what they have in common.
"""

from __future__ import annotations

import math
import random
import zlib
from typing import Any, Final

import torch
from torch import Tensor

SEED: Final = 20261
VOCAB: Final = 4096
FIRST_TOKEN: Final = 2  # 0 and 1 begin and end a text
LAYERS: Final = 2
HIDDEN, FEED_FORWARD, Q_RANK = 512, 1024, 256
LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
INDEX_HEADS, INDEX_DIM, TOPK = 64, 128, 2048

_QUERY_GAIN: Final = 1.5  # attention logits get a spread of about 2: some tens of tokens dominate each row
_OUTPUT_GAIN: Final = 4.0  # what attention adds is about as large as what it is added to
_LOGIT_GAIN: Final = 1.0  # spread of the output logits

ALIKE: Final[dict[str, Any]] = {
    "moe_layer_freq": 1,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""Of config.json, what all small checkpoints have. Experts are described because the configuration must name them; no layer has
any."""


def v32_config(heads: int) -> dict[str, Any]:
    """config.json of the small model."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": NOPE,
        "v_head_dim": VALUE,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": TOPK,
        "first_k_dense_replace": LAYERS + 1,
        **ALIKE,
        "max_position_embeddings": 32_768,
        "rope_theta": 10000,
        # "rope_type" beside "type" is refused by vLLM 0.24 with transformers 5
        "rope_scaling": {
            "type": "yarn",
            "factor": 8,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }


def prompts(lengths: list[int]) -> list[dict[str, list[int]]]:
    """Random token ids, the same for every engine."""
    draw = random.Random(SEED)
    return [{"prompt_token_ids": [draw.randrange(FIRST_TOKEN, VOCAB) for _ in range(length)]} for length in lengths]


def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    """[*shape] float32 of a standard normal distribution, the seed being the name."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


class Weights:
    """Parameters by name, as they are drawn."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {"model.embed_tokens.weight": drawn("embed", (VOCAB, HIDDEN)).to(torch.bfloat16)}

    def linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """`name.weight` [rows, columns] bf16; what comes out is `gain` times as large as what goes in."""
        self.found[f"{name}.weight"] = (drawn(name, (rows, columns)) * (gain / math.sqrt(columns))).to(torch.bfloat16)

    def norm(self, name: str, width: int, kind: str = "weight") -> None:
        """`name.weight` around 1, or `name.bias` around 0."""
        middle = 1.0 if kind == "weight" else 0.0
        self.found[f"{name}.{kind}"] = (middle + 0.1 * drawn(f"{name}.{kind}", (width,))).to(torch.bfloat16)

    def attention(self, name: str, heads: int, nope: int, rope: int, value: int, index_heads: int) -> None:
        """MLA with an indexer, by the names that DeepSeek-V3.2, GLM-5.3-Flash and hy_v4 share."""
        self.linear(f"{name}.q_a_proj", Q_RANK, HIDDEN)
        self.linear(f"{name}.q_b_proj", heads * (nope + rope), Q_RANK, _QUERY_GAIN)
        self.linear(f"{name}.kv_a_proj_with_mqa", LATENT + rope, HIDDEN)
        self.linear(f"{name}.kv_b_proj", heads * (nope + value), LATENT)
        self.linear(f"{name}.o_proj", HIDDEN, heads * value, _OUTPUT_GAIN)
        for norm, width in (("q_a_layernorm", Q_RANK), ("kv_a_layernorm", LATENT)):
            self.norm(f"{name}.{norm}", width)
        self.linear(f"{name}.indexer.wq_b", index_heads * INDEX_DIM, Q_RANK)
        self.linear(f"{name}.indexer.wk", INDEX_DIM, HIDDEN)
        self.linear(f"{name}.indexer.weights_proj", index_heads, HIDDEN)
        self.norm(f"{name}.indexer.k_norm", INDEX_DIM)
        self.norm(f"{name}.indexer.k_norm", INDEX_DIM, "bias")

    def rest(self, layer: str) -> None:
        """The norms and the dense feed-forward network of a layer."""
        for name in ("input_layernorm", "post_attention_layernorm"):
            self.norm(f"{layer}.{name}", HIDDEN)
        self.linear(f"{layer}.mlp.gate_proj", FEED_FORWARD, HIDDEN)
        self.linear(f"{layer}.mlp.up_proj", FEED_FORWARD, HIDDEN)
        self.linear(f"{layer}.mlp.down_proj", HIDDEN, FEED_FORWARD)

    def drafting(self, layer: str) -> None:
        """What a layer that drafts has beside attention and its feed-forward network."""
        self.found[f"{layer}.embed_tokens.weight"] = self.found["model.embed_tokens.weight"].clone()
        for name in ("enorm", "hnorm", "shared_head.norm"):
            self.norm(f"{layer}.{name}", HIDDEN)
        self.linear(f"{layer}.eh_proj", HIDDEN, 2 * HIDDEN)
        self.linear(f"{layer}.shared_head.head", VOCAB, HIDDEN, _LOGIT_GAIN)

    def end(self) -> dict[str, Tensor]:
        """All parameters, with those behind the last layer."""
        self.norm("model.norm", HIDDEN)
        self.linear("lm_head", VOCAB, HIDDEN, _LOGIT_GAIN)
        return self.found


def tensors(heads: int, *, drafts: bool = False) -> dict[str, Tensor]:
    """Every parameter in bf16, under the names that DeepSeek-V3.2's checkpoints use; `drafts`: of an MTP layer as well."""
    weights = Weights()
    for number in range(LAYERS + drafts):
        weights.attention(f"model.layers.{number}.self_attn", heads, NOPE, ROPE, VALUE, INDEX_HEADS)
        weights.rest(f"model.layers.{number}")
    if drafts:
        weights.drafting(f"model.layers.{LAYERS}")
    return weights.end()
