# SPDX-License-Identifier: Apache-2.0
"""How pack_selection is tried and judged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation, Request
from mla_portable.judge.problems.base import STRENGTH, Params, Problems, one_variant
from mla_portable.judge.problems.bench import Bench, BenchProblem, KernelCase, Workshop, spread
from mla_portable.judge.problems.compare import BITS, Finding, same_bits
from mla_portable.judge.problems.draw import generator
from mla_portable.judge.problems.exact import INT32_MAX, INT32_MIN
from mla_portable.judge.problems.shapes import MANY_ROWS, can_capture, can_hold_many, topks
from mla_portable.judge.problems.stage import Problem, Results, Stage
from mla_portable.primitives import PACK_SELECTION

TOLERANCES: Final = {("any", "out"): BITS}
ROWS: Final = 6
LONG: Final = 40_000
"""Positions of a row that no block of threads packs alone."""


def pack_selection(topk_indices: Tensor, *, width: int, starts: Tensor | None = None) -> Tensor:
    """[T, W] int32: position by position, in Python's integers."""
    rows: list[list[int]] = []
    begins = [0] * topk_indices.shape[0] if starts is None else starts.tolist()
    for positions, begin in zip(topk_indices.tolist(), begins, strict=True):
        mask = 0
        for position in {p for p in positions if p >= 0 and begin <= p < begin + width}:
            mask |= 1 << (position - begin)
        words = [mask >> 32 * w & 0xFFFFFFFF for w in range(-(-width // 32))]
        rows.append([word - (word >> 31 << 32) for word in words])
    return torch.tensor(rows, dtype=torch.int32, device="cpu").view(len(rows), -(-width // 32))


def findings(storage: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> Iterator[Finding]:
    """Words, exactly."""
    yield same_bits("out", got["out"], want["out"])


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSelectionParams(Params):
    """One pack_selection call.

    Attributes:
        topk: K. width: positions of a row.
        positions: "sorted", then -1; "shuffled", with -1 anywhere; "duplicates", few of them, many times; "absent", none in
            half of the rows; "corpus", negative ones, those just past the row and the largest of int32 among them;
            "limits", those at the ends of int32, of the row and of what is no position, in every row.
        starts: "none"; "mixed", 0, some, far from every position, negative, next to the largest position; "limits", at the
            ends of int32.
        tokens: T. inputs: "packed"; "views"; "odd", rows K + 1 apart, so that only the first one is aligned to more than a
            position. outputs: "packed" or "views"; also "fresh", allocated by the callee.
    """

    primitive = PACK_SELECTION
    says = "k{topk}! w{width}! {positions}! starts_{starts} t{tokens} in{inputs} out_{outputs}"
    asks = "topk"
    topk: int
    width: int
    positions: str = "shuffled"
    starts: str = "none"
    tokens: int = ROWS
    inputs: str = "packed"
    outputs: str = "fresh"

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage, shape = generator(seed), Stage(device), (self.tokens, self.topk)
        reach = 2 * self.width  # of positions, half of which lie past a row that starts at 0
        if self.positions in ("sorted", "shuffled"):
            chosen = torch.stack(
                [torch.randperm(max(reach, self.topk), generator=g) for _ in range(self.tokens)] or [torch.empty(0)]
            )
            chosen = chosen[:, : self.topk] if self.tokens else torch.empty(shape)
            chosen = torch.where(chosen < reach, chosen, -1)
        else:
            chosen = torch.randint(0, reach, shape, generator=g)
        if self.positions == "sorted":
            chosen = torch.where(chosen < 0, reach, chosen).sort(dim=1).values
            chosen = torch.where(chosen < reach, chosen, -1)
        elif self.positions == "duplicates":
            chosen = chosen[:, torch.arange(self.topk) % 3 % self.topk]
        elif self.positions == "absent":
            chosen[::2] = -1
        elif self.positions == "corpus":
            odd = torch.tensor([-1, self.width, self.width - 1, INT32_MIN, INT32_MAX, -self.width, 0, self.width + 1])
            at = torch.rand(shape, generator=g) < 0.5
            chosen = torch.where(at, odd[torch.arange(self.topk) % len(odd)], chosen)
        elif self.positions == "limits":
            ends = torch.tensor([INT32_MIN, INT32_MAX, INT32_MIN + 1, INT32_MAX - 1, -1, 0, self.width - 1, self.width])
            chosen = ends[torch.arange(self.topk) % len(ends)].expand(shape)
        if self.positions == "shuffled":
            chosen = chosen.masked_fill(torch.rand(shape, generator=g) < 0.2, -1)
        positions = chosen.to(torch.int32)
        starts = None
        if self.starts == "mixed":
            few = torch.tensor([0, self.width // 2 + 1, reach + 5, -3, INT32_MAX - 2, INT32_MIN])
            starts = few[torch.arange(self.tokens) % len(few)].to(torch.int32)
        elif self.starts == "limits":
            ends = torch.tensor([INT32_MIN, INT32_MIN + 1, -1, 0, INT32_MAX - 1, INT32_MAX])
            starts = ends[torch.arange(self.tokens) % len(ends)].to(torch.int32)
        placed = positions
        if self.inputs == "odd":  # behind each row a position that is not its own
            placed = torch.cat([positions, torch.zeros_like(positions[:, :1])], dim=1)[:, :-1]
        args = {"topk_indices": stage.read("topk_indices", placed, strided=self.inputs == "views")}
        keywords: dict[str, Any] = {"width": self.width}
        if starts is not None:
            keywords["starts"] = stage.read("starts", starts)
        result = (self.tokens, -(-self.width // 32))
        if self.outputs != "fresh":
            keywords["out"] = stage.write("out", result, torch.int32, strided=self.outputs == "views")
        want = pack_selection(positions, width=self.width, starts=starts)
        judge = partial(findings, "any", want={"out": want})
        return Problem(stage, args, keywords, {"out": (result, torch.int32)}, judge, frozenset({"out"}))


def _params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[PackSelectionParams]:
    """What a level asks of an implementation of pack_selection."""
    widths = topks(implementation, facts, level)
    axes: dict[str, list[Any]] = {
        "topk": [1, *widths][: None if level != "smoke" else 2],
        "width": [300, 1, 32, 4_100],
        "positions": ["shuffled", "sorted", "duplicates", "absent", "corpus"],
        "starts": ["none", "mixed"],
        "inputs": ["packed", "views"],
        "outputs": ["fresh", "packed", "views"],
        "run": ["once", "repeat"],
    }
    if facts.device_type == "cpu":
        axes["topk"] = [topk for topk in axes["topk"] if topk <= 128]
    yield from PackSelectionParams.covering(implementation, facts, axes, strength=STRENGTH[level])
    base = PackSelectionParams(topk=axes["topk"][-1], width=300)
    yield replace(base, tokens=0)
    if level == "smoke":
        return
    short = replace(base, topk=next((topk for topk in axes["topk"] if topk % 4 == 0), base.topk))
    yield replace(short, inputs="odd")
    yield replace(short, positions="limits", starts="limits")
    yield from (replace(base, width=LONG, positions=each, starts="mixed") for each in axes["positions"])
    if can_hold_many(facts, level):
        yield replace(base, topk=widths[0], positions="duplicates", tokens=MANY_ROWS)
    if can_capture(implementation, facts):
        yield replace(base, run="graph", outputs="packed")


def _of_request(request: Request, name: str) -> PackSelectionParams:
    return PackSelectionParams(topk=request.topk or 64, width=300, positions="corpus", starts="mixed", outputs="packed")


def _make(workshop: Workshop, case: KernelCase) -> BenchProblem:
    """A case that is timed: distinct positions, ascending; or those of a prompt's last tokens, as an indexer lists them."""
    lists = workshop.neighbours(case, torch.arange(case.width - case.rows + 1, case.width + 1))
    chosen = _drawn(workshop, case) if lists is None else lists[0]
    out = workshop.empty(case.rows, -(-case.width // 32), dtype=torch.int32)
    judged = spread(case.rows, workshop.check_rows, workshop.device)

    @cache
    def wanted() -> Tensor:
        return pack_selection(chosen[judged].cpu(), width=case.width)

    def judge(results: Results) -> Iterator[Finding]:
        yield from findings("any", {"out": results["out"][judged].cpu()}, {"out": wanted()})

    arguments = {"topk_indices": chosen, "width": case.width, "out": out}
    moved = chosen.nbytes + out.nbytes
    return BenchProblem(case, workshop.request(case), arguments, 1, {"out": out}, moved, 0, judge)


def _drawn(workshop: Workshop, case: KernelCase) -> Tensor:
    """[T, K] int32, 1,024 rows at a time, for their scores."""
    parts = (min(1024, case.rows - begin) for begin in range(0, case.rows, 1024))
    drawn = (workshop.scores(rows, case.width).topk(case.topk or 1, dim=1).indices.sort(dim=1).values for rows in parts)
    return torch.cat([each.to(torch.int32) for each in drawn])


PROBLEMS: Final = Problems(
    primitive=PACK_SELECTION,
    oracle=pack_selection,
    tolerances=TOLERANCES,
    findings=findings,
    params=_params,
    of_request=_of_request,
    sizes=("topk",),
    variants=one_variant("corpus"),
    rows=ROWS,
    bench=Bench(
        rows=(8_192,),
        heads=(),
        make=_make,
        shape=lambda case: f"T {case.rows}, K {case.topk}, width {case.width}",
        width=lambda rows, topk: max(rows, topk),
        takes="neighbours",
    ),
)
