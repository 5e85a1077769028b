# SPDX-License-Identifier: Apache-2.0
"""Merging the selections that the ranks of decode context parallelism made from their own keys.

Each rank chooses the K best of its own (`indexer_select`), and the K best of all are among these. Their scores are gathered, 4
bytes a candidate, and `topk_select` says which of them are the best; positions stay where their keys are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from mla_portable.contracts import ContextShare
from mla_portable.primitives import TopkSelect

_GATHERED_BYTES: Final = 64 << 20
"""Scores of all ranks that are gathered at a time."""


class SelectionMerge:
    """Leaves each rank those of its candidates that are among the K best of all ranks.

    Of equal scores those of lower ranks are kept, and there the earlier ones.
    """

    def __init__(
        self,
        share: ContextShare,
        topk: int,
        select: TopkSelect,
        gather: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> None:
        """
        Args:
            share: this rank's. topk: K. select: of `size` * K scores a row. gather: a collective, [n, K] float32 of each rank
                -> [n, size * K], lower ranks first.
        """
        self._select, self._gather, self._topk, self._first = select, gather, topk, share.rank * topk
        self._rows, self._size = max(1, _GATHERED_BYTES // (4 * topk * share.size)), share.size
        self._starts = torch.zeros(self._rows, dtype=torch.int32, device=device)
        self._ends = torch.full_like(self._starts, share.size * topk)

    def __call__(self, scores: Tensor, positions: Tensor) -> None:
        """Make candidates that are not kept -1, in no particular order.

        Args:
            scores: [T, K] float32, -inf = absent. positions: [T, K] int32, those that this rank chose; overwritten.
        Allocates at most `nbytes(T)`. May be captured in a CUDA graph where `gather` and `select` may.
        """
        for first in range(0, positions.shape[0], self._rows):
            chosen = positions[first : first + self._rows]
            rows = chosen.shape[0]
            everyone = self._gather(scores[first : first + self._rows])
            best = self._select(
                everyone, self._starts[:rows], self._ends[:rows], topk=self._topk
            )  # columns, ascending, then -1
            # columns of other ranks become those of an absent candidate on either side
            padded = torch.nn.functional.pad(chosen, (1, 1), value=-1)
            own = best.clamp_(self._first - 1, self._first + self._topk).sub_(self._first - 1)
            torch.gather(padded, 1, own.long(), out=chosen)

    def nbytes(self, num_tokens: int) -> int:
        """What a call holds at most at a time: the gathered scores in two orders, and a few times a rank's own."""
        return 4 * min(num_tokens, self._rows) * self._topk * (2 * self._size + 5) + (self._topk << 4)
