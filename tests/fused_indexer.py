# SPDX-License-Identifier: Apache-2.0
"""A plugin whose indexer is one operation for scores and top-k, as several vendors ship it: no score leaves it.

The operation takes block tables as they are: an entry that names no block reads one of another request, as a device would read
other memory. So the plugin declares `Support.needs_whole_tables`. It lists the best position first, and nothing sorts them.
`logits` is an operation of scores that reads tables so too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mla_portable.contracts import Implementation, Registrar, Support, hookimpl
from mla_portable.layouts import INDEX_FP8
from mla_portable.primitives import INDEXER_LOGITS, INDEXER_SELECT

WIDTH = 128


def _keys(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """[length, 128] float64 of a request, from [blocks, size, 128 or 132]."""
    size = pages.shape[1]
    blocks = pages[table[: -(-length // size)].long() % len(pages)].flatten(1)
    if pages.dtype == torch.bfloat16:
        return blocks.view(-1, WIDTH)[:length].double()
    codes = blocks[:, : size * WIDTH].contiguous().view(torch.float8_e4m3fn).view(-1, WIDTH)
    scales = blocks[:, size * WIDTH :].contiguous().view(torch.float32).view(-1, 1)
    return (codes.float().double() * scales.double())[:length]


def _scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """[n] float32 of a token; -inf for NaN."""
    products = (queries.float().double() @ keys.T).clamp(min=0)
    return (weights.double() @ products).float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def lightning(
    q: Tensor, pages: Tensor, weights: Tensor, query_ends: list[int], key_lengths: list[int], table: Tensor, count: int
) -> Tensor:
    """[T, count] int32: positions of the best-scored keys, the best first, then -1. Requests follow one another from 0 on."""
    chosen = torch.full((len(q), count), -1, dtype=torch.int32)
    begin = 0
    for request, (end, length) in enumerate(zip(query_ends, key_lengths, strict=True)):
        keys = _keys(pages, table[request], length)
        for token in range(begin, end):
            seen = max(0, length - (end - 1 - token))
            scores = _scores(q[token], weights[token], keys[:seen])
            order = scores.sort(descending=True, stable=True).indices[: min(count, int((scores > -torch.inf).sum()))]
            chosen[token, : len(order)] = order.int()
        begin = end
    return chosen


def _requests(
    q: Tensor, pages: Tensor, query_start_loc: Tensor, seq_lens: Tensor, block_table: Tensor
) -> tuple[slice, list[int], list[int]]:
    """The tokens of requests, and ends and key lengths as the operation counts them, from the first of those tokens."""
    starts = query_start_loc.tolist()
    first, last = min(max(starts[0], 0), len(q)), min(max(starts[-1], 0), len(q))
    most = block_table.shape[1] * pages.shape[1]
    ends = [min(max(end, first), last) - first for end in starts[1:]]
    # of a request whose last tokens do not exist, the last one that does sees fewer keys
    cut = [end - first - there for end, there in zip(starts[1:], ends, strict=True)]
    lengths = [max(min(max(length, 0), most) - gone, 0) for length, gone in zip(seq_lens.tolist(), cut, strict=True)]
    return slice(first, max(first, last)), ends, lengths


class Fused:
    """indexer_select as `lightning`. calls: of it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self,
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
        self.calls += 1
        out = torch.empty((len(q), topk), dtype=torch.int32) if out is None else out
        out.fill_(-1)
        some, ends, lengths = _requests(q, index_cache, query_start_loc, seq_lens, block_table)
        if some.stop > some.start and len(index_cache):
            out[some] = lightning(q[some], index_cache, weights[some], ends, lengths, block_table, topk)
        return out


def logits(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    out: Tensor,
) -> Tensor:
    """indexer_logits; every entry of a table that a length reaches is read."""
    out.fill_(-torch.inf)
    some, ends, lengths = _requests(q, index_cache, query_start_loc, seq_lens, block_table)
    begin = 0
    for request, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        keys = _keys(index_cache, block_table[request], length) if end > begin else None
        for token in range(begin, end):
            seen = max(0, min(length - (end - 1 - token), out.shape[1]))
            out[some.start + token, :seen] = _scores(q[some][token], weights[some][token], keys[:seen])
        begin = end
    return out


class Plugin:
    """`fused.indexer`. Support as given, but for what it declares of tables."""

    def __init__(self, **support: object) -> None:
        self.fused = Fused()
        self.support = {
            "source": "a stand-in",
            "device_types": ("cpu",),
            "kv_layouts": (INDEX_FP8.name, "index_bf16"),
            "needs_whole_tables": True,
            "ordered": False,
            **support,
        }

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        calls: dict[object, Callable[..., Tensor]] = {INDEXER_SELECT: self.fused, INDEXER_LOGITS: logits}
        for primitive, call in calls.items():
            support = Support(**self.support)
            registrar.add(Implementation("fused.indexer", primitive, support, lambda request, call=call: call, preference=5))
