# SPDX-License-Identifier: Apache-2.0
"""Every checkpoint of the kit by its name, written to disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import four_bits
import other_models
from checkpoint import tensors, v32_config
from torch import Tensor


def write(folder: Path, config: dict[str, Any], make: Callable[[], dict[str, Tensor]]) -> None:
    """Write config.json and model.safetensors, unless they are there."""
    from safetensors.torch import save_file

    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(make(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))  # last: it says that all is there


_RANK_EXPERTS: Final = {16: 16, 128: 10}
"""By the heads of a rank. 16 in BF16 have the bytes of the 32 FP8 experts of a GPU; beside the attention of 128 heads, which is
eight times as large, 10 leave the same room."""


RANK_LAYERS: Final = 61
_RANK_SIZES: Final = {
    "rank": (16_384, RANK_LAYERS),
    "ranklong": (65_536, RANK_LAYERS),
    "half": (16_384, 31),
    "halfdrafts": (16_384, 31),
}
"""Positions and layers, by the kind of model."""


def write_rank_config(folder: Path, heads: int, positions: int, layers: int = RANK_LAYERS, *, drafts: bool = False) -> None:
    """The configuration, without weights, of what one of eight GPUs holds of DeepSeek-V3.2.

    With 16 heads attention is split by tensor parallelism, with 128 each GPU has requests of its own (data parallelism). All 61
    layers of the real widths, about 94 GB in BF16. One expert serves each token, and the dense layers are an eighth wide.
    positions: the longest sequence, a multiple of 4,096. layers: of them so many; those of a model are alike but for the first
    three. drafts: with a layer that drafts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scaling = {**v32_config(heads)["rope_scaling"], "factor": positions // 4096, "original_max_position_embeddings": 4096}
    config = v32_config(heads) | {
        "num_hidden_layers": layers,
        **({"num_nextn_predict_layers": 1} if drafts else {}),
        "hidden_size": 7168,
        "q_lora_rank": 1536,
        "intermediate_size": 2304,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_routed_experts": _RANK_EXPERTS[heads],
        "num_experts_per_tok": 1,
        "vocab_size": 16_384,
        "max_position_embeddings": positions,
        "rope_scaling": scaling,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_dense_config(folder: Path) -> None:
    """The configuration, without weights, of a model like the others but without an indexer: its attention is not sparse."""
    folder.mkdir(parents=True, exist_ok=True)
    dense = {key: value for key, value in v32_config(16).items() if not key.startswith("index_")}
    dense |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    (folder / "config.json").write_text(json.dumps(dense, indent=1))


def write_model(folder: Path, name: str) -> None:
    """Write the checkpoint `name` below a folder: `dense`, or what it is and its heads.

    heads16: a small model. drafts16: with a layer that drafts. rank16: one GPU's share of the whole model, without weights.
    ranklong16: the same for longer sequences. half16: of half its depth; halfdrafts16: and with a layer that drafts. shares16,
    nope16, sinks16: small models in the shape of GLM-5, of GLM-5.3-Flash and of hy_v4 (`other_models`). sharesdrafts16: the
    first of these with a layer that drafts; rankflash16: as rank16, of the second. packed16, awq16: as heads16 in 4 bits
    (`four_bits`); packedtwin16, awqtwin16: the same values in bf16.
    """
    kind = name.rstrip("0123456789")
    heads, to = name.removeprefix(kind), folder / name
    if kind == "dense":
        write_dense_config(to)
    elif kind in _RANK_SIZES:
        write_rank_config(to, int(heads), *_RANK_SIZES[kind], drafts=kind == "halfdrafts")
    elif kind == "rankflash":
        to.mkdir(parents=True, exist_ok=True)
        (to / "config.json").write_text(json.dumps(other_models.glm_rank_config(int(heads)), indent=1))
    else:
        drafts = {"num_nextn_predict_layers": 1}
        config, make = {
            "heads": (v32_config, tensors),
            "drafts": (lambda heads: v32_config(heads) | drafts, lambda heads: tensors(heads, drafts=True)),
            "packed": (
                lambda heads: v32_config(heads) | {"quantization_config": four_bits.PACKED},
                lambda heads: four_bits.packed(tensors(heads)),
            ),
            "awq": (
                lambda heads: v32_config(heads) | {"quantization_config": four_bits.AWQ},
                lambda heads: four_bits.awq(tensors(heads)),
            ),
            "packedtwin": (v32_config, lambda heads: four_bits.packed_values(tensors(heads))),
            "awqtwin": (v32_config, lambda heads: four_bits.awq_values(tensors(heads))),
            "shares": (other_models.glm5_config, other_models.glm5_tensors),
            "sharesdrafts": (partial(other_models.glm5_config, drafts=True), partial(other_models.glm5_tensors, drafts=True)),
            "nope": (other_models.glm_config, other_models.glm_tensors),
            "sinks": (other_models.hy_config, other_models.hy_tensors),
        }[kind]
        write(to, config(int(heads)), lambda: make(int(heads)))
