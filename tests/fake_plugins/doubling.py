# SPDX-License-Identifier: Apache-2.0
"""A plugin with a primitive of its own, problems to try it with, and an oracle that raises."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation, Primitive, Registrar, Support, hookimpl
from mla_portable.judge.problems.base import Params, Problems, one_variant
from mla_portable.judge.problems.compare import Finding
from mla_portable.judge.problems.stage import Problem, Results, Stage


class DoubleRows(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...


DOUBLE_ROWS: Final = Primitive[DoubleRows]("double_rows", module=__name__, results=("out",), problems=__name__)
SUPPORT = Support("a test", device_types=("cpu",))


def oracle(x: Tensor) -> Tensor:
    raise LookupError("no such table")


def exiting(x: Tensor) -> Tensor:
    sys.exit("an oracle that ends the process")


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubled(Params):
    primitive: ClassVar[Primitive[Any]] = DOUBLE_ROWS
    says: ClassVar[str] = ""

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        stage, values = Stage(device), torch.ones(2, 3)

        def judge(got: Results) -> Iterator[Finding]:
            yield Finding("out", float((got["out"] - PROBLEMS.oracle(values)).abs().max()), 0, "")

        return Problem(stage, {"x": stage.read("x", values)}, {}, {"out": ((2, 3), torch.float32)}, judge)


PROBLEMS = Problems(
    primitive=DOUBLE_ROWS,
    oracle=lambda x: oracle(x),
    tolerances={},
    findings=lambda *given: iter(()),
    params=lambda implementation, device, level: [Doubled()],
    of_request=lambda request, name: Doubled(),
    variants=one_variant("tiny"),
)


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    registrar.add(Implementation("doubling.v1", DOUBLE_ROWS, SUPPORT, lambda request: lambda x: x * 2, preference=10))
