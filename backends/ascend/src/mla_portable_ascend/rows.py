# SPDX-License-Identifier: Apache-2.0
"""What the vendor's operations want of their inputs, made from what the contract allows."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mla_portable.layouts import HEAD_SIZE

COPIED_ROWS: Final = 1 << 17
"""Rows of a cache that are copied at a time where the operation cannot read it in place: 151 MB."""


def valid_first(indices: Tensor, num_rows: int, lengths: Tensor | None) -> Tensor:
    """The valid entries of each row in their order, then -1: the operation stops at the first -1.

    Args:
        indices: [T, K] int32, of which those in [0, num_rows) and before `lengths` [T] count.
    Returns: [T, K] int32, contiguous.
    """
    num_tokens, topk = indices.shape
    valid = (indices >= 0) & (indices < num_rows)
    if lengths is not None:
        valid &= torch.arange(topk, device=indices.device) < lengths.unsqueeze(1)
    place = torch.where(valid, valid.cumsum(1) - 1, topk)  # the last column takes what is absent
    found = indices.new_full((num_tokens, topk + 1), -1)
    return found.scatter_(1, place, torch.where(valid, indices, -1))[:, :topk].contiguous()


def named_rows(kv: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that `slots` name, copied next to one another.

    Args:
        kv: [W, 576] or [blocks, block_size, 576]. slots: [T, K] int32, slots of it or -1.
    Returns: rows [T * K, 576] and, for each entry of `slots`, its row there or -1, int32.
    """
    named = slots.clamp(min=0).flatten().long()
    if kv.dim() == 2:
        rows = kv[named]
    else:
        block_size = kv.shape[1]
        rows = kv[named // block_size, named % block_size]
    places = torch.arange(slots.numel(), dtype=torch.int32, device=slots.device).view_as(slots)
    return rows.view(-1, HEAD_SIZE), torch.where(slots >= 0, places, -1)
