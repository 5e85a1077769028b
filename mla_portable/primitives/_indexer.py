# SPDX-License-Identifier: Apache-2.0
"""What the indexer's primitives share: the check of queries against a paged index cache, and the reference's scores.

A score is sum_h weights[t, h] * max(q[t, h] . k[s], 0), of token t and position s of its request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from mla_portable.contracts.rules import check_cache, check_dense, check_tensor, shape_of
from mla_portable.contracts.share import WHOLE, ContextShare
from mla_portable.contracts.values import INT32_MAX, refuse, rounded_rows
from mla_portable.layouts import INDEX, INDEX_HEAD_SIZE, CacheLayout, index_query_dtype
from mla_portable.primitives._reference import CacheRows, products

_CHUNK_ELEMENTS: Final = 1 << 25
"""Of the scores of all heads that are held at a time: 256 MiB in float64."""


def check_queries(where: str, q: Tensor, weights: Tensor, layout: CacheLayout) -> tuple[int, int]:
    """q [T, H, 128] as keys of `layout` want it, and weights [T, H] float32. Returns: T, H. Raises: InvalidArgument."""
    num_tokens, num_heads, _ = shape_of(where, "q", q, 3, "[T, H, 128]")
    dtype, device = index_query_dtype(layout), q.device
    if layout.is_quantized and q.dtype == torch.bfloat16:
        refuse(where, "q", q.dtype, f"{dtype} for {layout.name} keys", "Quantise q, and multiply weights by its scales.")
    check_tensor(where, "q", q, dtype, (num_tokens, num_heads, INDEX_HEAD_SIZE), device, "[T, H, 128]")
    if num_heads < 1:
        refuse(where, "q", f"shape {list(q.shape)}", "[T, H, 128] with H of at least 1")
    check_tensor(where, "weights", weights, torch.float32, (num_tokens, num_heads), device, "[T, H]")
    return num_tokens, num_heads


def check_pages(
    where: str, q: Tensor, weights: Tensor, index_cache: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor
) -> tuple[tuple[str, int, int, int, bool, int], dict[str, Tensor]]:
    """The arguments that indexer_logits and indexer_select have in common.

    Returns: kv_layout, num_heads, block_size, cache_alignment, uneven_blocks and rows of a Request; the arguments by name.
    Raises: InvalidArgument.
    """
    check_dense(where, "q", q, "[T, H, 128]")
    int32, device = torch.int32, q.device
    layout, block_size, apart, alignment = check_cache(where, "index_cache", index_cache, device, INDEX)
    num_tokens, num_heads = check_queries(where, q, weights, layout)
    num_reqs, columns = shape_of(where, "block_table", block_table, 2, "[R, columns]")
    check_tensor(where, "query_start_loc", query_start_loc, int32, (num_reqs + 1,), device, "[R + 1]")
    if query_start_loc.is_cpu:  # nothing has to be read back
        first, last = int(query_start_loc[0]), int(query_start_loc[-1])
        if first < 0 or last > num_tokens:
            refuse(where, "query_start_loc", f"values from {first} to {last}", f"values from 0 to T = {num_tokens}")
    check_tensor(where, "seq_lens", seq_lens, int32, (num_reqs,), device, "[R]")
    check_tensor(where, "block_table", block_table, int32, (num_reqs, columns), device, "[R, columns]")
    read = {
        "q": q,
        "weights": weights,
        "index_cache": index_cache,
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
        "block_table": block_table,
    }
    uneven, rows = bool(apart % layout.row_width), rounded_rows(num_tokens)
    return (layout.name, num_heads, block_size, alignment, uneven, rows), read


def query_values(q: Tensor, dtype: torch.dtype) -> Tensor:
    """q as numbers of `dtype`, exactly."""
    return q.float().to(dtype)


def scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """[n, K] of the dtype of `keys` [K, 128], for n tokens: q [n, H, 128], weights [n, H] float32."""
    each = products(query_values(q, keys.dtype), keys).relu_()  # [n, H, K]
    return each.mul_(weights.to(keys.dtype).unsqueeze(-1)).sum(dim=1)


def seen_scores(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    width: int | None = None,
    dtype: torch.dtype = torch.float64,
    share: ContextShare = WHOLE,
) -> Iterator[tuple[slice, Tensor]]:
    """Tokens, and their scores [n, positions] of `dtype`: -inf where a token does not see, or the position has no block.

    Tokens that see nothing are left out. width: no position from there on is scored. share: what the cache holds; scores are of
    own positions, in order. Synchronises the host on a GPU.
    """
    num_blocks, block_size, _ = index_cache.shape
    rows = CacheRows(index_cache, INDEX)
    lengths = seq_lens.clamp(0, min(block_table.shape[1] * block_size * share.size, INT32_MAX)).tolist()
    for request, (begin, end) in enumerate(pairwise(query_start_loc.tolist())):
        after_own = lengths[request] - end  # added to a token, its own position
        begin, end = max(begin, 0), min(end, q.shape[0])
        own = share.length(lengths[request])
        seen = own if width is None else min(own, width)
        if begin >= end or seen == 0 or num_blocks == 0:
            continue
        position = torch.arange(seen, dtype=torch.int64, device=q.device)
        block = block_table[request, position // block_size].long()
        valid = (block >= 0) & (block < num_blocks)
        keys, _ = rows.values(torch.where(valid, block * block_size + position % block_size, 0), dtype)  # [seen, 128]
        keys.masked_fill_(~valid.unsqueeze(1), 0)
        reached = share.positions(position)
        step = max(1, _CHUNK_ELEMENTS // (max(q.shape[1], INDEX_HEAD_SIZE) * seen))
        for start in range(begin, end, step):
            some = slice(start, min(start + step, end))
            token = torch.arange(some.start, some.stop, dtype=torch.int64, device=q.device).unsqueeze(1)
            found = scores(q[some], weights[some], keys)
            yield some, torch.where(valid & (reached <= token + after_own), found, -math.inf)
