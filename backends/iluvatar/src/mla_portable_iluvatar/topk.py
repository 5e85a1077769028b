# SPDX-License-Identifier: Apache-2.0
"""topk_select through the vendor's `dsa_update_topk_indices(logits, starts, ends, topk, buffer)`, which writes the buffer.

Its one public call does not show whether it writes columns or positions relative to a row's start: rows are given that begin at
column 0, where both are the same. Scores that do not count are -inf there, and a place of the buffer counts where it names a
greater score, whatever else the op writes. Positions are sorted afterwards. Which of equal scores it takes is not known: the
probe refuses an op that does not take the lower positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from mla_portable_iluvatar.resolve import Op
from mla_portable_iluvatar.rows import INT32_MAX

MAX_TOPK: Final = 2048
"""That of the models with whose engine the op is known, DeepSeek-V3.2's."""
_CHUNK_ELEMENTS: Final = 1 << 21
"""Scores that are copied at a time: 8 MiB, and as much for each temporary."""


def bind_topk_select(op: Op) -> Callable[..., Tensor]:
    """topk_select through `op`; allocates at most 64 MiB, except where one row takes more."""

    def topk_select(logits: Tensor, row_starts: Tensor, row_ends: Tensor, *, topk: int, out: Tensor | None = None) -> Tensor:
        num_rows, num_logits = logits.shape
        if out is None:
            out = torch.empty((num_rows, topk), dtype=torch.int32, device=logits.device)
        out.fill_(-1)
        if num_logits == 0:
            return out
        column = torch.arange(num_logits, dtype=torch.int32, device=logits.device)
        step = max(1, _CHUNK_ELEMENTS // max(num_logits, topk))
        for begin in range(0, num_rows, step):
            rows = slice(begin, begin + step)
            scores, ends = logits[rows], row_ends[rows].clamp(0, num_logits)
            starts = row_starts[rows].clamp(min=0).unsqueeze(1)  # [C, 1]
            counts = (column >= starts) & (column < ends.unsqueeze(1)) & (scores > -math.inf)  # NaN is not greater
            scores = torch.where(counts, scores + 0.0, -math.inf)  # -0.0 is 0.0
            written = torch.full((scores.shape[0], topk), -1, dtype=torch.int32, device=logits.device)
            op(scores, torch.zeros_like(ends), ends.clamp(min=1), topk, written)
            named = (written >= 0) & (written < num_logits)
            named &= scores.gather(1, torch.where(named, written, 0).long()) > -math.inf
            places = torch.where(named, written - starts, INT32_MAX).sort(dim=1).values
            out[rows] = torch.where(places < INT32_MAX, places, -1)
        return out

    return topk_select


def topk_trial(op: Op, device: torch.device) -> None:
    """One call on a small problem: four rows, of which one is shorter than K."""
    scores = torch.arange(4 * 128, dtype=torch.float32, device=device).view(4, 128)
    starts = torch.zeros(4, dtype=torch.int32, device=device)
    bind_topk_select(op)(scores, starts, torch.arange(32, 160, 32, dtype=torch.int32, device=device), topk=64)
