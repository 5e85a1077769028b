# SPDX-License-Identifier: Apache-2.0
"""What the vendor's ops want of their inputs, made from what the contract allows: compact indices, flat contiguous rows.

The ops are known to take a contiguous [N, 1, 576] cache with valid indices first in each row and, in some, how many there
are. Engines give paged caches whose blocks lie apart, and absent indices in any column.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mla_portable.layouts import HEAD_SIZE

INT32_MAX: Final = 2**31 - 1
WIDTH_MULTIPLE: Final = 64
"""Rows of indices are widened to a multiple of this: the only width publicly tested."""


class FlatRows:
    """A paged cache as rows that follow one another, [N, 576], where its memory allows.

    rows: None where it does not, because blocks do not lie whole rows apart, or because element offsets would pass int32
    and it is not documented that the ops compute addresses in 64 bits.
    """

    __slots__ = ("block_rows", "block_size", "num_slots", "rows")

    def __init__(self, kv_cache: Tensor) -> None:
        num_blocks, self.block_size, width = kv_cache.shape
        self.num_slots = num_blocks * self.block_size
        stride = kv_cache.stride(0) if num_blocks > 1 else self.block_size * width
        self.block_rows, rest = divmod(stride, width)
        count = (num_blocks - 1) * self.block_rows + self.block_size if num_blocks else 0
        usable = rest == 0 and count * width <= INT32_MAX
        self.rows = kv_cache.as_strided((count, width), (width, 1)) if usable else None

    def row_of(self, slots: Tensor) -> Tensor:
        """The row of each slot; slots are valid ones, int64 or int32."""
        if self.block_rows == self.block_size:
            return slots
        return slots // self.block_size * self.block_rows + slots % self.block_size


def flat_rows(kv: Tensor) -> FlatRows:
    """`kv` [W, 576] or [blocks, block_size, 576] as flat rows."""
    return FlatRows(kv.unsqueeze(0) if kv.dim() == 2 else kv)


class Picked:
    """Index rows as the ops want them.

    Attributes:
        slots: [T, K'] int32, valid ones first in their order, -1 after them; K' a multiple of 64. In a row without any the
            first is 0, so that no op meets a row of nothing; what it makes of it is overwritten.
        lens: [T] int32, at least 1. empty: [T] bool.
    """

    __slots__ = ("empty", "lens", "slots")

    def __init__(self, slots: Tensor, lens: Tensor, empty: Tensor) -> None:
        self.slots, self.lens, self.empty = slots, lens, empty


def pick(indices: Tensor, num_slots: int, lengths: Tensor | None) -> Picked:
    """Compact `indices` [T, K] int32 of which those in [0, num_slots) and before `lengths` [T] count."""
    num_tokens, topk = indices.shape
    valid = (indices >= 0) & (indices < num_slots)  # [T, K]
    if lengths is not None:
        valid &= torch.arange(topk, device=indices.device) < lengths.unsqueeze(1)
    counts = valid.sum(1, dtype=torch.int32)  # [T]
    width = -(-topk // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    slots = indices.new_full((num_tokens, width + 1), -1)
    place = torch.where(valid, valid.cumsum(1) - 1, width)  # the last column takes what is absent
    slots.scatter_(1, place, indices)
    empty = counts == 0
    slots[:, 0].masked_fill_(empty, 0)
    return Picked(slots[:, :width].contiguous(), counts.clamp(min=1), empty)


def gathered(kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The named rows, copied next to one another, where the cache itself cannot be handed over.

    Args:
        slots: [T, K'] as in Picked.
    Returns: rows [T * K', 576] and, for each place of `slots`, its row there or -1, int32.
    """
    block_size = kv_cache.shape[1]
    named = slots.clamp(min=0).long()
    rows = kv_cache[named // block_size, named % block_size].reshape(-1, HEAD_SIZE)
    places = torch.arange(slots.numel(), dtype=torch.int32, device=slots.device).view_as(slots)
    return rows, torch.where(slots >= 0, places, -1)
