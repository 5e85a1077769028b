# SPDX-License-Identifier: Apache-2.0
"""How topk_select is tried and judged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation, Request, Support
from mla_portable.judge.problems.base import STRENGTH, Params, Problems
from mla_portable.judge.problems.bench import CHUNK_ROWS, Bench, BenchProblem, KernelCase, Workshop, spread
from mla_portable.judge.problems.compare import BITS, Finding, same_bits
from mla_portable.judge.problems.draw import generator
from mla_portable.judge.problems.exact import INT32_MAX, INT32_MIN
from mla_portable.judge.problems.shapes import MANY_ROWS, accepted, can_capture, can_hold_many, topks
from mla_portable.judge.problems.stage import Problem, Results, Stage
from mla_portable.primitives import TOPK_SELECT

TOLERANCES: Final = {("any", "out"): BITS}
ROWS: Final = 6
BUSY_ROWS: Final = 300
"""More rows than a GPU has multiprocessors: a kernel may have another build for so many."""
EDGES: Final = (
    *((5, INT32_MIN), (INT32_MAX, INT32_MIN + 1), (INT32_MIN, INT32_MAX)),
    *((7, INT32_MAX), (INT32_MIN + 1, 2), (INT32_MAX, INT32_MAX)),
)
"""Starts and ends whose differences, and what they are rounded up to, may wrap."""
LONG: Final = 20_000
"""Scores of a row that no block of threads holds in registers."""
_FEW_TIES, _MANY_TIES, _TIES_BEHIND = 40, 2_500, 6_000
"""Equal scores of "parted": a whole tile of 4,096 scores lies between, and they are more than a tile together."""


def topk_select(logits: Tensor, row_starts: Tensor, row_ends: Tensor, *, topk: int) -> Tensor:
    """[T, topk] int32: score by score, the larger first, of equal ones the earlier."""
    out = torch.full((logits.shape[0], topk), -1, dtype=torch.int32, device="cpu")
    for t, (start, end) in enumerate(zip(row_starts.tolist(), row_ends.tolist(), strict=True)):
        row: list[float] = logits[t, max(start, 0) : max(end, 0)].tolist()
        ranked = sorted((-score, position) for position, score in enumerate(row) if score > -math.inf)
        best = [position for _, position in ranked[:topk]]
        out[t, : len(best)] = torch.tensor(sorted(best), dtype=torch.int32)
    return out


def findings(storage: str, got: dict[str, Tensor], want: dict[str, Tensor], *, ordered: bool = True) -> Iterator[Finding]:
    """Positions, exactly; unless `ordered`, those in front of the first negative one in any order."""
    yield same_bits("out", got["out"] if ordered else in_order(got["out"])[0], want["out"])


def in_order(out: Tensor, *beside: Tensor) -> tuple[Tensor, ...]:
    """`out` [T, K] with the positions in front of a row's first negative one sorted, and others [T, K] moved along."""
    leading = (out >= 0).cumprod(dim=1).bool()
    order = torch.where(leading, out.long(), INT32_MAX + 1).argsort(dim=1, stable=True)
    return tuple(each.gather(1, order) for each in (out, *beside))


