# SPDX-License-Identifier: Apache-2.0
"""convert_indices in plain torch: positions in a request -> slots in the cache, and how many of them are valid.

slot = block_table[req_id, pos // block_size] * block_size + pos % block_size, in int64. It is -1 when pos, the request id
or the table entry is negative, when the request or the column is outside the table, and when the slot is not below
num_slots or does not fit int32.
A prefill token's row is workspace_starts[prefill_request_id] + pos; only pos, that id and int32 limit it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from mla_portable.reference.arithmetic import isolated

__all__ = ["convert_indices"]

_INT32_MAX: Final = 2**31 - 1
_CHUNK_BYTES: Final = 256 << 20
_TEMPORARY_BYTES: Final = 64
"""Of int64 and bool temporaries per index."""


@isolated
def convert_indices(
    topk_indices: Tensor,
    req_id_per_token: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    num_slots: int | None = None,
    prefill_request_ids: Tensor | None = None,
    prefill_workspace_starts: Tensor | None = None,
    compact: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Global slots or workspace rows of each token's positions; `primitives.ConvertIndices`.

    Allocates temporaries of at most about 256 MiB. Not graph-safe.
    """
    num_tokens, topk = topk_indices.shape
    if out is None:
        out = (
            torch.empty((num_tokens, topk), dtype=torch.int32, device=topk_indices.device),
            torch.empty((num_tokens,), dtype=torch.int32, device=topk_indices.device),
        )
    indices, counts = out
    step = max(1, _CHUNK_BYTES // (_TEMPORARY_BYTES * max(topk, 1)))
    for begin in range(0, num_tokens, step):
        chunk = slice(begin, begin + step)
        pos = topk_indices[chunk].long()
        slot = _slots(pos, req_id_per_token[chunk].long(), block_table, block_size, num_slots)
        if prefill_request_ids is not None:
            request = prefill_request_ids[chunk].long()
            row = _workspace_rows(pos, request, prefill_workspace_starts)
            slot = torch.where((request >= 0).unsqueeze(1), row, slot)
        valid = slot >= 0
        if compact:
            order = torch.sort(valid.to(torch.uint8), dim=1, descending=True, stable=True).indices
            slot = slot.gather(1, order)
        indices[chunk] = slot.to(torch.int32)
        counts[chunk] = valid.sum(dim=1, dtype=torch.int32)
    return indices, counts


def _slots(pos: Tensor, req_id: Tensor, block_table: Tensor, block_size: int, num_slots: int | None) -> Tensor:
    """Slots [n, K] int64 of pos [n, K] in the requests req_id [n]; -1 where there is none."""
    num_reqs, columns = block_table.shape
    if num_reqs == 0 or columns == 0:
        return torch.full_like(pos, -1)
    column = pos.div(block_size, rounding_mode="floor")
    valid = (pos >= 0) & (column < columns) & ((req_id >= 0) & (req_id < num_reqs)).unsqueeze(1)
    block = block_table[req_id.clamp(0, num_reqs - 1).unsqueeze(1), column.clamp(0, columns - 1)].long()
    slot = block * block_size + pos % block_size
    limit = _INT32_MAX if num_slots is None else min(num_slots - 1, _INT32_MAX)
    return slot.masked_fill_(~(valid & (block >= 0) & (slot <= limit)), -1)


def _workspace_rows(pos: Tensor, request: Tensor, starts: Tensor | None) -> Tensor:
    """Workspace rows [n, K] int64 of pos [n, K] in the prefill requests request [n]; no starts means no such request."""
    num_prefills = 0 if starts is None else starts.shape[0]
    if starts is None or num_prefills == 0:
        return torch.full_like(pos, -1)
    row = starts[request.clamp(0, num_prefills - 1)].long().unsqueeze(1) + pos
    known = ((request >= 0) & (request < num_prefills)).unsqueeze(1)
    return row.masked_fill_(~(known & (pos >= 0) & (row >= 0) & (row <= _INT32_MAX)), -1)
