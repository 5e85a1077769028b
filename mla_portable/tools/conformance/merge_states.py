# SPDX-License-Identifier: Apache-2.0
"""The cases of merge_states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation, Request
from mla_portable.primitives import MERGE_STATES
from mla_portable.reference import oracle
from mla_portable.tools.conformance.compare import Finding, attributes, close, cosine
from mla_portable.tools.conformance.cover import covering
from mla_portable.tools.conformance.inputs import generator
from mla_portable.tools.conformance.params import Params, can_capture
from mla_portable.tools.conformance.problem import Guarded, Problem, Stage
from mla_portable.tools.conformance.tolerances import tolerance

__all__ = ["MergeStatesParams", "merge_states_params"]

SHAPES: Final[dict[str, tuple[int, ...]]] = {"th": (3, 5, 512), "bsh": (2, 2, 16, 512), "t": (7, 100), "one": (1, 1)}
DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeStatesParams(Params):
    """One merge_states call.

    Attributes:
        parts: P. shape: a key of SHAPES, [..., D]; "empty" has no rows. dtype: of outs, a key of DTYPES.
        dead: which parts have lse -inf, with NaN in their out: "none"; "some", each part of some rows; "rows", some rows
            wholly; "all".
        size: "plain"; "large", lse of +-300, past what exp can take; "apart", one part outweighs the others by e^200;
            "huge", lse near 3e4, -3e4 and 1e6, where float32 has steps of up to 0.06.
        inputs: "packed" or "views".
    """

    primitive = MERGE_STATES
    parts: int
    shape: str = "th"
    dtype: str = "fp32"
    dead: str = "none"
    size: str = "plain"
    inputs: str = "packed"

    def words(self) -> list[str]:
        """See Params."""
        remarks = {
            f"dead_{self.dead}": self.dead != "none",
            self.size: self.size != "plain",
            "inviews": self.inputs == "views",
            self.run: self.run != "once",
        }
        return [f"p{self.parts}", self.shape, self.dtype, *(word for word, said in remarks.items() if said)]

    def request(self, device: DeviceFacts) -> Request:
        """See Params."""
        return Request(primitive=self.primitive, device=device, graph=self.run == "graph")

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage, dtype = generator(seed), Stage(device), DTYPES[self.dtype]
        shape = (0, 5, 512) if self.shape == "empty" else SHAPES[self.shape]
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
        elif self.dead == "rows":
            dead = (rows % 2 == 0).expand(lses.shape)
        elif self.dead == "all":
            dead = ~dead
        lses = lses.masked_fill(dead, -math.inf)
        outs = outs.masked_fill(dead.unsqueeze(-1), math.nan)
        apart = self.inputs == "views"
        outs_placed, lses_placed = stage.read("outs", outs, strided=apart), stage.read("lses", lses, strided=apart)
        want_out, want_lse = oracle.merge_states(outs, lses)

        def call(bound: Callable[..., Any]) -> tuple[Tensor, ...]:
            out, lse = bound(outs_placed, lses_placed)
            return out, lse

        def judge(results: tuple[Tensor, ...], writes: dict[str, Guarded]) -> Iterator[Finding]:
            expected = (("out", want_out, dtype), ("lse", want_lse, torch.float32))
            for got, (name, want, wanted_dtype) in zip(results, expected, strict=True):
                found = attributes(f"{name} tensor", got, tuple(want.shape), wanted_dtype, device)
                yield found
                if found.message:
                    return
                limit = tolerance(self.primitive, str(dtype).removeprefix("torch."), name)
                yield close(name, got, want, limit)
                if limit.cosine is not None:
                    yield cosine(f"{name} cosine", got, want, limit.cosine)

        return Problem(stage, call, judge)


def merge_states_params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[MergeStatesParams]:
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
    strength = {"smoke": 1, "quick": 2, "full": 3}[level]
    for choice in covering(axes, strength=strength):
        yield MergeStatesParams(**choice)
    base = MergeStatesParams(parts=2, dead="some")
    yield replace(base, shape="empty")
    yield replace(base, parts=3, size="huge")
    if level != "smoke" and can_capture(implementation, facts):
        yield replace(base, run="graph")
