# SPDX-License-Identifier: Apache-2.0
"""indexer_logits: how much each query token wants each cached token of its request: what the top-k is taken of."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Final, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import Primitive
from mla_portable.contracts.rules import check_disjoint, check_tensor, shape_of
from mla_portable.contracts.values import refuse
from mla_portable.dispatch import find
from mla_portable.layouts import INDEX_HEAD_SIZE
from mla_portable.primitives._reference import isolated, products

__all__ = ["INDEXER_LOGITS", "IndexerLogits", "indexer_logits"]

_CHUNK_ELEMENTS: Final = 1 << 25
"""Of the scores of all heads that are held at a time: 256 MiB in float64."""


class IndexerLogits(Protocol):
    """How much each query token wants each cached token of its request: what the top-k is taken of.

    q [T, H, 128] bf16 and weights [T, H] float32, of the indexer's own heads; index_cache [blocks, block_size, 128] bf16;
    query_start_loc [R + 1] int32, ascending; seq_lens [R] int32; block_table [R, columns] int32. A length counts as one in
    [0, columns * block_size]. Token t belongs to the request r with query_start_loc[r] <= t < query_start_loc[r + 1], at
    position seq_lens[r] - query_start_loc[r + 1] + t. The first value may be below or above 0 and the last above or below T:
    such values are not clamped, so the last token of a request is at its last position, though only tokens 0 to T - 1 exist.
    Values that do not ascend give unspecified scores, and no access outside of the arguments.
    Returns out [T, N] float32: out[t, s] = sum_h weights[t, h] * max(q[t, h] . k[s], 0) for positions s up to the token's
    own. All else is -inf: later positions, those without a block in the cache, and tokens that belong to no request.
    """

    def __call__(
        self,
        q: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        out: Tensor,
    ) -> Tensor: ...


def indexer_logits(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    out: Tensor,
    backend: str | None = None,
) -> Tensor:
    """Score the cached tokens of each request for each of its query tokens: what the top-k is taken of.

    Args:
        q: [T, H, 128] bf16. weights: [T, H] float32, of either sign. H are the indexer's own heads, 64 in DeepSeek-V3.2.
        index_cache: [blocks, block_size, 128] bf16, the indexer's keys; blocks may lie further apart than a block is long.
        query_start_loc: [R + 1] int32, ascending: the first token of each request, and the end of the last one. Token t of
            request r is at position seq_lens[r] - query_start_loc[r + 1] + t. On a CPU the values must lie in [0, T]. On a GPU
            they are not read back: tokens outside of [0, T) do not exist and shift no position.
        seq_lens: [R] int32, context and query; a length counts as at most columns * block_size.
        block_table: [R, columns] int32.
        out: [T, N] float32, written; column s is position s of the token's request.
        backend: see `mla_portable.primitives`.
    Returns: `out` = sum over heads of weights * max(q.k, 0); -inf where a token sees no key: past its own position, without
        a block, or where the token belongs to no request.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe.
    """
    facts = check(q, weights, index_cache, query_start_loc, seq_lens, block_table, out)
    return find(INDEXER_LOGITS, backend, q, facts).call(
        q, weights, index_cache, query_start_loc, seq_lens, block_table, out=out
    )


def check(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    out: Tensor,
) -> tuple[object, ...]:
    """Raise InvalidArgument, or return the facts."""
    where, int32, axes = "indexer_logits", torch.int32, "[blocks, block_size, 128]"
    num_tokens, num_heads, _ = shape_of(where, "q", q, 3, "[T, H, 128]")
    device = q.device
    check_tensor(where, "q", q, torch.bfloat16, (num_tokens, num_heads, INDEX_HEAD_SIZE), device, "[T, H, 128]")
    if num_heads < 1:
        refuse(where, "q", f"shape {list(q.shape)}", "[T, H, 128] with H of at least 1")
    check_tensor(where, "weights", weights, torch.float32, (num_tokens, num_heads), device, "[T, H]")
    blocks, block_size, _ = shape_of(where, "index_cache", index_cache, 3, axes)
    check_tensor(where, "index_cache", index_cache, torch.bfloat16, (blocks, block_size, INDEX_HEAD_SIZE), device, axes)
    if block_size < 1:
        refuse(where, "index_cache", f"block_size {block_size}", "a block of at least 1 token")
    block_stride, row_stride, _ = index_cache.stride()
    length = block_size * INDEX_HEAD_SIZE
    if (row_stride != INDEX_HEAD_SIZE and block_size > 1) or (block_stride < length and blocks > 1):
        limit = f"[{length} or more, {INDEX_HEAD_SIZE}, 1]: whole rows, one after the other within a block"
        refuse(where, "index_cache", f"strides {list(index_cache.stride())}", limit, "Slice the cache by blocks only.")
    num_reqs, columns = shape_of(where, "block_table", block_table, 2, "[R, columns]")
    check_tensor(where, "query_start_loc", query_start_loc, int32, (num_reqs + 1,), device, "[R + 1]")
    if query_start_loc.is_cpu:  # nothing has to be read back
        first, last = int(query_start_loc[0]), int(query_start_loc[-1])
        if first < 0 or last > num_tokens:
            refuse(where, "query_start_loc", f"values from {first} to {last}", f"values from 0 to T = {num_tokens}")
    check_tensor(where, "seq_lens", seq_lens, int32, (num_reqs,), device, "[R]")
    check_tensor(where, "block_table", block_table, int32, (num_reqs, columns), device, "[R, columns]")
    width = shape_of(where, "out", out, 2, "[T, N]")[1]
    check_tensor(where, "out", out, torch.float32, (num_tokens, width), device, "[T, N]")
    read = {
        "q": q,
        "weights": weights,
        "index_cache": index_cache,
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
        "block_table": block_table,
    }
    check_disjoint(where, {"out": out}, read)
    return num_heads, block_size


@isolated
def reference(
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
    """Weighted sums over heads of what is positive of q.k.

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


INDEXER_LOGITS: Final = Primitive[IndexerLogits](
    "indexer_logits",
    module=__name__,
    facts=("num_heads", "block_size"),
    results=("out",),
    typical={"num_heads": 64},
    reference=reference,
    reference_float32=partial(reference, dtype=torch.float32),
    sources=("mla_portable.primitives._reference",),
)