@dataclass(frozen=True, slots=True, kw_only=True)
class TopkSelectParams(Params):
    """One topk_select call.

    Attributes:
        topk: K. length: N.
        scores: "plain"; "ties", few different ones; "equal", all of them; "ascending", the largest last; "holes", -inf, NaN,
            +inf and zeros of both signs among them; "tied holes", the same among few different ones; "absent", nothing but
            -inf; "zeros", of both signs, and few others; "parted", the largest, all equal, lie at both ends of a LONG row, at
            its front fewer than K or more.
        ranges: "whole"; "mixed": ends before K, at K and past N, negative starts, a start past the end, one column; "edges":
            EDGES in turn.
        rows: T.
        order: of the positions, "ascending"; "none", any.
        inputs, outputs: "packed" or "views"; outputs also "fresh", allocated by the callee.
    """

    primitive = TOPK_SELECT
    says = "k{topk}! n{length}! {scores} ranges_{ranges} t{rows} order_{order} in{inputs} out_{outputs}"
    asks = "topk ordered=order"
    topk: int
    length: int
    scores: str = "plain"
    ranges: str = "whole"
    rows: int = ROWS
    order: str = "ascending"
    inputs: str = "packed"
    outputs: str = "fresh"

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage, apart = generator(seed), Stage(device), self.inputs == "views"
        logits = torch.randn(self.rows, self.length, generator=g)
        if self.scores in ("ties", "tied holes"):
            logits = (2 * logits).round() / 2
        elif self.scores == "equal":
            logits.fill_(-3.5)
        elif self.scores == "ascending":
            logits = logits.sort(dim=1).values
        elif self.scores == "absent":
            logits.fill_(-math.inf)
        elif self.scores == "zeros":
            signed = torch.zeros_like(logits).copysign(logits)
            signed[:, ::50] = logits[:, ::50]
            logits = signed
        elif self.scores == "parted":
            logits.clamp_(max=1)
            for row in range(self.rows):
                logits[row, : _FEW_TIES if row % 2 else _MANY_TIES] = logits[row, -_TIES_BEHIND:] = 2
        if self.scores in ("holes", "tied holes"):
            for i, value in enumerate((-math.inf, math.nan, math.inf, 0.0, -0.0)):
                logits[:, i::9] = value
        starts, ends = torch.zeros(self.rows, dtype=torch.int32), torch.full((self.rows,), self.length, dtype=torch.int32)
        if self.ranges == "mixed":
            starts = torch.tensor([0, 3, -7, 5, self.length + 9, 1], dtype=torch.int32)
            ends = torch.tensor([self.topk, self.length + 100, self.length, 2, self.length, 2], dtype=torch.int32)
        elif self.ranges == "edges":
            starts, ends = torch.tensor(EDGES, dtype=torch.int32)[torch.arange(self.rows) % len(EDGES)].T.contiguous()
        args = {
            "logits": stage.read("logits", logits, strided=apart),
            "row_starts": stage.read("row_starts", starts),
            "row_ends": stage.read("row_ends", ends),
        }
        shape = (self.rows, self.topk)
        keywords: dict[str, Any] = {"topk": self.topk}
        if self.outputs != "fresh":
            keywords["out"] = stage.write("out", shape, torch.int32, strided=self.outputs == "views")
        want = topk_select(logits, starts, ends, topk=self.topk)

        judge = partial(findings, "any", want={"out": want}, ordered=self.order != "none")
        return Problem(stage, args, keywords, {"out": (shape, torch.int32)}, judge, frozenset({"out"}))


def _params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[TopkSelectParams]:
    """What a level asks of an implementation of topk_select."""
    widths = topks(implementation, facts, level)
    axes: dict[str, list[Any]] = {
        "topk": accepted(implementation, facts, "topk", [1, *widths])[: None if level != "smoke" else 2],
        "length": [300, 1, 3000],
        "scores": ["plain", "ties", "equal", "ascending", "holes", "absent"],
        "ranges": ["whole", "mixed"],
        "inputs": ["packed", "views"],
        "outputs": ["fresh", "packed", "views"],
        **orders(implementation.support),
    }
    if facts.device_type == "cpu":
        axes["topk"] = [topk for topk in axes["topk"] if topk <= 128] or axes["topk"][:1]
    yield from TopkSelectParams.covering(implementation, facts, axes, strength=STRENGTH[level])
    if level == "smoke":
        return
    order = axes.get("order", ["ascending"])[0]
    base = TopkSelectParams(topk=axes["topk"][-1], length=LONG, ranges="mixed", order=order)
    yield from (replace(base, scores=scores) for scores in axes["scores"])
    yield replace(base, scores="parted")
    yield TopkSelectParams(topk=widths[0], length=300, scores="zeros", order=order)
    few = TopkSelectParams(topk=widths[0], length=300, ranges="edges", order=order)
    if order != "none":
        short = replace(few, ranges="mixed")
        yield from (
            replace(each, scores=scores, order="none") for each in (base, short) for scores in ("plain", "ties", "holes")
        )
    yield from (replace(few, length=length) for length in (300, 5000, LONG))
    if facts.device_type != "cpu":
        yield replace(few, length=LONG, rows=BUSY_ROWS)
    if can_hold_many(facts, level):
        yield replace(few, length=40, ranges="whole", rows=MANY_ROWS)
    if can_capture(implementation, facts):
        yield replace(base, run="graph", outputs="packed")


