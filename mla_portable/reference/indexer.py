# SPDX-License-Identifier: Apache-2.0
"""indexer_logits in plain torch: the sparse indexer's scores, request by request, in float32."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

__all__ = ["indexer_logits"]

_CHUNK_ELEMENTS: Final = 1 << 26
"""Of the scores of all heads that are held at a time: 256 MiB."""


def indexer_logits(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    out: Tensor,
) -> Tensor:
    """Weighted sums over heads of what is positive of q.k; `contracts.primitives.IndexerLogits`.

    Synchronises the host on a GPU. Not graph-safe.
    """
    num_blocks, block_size, _ = index_cache.shape
    out.fill_(-math.inf)
    lengths = seq_lens.clamp(0, block_table.shape[1] * block_size).tolist()
    for request, (begin, end) in enumerate(pairwise(query_start_loc.tolist())):
        end = min(end, q.shape[0])
        first = lengths[request] - (end - begin)  # the position of the first token
        seen = min(lengths[request], out.shape[1])
        if begin >= end or seen == 0 or num_blocks == 0:
            continue
        position = torch.arange(seen, device=out.device)
        block = block_table[request, position // block_size].long()
        valid = (block >= 0) & (block < num_blocks)
        keys = index_cache[torch.where(valid, block, 0), position % block_size].float()  # [seen, 128]
        keys.masked_fill_(~valid.unsqueeze(1), 0)
        step = max(1, _CHUNK_ELEMENTS // (q.shape[1] * seen))
        for start in range(begin, end, step):
            rows = slice(start, min(start + step, end))
            scores = (q[rows].float() @ keys.T).relu_()  # [rows, H, seen]
            logits = (weights[rows].unsqueeze(1) @ scores).squeeze(1)
            own = first + torch.arange(rows.start - begin, rows.stop - begin, device=out.device).unsqueeze(1)
            out[rows, :seen] = torch.where(valid & (position <= own), logits, -math.inf)
    return out
