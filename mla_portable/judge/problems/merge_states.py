# SPDX-License-Identifier: Apache-2.0
"""How merge_states is tried and judged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation, Request
from mla_portable.judge.problems.attention import judge_state
from mla_portable.judge.problems.base import STRENGTH, Params, Problems, one_variant
from mla_portable.judge.problems.bench import Bench, BenchProblem, KernelCase, Workshop, spread
from mla_portable.judge.problems.compare import Finding, Tolerance
from mla_portable.judge.problems.draw import generator
from mla_portable.judge.problems.shapes import MANY_ROWS, can_capture, can_hold_many
from mla_portable.judge.problems.stage import Problem, Results, Stage
from mla_portable.layouts import KV_LORA_RANK
from mla_portable.primitives import MERGE_STATES

TOLERANCES: Final = {
    ("float32", "out"): Tolerance(
        1e-6, 5e-5, "exp(lse - total) in float32, where lse may be 300 and has steps of 3e-5", "row", cosine=1e-9
    ),
    ("bfloat16", "out"): Tolerance(1e-6, 4.2e-3, "one rounding to bf16, 2^-8", "row", cosine=1e-5),
    ("float16", "out"): Tolerance(1e-6, 6e-4, "one rounding to fp16, 2^-11", "row", cosine=1e-6),
    ("any", "lse"): Tolerance(1e-5, 1e-6, "float32 exp and log"),
}
SHAPES: Final[dict[str, tuple[int, ...]]] = {"th": (3, 5, 512), "bsh": (2, 2, 16, 512), "t": (7, 100), "one": (1, 1)}
_PARTS: Final = 2
_JUDGED_ROWS: Final = 64
DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """out [..., D] and lse [...], float64."""
    parts, part_lses = outs.detach().cpu().double(), lses.detach().cpu().double()
    part_lses = torch.where(part_lses == math.inf, -math.inf, part_lses)  # empty, as FlashMLA says it
    total = torch.zeros(part_lses.shape[1:], dtype=torch.float64, device="cpu")
    out = torch.zeros(parts.shape[1:], dtype=torch.float64, device="cpu")
    top = part_lses.amax(dim=0) if part_lses.shape[0] else total
    for part, part_lse in zip(parts, part_lses, strict=True):
        counts = part_lse != -math.inf
        weight = torch.where(counts, torch.exp(part_lse - top), 0.0)
        total = total + weight
        out = out + torch.where(counts[..., None], weight[..., None] * part, 0.0)
    empty = total == 0
    lse = torch.where(empty, -math.inf, top + total.log())
    return torch.where(empty[..., None], 0.0, out / total[..., None]), lse


findings = partial(judge_state, TOLERANCES)
"""out [.., D] and lse [..]; storage is the dtype of out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeStatesParams(Params):
    """One merge_states call.

    Attributes:
        parts: P. shape: a key of SHAPES, [..., D]; "empty" has no rows, "many" MANY_ROWS. dtype: of outs, a key of DTYPES.
        dead: which parts have lse -inf, with NaN in their out: "none"; "some", each part of some rows; "rows", some rows
            wholly; "mixed", both, and the dead ones of part 1 have lse +inf; "all".
        size: "plain"; "large", lse of +-300, past what exp can take; "apart", one part outweighs the others by e^200;
            "huge", lse near 3e4, -3e4 and 1e6, where float32 has steps of up to 0.06.
        inputs: "packed" or "views". heads: of the shape "th".
    """

    primitive = MERGE_STATES
    says = "p{parts}! {shape}! {dtype}! dead_{dead} {size} h{heads} in{inputs}"
    parts: int
    shape: str = "th"
    dtype: str = "fp32"
    dead: str = "none"
    size: str = "plain"
    inputs: str = "packed"
    heads: int = 5

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage, dtype = generator(seed), Stage(device), DTYPES[self.dtype]
        shape = {**SHAPES, "empty": (0, 5, 512), "many": (MANY_ROWS, 16), "th": (3, self.heads, 512)}[self.shape]
        outs = torch.randn(self.parts, *shape, generator=g).to(dtype)
        lses = 3 * torch.randn(self.parts, *shape[:-1], generator=g)
        if self.size == "large":
            lses = lses + torch.tensor([300.0, -300.0])[torch.arange(lses[0].numel()) % 2].view(lses.shape[1:])
        elif self.size == "apart":
            lses[0] += 200
        elif self.size == "huge":
            lses = lses + torch.tensor([3e4, -3e4, 1e6])[torch.arange(lses[0].numel()) % 3].view(lses.shape[1:])
        dead = torch.zeros(lses.shape, dtype=torch.bool)
        rows = torch.arange(lses[0].numel()).view(lses.shape[1:])
        if self.dead == "some":
            dead = (rows + torch.arange(self.parts).view(-1, *[1] * rows.dim())) % 3 == 0
        elif self.dead == "mixed":
            dead[1, 1], dead[:, 2] = True, True
        elif self.dead == "rows":
            dead = (rows % 2 == 0).expand(lses.shape)
        elif self.dead == "all":
            dead = ~dead
        lses = lses.masked_fill(dead, -math.inf)
        if self.dead == "mixed":
            lses[1].masked_fill_(dead[1], math.inf)
        outs = outs.masked_fill(dead.unsqueeze(-1), math.nan)
        apart = self.inputs == "views"
        args = {"outs": stage.read("outs", outs, strided=apart), "lses": stage.read("lses", lses, strided=apart)}
        want = dict[str, Tensor](zip(("out", "lse"), merge_states(outs, lses), strict=True))

        returns = {"out": (shape, dtype), "lse": (shape[:-1], torch.float32)}
        return Problem(stage, args, {}, returns, partial(findings, str(dtype).removeprefix("torch."), want=want))


