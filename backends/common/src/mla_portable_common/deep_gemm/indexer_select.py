# SPDX-License-Identifier: Apache-2.0
"""indexer_select as DeepGEMM's paged scores of some tokens at a time, then the device's topk_select on them where they lie.

Scores are not copied: the top-k gets how many each token sees, and absent blocks are overwritten with -inf before it.
Four launches and those of the top-k serve some tokens: what they see, DeepGEMM's schedule unless it was planned, scores,
absent blocks.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mla_portable.primitives import TopkSelect
from mla_portable_common.deep_gemm.conventions import Scores
from mla_portable_common.deep_gemm.indexer_logits import PagedScores, packed
from mla_portable_common.deep_gemm.pages import PAGE, IndexPasses, Pages
from mla_portable_common.deep_gemm.schedules import IndexSchedule

SCRATCH_BYTES: Final = 60 << 20
"""Of scores, tables and the top-k; what allocators round up to stays within the 64 MiB that the primitive promises."""
TOPK_BYTES: Final = 64 << 10
"""For each row: what a topk_select may take."""


class DeepGemmSelect:
    """The callable; see `mla_portable.primitives.IndexerSelect`. Graph-safe with `out` once a call of the size was made."""

    def __init__(
        self,
        kernel: Scores,
        passes: IndexPasses,
        topk: TopkSelect,
        *,
        topk_bytes: int = TOPK_BYTES,
        scratch_bytes: int = SCRATCH_BYTES,
    ) -> None:
        """topk_bytes: of memory that `topk` takes for each row. scratch_bytes: of scores, tables and the top-k."""
        self._scores, self._passes, self._topk, self._scratch_bytes = PagedScores(kernel, passes), passes, topk, scratch_bytes
        self._topk_bytes = topk_bytes

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
        schedule: IndexSchedule | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        num_tokens, width = q.shape[0], block_table.shape[1] * PAGE
        if out is None:
            out = torch.empty((num_tokens, topk), dtype=torch.int32, device=q.device)
        if num_tokens == 0:
            return out
        if width == 0 or index_cache.shape[0] == 0 or seq_lens.shape[0] == 0:
            return out.fill_(-1)
        pages = Pages(query_start_loc, seq_lens, block_table, index_cache.shape[0], width)
        q, weights = packed(q), packed(weights)
        for first, count in self._scores.calls(num_tokens, pages, self._scratch_bytes, self._topk_bytes):
            self._select(out[first : first + count], topk, q, weights, index_cache, pages, first, count, schedule)
        return out

    def _select(
        self,
        out: Tensor,
        topk: int,
        q: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        pages: Pages,
        first: int,
        count: int,
        schedule: IndexSchedule | None,
    ) -> None:
        """Some tokens. A function of its own: its scores are free again when it returns."""
        logits, rows = self._scores(q, weights, index_cache, pages, first, count, schedule)
        self._passes.erase(logits, rows, pages)
        self._topk(logits, rows.starts, rows.ends, topk=topk, out=out)
