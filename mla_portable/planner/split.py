# SPDX-License-Identifier: Apache-2.0
"""Split-KV schedules for a planner: one object per row count, all over one block of scratch."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_portable.contracts import KV_LORA_RANK, SplitSchedule, split_kv

__all__ = ["SplitSchedules"]


class SplitSchedules:
    """The schedules of one planner, by decode rows B * S.

    The scratch is allocated here, once: as much as the greediest row count takes, never above `max_scratch_bytes`. Every
    schedule is a view of its beginning, so calls on one stream may follow each other, calls on two streams may not overlap.
    Where they are batch-invariant, every row count is cut as the greatest one is.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        topk: int,
        num_sms: int,
        max_num_rows: int,
        batch_invariant: bool = False,
        max_scratch_bytes: int,
        device: torch.device,
    ) -> None:
        self._cut_as = max_num_rows if batch_invariant else None
        self._num_heads, self._topk, self._num_sms, self._max_scratch_bytes = num_heads, topk, num_sms, max_scratch_bytes
        self._known: dict[int, SplitSchedule] = {}
        needed = 0
        for rows in range(1, max_num_rows + 1):
            num_splits, _ = self._split(rows)
            if num_splits > 1:
                needed = max(needed, num_splits * rows * num_heads * (KV_LORA_RANK + 1))
        self._scratch: Tensor | None = torch.empty(needed, dtype=torch.float32, device=device) if needed else None

    @property
    def scratch_bytes(self) -> int:
        """Bytes held for partial results."""
        return 0 if self._scratch is None else self._scratch.nbytes

    def get(self, num_rows: int) -> SplitSchedule:
        """The schedule of `num_rows` rows, up to the configured most; the same object each time."""
        schedule = self._known.get(num_rows)
        if schedule is None:
            schedule = self._known[num_rows] = self._make(num_rows)
        return schedule

    def _split(self, num_rows: int) -> tuple[int, int]:
        return split_kv(
            num_rows=self._cut_as or num_rows,
            num_heads=self._num_heads,
            topk=self._topk,
            num_sms=self._num_sms,
            max_scratch_bytes=self._max_scratch_bytes,
        )

    def _make(self, num_rows: int) -> SplitSchedule:
        num_splits, split_len = self._split(num_rows)
        partial_out = partial_lse = None
        if num_splits > 1:
            assert self._scratch is not None  # sized over every row count above
            lse_words = num_splits * num_rows * self._num_heads
            out_words = lse_words * KV_LORA_RANK
            partial_out = self._scratch[:out_words].view(num_splits, num_rows, self._num_heads, KV_LORA_RANK)
            partial_lse = self._scratch[out_words : out_words + lse_words].view(num_splits, num_rows, self._num_heads)
        return SplitSchedule(
            num_rows=num_rows,
            num_heads=self._num_heads,
            topk=self._topk,
            num_splits=num_splits,
            split_len=split_len,
            partial_out=partial_out,
            partial_lse=partial_lse,
        )
