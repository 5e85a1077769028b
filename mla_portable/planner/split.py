# SPDX-License-Identifier: Apache-2.0
"""Split-KV schedules for a planner: one object per row count, all over one block of scratch."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mla_portable.contracts import ProgramShape, SplitSchedule, split_kv
from mla_portable.layouts import KV_LORA_RANK

__all__ = ["SplitSchedules"]

_INVARIANT_LENGTH: Final = 256
"""Shortest split of batch-invariant schedules: 256 indices are 164 KiB of FP8 rows, and their partial result for 16 heads,
written once and read once, is 64 KiB."""


class SplitSchedules:
    """The schedules of one planner, by decode rows B * S.

    The scratch is allocated here, once: the most that any row count needs, never above `max_scratch_bytes`. Every schedule is
    a view of its beginning, so calls on one stream may follow each other, calls on two streams may not overlap.

    Batch-invariant schedules have one split length for every row count, so that a row's sums have the same order in every
    batch: 256 indices, or the shortest length whose partial results of `max_num_rows` rows fit the scratch.
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
        program: ProgramShape,
        value_width: int = KV_LORA_RANK,
    ) -> None:
        self._program, self._value_width = program, value_width
        self._num_heads, self._topk, self._num_sms, self._max_scratch_bytes = num_heads, topk, num_sms, max_scratch_bytes
        self._known: dict[int, SplitSchedule] = {}
        self._invariant = self._one_length(max_num_rows) if batch_invariant else None
        # split_kv leaves rows whole where more than half of the blocks that run at once would have one each.
        counts = (max_num_rows,) if batch_invariant else range(1, min(max_num_rows, program.per_sm * num_sms // 2) + 1)
        split_rows = (rows * num_splits for rows in counts if (num_splits := self._split(rows)[0]) > 1)
        needed = max(split_rows, default=0) * num_heads * (value_width + 1)
        self._scratch: Tensor | None = torch.empty(needed, dtype=torch.float32, device=device) if needed else None

    @property
    def scratch_bytes(self) -> int:
        """Bytes held for partial results."""
        return 0 if self._scratch is None else self._scratch.nbytes

    def get(self, num_rows: int) -> SplitSchedule:
        """The schedule of `num_rows` rows, up to `max_num_rows`; the same object each time."""
        schedule = self._known.get(num_rows)
        if schedule is None:
            schedule = self._known[num_rows] = self._make(num_rows)
        return schedule

    def _one_length(self, max_num_rows: int) -> tuple[int, int]:
        """(num_splits, split_len) for every row count."""
        tile = self._program.tile
        num_tiles = -(-self._topk // tile)
        affordable = self._max_scratch_bytes // (4 * max_num_rows * self._num_heads * (self._value_width + 1))
        if self._num_sms == 0 or affordable <= 1:
            return 1, num_tiles * tile
        tiles = min(num_tiles, max(-(-_INVARIANT_LENGTH // tile), -(-num_tiles // affordable)))
        return -(-num_tiles // tiles), tiles * tile

    def _split(self, num_rows: int) -> tuple[int, int]:
        if self._invariant is not None:
            return self._invariant
        return split_kv(
            num_rows=num_rows,
            num_heads=self._num_heads,
            topk=self._topk,
            num_sms=self._num_sms,
            value_width=self._value_width,
            program=self._program,
            max_scratch_bytes=self._max_scratch_bytes,
        )

    def _make(self, num_rows: int) -> SplitSchedule:
        num_splits, split_len = self._split(num_rows)
        partial_out = partial_lse = None
        if num_splits > 1:
            assert self._scratch is not None  # sized for every row count in __init__
            lse_words = num_splits * num_rows * self._num_heads
            out_words = lse_words * self._value_width
            partial_out = self._scratch[:out_words].view(num_splits, num_rows, self._num_heads, self._value_width)
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
