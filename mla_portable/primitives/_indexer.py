# SPDX-License-Identifier: Apache-2.0
"""What the indexer's primitives share: the check of queries against a paged index cache, and the reference's scores.

A score is sum_h weights[t, h] * max(q[t, h] . k[s], 0), of token t and position s of its request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from mla_portable.contracts import DecodeSchedule
from mla_portable.contracts.share import WHOLE, ContextShare
from mla_portable.contracts.values import INT32_MAX, describe, refuse, rounded_rows
from mla_portable.dispatch import Served
from mla_portable.kit.rules import check_cache, check_dense, check_disjoint
from mla_portable.kit.tensor_table import Axes, Checked, TensorTable
from mla_portable.layouts import INDEX, INDEX_HEAD_SIZE, CacheLayout, index_query_dtype
from mla_portable.primitives._reference import CacheRows, products

_CHUNK_ELEMENTS: Final = 1 << 21
"""Of the scores of all heads that are held at a time: 16 MiB in float64."""
_CHUNK_KEYS: Final = 1 << 13
"""Keys that are held at a time: 8 MiB in float64, and as much again while they are decoded."""


QUERIES: Final = {
    "q": Axes("T H width", not_empty="H"),
    "weights": Axes("T H", torch.float32),
}
"""The first rows of the indexer's tables, whose `width` is INDEX_HEAD_SIZE."""
PAGES: Final = {
    **QUERIES,
    "index_cache": Checked(),
    "block_table": Axes("R columns", torch.int32),
    "query_start_loc": Axes("R+1", torch.int32),
    "seq_lens": Axes("R", torch.int32),
}
"""Those of indexer_logits and indexer_select."""


def query_dtype(where: str, q: Tensor, layout: CacheLayout) -> torch.dtype:
    """The dtype of queries of keys in `layout`. Raises: InvalidArgument for bf16 ones of quantised keys, with the remedy."""
    dtype = index_query_dtype(layout)
    if layout.is_quantized and q.dtype == torch.bfloat16:
        refuse(where, "q", q.dtype, f"{dtype} for {layout.name} keys", "Quantise q, and multiply weights by its scales.")
    return dtype


class PageFacts(NamedTuple):
    """The fields of a Request that the arguments of indexer_logits decide, and those that indexer_select shares with it."""

    kv_layout: str
    block_size: int | None
    cache_alignment: int
    uneven_blocks: bool
    num_heads: int
    rows: int | None


def check_pages(
    table: TensorTable,
    pages: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    results: tuple[Tensor | None, ...],
    sizes: dict[str, int],
    schedule: DecodeSchedule | None,
    kv_layout: str | None = None,
) -> PageFacts:
    """The arguments that indexer_logits and indexer_select have in common, and what they write.

    Args:
        table: of PAGES, then rows for `results`. pages: q, weights, index_cache, query_start_loc, seq_lens, block_table.
        sizes: of further given axes, K of indexer_select among them; all others are added. kv_layout: of the cache, None to
            infer it.
    Raises: InvalidArgument; PlanMismatch for a schedule of another call.
    """
    where, topk = table.where, sizes.get("K")
    q, weights, index_cache, query_start_loc, seq_lens, block_table = pages
    check_dense(where, "q", q, "[T, H, 128]")
    cache = check_cache(where, "index_cache", index_cache, q.device, INDEX, kv_layout=kv_layout)
    sizes["width"] = INDEX_HEAD_SIZE
    tensors = q, weights, index_cache, block_table, query_start_loc, seq_lens, *results
    table.check(tensors, sizes, query_dtype(where, q, cache.layout))
    if query_start_loc.is_cpu:  # nothing has to be read back
        first, last = int(query_start_loc[0]), int(query_start_loc[-1])
        if first < 0 or last > sizes["T"]:
            refuse(where, "query_start_loc", f"values from {first} to {last}", f"values from 0 to T = {sizes['T']}")
    rows = rounded_rows(sizes["T"])
    if schedule is not None:
        if not isinstance(schedule, DecodeSchedule):  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse(where, "schedule", describe(schedule), "a schedule from a planner, or None")
        schedule.check_indexer(where, sizes["T"], sizes["R"], sizes["H"], topk, q.device)
        scratch = schedule.scratch(where, 0)
        if scratch:
            named = dict(zip(table.rows, tensors, strict=True))
            written = {name: each for name, each in named.items() if table.rows[name].written}
            check_disjoint(where, written, {name: each for name, each in named.items() if name not in written}, scratch)
        rows = None  # it was planned for the implementation that serves every number of rows
    return PageFacts(*cache, sizes["H"], rows)


