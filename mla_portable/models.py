# SPDX-License-Identifier: Apache-2.0
"""What models with sparse MLA ask of attention and of their indexer: the one table, which commands and benchmarks read.

Of a released model's config.json. Imports nothing, so that a command's help may state these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Model:
    """A model, or a family whose attention is the same.

    Attributes:
        name: as people write it. heads: query heads of a layer, which the ranks of tensor parallelism share.
        head_dims: widths of a head: of queries and keys without rope (P), of their rotary part (R), 0 where there is none, and
            of values (V). The softmax scale is (P + R)**-0.5.
        layouts: of the cache, by name, as engines have it.
        topk: indices of a token's list: those that the indexer selects; with a second cache the window's.
        extra_topk: indices into a second cache, which the indexer selects; 0 where there is one cache.
        index_heads: of the indexer. max_model_len: tokens of a sequence, for which a layer's workspace is made; of models that
            take a million 131,072, as docs/deploy.md starts them.
        sinks: layers have an attention sink for each head.
        per_head_prompts: an up-projection makes keys and values of each head from the cached rows, so that prompts may attend
            to these. False: rows of the cache are the keys and values of all heads.
    """

    name: str
    heads: int
    head_dims: tuple[int, int, int]
    layouts: tuple[str, ...]
    index_heads: int
    max_model_len: int
    topk: int = 2048
    extra_topk: int = 0
    sinks: bool = False
    per_head_prompts: bool = True

    @property
    def rank_heads(self) -> tuple[int, int]:
        """Query heads of a rank of eight, and of one."""
        return self.heads // 8, self.heads

    @property
    def qk_head_dim(self) -> int:
        """P + R."""
        return self.head_dims[0] + self.head_dims[1]

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5


DEEPSEEK_V32: Final = Model(
    "DeepSeek-V3.2",
    heads=128,
    head_dims=(128, 64, 128),
    layouts=("fp8_ds_mla", "bf16"),
    index_heads=64,
    max_model_len=163_840,
)
GLM_5: Final = Model(
    "GLM-5",
    heads=64,
    head_dims=(192, 64, 256),
    layouts=("fp8_ds_mla", "bf16"),
    index_heads=32,
    max_model_len=202_752,
)
GLM_53_FLASH: Final = Model(
    "GLM-5.3-Flash",
    heads=64,
    head_dims=(256, 0, 256),
    layouts=("fp8_ds_mla", "fp8_nope", "bf16_nope"),
    index_heads=32,
    max_model_len=131_072,
)
DEEPSEEK_V4: Final = Model(
    "DeepSeek-V4",
    heads=64,
    head_dims=(448, 64, 512),
    layouts=("fp8_v4",),
    index_heads=64,
    max_model_len=131_072,
    topk=128,
    extra_topk=512,
    sinks=True,
    per_head_prompts=False,
)
"""V4-Flash; V4-Pro has 128 heads."""
DEEPSEEK_V41: Final = Model(
    "DeepSeek-V4.1",
    heads=64,
    head_dims=(448, 64, 512),
    layouts=("fp8_v4",),
    index_heads=32,
    max_model_len=131_072,
    topk=128,
    extra_topk=512,
    sinks=True,
    per_head_prompts=False,
)
"""On SM90; on SM100 its rows have 528 and 288 bytes, for which there is no layout."""

A_X_K2: Final = Model(
    "A.X-K2",
    heads=32,
    head_dims=(64, 32, 64),
    layouts=("bf16_128_32",),
    index_heads=16,
    max_model_len=131_072,
)
"""A.X-K2-Light, with a latent of 128. The output of attention is gated before the output projection, which is the model's."""
MISTRAL_LARGE_4: Final = Model(
    "Mistral-Large-4",
    heads=64,
    head_dims=(64, 64, 128),
    layouts=("bf16", "bf16_nope"),
    index_heads=32,
    max_model_len=131_072,
)
"""Layers with rope have rows of `bf16`; every fourth has none, head dims of (128, 0, 128) and rows of `bf16_nope`."""

_ALL: Final = (DEEPSEEK_V32, GLM_5, GLM_53_FLASH, DEEPSEEK_V4, DEEPSEEK_V41, A_X_K2, MISTRAL_LARGE_4)
MODELS: Final = MappingProxyType({model.name.lower(): model for model in _ALL})
"""By the name in small letters, as options of commands take it."""
