# SPDX-License-Identifier: Apache-2.0
"""PromptTimes: which way a step's prompts take less GPU time, over latent rows or over keys of each head.

The two ways of a layer, projections included, for R prompts with T new tokens, `keys` (new tokens and the context before them),
`pairs` of a token and a key that it sees, and `selected` pairs, of which a token has at most K:

    over latent rows   the query times W_UK and the output times W_UV, for every new token; then a product of 576 and one of 512
                       for every selected pair and head
    over keys of       keys and values out of latent rows for every key; then, for DeepSeek-V3.2, a product of 192 and one of 128
    each head          for every pair and head; a bit mask of the selection, where a token does not select all that it sees

So either time is close to a sum of these counts, each times a constant of the device, the head count and the kernels. The
constants are fits to times of whole layers (`mla-portable bench prompts --fit` makes them).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int32]


class Counts(NamedTuple):
    """What a step's prompts amount to. tokens, keys, pairs, selected: as above. context: keys that the cache has."""

    tokens: int
    keys: int
    context: int
    pairs: int
    selected: int

    @classmethod
    def of(cls, query_lens: Lengths, seq_lens: Lengths, topk: int) -> Counts:
        """query_lens, seq_lens: [R], new tokens, and new tokens with their context. topk: keys that a token selects at most."""
        new, length = query_lens.astype(np.int64), seq_lens.astype(np.int64)
        before = length - new
        # the tokens of a request that see at most K keys are the first ones
        few = np.clip(topk - before, 0, new)
        selected = few * before + few * (few + 1) // 2 + (new - few) * topk
        pairs = new * before + new * (new + 1) // 2
        return cls(int(new.sum()), int(length.sum()), int(before.sum()), int(pairs.sum()), int(selected.sum()))


@dataclass(frozen=True, slots=True)
class PromptTimes:
    """GPU time of a layer's prompts, in microseconds.

    Attributes:
        fixed: of either way. token: of a thousand new tokens, key: of a thousand keys, pair: of a million pairs.
        latent_*: over latent rows, its pairs are the selected ones. dense_*: over keys of each head, all of them. masked_*: the
        same under a selection. context_*: on top of either, where the cache has a context: fixed for its kernels, and for each
        new token, whose partial results are merged.
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
    context_fixed: float
    context_token: float

    def latent_us(self, counts: Counts) -> float:
        """Over latent rows."""
        return self.latent_fixed + self.latent_token * counts.tokens * 1e-3 + self.latent_pair * counts.selected * 1e-6

    def per_head_us(self, counts: Counts, *, masked: bool) -> float:
        """Over keys of each head."""
        if masked:
            us = self.masked_fixed + self.masked_key * counts.keys * 1e-3 + self.masked_pair * counts.pairs * 1e-6
        else:
            us = self.dense_fixed + self.dense_key * counts.keys * 1e-3 + self.dense_pair * counts.pairs * 1e-6
        return us + (self.context_fixed + self.context_token * counts.tokens * 1e-3 if counts.context else 0.0)

    def per_head_saves(self, query_lens: Lengths, seq_lens: Lengths, topk: int) -> float:
        """Microseconds that a layer takes less over keys of each head; negative where it takes more."""
        counts = Counts.of(query_lens, seq_lens, topk)
        masked = bool(seq_lens.max(initial=0) > topk)
        return self.latent_us(counts) - self.per_head_us(counts, masked=masked)


H200: Final = {
    8: PromptTimes(20, 36.8, 156, 20, 9.2, 8.8, 40, 9.2, 12.0, 60, 10),
    16: PromptTimes(20, 49.7, 156, 20, 19.5, 12.8, 40, 19.5, 16.5, 60, 20),
    32: PromptTimes(20, 98.9, 199, 20, 37.8, 26.8, 40, 37.8, 33.0, 60, 40),
    64: PromptTimes(20, 145, 203, 20, 73.7, 56.5, 40, 73.7, 70.0, 60, 80),
    128: PromptTimes(20, 287, 383, 20, 146, 118, 40, 146, 140, 60, 160),
}
"""Query heads of a rank -> times on an H200."""


def prompt_times(num_heads: int) -> PromptTimes:
    """The times for a head count: those of the next one that was measured.

    Other GPUs than an H200 are decided by the same numbers: what counts is their ratio, and that is mostly one of products.
    """
    return H200[min((heads for heads in H200 if heads >= num_heads), default=max(H200))]
