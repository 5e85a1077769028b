# SPDX-License-Identifier: Apache-2.0
"""PromptTimes: which way a step's prompts take less GPU time, over latent rows or over keys of each head.

The two ways of a layer, projections included, for R prompts with T new tokens, `keys` (new tokens and the context before them),
`pairs` of a token and a key that it sees, and `selected` pairs, of which a token has at most K:

    over latent rows   the query times W_UK and the output times W_UV, for every new token; then a product of 576 and one of 512
                       for every selected pair and head
    over keys of       keys and values out of latent rows for every key; then, in DeepSeek-V3.2, a product of 192 and one of
    each head          128 for every pair and head; a bit mask of the selection, where a token does not select all it sees

So either time is close to a sum of these counts, each times a constant of the device, the head count and the kernels. The
constants are fits to times of whole layers (`mla-portable bench prompts --fit` makes them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mla_portable.attention.prompts import PromptAttention

Lengths = npt.NDArray[np.int32]


class Counts(NamedTuple):
    """What a step's prompts amount to.

    tokens, keys, pairs, selected: as above. merged: partial results of new tokens that are merged; parts: of the keys, but the
    first one (PromptPlan).
    """

    tokens: int
    keys: int
    pairs: int
    selected: int
    parts: int
    merged: int

    @classmethod
    def of(cls, query_lens: Lengths, seq_lens: Lengths, topk: int, key_rows: int) -> Counts:
        """query_lens, seq_lens: [R], new tokens, and new tokens with their context. topk, key_rows: as of `plan_prompts`."""
        new, length = query_lens.astype(np.int64), seq_lens.astype(np.int64)
        before = length - new
        # the tokens of a request that see at most K keys are the first ones
        few = np.clip(topk - before, 0, new)
        selected = few * before + few * (few + 1) // 2 + (new - few) * topk
        pairs = new * before + new * (new + 1) // 2
        tokens, keys = int(new.sum()), int(length.sum())
        parts = -(-max(0, keys - key_rows) // key_rows)
        return cls(tokens, keys, int(pairs.sum()), int(selected.sum()), parts, parts * tokens)


@dataclass(frozen=True, slots=True)
class PromptTimes:
    """GPU time of a layer's prompts, in microseconds.

    Attributes:
        latent_*: over latent rows; its pairs are the selected ones. dense_*: over keys of each head, masked_*: the same under a
            selection; their pairs are all of them. fixed: of a step, token: of a thousand new tokens, key: of a thousand keys,
            pair: of a million pairs.
        part: of a part of the keys but the first, merged: of a thousand merged tokens, dense or masked.
    """

    latent_fixed: float
    latent_token: float
    latent_pair: float
    dense_fixed: float
    dense_key: float
    dense_pair: float
    masked_fixed: float
    masked_key: float
    masked_pair: float
    part: float
    merged: float

    def latent_us(self, counts: Counts) -> float:
        """Over latent rows."""
        return self.latent_fixed + self.latent_token * counts.tokens * 1e-3 + self.latent_pair * counts.selected * 1e-6

    def per_head_us(self, counts: Counts, *, masked: bool) -> float:
        """Over keys of each head."""
        if masked:
            us = self.masked_fixed + self.masked_key * counts.keys * 1e-3 + self.masked_pair * counts.pairs * 1e-6
        else:
            us = self.dense_fixed + self.dense_key * counts.keys * 1e-3 + self.dense_pair * counts.pairs * 1e-6
        return us + self.part * counts.parts + self.merged * counts.merged * 1e-3

    def saves(self, counts: Counts, *, masked: bool) -> float:
        """Microseconds that a layer takes less over keys of each head; negative where it takes more."""
        return self.latent_us(counts) - self.per_head_us(counts, masked=masked)


TIMES: Final = {
    (True, True): {
        8: PromptTimes(22.74, 38.68, 148.3, 25.54, 7.53, 16.28, 0, 17.51, 14.59, 133.6, 0),
        64: PromptTimes(29, 159.3, 196.8, 23.88, 82.35, 93.06, 143.5, 52.11, 133.3, 0, 81.8),
    },
    (True, False): {
        8: PromptTimes(21.49, 37.71, 148.1, 21.12, 5.277, 8.465, 0, 12.49, 7.855, 72.23, 0),
        16: PromptTimes(22.25, 50.92, 150.2, 20.95, 12.36, 13.71, 0, 18.45, 16.57, 17.71, 11.95),
        32: PromptTimes(22.86, 101.8, 190, 21.31, 25.33, 25.89, 33.18, 22.32, 35.47, 0, 31.57),
        64: PromptTimes(26.02, 149, 195.3, 21.5, 52.2, 49.23, 71.38, 37.56, 70.8, 0, 62.8),
        128: PromptTimes(36.79, 272.9, 396.9, 22.86, 105.6, 96.08, 3.124, 66.97, 152.9, 5.051, 120.6),
    },
    (False, False): {
        16: PromptTimes(22.28, 49.54, 151.1, 19.12, 12.7, 27.31, 23.13, 27.37, 32.16, 0, 12.55),
        64: PromptTimes(26.54, 149.2, 191.9, 16.18, 63.42, 94.29, 409.6, 24.98, 128, 0, 98.7),
    },
}
"""(masked prompts by the native kernel, heads wider than V3.2's) -> query heads of a rank -> times on an H200, FP8 cache.

The rows of other kernels are times of Triton's, and of `nvidia.native_sm80` over latent rows, in SM80's code."""

_NATIVE: Final = "nvidia.native"
_V32_WIDTHS: Final = 192 + 128


def prompt_times(attention: PromptAttention) -> PromptTimes:
    """The times for a layer: those of its kernels and widths at the next head count that was measured.

    Other GPUs than an H200 are decided by the same numbers: what counts is their ratio, and that is mostly one of products.
    """
    spec, dims = attention.spec, attention.head_dims
    native = attention.decisions["masked"].chosen == _NATIVE
    wide = dims.query + dims.value > _V32_WIDTHS
    by_heads = TIMES[native, wide]
    return by_heads[min((heads for heads in by_heads if heads >= spec.num_heads), default=max(by_heads))]
