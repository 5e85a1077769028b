# SPDX-License-Identifier: Apache-2.0
"""indexer_logits: scores of the cached tokens of each request, for each of its query tokens; top-k selects from them."""

from __future__ import annotations

import math
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import DecodeSchedule, Primitive
from mla_portable.dispatch import find, opaque
from mla_portable.kit.tensor_table import Axes, TensorTable
from mla_portable.layouts import INDEX
from mla_portable.models import DEEPSEEK_V32
from mla_portable.primitives._indexer import PAGES, PageFacts, check_pages, schedule_keyword, seen_scores
from mla_portable.primitives._reference import isolated

__all__ = ["INDEXER_LOGITS", "IndexerLogits", "indexer_logits"]

TENSORS: Final = TensorTable("indexer_logits", {**PAGES, "out": Axes("T N", torch.float32, written=True)}, given="width")


class IndexerLogits(Protocol):
    """Scores of the cached tokens of each request, for each of its query tokens.

    q [T, H, 128] and weights [T, H] float32, of the indexer's own heads; index_cache [blocks, block_size, 128] bf16, with q in
    bf16, or [blocks, block_size, 132] uint8 (`mla_portable.layouts.index`), with q in e4m3 and its scales in `weights`;
    query_start_loc [R + 1] int32, ascending; seq_lens [R] int32; block_table [R, columns] int32. A length counts as one in
    [0, columns * block_size]. Token t belongs to the request r with query_start_loc[r] <= t < query_start_loc[r + 1], at
    position seq_lens[r] - query_start_loc[r + 1] + t. The first value may be below or above 0 and the last above or below T:
    such values are not clamped, so the last token of a request is at its last position, though only tokens 0 to T - 1 exist.
    Values that do not ascend give unspecified scores, and no access outside of the arguments.
    Returns out [T, N] float32: out[t, s] = sum_h weights[t, h] * max(q[t, h] . k[s], 0) for positions s up to the token's
    own. All else is -inf: later positions, those without a block in the cache, and tokens that belong to no request.
    So is a score that is NaN, of a key, query or weight; max(NaN, 0) is NaN.
    What declares `Support.needs_whole_tables` is called only where every position below a length has a block
    (`Request.whole_tables`); what declares `needs_uniform_query_len`, only where each request has T / R tokens.

    An implementation with a `schedule_kind` takes one more keyword, `schedule`, which is passed where there is one. It was
    planned for so many tokens and requests, all of which have equally many.
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


@opaque
def indexer_logits(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    schedule: DecodeSchedule | None = None,
    out: Tensor,
    kv_layout: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """Score the cached tokens of each request, for each of its query tokens.

    Args:
        q: [T, H, 128] bf16 for a bf16 cache, float8_e4m3fn for an FP8 cache. H are the indexer's own heads, 64 in
            DeepSeek-V3.2. weights: [T, H] float32, of either sign; scales of q are multiplied into them.
        index_cache: the indexer's keys, [blocks, block_size, 128] bf16 or [blocks, block_size, 132] uint8, whose blocks are
            block_size * 128 e4m3 bytes and then block_size float32 scales. Blocks may lie further apart than a block is long.
        query_start_loc: [R + 1] int32, ascending: the first token of each request, and the end of the last one. Token t of
            request r is at position seq_lens[r] - query_start_loc[r + 1] + t. On a CPU the values must lie in [0, T]. On a GPU
            they are not read back: tokens outside of [0, T) do not exist and shift no position.
        seq_lens: [R] int32, context and query; a length counts as at most columns * block_size.
        block_table: [R, columns] int32.
        schedule: from a planner of the kind that serves, for T tokens of R requests; None: one is made in the call.
        out: [T, N] float32, written; column s is position s of the token's request.
        kv_layout, backend: see `mla_portable.primitives`.
    Returns: `out` = sum over heads of weights * max(q.k, 0); -inf where a token sees no key: past its own position, without
        a block, or where the token belongs to no request. A score that is NaN is -inf.
    Raises: InvalidArgument, PlanMismatch (a schedule made for another call or another kind of kernel), UnknownBackend,
        UnsupportedRequest. Graph-safe.
    """
    facts = check(q, weights, index_cache, query_start_loc, seq_lens, block_table, schedule, out, kv_layout)
    served = find(INDEXER_LOGITS, backend, q, facts)
    own = schedule_keyword(TENSORS.where, served, schedule)
    return served.call(q, weights, index_cache, query_start_loc, seq_lens, block_table, out=out, **own)


def check(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    schedule: DecodeSchedule | None,
    out: Tensor,
    kv_layout: str | None = None,
) -> PageFacts:
    """Raise InvalidArgument, or PlanMismatch for the schedule, or return the facts."""
    pages = q, weights, index_cache, query_start_loc, seq_lens, block_table
    return check_pages(TENSORS, pages, (out,), {}, schedule, kv_layout)


@isolated
def reference(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    schedule: DecodeSchedule | None = None,
    out: Tensor,
    kv_layout: str | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Weighted sums over heads of the positive part of q.k.

    `schedule` is not used. `dtype` is that of the arithmetic. Synchronises the host on a GPU. Not graph-safe.
    """
    out.fill_(-math.inf)
    pages = index_cache, query_start_loc, seq_lens, block_table
    for rows, found in seen_scores(q, weights, *pages, kv_layout=kv_layout, width=out.shape[1], dtype=dtype):
        out[rows, : found.shape[1]] = found
    return out


INDEXER_LOGITS: Final = Primitive[IndexerLogits](
    "indexer_logits",
    module=__name__,
    facts=PageFacts._fields,
    results=("out",),
    stated=("uniform_query_len", "whole_tables"),
    cache=INDEX,
    typical={"num_heads": DEEPSEEK_V32.index_heads, "kv_layout": "index_fp8"},
    reference=reference,
    reference_float32=partial(reference, dtype=torch.float32),
)