def orders(support: Support) -> dict[str, list[Any]]:
    """Axes of `run`, and of `order` where the implementation gives none: two of its calls need not agree in it."""
    return {"run": ["once", "repeat"]} if support.ordered else {"run": ["once"], "order": ["none"]}


def order_of(request: Request) -> str:
    """The parameter of a request."""
    return "ascending" if request.ordered else "none"


def _of_request(request: Request, name: str) -> TopkSelectParams:
    topk = request.topk or 64
    length = max(300, 2 * topk)  # so that there is something to leave out
    order = order_of(request)
    return TopkSelectParams(topk=topk, length=length, scores="tied holes", ranges="mixed", order=order, outputs="packed")


def _variants(request: Request, support: Support) -> Iterator[tuple[str, Request]]:
    yield "holes", request.but(ordered=support.ordered)


def _scores(workshop: Workshop, case: KernelCase) -> tuple[Tensor, Tensor]:
    """[T, N] float32, and the ends of rows [T] int32."""
    if case.selection is None:
        logits = workshop.scores(case.rows, case.width).mul_(2).sub_(1).erfinv_()
        return logits, torch.full((case.rows,), case.width, dtype=torch.int32, device=workshop.device)
    index = case.selection.index_inputs(case.rows, one_request=case.rows >= CHUNK_ROWS, device=workshop.device)
    keys = index.keys.float()
    rows = [weights @ (queries.float() @ keys.T).relu() for queries, weights in zip(index.queries, index.weights, strict=True)]
    return torch.stack(rows), index.seen


def _make(workshop: Workshop, case: KernelCase) -> BenchProblem:
    """A case that is timed: rows searched from end to end, of float32 scores of unit variance that are hardly ever equal.

    With an indexer's inputs rows hold its scores, in float32, and end where the token's keys do.
    """
    device, topk = workshop.device, case.topk or 1
    logits, ends = _scores(workshop, case)
    starts = torch.zeros_like(ends)
    out = workshop.empty(case.rows, topk, dtype=torch.int32)
    arguments = {"logits": logits, "row_starts": starts, "row_ends": ends, "topk": topk, "out": out}
    judged = spread(case.rows, workshop.check_rows, device)

    @cache
    def wanted() -> Tensor:
        return topk_select(logits[judged].cpu(), starts[judged], ends[judged], topk=topk)

    def judge(results: Results) -> Iterator[Finding]:
        yield from findings("any", {"out": results["out"][judged].cpu()}, {"out": wanted()}, ordered=False)

    request = workshop.request(case, ordered=False)  # as engines ask
    return BenchProblem(case, request, arguments, 3, {"out": out}, logits.nbytes + out.nbytes, 0, judge)


PROBLEMS: Final = Problems(
    primitive=TOPK_SELECT,
    oracle=topk_select,
    tolerances=TOLERANCES,
    findings=findings,
    params=_params,
    of_request=_of_request,
    sizes=("topk",),
    variants=_variants,
    rows=ROWS,
    bench=Bench(
        rows=(1, 16, 64),
        heads=(),
        make=_make,
        shape=lambda case: f"T {case.rows}, N {case.width}, K {case.topk}",
        width=lambda rows, topk: 32_768,
        takes="index",
    ),
)
