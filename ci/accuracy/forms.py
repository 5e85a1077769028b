# SPDX-License-Identifier: Apache-2.0
"""The checkpoints that are trained: attention and indexer have a real model's dimensions, the rest is small."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from checkpoint import ALIKE


@dataclass(frozen=True)
class Form:
    """A model's shape, as one rank of eight has its heads.

    Attributes:
        name: of its checkpoint. architecture: (class, model_type) of its configuration.
        nope, rope, value: of a head. index_heads, index_dim: of the indexer. index_pairs: it rotates neighbouring elements, as
            attention does, instead of halves.
        indexed: of each layer, whether it has an indexer; others attend to what the layer before them chose.
        positions: the longest sequence.
    """

    name: str
    architecture: tuple[str, str]
    heads: int
    nope: int
    value: int
    index_heads: int
    index_pairs: bool
    theta: float
    indexed: tuple[bool, ...] = (True,) * 4
    vocab: int = 4096
    hidden: int = 512
    inner: int = 1024
    q_rank: int = 128
    latent: int = 512
    rope: int = 64
    index_dim: int = 128
    topk: int = 256
    positions: int = 33_792

    @property
    def layers(self) -> int:
        return len(self.indexed)

    @property
    def scale(self) -> float:
        """Of attention's scores before the softmax."""
        return (self.nope + self.rope) ** -0.5

    def config(self) -> dict[str, Any]:
        """config.json. No layer has experts, nor one that drafts; experts are described because they must be."""
        shared = {} if all(self.indexed) else self._shared()
        of_glm = self.architecture[1] == "glm_moe_dsa"
        rope: dict[str, Any] = {"rope_theta": self.theta}
        if of_glm:
            rope = {"rope_parameters": {"rope_type": "default", **rope}}
        styles = {"rope_interleave": True, "indexer_rope_interleave": True} if self.index_pairs else {}
        return {
            "architectures": [self.architecture[0]],
            "model_type": self.architecture[1],
            "torch_dtype": "bfloat16",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.latent,
            "qk_rope_head_dim": self.rope,
            "qk_nope_head_dim": self.nope,
            "v_head_dim": self.value,
            "index_n_heads": self.index_heads,
            "index_head_dim": self.index_dim,
            "index_topk": self.topk,
            "first_k_dense_replace": self.layers + 1,
            "mlp_layer_types": ["dense"] * self.layers,
            **ALIKE,
            "num_nextn_predict_layers": 0,
            "max_position_embeddings": self.positions,
            **rope,
            **styles,
            **shared,
        }

    def _shared(self) -> dict[str, Any]:
        """Which layers have an indexer, as vLLM reads it and as transformers does."""
        pattern = "".join("F" if own else "S" for own in self.indexed)
        return {"index_topk_pattern": pattern, "indexer_types": ["full" if own else "shared" for own in self.indexed]}


V32: Final = Form("v32", ("DeepseekV32ForCausalLM", "deepseek_v32"), 16, 128, 128, 64, False, 100_000.0)
GLM5: Final = Form(
    "glm5", ("GlmMoeDsaForCausalLM", "glm_moe_dsa"), 8, 192, 256, 32, True, 1_000_000.0, indexed=(True, True, False, True)
)
FORMS: Final = {form.name: form for form in (V32, GLM5)}


def toy(form: Form) -> Form:
    """The same in small, for a CPU: it checks the program, and its text is worth nothing."""
    small = {"vocab": 512, "hidden": 48, "inner": 64, "q_rank": 24, "latent": 32, "rope": 8, "index_dim": 16, "positions": 512}
    dims = {"heads": 2, "nope": 8 + 4 * form.index_pairs, "value": 8 + 8 * form.index_pairs, "index_heads": 2, "topk": 16}
    return replace(form, indexed=form.indexed[1:], **small, **dims)
