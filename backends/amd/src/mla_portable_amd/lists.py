# SPDX-License-Identifier: Apache-2.0
"""Index rows as AITER's attention takes them: one list of rows of the cache without gaps, and where each token's part begins.

That is a CSR matrix whose pages are single rows. The lengths are known on the device alone, so the list is as long as all
indices together; what stands behind its end is not read. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Lists(NamedTuple):
    """Of T tokens with K indices each.

    Attributes:
        begins: [T + 1] int32; slots[begins[t] : begins[t + 1]] are those of token t.
        slots: [T * K] int32, each a slot of the cache, those behind the end too. empty: [T] bool.
    """

    begins: Tensor
    slots: Tensor
    empty: Tensor


def lists_of(indices: Tensor, lengths: Tensor | None, num_slots: int, *, compacted: bool) -> Lists:
    """The indices that count, moved together.

    Args:
        indices: [T, K] int32; those in [0, num_slots) count. num_slots: at least 1. lengths: [T] int32 or None, how many
            leading indices of each row count.
        compacted: the caller promises that the first `lengths` of each row are slots: nothing in a row has to move.
    """
    num_tokens, topk = indices.shape
    column = torch.arange(topk, device=indices.device)
    if compacted and lengths is not None:
        counts, within = lengths, column.expand(num_tokens, -1)
        kept = column < lengths.unsqueeze(1)  # [T, K]
    else:
        kept = (indices >= 0) & (indices < num_slots)
        if lengths is not None:
            kept &= column < lengths.unsqueeze(1)
        counts, within = kept.sum(1), kept.cumsum(1) - 1
    begins = indices.new_zeros(num_tokens + 1)
    torch.cumsum(counts, 0, out=begins[1:])
    slots = indices.new_zeros(num_tokens * topk + 1)  # the last one takes what does not count
    place = torch.where(kept, begins[:-1].unsqueeze(1) + within, slots.shape[0] - 1)
    slots.scatter_(0, place.flatten(), indices.flatten())
    slots = slots[:-1]
    # A kernel may load a tile beyond the end and weigh it with 0: that must be a row that somebody wrote.
    behind = torch.arange(slots.shape[0], device=slots.device) >= begins[-1]
    return Lists(begins, torch.where(behind, slots[0], slots), begins.diff() == 0)