def _params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[MergeStatesParams]:
    """What a level asks of an implementation of merge_states."""
    axes: dict[str, list[Any]] = {
        "parts": [2, 1, 3, 16],
        "shape": list(SHAPES),
        "dtype": list(DTYPES),
        "dead": ["none", "some", "rows", "all"],
        "size": ["plain", "large", "apart"],
        "inputs": ["packed", "views"],
        "run": ["once", "repeat"],
    }
    yield from MergeStatesParams.covering(implementation, facts, axes, strength=STRENGTH[level])
    base = MergeStatesParams(parts=2, dead="some")
    yield replace(base, shape="empty")
    yield replace(base, parts=3, size="huge")
    if can_hold_many(facts, level):
        yield replace(base, shape="many")
    yield replace(base, parts=3, dead="mixed")
    if level != "smoke" and can_capture(implementation, facts):
        yield replace(base, run="graph")


def _of_request(request: Request, name: str) -> MergeStatesParams:
    return MergeStatesParams(parts=3, dead="mixed", heads=request.num_heads or 1)


def _make(workshop: Workshop, case: KernelCase) -> BenchProblem:
    """A case that is timed: partial results of two parts, as context parallelism on two ranks gives."""
    outs = workshop.normal(_PARTS, case.rows, KV_LORA_RANK)
    lses = workshop.normal(_PARTS, case.rows).float()
    judged = spread(case.rows, _JUDGED_ROWS, workshop.device)

    def judge(results: Results) -> Iterator[Finding]:
        want = merge_states(outs[:, judged], lses[:, judged])
        got = {name: value[judged] for name, value in results.items()}
        yield from findings("bfloat16", got, {"out": want[0], "lse": want[1]})

    none = workshop.empty(0, dtype=torch.float32)  # results are the call's own
    moved = (outs.nbytes + lses.nbytes) * (_PARTS + 1) // _PARTS
    arguments = {"outs": outs, "lses": lses}
    return BenchProblem(case, workshop.request(case), arguments, 2, {"out": none, "lse": none}, moved, 0, judge)


PROBLEMS: Final = Problems(
    primitive=MERGE_STATES,
    oracle=merge_states,
    tolerances=TOLERANCES,
    findings=findings,
    params=_params,
    of_request=_of_request,
    sizes=("num_heads",),
    variants=one_variant("empty parts"),
    rows=3,
    bench=Bench(rows=(2_048, 16_384), heads=(), make=_make, shape=lambda case: f"P {_PARTS}, rows {case.rows}"),
)
