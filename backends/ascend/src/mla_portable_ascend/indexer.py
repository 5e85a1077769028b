# SPDX-License-Identifier: Apache-2.0
"""indexer_select through `npu_lightning_indexer`: scores and selection in one operation, over bf16 keys.

It takes running sums of query tokens without the leading 0, and lists positions in no documented order, then -1. No score
leaves it, so a position without a block cannot be left out: it needs whole tables. Of equal scores it may choose any.

Tokens that belong to no request are passed as one more request without keys before the first, and one after the last. Where
blocks lie apart by anything but whole blocks, those that tables name are copied, as many requests at a time as take
COPIED_BYTES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from mla_portable.contracts import Request
from mla_portable_ascend.resolve import Op
from mla_portable_ascend.rows import adjacent_blocks

KEYWORDS: Final = (
    *("query", "key", "weights", "actual_seq_lengths_query", "actual_seq_lengths_key", "block_table"),
    *("layout_query", "layout_key", "sparse_count", "sparse_mode"),
)
"""What the operation is called with."""
COPIED_BYTES: Final = 32 << 20
_LAST: Final = 2**31 - 1


def bind_indexer_select(op: Op, request: Request, *, weights_dtype: torch.dtype) -> Callable[..., Tensor]:
    """indexer_select through `op`, which takes weights of `weights_dtype`. Positions are sorted where a request asks for it."""

    def indexer_select(
        q: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        topk: int,
        out: Tensor | None = None,
    ) -> Tensor:
        num_tokens, columns = q.shape[0], block_table.shape[1]
        if out is None:
            out = torch.empty((num_tokens, topk), dtype=torch.int32, device=q.device)
        capacity = columns * index_cache.shape[1]
        if 0 in (num_tokens, block_table.shape[0], capacity, index_cache.shape[0]):
            return out.fill_(-1)
        pad = torch.nn.functional.pad
        inside = query_start_loc.clamp(0, num_tokens)
        behind = (query_start_loc[1:] - inside[1:]).clamp(min=0)  # tokens of a request after the last one that is here
        ends = pad(inside, (0, 1), value=num_tokens)  # [R + 2]: requests 0 and R + 1 are nobody's
        lengths = pad((seq_lens.clamp(0, capacity) - behind).clamp(min=0), (1, 1))
        table = pad(block_table, (0, 0, 1, 1))
        found = out.new_full((num_tokens, topk), -1)
        for keys, blocks, given in _readable(index_cache, table, lengths):
            chosen, _ = op(
                query=q.contiguous(),
                key=keys.unsqueeze(2),
                weights=weights.to(weights_dtype).contiguous(),
                actual_seq_lengths_query=ends,
                actual_seq_lengths_key=given,
                block_table=blocks,
                layout_query="TND",
                layout_key="PA_BSND",
                sparse_count=topk,
                sparse_mode=3,
            )
            found = chosen.squeeze(1).maximum(found)
        if request.ordered:
            found = found.masked_fill(found < 0, _LAST).sort(dim=1).values
            found.masked_fill_(found == _LAST, -1)
        return out.copy_(found)

    return indexer_select


def _readable(cache: Tensor, table: Tensor, lengths: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Blocks that follow one another, a table of them, and the lengths of the requests whose keys these are, 0 for others.

    Args:
        cache: [blocks, block_size, 128]. table: [R, columns]. lengths: [R], 0 for the first request and the last one.
    """
    whole = adjacent_blocks(cache)
    if whole is not None:
        blocks, factor = whole
        yield blocks, table if factor == 1 else table * factor, lengths
        return
    num_requests, columns = table.shape
    step = max(1, COPIED_BYTES // (columns * cache[0].numel() * cache.element_size()))
    request = torch.arange(num_requests, device=table.device)
    for first in range(1, num_requests - 1, step):
        own = (request >= first) & (request < first + step)
        named = table[first : first + step].clamp(0, cache.shape[0] - 1)
        copied = torch.arange(named.numel(), dtype=torch.int32, device=table.device).view_as(named)
        places = table.new_zeros(table.shape)
        places[first : first + step] = copied
        yield cache[named.flatten().long()], places, torch.where(own, lengths, 0)
