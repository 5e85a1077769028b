# SPDX-License-Identifier: Apache-2.0
"""indexer_select made of two kernels: scores of some tokens at a time into bounded scratch, then the top-k of each row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Protocol

import torch
from torch import Tensor

from mla_portable.contracts.share import WHOLE, ContextShare
from mla_portable.primitives.topk_select import TopkSelect

SELECT_SCRATCH_BYTES: Final = 64 << 20
"""Bytes that one call of indexer_select may allocate besides its result."""
_ROUNDING: Final = 1 << 10
"""What an allocator may round two tensors up by."""


class SeenScores(Protocol):
    """Scores of the tokens from `first` on: indexer_logits, but for what a token does not see.

    out: [T', N] float32, of which only what a token sees is written. bounds: [2, T'] int32, written: each token sees positions
    bounds[0] to bounds[1] - 1. share: what the cache holds; then these are own positions. It is given only to parts of an
    implementation that declares `Support.context_parallel`. all_chosen: of a token that sees at most so many positions all are
    chosen, so that any finite score will do where the position has a block; elsewhere it is -inf. The rest: see
    `mla_portable.primitives.IndexerLogits`.
    """

    def __call__(
        self,
        out: Tensor,
        bounds: Tensor,
        q: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        first: int,
        share: ContextShare = WHOLE,
        *,
        all_chosen: int = 0,
    ) -> None: ...


def rows_at_a_time(num_tokens: int, num_logits: int, beside: int = 0) -> int:
    """Tokens whose scores are held at a time, at least 1; alike in all parts but the last.

    Args:
        beside: bytes that the top-k takes for each.
    """
    most = max(1, (SELECT_SCRATCH_BYTES - _ROUNDING) // (4 * (num_logits + 2) + beside))
    return -(-num_tokens // -(-num_tokens // most))


class SelectInParts:
    """The callable; see `mla_portable.primitives.IndexerSelect`. Graph-safe with `out` where its parts are.

    Args:
        score: the scores. choose: the top-k. beside: (N, K) -> bytes that `choose` takes for each row.
        finish: (chosen [T', K], scores_out [T', K] or None, scores [T', N], share): lists the scores of what was chosen, and
            makes own positions those of the sequence. None where no support of a ContextShare is declared.
    """

    def __init__(
        self,
        score: SeenScores,
        choose: TopkSelect,
        beside: Callable[[int, int], int] = lambda width, topk: 0,
        finish: Callable[[Tensor, Tensor | None, Tensor, ContextShare], None] | None = None,
    ) -> None:
        self._score, self._choose, self._beside, self._finish = score, choose, beside, finish

    def __call__(
        self,
        q: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        topk: int,
        dcp_size: int = 1,
        dcp_rank: int = 0,
        interleave: int = 1,
        out: Tensor | None = None,
        scores_out: Tensor | None = None,
    ) -> Tensor:
        num_tokens, num_logits = q.shape[0], block_table.shape[1] * index_cache.shape[1]
        if out is None:
            out = torch.empty((num_tokens, topk), dtype=torch.int32, device=q.device)
        if num_tokens == 0:
            return out
        if num_logits == 0 or index_cache.shape[0] == 0:
            if scores_out is not None:
                scores_out.fill_(-math.inf)
            return out.fill_(-1)
        share = WHOLE if dcp_size == 1 else ContextShare(dcp_size, dcp_rank, interleave)
        held = {} if share.size == 1 else {"share": share}
        all_chosen = topk if scores_out is None else 0
        rows = rows_at_a_time(num_tokens, num_logits, self._beside(num_logits, topk))
        logits = torch.empty((rows, num_logits), dtype=torch.float32, device=q.device)
        bounds = torch.empty((2, rows), dtype=torch.int32, device=q.device)
        for first in range(0, num_tokens, rows):
            count = min(rows, num_tokens - first)
            scores, limits = logits[:count], bounds[:, :count]
            pages = q, weights, index_cache, query_start_loc, seq_lens, block_table
            self._score(scores, limits, *pages, first, all_chosen=all_chosen, **held)
            chosen = out[first : first + count]
            self._choose(scores, limits[0], limits[1], topk=topk, out=chosen)
            if self._finish is not None and (held or scores_out is not None):
                self._finish(chosen, None if scores_out is None else scores_out[first : first + count], scores, share)
        return out
