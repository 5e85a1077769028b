# SPDX-License-Identifier: Apache-2.0
"""indexer_select: the positions of the K best-scored cached tokens of each query token, without a matrix of all scores."""

from __future__ import annotations

import math
from functools import partial
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import DecodeSchedule, Primitive
from mla_portable.contracts.share import ContextShare, check_share
from mla_portable.contracts.values import INT32_MAX, check_count, check_flag, refuse
from mla_portable.dispatch import find, opaque
from mla_portable.kit.tensor_table import Axes, TensorTable
from mla_portable.layouts import INDEX
from mla_portable.primitives._indexer import PAGES, check_pages, schedule_keyword, seen_scores
from mla_portable.primitives._reference import isolated
from mla_portable.primitives.indexer_logits import INDEXER_LOGITS
from mla_portable.primitives.topk_select import check_result_size
from mla_portable.primitives.topk_select import reference as select

__all__ = ["INDEXER_SELECT", "IndexerSelect", "indexer_select"]

TENSORS: Final = TensorTable(
    "indexer_select",
    {
        **PAGES,
        "out": Axes("T K", torch.int32, optional=True, written=True),
        "scores_out": Axes("T K", torch.float32, optional=True, written=True),
    },
    given="width K",
)


class IndexerSelect(Protocol):
    """The positions of the K best-scored cached tokens of each query token, in ascending order; in any where none is asked for.

    Arguments as of `IndexerLogits`, but for `out` [T, topk] int32, written and returned: positions in the token's request,
    then -1. What is bound for a request without `Request.ordered` may list them in any order, in front of -1. Chosen are the
    largest of the scores that indexer_logits gives, in float32, as topk_select chooses; -inf and NaN never. A token that sees
    at most topk positions gets all of them that have a block; they need not be scored, so NaN may be chosen there. Graph-safe
    with `out`; at most 64 MiB of scratch may be allocated on the current stream, at any batch and context. Scores of as many
    tokens as fit are computed at a time, so a wide block table costs time: pass the columns in use.

    With dcp_size > 1 cache and block table hold the own positions of dcp_rank (`ContextShare`), and K of these are chosen among
    those that the token sees. scores_out [T, topk] float32 is written: the score of each entry of `out`, -inf where that is -1.
    An implementation that does not declare `Support.context_parallel` is called without these four arguments. One that declares
    `Support.needs_whole_tables` is called only where every position below a length has a block (`Request.whole_tables`).

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
        topk: int,
        dcp_size: int = 1,
        dcp_rank: int = 0,
        interleave: int = 1,
        out: Tensor | None = None,
        scores_out: Tensor | None = None,
    ) -> Tensor: ...


@opaque
def indexer_select(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    topk: int,
    ordered: bool = True,
    dcp_size: int = 1,
    dcp_rank: int = 0,
    interleave: int = 1,
    schedule: DecodeSchedule | None = None,
    out: Tensor | None = None,
    scores_out: Tensor | None = None,
    kv_layout: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """The positions of the K best-scored cached tokens of each query token: `topk_select` of `indexer_logits`.

    The matrix of all scores is never stored: scratch is at most 64 MiB at any batch and context.

    Args:
        q, weights, index_cache, query_start_loc, seq_lens, block_table: as of `indexer_logits`.
        topk: K, at least 1. out: [T, K] int32, written; it overlaps no input. kv_layout, backend: see
            `mla_portable.primitives`.
        ordered: False allows any order of the positions, still in front of -1, which may differ from call to call.
        dcp_size, dcp_rank, interleave: `index_cache` and `block_table` hold the share of one rank of a `ContextShare`, in
            blocks of a multiple of `interleave`; `seq_lens` and positions are those of the whole sequence. Chosen are the best
            of the rank's own. The K best of all are among what the ranks choose: those of the highest scores there, and of
            equal scores the lower positions.
        schedule: as of `indexer_logits`.
        scores_out: [T, K] float32, written: the score of each chosen position, -inf where there is none.
    Returns: [T, K] int32, positions in the token's request, ascending, then -1 where the token sees fewer than K keys. Of equal
        scores the lower positions are chosen. Scores of NaN or -inf are not, but a token that sees at most K keys may get all
        that have a block, unscored.
    Raises: InvalidArgument, PlanMismatch (a schedule made for another call or another kind of kernel), UnknownBackend,
        UnsupportedRequest. Graph-safe with `out`.
    """
    pages = q, weights, index_cache, query_start_loc, seq_lens, block_table
    facts = check(*pages, topk, ordered, dcp_size, dcp_rank, interleave, schedule, out, scores_out, kv_layout)
    served = find(INDEXER_SELECT, backend, q, facts)
    own = schedule_keyword(TENSORS.where, served, schedule)
    if dcp_size == 1 and scores_out is None:
        return served.call(*pages, topk=topk, out=out, **own)
    share = {"dcp_size": dcp_size, "dcp_rank": dcp_rank, "interleave": interleave}
    return served.call(*pages, topk=topk, out=out, scores_out=scores_out, **share, **own)


class Facts(NamedTuple):
    """The fields of a Request that a call's arguments decide: first those of `PageFacts`."""

    kv_layout: str
    block_size: int | None
    cache_alignment: int
    uneven_blocks: bool
    num_heads: int
    rows: int | None
    topk: int
    ordered: bool
    context_parallel: bool


