# SPDX-License-Identifier: Apache-2.0
"""How indexer_select is tried and judged: order and number of the positions, and by how much a chosen score is too low."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import ContextShare, DeviceFacts, Implementation, Request, Support
from mla_portable.judge.problems.base import Problems
from mla_portable.judge.problems.bench import BLOCK_SIZE, CHUNK_ROWS, Bench, BenchProblem, KernelCase, Workshop, spread
from mla_portable.judge.problems.compare import BITS, Finding, Tolerance, limit_of
from mla_portable.judge.problems.indexer_pages import (
    SCORES,
    PageParams,
    format_of,
    needs_a_promise,
    page_of_request,
    page_params,
    scored,
    spoiled,
)
from mla_portable.judge.problems.shapes import accepted, block_sizes, heads, one_storage_each, storages, topks
from mla_portable.judge.problems.stage import Guarded, Problem, Results, Stage
from mla_portable.judge.problems.topk_select import in_order, order_of, orders
from mla_portable.layouts import INDEX_FP8, INDEX_HEAD_SIZE, LAYOUTS, CacheLayout, index_query_dtype
from mla_portable.primitives import INDEXER_SELECT

_SHARES: Final = ("none", "whole", "first_of_2", "last_of_8", "middle_of_3", "last_of_2_by_block")
"""Shares that meet every other value; the rest of `indexer_pages.SHARES` has cases of its own."""
TOLERANCES: Final = {
    ("any", "order"): BITS,
    **{
        (storage, "score"): Tolerance(each.abs, 2 * each.rel, "two scores, each off by its tolerance, may change places", "row")
        for (storage, _), each in SCORES.items()
    },
    **{(storage, "listed"): each for (storage, _), each in SCORES.items()},
}


def indexer_select(
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
    kv_layout: str | None = None,
) -> Tensor:
    """[T, N] float64: the scores that positions are chosen by, -inf where none may be and NaN where the score is.

    N is what the table reaches.
    """
    share, width = ContextShare(dcp_size, dcp_rank, interleave), block_table.shape[1] * index_cache.shape[1] * dcp_size
    return scored(q, weights, index_cache, query_start_loc, seq_lens, block_table, width, share, kv_layout)[0]


def findings(storage: str, got: dict[str, Tensor], want: dict[str, Tensor], *, ordered: bool = True) -> Iterator[Finding]:
    """out [T, K] against the scores [T, N] in `want`, of sums of the "terms" there.

    order: a row lists as many positions as it must, ascending where `ordered`, each once, then -1; each may be chosen (of NaN:
    `_open_scores`). score: how far the lowest chosen score lies below the highest that was left out, of the row's largest
    magnitude; of its largest terms for FP8. listed: where `got` has "scores_out" [T, K], how far each is from that of its
    position, likewise; -inf where there is no position.
    """
    if not ordered:
        names = [name for name in ("out", "scores_out") if name in got]
        got = dict(zip(names, in_order(*(got[name].cpu() for name in names)), strict=True))
    out = got["out"].cpu().long()
    scores = _open_scores(out, want["out"], scored="scores_out" in got)
    topk, open_ = out.shape[1], scores > -math.inf
    count = open_.sum(dim=1).clamp(max=topk)
    named = torch.arange(topk) < count.unsqueeze(1)
    inside = (out >= 0) & (out < scores.shape[1])
    place = torch.where(inside & named, out, 0)
    sound = (~named | (inside & open_.gather(1, place) if scores.shape[1] else inside)) & (named | (out == -1))
    sound[:, 1:] &= ~named[:, 1:] | (out[:, 1:] > out[:, :-1])
    wrong = (~sound).nonzero().tolist()
    if wrong:
        row, entry = wrong[0]
        expected = "a position that the token sees, above the one before it" if named[row, entry] else "-1"
        what = f"got {int(out[row, entry])}, expected {expected}"
        message = f"order[{row}, {entry}]: {what}; {len(wrong)} of {sound.numel()} are not in order"
        yield Finding("order", len(wrong), 0, message, f"entry {entry} of a row: {what}", f"row {row}")
        return
    yield Finding("order", 0, 0)
    if not scores.shape[1]:
        return
    taken = torch.zeros_like(open_)
    taken.scatter_(1, place, named)
    taken[:, 0] = ((out == 0) & named).any(dim=1)  # what is not named was placed there
    lowest = torch.where(taken, scores, math.inf).amin(dim=1)
    highest = torch.where(open_ & ~taken, scores, -math.inf).amax(dim=1)
    limit = limit_of(TOLERANCES, storage, "score")
    magnitude = want["terms"].nan_to_num(nan=0.0) if storage == "fp8" else scores.abs()
    size = torch.where(open_, magnitude, 0).amax(dim=1).clamp(min=limit.abs / limit.rel)
    error = ((highest - lowest) / size).clamp(min=0).nan_to_num(nan=0.0)
    worst = int(error.argmax()) if error.numel() else 0
    value = float(error[worst]) if error.numel() else 0.0
    message = ""
    if value > limit.rel:
        message = f"row {worst}: a chosen score is {float(lowest[worst]):g}, one that was left out {float(highest[worst]):g}"
    yield Finding("score", value, limit.rel, message, "a lower score was chosen" if message else "", f"row {worst}")
    if "scores_out" in got:
        limit = limit_of(TOLERANCES, storage, "listed")
        listed, expected = got["scores_out"].cpu().double(), torch.where(named, scores.gather(1, place), -math.inf)
        error = torch.where(listed == expected, 0, (listed - expected).abs() / size.unsqueeze(1)).nan_to_num(nan=math.inf)
        worst = int(error.argmax()) if error.numel() else 0
        value = float(error.view(-1)[worst]) if error.numel() else 0.0
        message = ""
        if value > limit.rel:
            row, entry = divmod(worst, topk)
            message = f"scores_out[{row}, {entry}]: {float(listed[row, entry]):g}, expected {float(expected[row, entry]):g}"
        yield Finding("listed", value, limit.rel, message, "not the score of the position" if message else "", "")


def _open_scores(out: Tensor, scores: Tensor, *, scored: bool) -> Tensor:
    """The scores [T, N] that a choice `out` [T, K] is judged by: NaN is -inf, and so never chosen.

    A row that sees at most K keys need not be scored, unless `scored`: its scores were asked for. If such a row lists a key of
    NaN, it must list all of its keys: NaN is 0 then.
    """
    lost, (rows, width) = scores.isnan(), scores.shape
    place = torch.where((out >= 0) & (out < width), out, width)
    listed = torch.zeros(rows, width + 1, dtype=torch.bool).scatter_(1, place, True)[:, :width]
    seen = (lost | (scores > -math.inf)).sum(dim=1)
    unscored = (listed & lost).any(dim=1) & (seen <= out.shape[1]) & (not scored)
    return torch.where(lost, torch.where(unscored, 0.0, -math.inf).unsqueeze(1), scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSelectParams(PageParams):
    """One indexer_select call.

    Attributes:
        topk: K. order: of the positions, "ascending"; "none", any.
    """

    primitive = INDEXER_SELECT
    says = (
        "{kv}! {scale_format} h{heads}! b{block_size}! k{topk}! {batch}! share_{share} tail{tail} starts_{starts} "
        "table_{table} in{inputs} out_{outputs} {blocks} stale{stale} absent_{absent} promised{promised} order_{order} "
        "scheduled{scheduled}"
    )
    asks = f"{PageParams.asks} topk context_parallel=share ordered=order"
    topk: int
    order: str = "ascending"

    @property
    def ragged_blocks(self) -> int:
        """So many that tokens see more than K keys, two blocks of which are missing."""
        return 4 + -(-self.topk // self.block_size)

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        stage = Stage(device)
        pages = self.pages(seed, stage)
        shape = (pages.args["q"].shape[0], self.topk)
        keywords: dict[str, Any] = {"topk": self.topk, **self.planned(pages, device, facts, self.topk)}
        if self.outputs != "fresh":
            keywords["out"] = stage.write("out", shape, torch.int32, strided=self.outputs == "views")
        share = self.held
        expected, terms = scored(**pages.arguments, width=pages.capacity, share=share, kv_layout=self.kv)
        want = {"out": expected, "terms": terms}
        judge = partial(findings, format_of(pages.arguments["q"]), want=want, ordered=self.order != "none")
        if self.share != "none":
            listed = stage.write("scores_out", shape, torch.float32, strided=self.outputs == "views")
            keywords |= {"scores_out": listed, **share.arguments}
            judge = partial(_with_scores, judge, stage.writes["scores_out"])
        return Problem(stage, dict(pages.args), keywords, {"out": (shape, torch.int32)}, judge, frozenset({"out"}))


def _with_scores(judge: Callable[[Results], Iterator[Finding]], written: Guarded, results: Results) -> Iterator[Finding]:
    """Judge `scores_out` too, of which `results` has the storage."""
    storage, view = results["scores_out"], written.view
    yield written.outside("scores_out", storage)
    yield from judge({**results, "scores_out": storage.as_strided(view.shape, view.stride(), view.storage_offset())})


def _params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[IndexerSelectParams]:
    """What a level asks of an implementation of indexer_select."""
    widths = accepted(implementation, facts, "topk", [1, *topks(implementation, facts, level)])
    widths = widths[: None if level != "smoke" else 2]
    if facts.device_type == "cpu":
        widths = [topk for topk in widths if topk <= 128] or widths[:1]
    shared = True in accepted(implementation, facts, "context_parallel", [True])
    shares = list(_SHARES) if shared else ["none"]
    axes: dict[str, list[Any]] = {"share": shares, "topk": widths, "outputs": ["fresh", "packed", "views"]}
    axes |= orders(implementation.support)
    order = axes.get("order", ["ascending"])[0]
    plain, few = {"topk": widths[-1], "order": order}, {"topk": widths[:2][-1]}
    found = list(page_params(IndexerSelectParams, implementation, facts, level, axes, plain=plain, few=few, whole={}))
    yield from found
    if level != "smoke" and order != "none":  # what gives an order may be asked for none
        yield from (replace(each, order="none") for each in found if each.batch == "chunk" and each.absent == "none")
    if shared and level != "smoke":
        tokens, each = block_sizes(implementation, facts, level)[-1], heads(implementation, facts, level)
        fewest, many = each[0], each[-1]
        promised = needs_a_promise(implementation.support)
        sizes: dict[str, Any] = {"heads": many, "block_size": tokens, "promised": promised, "order": order, **few}
        for kv, scale_format in storages(implementation):
            for batch, share in (("long", "middle_of_3"), ("chunk", "last_of_2_by_block")):
                yield IndexerSelectParams(kv=kv, scale_format=scale_format, **sizes, batch=batch, share=share)
        for kv, scale_format in one_storage_each(storages(implementation)):
            base = replace(IndexerSelectParams(kv=kv, scale_format=scale_format, **sizes), heads=fewest)
            yield from (replace(base, share=share, stale=True) for share in ("first_of_3", "first_of_2_by_block"))
            yield replace(base, share="first_of_3", batch="full")
            if order != "none":
                yield replace(base, share="first_of_3", batch="chunk", order="none")
            yield from spoiled(implementation, facts, replace(base, heads=many, share="first_of_2", batch="chunk"))


def _of_request(request: Request) -> IndexerSelectParams:
    shared = request.context_parallel
    share = "first_of_3" if shared else "none"  # a first rank owns less of a round than the round has
    own: dict[str, Any] = {"topk": request.topk or 64, "share": share, "stale": shared, "order": order_of(request)}
    return page_of_request(IndexerSelectParams, request, **own)


def _variants(request: Request, support: Support) -> Iterator[tuple[str, Request]]:
    request = request.but(whole_tables=support.needs_whole_tables, ordered=support.ordered)
    yield "ragged", request
    if support.context_parallel:
        yield "share", request.but(context_parallel=True)


def _shape(case: KernelCase) -> str:
    """The sizes in words."""
    kind = "T" if case.rows >= CHUNK_ROWS else "batch"
    return f"{kind} {case.rows}, context {case.width}, H {case.num_heads}, K {case.topk}"


def _inputs(workshop: Workshop, case: KernelCase, layout: CacheLayout, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, weights, pages and seq_lens of requests, whose pages `table` names: random, or a model's; each has all keys."""
    tokens, requests, dtype = case.rows, table.shape[0], index_query_dtype(layout)
    if case.selection is None:
        pages, heads = workshop.index_pages(case, table.numel()), case.num_heads or 1
        q, weights = workshop.normal(tokens, heads, INDEX_HEAD_SIZE).to(dtype), workshop.normal(tokens, heads).float()
        return q, weights, pages, torch.full((requests,), case.width, device=workshop.device, dtype=torch.int32)
    index = case.selection.index_inputs(tokens, one_request=requests == 1 < tokens, device=workshop.device)
    keys = torch.nn.functional.pad(index.keys, (0, 0, 0, table.shape[1] * BLOCK_SIZE - len(index.keys)))
    own = workshop.pages_of(layout, keys, case.scale_format)
    pages = torch.empty((table.numel(), *own.shape[1:]), dtype=own.dtype, device=own.device)
    pages[table.long().flatten()] = own.repeat(requests, 1, 1)
    seq_lens = index.seen if requests == tokens else index.seen[-1:]
    if dtype.itemsize > 1:
        return index.queries.to(dtype), index.weights, pages, seq_lens
    scale = index.queries.float().abs().amax(dim=2, keepdim=True).clamp(min=1e-10) / torch.finfo(dtype).max
    return (index.queries.float() / scale).to(dtype), index.weights * scale.squeeze(2), pages, seq_lens


