# SPDX-License-Identifier: Apache-2.0
"""indexer_logits in plain torch: the sparse indexer's scores, request by request."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from mla_portable.reference.arithmetic import isolated, products

__all__ = ["indexer_logits"]

_CHUNK_ELEMENTS: Final = 1 << 25
"""Of the scores of all heads that are held at a time: 256 MiB in float64."""


@isolated
def indexer_logits(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    out: Tensor,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Weighted sums over heads of what is positive of q.k; `primitives.IndexerLogits`.

    `dtype` is that of the arithmetic. Synchronises the host on a GPU. Not graph-safe.
    """
    num_blocks, block_size, head_size = index_cache.shape
    out.fill_(-math.inf)
    lengths = seq_lens.clamp(0, block_table.shape[1] * block_size).tolist()
    for request, (begin, end) in enumerate(pairwise(query_start_loc.tolist())):
        after_own = lengths[request] - end  # added to a token, its own position
        begin, end = max(begin, 0), min(end, q.shape[0])
        seen = min(lengths[request], out.shape[1])
        if begin >= end or seen == 0 or num_blocks == 0:
            continue
        position = torch.arange(seen, dtype=torch.int64, device=out.device)
        block = block_table[request, position // block_size].long()
        valid = (block >= 0) & (block < num_blocks)
        keys = index_cache[torch.where(valid, block, 0), position % block_size].to(dtype)  # [seen, 128]
        keys.masked_fill_(~valid.unsqueeze(1), 0)
        step = max(1, _CHUNK_ELEMENTS // (max(q.shape[1], head_size) * seen))
        for start in range(begin, end, step):
            rows = slice(start, min(start + step, end))
            scores = products(q[rows].to(dtype), keys).relu_()  # [rows, H, seen]
            logits = scores.mul_(weights[rows].to(dtype).unsqueeze(-1)).sum(dim=1)
            token = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=out.device).unsqueeze(1)
            out[rows, :seen] = torch.where(valid & (position <= token + after_own), logits, -math.inf)
    return out