def check(
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk: int,
    ordered: bool,
    dcp_size: int,
    dcp_rank: int,
    interleave: int,
    schedule: DecodeSchedule | None,
    out: Tensor | None,
    scores_out: Tensor | None,
    kv_layout: str | None = None,
) -> Facts:
    """Raise InvalidArgument, or PlanMismatch for the schedule, or return the facts."""
    where = TENSORS.where
    check_count(where, "topk", topk, 1, INT32_MAX)
    check_flag(where, "ordered", ordered)
    check_share(where, dcp_size, dcp_rank, interleave)
    pages = q, weights, index_cache, query_start_loc, seq_lens, block_table
    facts = check_pages(TENSORS, pages, (out, scores_out), {"K": topk}, schedule, kv_layout)
    check_result_size(where, topk, q.shape[0], out)
    if index_cache.shape[1] % interleave:
        expected = f"a divisor of block_size, {index_cache.shape[1]}"
        refuse(where, "interleave", str(interleave), expected)
    return Facts(*facts, topk, ordered, dcp_size > 1 or scores_out is not None)


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
    dcp_size: int = 1,
    dcp_rank: int = 0,
    interleave: int = 1,
    schedule: DecodeSchedule | None = None,
    out: Tensor | None = None,
    scores_out: Tensor | None = None,
    kv_layout: str | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """A stable sort of the scores of some tokens at a time.

    `schedule` is not used. `dtype` is that of the scores; they are chosen in float32.
    """
    share = ContextShare(dcp_size, dcp_rank, interleave)
    if out is None:
        out = torch.empty((q.shape[0], topk), dtype=torch.int32, device=q.device)
    out.fill_(-1)
    if scores_out is not None:
        scores_out.fill_(-math.inf)
    pages = q, weights, index_cache, query_start_loc, seq_lens, block_table
    for rows, found in seen_scores(*pages, kv_layout=kv_layout, dtype=dtype, share=share):
        starts = torch.zeros(found.shape[0], dtype=torch.int32, device=q.device)
        ends = torch.full_like(starts, found.shape[1])
        own = select(found.float(), starts, ends, topk=topk, out=out[rows]).long()
        if scores_out is not None:
            scores_out[rows] = found.float().gather(1, own.clamp(min=0)).masked_fill(own < 0, -math.inf)
        out[rows] = share.positions(own).int()
    return out


INDEXER_SELECT: Final = Primitive[IndexerSelect](
    "indexer_select",
    module=__name__,
    facts=Facts._fields,
    results=("out",),
    stated=("whole_tables",),
    cache=INDEX,
    typical=INDEXER_LOGITS.typical,
    reference=reference,
    reference_float32=partial(reference, dtype=torch.float32),
)
