# SPDX-License-Identifier: Apache-2.0
"""indexer_select: the positions of the K best-scored cached tokens of each query token, without a matrix of all scores."""

from __future__ import annotations

from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import Primitive
from mla_portable.contracts.rules import check_disjoint, check_tensor
from mla_portable.contracts.values import INT32_MAX, check_count
from mla_portable.dispatch import find
from mla_portable.layouts import INDEX
from mla_portable.primitives._indexer import check_pages, seen_scores
from mla_portable.primitives._reference import isolated
from mla_portable.primitives.indexer_logits import INDEXER_LOGITS
from mla_portable.primitives.topk_select import reference as select

__all__ = ["INDEXER_SELECT", "IndexerSelect", "indexer_select"]


class IndexerSelect(Protocol):
    """The positions of the K best-scored cached tokens of each query token, in ascending order.

    Arguments as of `IndexerLogits`, but for `out` [T, topk] int32, written and returned: positions in the token's request,
    then -1. Chosen are the largest of the scores that indexer_logits gives, in float32, as topk_select chooses; -inf and NaN
    never. Graph-safe with `out`; at most 64 MiB of scratch may be allocated on the current stream, at any batch and context.
    Scores of as many tokens as fit are computed at a time, so a wide block table costs time: pass the columns in use.
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
        topk: int,
        out: Tensor | None = None,
    ) -> Tensor: ...


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
    backend: str | None = None,
) -> Tensor:
    """The positions of the K best-scored cached tokens of each query token: `topk_select` of `indexer_logits`.

    The matrix of all scores never exists: scratch is at most 64 MiB at any batch and context.

    Args:
        q, weights, index_cache, query_start_loc, seq_lens, block_table: as of `indexer_logits`.
        topk: K, at least 1. out: [T, K] int32, written; it overlaps no input. backend: see `mla_portable.primitives`.
    Returns: [T, K] int32, positions in the token's request, ascending, then -1 where the token sees fewer than K keys. Of equal
        scores the lower positions are chosen.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe with `out`.
    """
    facts = check(q, weights, index_cache, query_start_loc, seq_lens, block_table, topk, out)
    return find(INDEXER_SELECT, backend, q, facts).call(
        q, weights, index_cache, query_start_loc, seq_lens, block_table, topk=topk, out=out
    )


def check(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk: int,
    out: Tensor | None,
) -> tuple[object, ...]:
    """Raise InvalidArgument, or return the facts."""
    where = "indexer_select"
    facts, read = check_pages(where, q, weights, index_cache, query_start_loc, seq_lens, block_table)
    check_count(where, "topk", topk, 1, INT32_MAX)
    if out is not None:
        check_tensor(where, "out", out, torch.int32, (q.shape[0], topk), q.device, "[T, K]")
        check_disjoint(where, {"out": out}, read)
    return *facts, topk


@isolated
def reference(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    topk: int,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """A stable sort of the scores of some tokens at a time. `dtype` is that of the scores; they are chosen in float32."""
    if out is None:
        out = torch.empty((q.shape[0], topk), dtype=torch.int32, device=q.device)
    out.fill_(-1)
    for rows, found in seen_scores(q, weights, index_cache, query_start_loc, seq_lens, block_table, dtype=dtype):
        starts = torch.zeros(found.shape[0], dtype=torch.int32, device=q.device)
        ends = torch.full_like(starts, found.shape[1])
        select(found.float(), starts, ends, topk=topk, out=out[rows])
    return out


INDEXER_SELECT: Final = Primitive[IndexerSelect](
    "indexer_select",
    module=__name__,
    facts=(*INDEXER_LOGITS.facts, "topk"),
    results=("out",),
    cache=INDEX,
    typical=INDEXER_LOGITS.typical,
    reference=reference,
    reference_float32=partial(reference, dtype=torch.float32),
)