def _make(workshop: Workshop, case: KernelCase) -> BenchProblem:
    """A case of indexer_select."""
    layout, device = LAYOUTS[case.kv_layout or INDEX_FP8.name], workshop.device
    tokens, heads, topk, context = case.rows, case.num_heads or 1, case.topk or 1, case.width
    requests = 1 if tokens >= CHUNK_ROWS else tokens
    columns = -(-context // BLOCK_SIZE)
    int32 = torch.int32
    single = torch.tensor([0, tokens], device=device, dtype=int32)
    table = workshop.permutation(requests * columns).view(requests, columns).to(int32)
    q, weights, index_cache, seq_lens = _inputs(workshop, case, layout, table)
    out = workshop.empty(tokens, topk, dtype=int32)
    arguments = {
        "q": q,
        "weights": weights,
        "index_cache": index_cache,
        "query_start_loc": single if requests == 1 else torch.arange(tokens + 1, device=device, dtype=int32),
        "seq_lens": seq_lens,
        "block_table": table,
        "topk": topk,
        "out": out,
    }
    judged = spread(tokens, workshop.check_rows, device)

    @cache
    def wanted() -> tuple[Tensor, Tensor]:
        """[n, N] float64: each judged token as a request of its own; what the sums add."""
        count = judged.shape[0]
        owner = judged if requests > 1 else torch.zeros_like(judged)
        own = seq_lens[judged].long() if requests > 1 else context - (tokens - 1 - judged)
        starts = torch.arange(count + 1, dtype=int32)
        pages = q[judged], weights[judged], index_cache, starts, own, table[owner]
        return scored(*pages, columns * BLOCK_SIZE, kv_layout=layout.name)

    def judge(results: Results) -> Iterator[Finding]:
        expected = dict[str, Tensor](zip(("out", "terms"), wanted(), strict=True))
        yield from findings(format_of(q), {"out": results["out"][judged]}, expected, ordered=False)

    seen = tokens * context - tokens * (tokens - 1) // 2 if requests == 1 else int(seq_lens.sum())
    flops = 2 * heads * INDEX_HEAD_SIZE * seen
    moved = int(seq_lens.sum()) * layout.row_bytes + q.nbytes + out.nbytes
    request = workshop.request(case, block_size=BLOCK_SIZE, whole_tables=True, ordered=False)  # as engines ask
    # matrix units multiply e4m3 twice as fast as the bfloat16 that the roofline bound is measured with
    flops = flops // 2 if layout.is_quantized else flops
    return BenchProblem(case, request, arguments, 6, {"out": out}, moved, flops, judge)


PROBLEMS: Final = Problems(
    primitive=INDEXER_SELECT,
    oracle=indexer_select,
    tolerances=TOLERANCES,
    findings=findings,
    params=_params,
    of_request=lambda request, name: _of_request(request),
    sizes=("num_heads", "block_size", "topk"),
    variants=_variants,
    rows=5,
    bench=Bench(
        rows=(1, 16, 64),
        layouts=("index_fp8",),
        heads=(64,),
        make=_make,
        shape=_shape,
        width=lambda rows, topk: 32_768,
        takes="index",
    ),
)