def schedule_keyword(where: str, served: Served[Any], schedule: DecodeSchedule | None) -> dict[str, Any]:
    """`schedule` for an implementation that takes one; nothing for others, whose callables need not have the keyword.

    Raises: PlanMismatch where it takes another kind.
    """
    if schedule is None or served.schedule_type is None:
        return {}
    served.check_schedule(where, schedule)
    return {"schedule": schedule}


def query_values(q: Tensor, dtype: torch.dtype) -> Tensor:
    """q as numbers of `dtype`, exactly."""
    return q.float().to(dtype)


def scores(q: Tensor, weights: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
    """[n, K] of the dtype of `keys` [K, 128]: -inf where a token does not see the key, and where the score is NaN.

    For n tokens: q [n, H, 128], weights [n, H] float32, seen [n, K] bool.
    """
    each = products(query_values(q, keys.dtype), keys).relu_()  # [n, H, K]
    found = each.mul_(weights.to(keys.dtype).unsqueeze(-1)).sum(dim=1)
    return found.masked_fill_(~seen | found.isnan(), -math.inf)


def seen_scores(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    kv_layout: str | None = None,
    width: int | None = None,
    dtype: torch.dtype = torch.float64,
    share: ContextShare = WHOLE,
) -> Iterator[tuple[slice, Tensor]]:
    """Tokens, and their scores [n, positions] of `dtype`: -inf where a token sees nothing, without a block, and for NaN.

    Tokens that see nothing are left out. kv_layout: of the cache, None to infer it. width: no position from there on is scored.
    share: what the cache holds; scores are of own positions, in order. Synchronises the host on a GPU.
    """
    num_blocks, block_size, _ = index_cache.shape
    rows = CacheRows(index_cache, INDEX, kv_layout)
    lengths = seq_lens.clamp(0, min(block_table.shape[1] * block_size * share.size, INT32_MAX)).tolist()
    for request, (begin, end) in enumerate(pairwise(query_start_loc.tolist())):
        after_own = lengths[request] - end  # added to a token, its own position
        begin, end = max(begin, 0), min(end, q.shape[0])
        own = share.length(lengths[request])
        seen = own if width is None else min(own, width)
        if begin >= end or seen == 0 or num_blocks == 0:
            continue
        step = max(1, _CHUNK_ELEMENTS // (max(q.shape[1], INDEX_HEAD_SIZE) * min(seen, _CHUNK_KEYS)))
        tiles = torch.arange(seen, dtype=torch.int64, device=q.device).split(_CHUNK_KEYS)
        keys = [_keys(rows, index_cache, block_table[request], tiles[0], dtype)] if len(tiles) == 1 else []
        for start in range(begin, end, step):
            some = slice(start, min(start + step, end))
            token = torch.arange(some.start, some.stop, dtype=torch.int64, device=q.device).unsqueeze(1)
            found = torch.empty((some.stop - some.start, seen), dtype=dtype, device=q.device)
            for position, columns in zip(tiles, found.split(_CHUNK_KEYS, dim=1), strict=True):
                values, valid = keys[0] if keys else _keys(rows, index_cache, block_table[request], position, dtype)
                inside = valid & (share.positions(position) <= token + after_own)
                columns.copy_(scores(q[some], weights[some], values, inside))
            yield some, found


def _keys(
    rows: CacheRows, index_cache: Tensor, table_row: Tensor, position: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The keys [n, 128] of `dtype` at positions [n] of a request, 0 where the cache has none, and where it has one [n]."""
    num_blocks, block_size, _ = index_cache.shape
    block = table_row[position // block_size].long()
    valid = (block >= 0) & (block < num_blocks)
    keys, _ = rows.values(torch.where(valid, block * block_size + position % block_size, 0), dtype)
    return keys.masked_fill_(~valid.unsqueeze(1), 0), valid
