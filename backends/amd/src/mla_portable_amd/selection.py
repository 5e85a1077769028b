# SPDX-License-Identifier: Apache-2.0
"""topk_select through AITER's `top_k_per_row_prefill`, in its stable form.

That form chooses the lower of equal scores and lists what it chose in ascending order. It counts columns from the first of the
row, orders scores by their bits, where NaN is the largest number and -0.0 below 0.0, and leaves none of a range out that
fits. So it gets a copy without NaN and -0.0, and what it chose of -inf is taken out behind it; the order stays, so that
callers who want none save nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import Request
from mla_portable_amd.library import Op

MAX_TOPK: Final = 2048
"""The greatest of AITER's own tests."""
_PART: Final = 1 << 22
"""Scores and chosen positions that are held at a time: with their temporaries less than the 64 MiB of the contract."""


def bind_topk_select(op: Op, request: Request[Any]) -> Callable[..., Tensor]:
    """topk_select through `op(logits, rowStarts, rowEnds, indices, values, numRows, stride0, stride1, k=, stable=)`."""

    def topk_select(logits: Tensor, row_starts: Tensor, row_ends: Tensor, *, topk: int, out: Tensor | None = None) -> Tensor:
        num_rows, num_logits = logits.shape
        if out is None:
            out = torch.empty((num_rows, topk), dtype=torch.int32, device=logits.device)
        if num_logits == 0:
            return out.fill_(-1)
        starts = row_starts.clamp(0, num_logits)
        ends = row_ends.clamp(max=num_logits).maximum(starts)
        step = max(1, _PART // max(num_logits, 4 * topk))
        for first in range(0, num_rows, step):
            part = slice(first, first + step)
            scores = logits[part].nan_to_num(-math.inf, posinf=math.inf, neginf=-math.inf).add_(0.0)
            begin = starts[part].contiguous()
            chosen = torch.empty((scores.shape[0], topk), dtype=torch.int32, device=logits.device)
            op(scores, begin, ends[part].contiguous(), chosen, None, scores.shape[0], *scores.stride(), k=topk, stable=True)
            value = scores.gather(1, chosen.clamp(min=0).long())
            kept = (chosen >= 0) & (value > -math.inf)
            place = torch.where(kept, kept.cumsum(1) - 1, topk)  # the last column takes what is left out
            found = chosen.new_full((scores.shape[0], topk + 1), -1)
            out[part] = found.scatter_(1, place, chosen - begin.unsqueeze(1))[:, :topk]
        return out

    return topk_select
