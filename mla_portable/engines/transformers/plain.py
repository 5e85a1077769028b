# SPDX-License-Identifier: Apache-2.0
"""Attention over chosen rows in plain torch and float32: for models in float32, which no kernel takes."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

_SCRATCH_BYTES: Final = 64 << 20
"""Of the rows that are gathered at a time; a single query may take more."""


def attend(q: Tensor, rows: Tensor, slots: Tensor, *, softmax_scale: float, attn_sink: Tensor | None, width: int) -> Tensor:
    """Attention of T queries, each over the rows that it names.

    Args:
        q: [T, H, D] float32. rows: [W, D] float32, whose first `width` numbers are the values.
        slots: [T, K] int32, -1 = absent. attn_sink: [H] float32.
    Returns: [T, H, width] float32; a query without a row has zeros.
    """
    out = q.new_empty((*q.shape[:2], width))
    step = max(1, _SCRATCH_BYTES // (rows.element_size() * slots.shape[1] * rows.shape[1]))
    for begin in range(0, len(q), step):
        chunk = slice(begin, begin + step)
        absent = (slots[chunk] < 0).unsqueeze(1)  # [C, 1, K]
        keys = rows[slots[chunk].clamp(min=0).long()]  # [C, K, D]
        keys = keys.masked_fill_(absent.mT, 0.0)  # a weight of 0 does not hide what row 0 may hold
        scores = (q[chunk] @ keys.mT * softmax_scale).masked_fill_(absent, -math.inf)  # [C, H, K]
        if attn_sink is not None:
            scores = torch.cat([scores, attn_sink.view(1, -1, 1).expand(len(scores), -1, 1)], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : slots.shape[1]]
        out[chunk] = (weights @ keys[..., :width]).masked_fill_(absent.all(dim=-1, keepdim=True), 0.0)
    return out
