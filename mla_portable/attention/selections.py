# SPDX-License-Identifier: Apache-2.0
"""Merging the selections that the ranks of decode context parallelism made from their own keys.

Each rank chooses the K best of its own (`indexer_select`), and the K best of all are among these. Candidates are sent as int64
keys that sort by score and then, the lower first, by position: one gather of 8 bytes each, and the K largest keys are the same
on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from mla_portable.contracts.values import INT32_MAX

__all__ = ["merge_selections", "merged_bytes"]

_GATHERED_BYTES: Final = 64 << 20
"""Of the keys of all ranks that are gathered at a time."""
_ABSENT: Final = -(2**63)


def merge_selections(scores: Tensor, positions: Tensor, size: int, gather: Callable[[Tensor], Tensor]) -> None:
    """Make `positions` the K best of all ranks, of equal scores the lower positions, in no particular order.

    Args:
        scores: [T, K] float32, of the positions that this rank chose. positions: [T, K] int32, -1 = absent; overwritten, on
            every rank with the same. size: ranks. gather: a collective, [n, K] int64 of each rank -> [n, size * K].
    Allocates `merged_bytes`. May be captured in a CUDA graph where `gather` may.
    """
    num_tokens, topk = positions.shape
    step = _rows(topk, size)
    for first in range(0, num_tokens, step):
        some = slice(first, first + step)
        keys = gather(_keys(scores[some], positions[some])).topk(topk, dim=1, sorted=False).values
        positions[some] = torch.where(keys == _ABSENT, -1, INT32_MAX - (keys & INT32_MAX))


def merged_bytes(num_tokens: int, topk: int, size: int) -> int:
    """What merge_selections holds at most at a time: the gathered keys, and a few times a rank's own."""
    return 8 * min(num_tokens, _rows(topk, size)) * topk * (size + 5)


def _rows(topk: int, size: int) -> int:
    return max(1, _GATHERED_BYTES // (8 * topk * size))


def _keys(scores: Tensor, positions: Tensor) -> Tensor:
    """[n, K] int64: the bits of a score, as an integer that sorts like it, over those of INT32_MAX - position."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 is 0.0
    ordered = torch.where(bits < 0, bits ^ INT32_MAX, bits).long()
    return torch.where(positions < 0, _ABSENT, (ordered << 32) | (INT32_MAX - positions))
