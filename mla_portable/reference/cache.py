# SPDX-License-Identifier: Apache-2.0
"""cache_write and gather_upconvert in plain torch: tokens into the paged cache, and out of it into a workspace."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mla_portable.layouts import layout_of
from mla_portable.reference.arithmetic import isolated
from mla_portable.reference.rows import CacheRows

__all__ = ["cache_write", "gather_upconvert"]

_CHUNK_TOKENS: Final = 16384
"""Tokens handled at a time: some 100 MB of float32 rows with their temporaries, whatever the batch."""


@isolated
def cache_write(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, scale_format: str = "pow2") -> None:
    """Write new tokens into the paged cache; `primitives.CacheWrite`.

    Rows are exactly what the layout's `pack` makes. Synchronises the host on a GPU. Not graph-safe.
    """
    layout = layout_of(kv_cache, where="cache_write")
    blocks, block_size, _ = kv_cache.shape
    for begin in range(0, slot_mapping.shape[0], _CHUNK_TOKENS):
        chunk = slice(begin, begin + _CHUNK_TOKENS)
        slots = slot_mapping[chunk].long()
        kept = ((slots >= 0) & (slots < blocks * block_size)).nonzero().squeeze(1)
        slots, latent, rope = slots[kept], kv_c[chunk][kept], k_pe[chunk][kept]
        rows = layout.pack(latent, rope, scale_format)
        first = 0
        for part in layout.parts(kv_cache):
            part[slots // block_size, slots % block_size] = rows[:, first : first + part.shape[2]]
            first += part.shape[2]


@isolated
def gather_upconvert(
    kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, workspace_starts: Tensor, *, out: Tensor
) -> Tensor:
    """Copy each request's cached tokens into consecutive bf16 rows of `out`; `primitives.GatherUpconvert`.

    Negative lengths count as 0. Synchronises the host on a GPU, once. Not graph-safe.
    """
    rows = CacheRows(kv_cache)
    num_blocks, block_size, _ = kv_cache.shape
    columns = block_table.shape[1]
    starts = workspace_starts.long()
    # of a request only tokens whose rows lie in the workspace are counted, so the work is bounded by W for each request
    first = (-starts).clamp_(min=0)  # [P]
    tokens = (torch.minimum(seq_lens.long(), out.shape[0] - starts) - first).clamp_(min=0)  # [P]
    ends = tokens.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    for begin in range(0, total, _CHUNK_TOKENS):
        # [n] tokens counted over all requests
        token = torch.arange(begin, min(begin + _CHUNK_TOKENS, total), dtype=torch.int64, device=out.device)
        request = torch.searchsorted(ends, token, right=True)
        position = first[request] + token - (ends - tokens)[request]
        row = starts[request] + position
        column = position // block_size
        valid = column < columns
        if columns:
            block = block_table[request, column.clamp(max=columns - 1)].long()
            valid &= (block >= 0) & (block < num_blocks)
        else:
            block = torch.zeros_like(column)
        if rows.num_slots:
            slot = torch.where(valid, block * block_size + position % block_size, 0)
            values = rows.layout.unpack(rows.raw(slot))
        else:
            values = torch.zeros((row.numel(), out.shape[1]), dtype=torch.bfloat16, device=out.device)
        out[row] = values.masked_fill(~valid.unsqueeze(1), 0)
    return out
