# SPDX-License-Identifier: Apache-2.0
"""What the vendor's operations want of their inputs, made from what the contract allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mla_portable.layouts import KV_LORA_RANK

COPIED_ROWS: Final = 1 << 17
"""Rows of a cache that are copied at a time where an operation cannot read it in place: 151 MB in bf16."""


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """The keys of one pretended request, as an operation reads them.

    Attributes:
        parts: one tensor or more of the same rows: pages [blocks, block_size, 1, width], or flat rows [N, 1, width].
        table: [1, columns] int32 with pages, None with flat rows. length: positions of the request.
    """

    parts: tuple[Tensor, ...]
    table: Tensor | None
    length: int

    @property
    def layout(self) -> str:
        """The operations' name for it."""
        return "TND" if self.table is None else "PA_BSND"


def valid_first(indices: Tensor, num_rows: int, lengths: Tensor | None) -> Tensor:
    """The valid entries of each row in their order, then -1: an operation stops at the first -1.

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


def flat_keys(parts: tuple[Tensor, ...], topk: int) -> Keys:
    """Flat rows [N, width] as keys: at least `topk`, for no more entries of a list are looked at than there are positions."""
    short = max(topk - parts[0].shape[0], 0)
    padded = (torch.nn.functional.pad(part, (0, 0, 0, short)) if short else part.contiguous() for part in parts)
    return Keys(tuple(part.unsqueeze(1) for part in padded), None, parts[0].shape[0] + short)


def paged_keys(caches: tuple[Tensor, ...], topk: int) -> Keys | None:
    """Paged caches [blocks, block_size, width] in place, a slot as the position of that number; None where they lie apart.

    Positions past the last slot, which a request of fewer slots than `topk` needs, are slots again; no list names them.
    """
    found = [adjacent_blocks(cache) for cache in caches]
    factors = {each[1] for each in found if each is not None}
    if None in found or len(factors) != 1:
        return None
    num_blocks, block_size, _ = caches[0].shape
    columns = max(num_blocks, -(-topk // block_size))
    table = torch.arange(columns, dtype=torch.int32, device=caches[0].device) % num_blocks * factors.pop()
    parts = tuple(each[0].unsqueeze(2) for each in found if each is not None)
    return Keys(parts, table.unsqueeze(0), columns * block_size)


def adjacent_blocks(cache: Tensor) -> tuple[Tensor, int] | None:
    """A paged cache as blocks that follow one another, and how many of these one of its own takes; None where it has none.

    cache: [blocks, block_size, width], rows contiguous and adjacent. What lies between its blocks is not read.
    """
    num_blocks, block_size, width = cache.shape
    factor, rest = divmod(cache.stride(0), block_size * width) if num_blocks > 1 else (1, 0)
    if rest:
        return None
    count = (num_blocks - 1) * factor + 1
    return cache.as_strided((count, block_size, width), (block_size * width, width, 1)), factor


def flattened(cache: Tensor) -> Tensor:
    """[W, width] or [blocks, block_size, width] as [N, width], copied where blocks lie apart."""
    return cache.reshape(-1, cache.shape[-1])


def named_rows(cache: Tensor, slots: Tensor) -> Tensor:
    """The rows that `slots` [T, K] name, copied next to one another: [T * K, width]. Of -1 any row."""
    named = slots.clamp(min=0).flatten().long()
    if cache.dim() == 2:
        return cache[named]
    return cache[named // cache.shape[1], named % cache.shape[1]]


def latent_and_rope(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The two parts of [..., 576], each contiguous."""
    return rows[..., :KV_LORA_RANK].contiguous(), rows[..., KV_LORA_RANK:].contiguous()
