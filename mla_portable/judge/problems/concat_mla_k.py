# SPDX-License-Identifier: Apache-2.0
"""How concat_mla_k is tried and judged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation, Request
from mla_portable.judge.problems.base import STRENGTH, Params, Problems, one_variant
from mla_portable.judge.problems.bench import Bench, BenchProblem, KernelCase, Workshop, spread
from mla_portable.judge.problems.compare import BITS, Finding, same_bits
from mla_portable.judge.problems.draw import generator
from mla_portable.judge.problems.shapes import MANY_ROWS, accepted, can_capture, can_hold_many, heads
from mla_portable.judge.problems.stage import Problem, Results, Stage
from mla_portable.primitives import CONCAT_MLA_K

TOLERANCES: Final = {("any", "out"): BITS}
WIDTHS: Final = ("128+64", "192+64", "7+5")
"""P + R of DeepSeek-V3.2, of GLM-5, and one that is no multiple of 16 bytes."""
_VALUES: Final = 128
"""Columns behind a head's own in the up-projection's result."""
_LATENT: Final = 512
"""Columns in front of the shared ones in a latent row."""
_JUDGED_ROWS: Final = 64


def concat_mla_k(k_nope: Tensor, k_rope: Tensor) -> Tensor:
    """[N, H, P + R] on the CPU, head by head."""
    own, shared = k_nope.detach().cpu(), k_rope.detach().cpu()
    parts = [torch.cat([own[:, head], shared], dim=1) for head in range(own.shape[1])]
    return torch.stack(parts, dim=1)


def findings(storage: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> Iterator[Finding]:
    """Every bit of every key."""
    yield same_bits("out", got["out"].cpu(), want["out"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcatMlaKParams(Params):
    """One concat_mla_k call, on all bits of bfloat16, NaN among them.

    Attributes:
        heads: H. widths: a key of WIDTHS. tokens: N.
        inputs: "packed"; "views"; "slices", of the up-projection's result and of latent rows; "transposed", heads in front of
            tokens. outputs: "fresh", allocated by the callee; "packed" or "views".
    """

    primitive = CONCAT_MLA_K
    says = "h{heads}! p{widths}! t{tokens}! in{inputs} out_{outputs}"
    asks = "num_heads=heads"
    heads: int
    widths: str
    tokens: int
    inputs: str = "packed"
    outputs: str = "fresh"

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage, tokens, count = generator(seed), Stage(device), self.tokens, self.heads
        own, shared = map(int, self.widths.split("+"))

        def drawn(*shape: int) -> Tensor:
            return torch.randint(-(2**15), 2**15, shape, generator=g).to(torch.int16).view(torch.bfloat16)

        if self.inputs == "slices":
            k_nope, k_rope = drawn(tokens, count, own + _VALUES)[..., :own], drawn(tokens, _LATENT + shared)[:, _LATENT:]
        elif self.inputs == "transposed":
            k_nope, k_rope = drawn(count, tokens, own).transpose(0, 1), drawn(tokens, shared)
        else:
            k_nope, k_rope = drawn(tokens, count, own), drawn(tokens, shared)
        strided = self.inputs == "views"
        args = {name: stage.read(name, x, strided=strided) for name, x in (("k_nope", k_nope), ("k_rope", k_rope))}
        result, keywords = (tokens, count, own + shared), dict[str, Any]()
        if self.outputs != "fresh":
            keywords["out"] = stage.write("out", result, torch.bfloat16, strided=self.outputs == "views")
        judge = partial(findings, "any", want={"out": concat_mla_k(k_nope, k_rope)})
        return Problem(stage, args, keywords, {"out": (result, torch.bfloat16)}, judge, frozenset({"out"}))


def _params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[ConcatMlaKParams]:
    """What a level asks of an implementation of concat_mla_k."""
    counts = heads(implementation, facts, level)
    small = accepted(implementation, facts, "num_heads", (1, 3, 20)) or counts[:1]
    axes: dict[str, list[Any]] = {
        "heads": small if facts.device_type == "cpu" else sorted({*small, *counts}),
        "widths": list(WIDTHS),
        "tokens": [9, 1, 131],
        "inputs": ["packed", "views", "slices", "transposed"],
        "outputs": ["fresh", "packed", "views"],
        "run": ["once", "repeat"],
    }
    yield from ConcatMlaKParams.covering(implementation, facts, axes, strength=STRENGTH[level])
    if not axes["heads"]:
        return
    base = ConcatMlaKParams(heads=axes["heads"][-1], widths=WIDTHS[0], tokens=131, inputs="slices", outputs="packed")
    yield replace(base, tokens=0)
    yield replace(base, tokens=0, outputs="fresh")
    if can_hold_many(facts, level):
        yield replace(base, heads=axes["heads"][0], tokens=MANY_ROWS)
    if level != "smoke" and can_capture(implementation, facts):
        yield replace(base, run="graph")


def _of_request(request: Request, name: str) -> ConcatMlaKParams:
    count = request.num_heads or 1
    return ConcatMlaKParams(heads=count, widths=WIDTHS[0], tokens=9, inputs="slices", outputs="packed")


def _make(workshop: Workshop, case: KernelCase) -> BenchProblem:
    """A case that is timed: DeepSeek-V3.2's widths, slices of the up-projection's result and of latent rows."""
    count = case.num_heads or 1
    own, shared = map(int, WIDTHS[0].split("+"))
    k_nope = workshop.normal(case.rows, count, own + _VALUES)[..., :own]
    k_rope = workshop.normal(case.rows, _LATENT + shared)[:, _LATENT:]
    out = workshop.empty(case.rows, count, own + shared, dtype=torch.bfloat16)
    judged = spread(case.rows, _JUDGED_ROWS, workshop.device)

    def judge(results: Results) -> Iterator[Finding]:
        want = concat_mla_k(k_nope[judged], k_rope[judged])
        yield from findings("any", {"out": results["out"][judged]}, {"out": want})

    arguments = {"k_nope": k_nope, "k_rope": k_rope, "out": out}
    moved = sum(each.numel() * each.element_size() for each in arguments.values())
    return BenchProblem(case, workshop.request(case), arguments, 2, {"out": out}, moved, 0, judge)


PROBLEMS: Final = Problems(
    primitive=CONCAT_MLA_K,
    oracle=concat_mla_k,
    tolerances=TOLERANCES,
    findings=findings,
    params=_params,
    of_request=_of_request,
    sizes=("num_heads",),
    variants=one_variant("slices"),
    rows=9,
    bench=Bench(rows=(8_192,), heads=(16, 128), make=_make, shape=lambda case: f"T {case.rows}, H {case.num_heads}"),
)
