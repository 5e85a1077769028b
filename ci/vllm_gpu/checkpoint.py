# SPDX-License-Identifier: Apache-2.0
"""A small seeded checkpoint in the shape of DeepSeek-V3.2: attention and indexer have the real dimensions, the rest is tiny.

Weights are random and large enough that attention decides which token comes next: with small ones a wrong kernel would go
unnoticed. Two layers carry a rounding of attention on, and with an FP8 cache amplify it, to 2 % of the final hidden state;
the gain of the output layer is such that this moves log-probabilities by 0.03 to 0.08, and one key left out of hundreds by
more than 0.5, so that a tolerance of 0.1 lies between the two (tests/test_vllm_gpu_model.py).

Every tensor is drawn from its own seed, so checkpoints of different head counts share what they have in common.
"""

from __future__ import annotations

import json
import math
import random
import zlib
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

SEED: Final = 20261
VOCAB: Final = 4096
_FIRST_TOKEN: Final = 2  # 0 and 1 begin and end a text
LAYERS: Final = 2
HIDDEN, FEED_FORWARD, Q_RANK = 512, 1024, 256
LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
INDEX_HEADS, INDEX_DIM, TOPK = 64, 128, 2048

_QUERY_GAIN: Final = 1.5  # attention logits get a spread of about 2: some tens of tokens dominate each row
_OUTPUT_GAIN: Final = 4.0  # what attention adds is about as large as what it is added to
_LOGIT_GAIN: Final = 1.0  # spread of the output logits


def _config(heads: int) -> dict[str, Any]:
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
        # Experts are described because the configuration must name them; no layer has any, nor one that drafts.
        "first_k_dense_replace": LAYERS + 1,
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
    return [{"prompt_token_ids": [draw.randrange(_FIRST_TOKEN, VOCAB) for _ in range(length)]} for length in lengths]


def _drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def tensors(heads: int, *, drafts: bool = False) -> dict[str, Tensor]:
    """Every parameter in bf16, under the names that DeepSeek-V3.2's checkpoints use; `drafts`: of an MTP layer as well."""
    found: dict[str, Tensor] = {}

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        found[f"{name}.weight"] = (_drawn(name, (rows, columns)) * (gain / math.sqrt(columns))).to(torch.bfloat16)

    def norm(name: str, width: int, kind: str = "weight") -> None:
        middle = 1.0 if kind == "weight" else 0.0
        found[f"{name}.{kind}"] = (middle + 0.1 * _drawn(f"{name}.{kind}", (width,))).to(torch.bfloat16)

    found["model.embed_tokens.weight"] = _drawn("embed", (VOCAB, HIDDEN)).to(torch.bfloat16)
    for number in range(LAYERS + drafts):
        layer = f"model.layers.{number}"
        attention, indexer = f"{layer}.self_attn", f"{layer}.self_attn.indexer"
        linear(f"{attention}.q_a_proj", Q_RANK, HIDDEN)
        linear(f"{attention}.q_b_proj", heads * (NOPE + ROPE), Q_RANK, _QUERY_GAIN)
        linear(f"{attention}.kv_a_proj_with_mqa", LATENT + ROPE, HIDDEN)
        linear(f"{attention}.kv_b_proj", heads * (NOPE + VALUE), LATENT)
        linear(f"{attention}.o_proj", HIDDEN, heads * VALUE, _OUTPUT_GAIN)
        linear(f"{indexer}.wq_b", INDEX_HEADS * INDEX_DIM, Q_RANK)
        linear(f"{indexer}.wk", INDEX_DIM, HIDDEN)
        linear(f"{indexer}.weights_proj", INDEX_HEADS, HIDDEN)
        norm(f"{indexer}.k_norm", INDEX_DIM)
        norm(f"{indexer}.k_norm", INDEX_DIM, "bias")
        for name, width in (("q_a_layernorm", Q_RANK), ("kv_a_layernorm", LATENT)):
            norm(f"{attention}.{name}", width)
        for name in ("input_layernorm", "post_attention_layernorm"):
            norm(f"{layer}.{name}", HIDDEN)
        linear(f"{layer}.mlp.gate_proj", FEED_FORWARD, HIDDEN)
        linear(f"{layer}.mlp.up_proj", FEED_FORWARD, HIDDEN)
        linear(f"{layer}.mlp.down_proj", HIDDEN, FEED_FORWARD)
    if drafts:
        layer = f"model.layers.{LAYERS}"
        found[f"{layer}.embed_tokens.weight"] = found["model.embed_tokens.weight"].clone()
        for name in ("enorm", "hnorm", "shared_head.norm"):
            norm(f"{layer}.{name}", HIDDEN)
        linear(f"{layer}.eh_proj", HIDDEN, 2 * HIDDEN)
        linear(f"{layer}.shared_head.head", VOCAB, HIDDEN, _LOGIT_GAIN)
    norm("model.norm", HIDDEN)
    linear("lm_head", VOCAB, HIDDEN, _LOGIT_GAIN)
    return found


def write(folder: Path, heads: int, *, drafts: bool = False) -> None:
    """Write config.json and model.safetensors, unless they are there."""
    from safetensors.torch import save_file

    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(heads, drafts=drafts), folder / "model.safetensors", metadata={"format": "pt"})
    config = {**_config(heads), **({"num_nextn_predict_layers": 1} if drafts else {})}
    (folder / "config.json").write_text(json.dumps(config, indent=1))  # last: it says that all is there


_RANK_EXPERTS: Final = {16: 16, 128: 10}
"""By the heads of a rank. 16 in BF16 have the bytes of the 32 FP8 experts of a GPU; beside the attention of 128 heads, which is
eight times as large, 10 leave the same room."""


def write_rank_config(folder: Path, heads: int) -> None:
    """The configuration, without weights, of what one of eight GPUs holds of DeepSeek-V3.2.

    With 16 heads attention is split by tensor parallelism, with 128 each GPU has requests of its own (data parallelism). All 61
    layers of the real widths, about 94 GB in BF16. One expert serves each token, and the dense layers are an eighth wide.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scaling = {**_config(heads)["rope_scaling"], "factor": 4, "original_max_position_embeddings": 4096}
    config = _config(heads) | {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "q_lora_rank": 1536,
        "intermediate_size": 2304,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_routed_experts": _RANK_EXPERTS[heads],
        "num_experts_per_tok": 1,
        "vocab_size": 16_384,
        "max_position_embeddings": 16_384,
        "rope_scaling": scaling,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_dense_config(folder: Path) -> None:
    """The configuration, without weights, of a model like the others but without an indexer: its attention is not sparse."""
    folder.mkdir(parents=True, exist_ok=True)
    dense = {key: value for key, value in _config(16).items() if not key.startswith("index_")}
    dense |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    (folder / "config.json").write_text(json.dumps(dense, indent=1))


def write_model(folder: Path, name: str) -> None:
    """Write the checkpoint `name` below a folder: `dense`, or what it is and its heads.

    heads16: a small model. drafts16: with a layer that drafts. rank16: one GPU's share of the whole model, without weights.
    """
    kind = name.rstrip("0123456789")
    heads, to = name.removeprefix(kind), folder / name
    if kind == "dense":
        write_dense_config(to)
    elif kind == "rank":
        write_rank_config(to, int(heads))
    else:
        write(to, int(heads), drafts={"heads": False, "drafts": True}[kind])
