# SPDX-License-Identifier: Apache-2.0
"""PromptTimes: which way a step's prompts take less GPU time, over latent rows or over keys of each head.

The two ways of a layer, projections included, for R prompts with T new tokens, `keys` (new tokens and the context before them),
`pairs` of a token and a key that it sees, and `selected` pairs, of which a token has at most K:

    over latent rows   the query times W_UK and the output times W_UV, for every new token; then a product of 576 and one of 512
                       for every selected pair and head
    over keys of       keys and values out of latent rows for every key; then, in DeepSeek-V3.2, a product of 192 and one of
    each head          128 for every pair and head; a bit mask of the selection, where a token does not select all it sees

So either time is close to a sum of these counts, each times a constant of the device, the head count and the kernels. The
constants are fits to times of whole layers (`mla-portable bench prompts --fit` makes them), kept in files like all times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mla_portable.contracts import Request
from mla_portable.times.records import Measurement

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
        seen = int((new * (2 * length - new + 1) // 2).sum())  # token i of a request sees all before its tokens, and i + 1
        tokens, keys, selected = int(new.sum()), int(length.sum()), seen
        if len(length) and length.max() > topk:
            # the tokens of a request that see at most K keys are the first ones
            before = length - new
            few = np.minimum(np.maximum(topk - before, 0), new)
            selected = int((few * before + few * (few + 1) // 2 + (new - few) * topk).sum())
        parts = -(-max(0, keys - key_rows) // key_rows)
        return cls(tokens, keys, seen, selected, parts, parts * tokens)


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


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """The constants of a device, where an implementation of masked_prefill attends to keys of each head.

    Attributes:
        qk_head_dim, v_head_dim, heads: of the layer; heads of one rank. times: the constants.
        stands_for: vendors whose devices without constants of their own are decided by these. What counts is the ratio of the
            two ways, and that is mostly one of products; a plugin states it where a vendor's devices are alike in that.
    """

    implementation: str
    qk_head_dim: int
    v_head_dim: int
    heads: int
    times: PromptTimes
    measurement: Measurement
    stands_for: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """By which widths of heads are compared."""
        return self.qk_head_dim + self.v_head_dim


def recorded_prompts(records: Iterable[PromptRecord], implementation: str, request: Request) -> PromptTimes | None:
    """The constants for a layer whose prompts an implementation attends to; None where none hold for its device.

    Of the device itself before those that stand for its vendor. Of these the next width that was measured, then the next head
    count, each the largest where all are smaller; of equal ones the last.

    Args:
        request: on masked_prefill, with head dims and heads.
    """
    if request.qk_head_dim is None or request.v_head_dim is None or request.num_heads is None:
        return None
    device, of_this = request.device, [each for each in records if each.implementation == implementation]
    found = [each for each in of_this if each.measurement.matches(device.name)]
    found = found or [each for each in of_this if device.vendor in each.stands_for]
    if not found:
        return None
    width = _next(request.qk_head_dim + request.v_head_dim, (each.width for each in found))
    found = [each for each in found if each.width == width]
    heads = _next(request.num_heads, (each.heads for each in found))
    return [each for each in found if each.heads == heads][-1].times


def _next(wanted: int, sizes: Iterable[int]) -> int:
    """The least of the sizes that is not below, else the largest."""
    listed = list(sizes)
    return min((size for size in listed if size >= wanted), default=max(listed))
