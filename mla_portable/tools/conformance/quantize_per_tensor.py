# SPDX-License-Identifier: Apache-2.0
"""The cases of quantize_per_tensor: the scale, and that each value becomes the nearest one of the target dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation, Request
from mla_portable.primitives import QUANTIZE_PER_TENSOR
from mla_portable.reference import oracle
from mla_portable.tools.conformance.compare import Finding, attributes, close
from mla_portable.tools.conformance.cover import covering
from mla_portable.tools.conformance.inputs import generator
from mla_portable.tools.conformance.params import Params, can_capture
from mla_portable.tools.conformance.problem import Guarded, Problem, Stage
from mla_portable.tools.conformance.tolerances import tolerance

__all__ = ["QuantizePerTensorParams", "quantize_per_tensor_params"]

SHAPES: Final[dict[str, tuple[int, ...]]] = {
    "rows": (3, 129), "heads": (2, 3, 576), "scalar": (), "one": (1,), "long": (70_001,), "empty": (0, 4),
}  # fmt: skip
INPUTS: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TARGETS: Final = {"e4m3": (torch.float8_e4m3fn, 3, -6), "e5m2": (torch.float8_e5m2, 2, -14)}
"""dtype, bits of mantissa, exponent of the smallest normal number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizePerTensorParams(Params):
    """One quantize_per_tensor call.

    Attributes:
        shape, source, target: keys of SHAPES, INPUTS, TARGETS.
        values: "plain"; "zeros"; "outlier", one value drowns the others; "ties", halves between target values; "tiny".
        inputs: "packed" or "views".
    """

    primitive = QUANTIZE_PER_TENSOR
    shape: str
    source: str
    target: str
    values: str = "plain"
    inputs: str = "packed"

    def words(self) -> list[str]:
        """See Params."""
        remarks = {"inviews": self.inputs == "views", self.run: self.run != "once"}
        return [self.shape, self.source, self.target, self.values, *(word for word, said in remarks.items() if said)]

    def request(self, device: DeviceFacts) -> Request:
        """See Params."""
        return Request(primitive=self.primitive, device=device, graph=self.run == "graph")

    def _values(self, g: torch.Generator) -> Tensor:
        shape, source = SHAPES[self.shape], INPUTS[self.source]
        x = torch.randn(shape, generator=g)
        if self.values == "zeros":
            x = torch.zeros(shape)
        elif self.values == "outlier" and x.numel():
            x.view(-1)[x.numel() // 2] = -30000.0
        elif self.values == "ties" and x.numel():
            x = (torch.arange(x.numel()) % 113 - 56).float().view(shape) / 4
            x.view(-1)[0] = 448.0 if self.target == "e4m3" else 57344.0
        elif self.values == "tiny":
            x = x * 1e-4
        return x.to(source)

    def build(self, seed: int, device: torch.device, facts: DeviceFacts) -> Problem:
        """See Params."""
        g, stage = generator(seed), Stage(device)
        dtype, mantissa_bits, least_exponent = TARGETS[self.target]
        x = self._values(g)
        x_placed = stage.read("x", x, strided=self.inputs == "views" and x.dim() > 0)
        _, want_scale = oracle.quantize_per_tensor(x, dtype)
        exact = x.double() / want_scale.double()
        exponent = torch.frexp(exact)[1] - 1  # of |y| = 1.m * 2**exponent
        half_step = 2.0 ** (exponent.clamp(min=least_exponent) - mantissa_bits - 1).double()

        def call(bound: Callable[..., Any]) -> tuple[Tensor, ...]:
            x_q, scale = bound(x_placed, dtype)
            return x_q, scale

        def judge(results: tuple[Tensor, ...], writes: dict[str, Guarded]) -> Iterator[Finding]:
            x_q, scale = results
            for found in (
                attributes("x_q tensor", x_q, tuple(x.shape), dtype, device),
                attributes("scale tensor", scale, (), torch.float32, device),
            ):
                yield found
                if found.message:
                    return
            yield close("scale", scale, want_scale, tolerance(self.primitive, "any", "scale"))
            yield close("x_q", x_q.cpu().float(), exact, tolerance(self.primitive, "any", "x_q"), steps=half_step)

        return Problem(stage, call, judge)


def quantize_per_tensor_params(
    implementation: Implementation, facts: DeviceFacts, level: str
) -> Iterator[QuantizePerTensorParams]:
    """What a level asks of an implementation of quantize_per_tensor."""
    axes: dict[str, list[Any]] = {
        "shape": [name for name in SHAPES if name != "long" or facts.device_type != "cpu" or level == "full"],
        "source": list(INPUTS),
        "target": list(TARGETS),
        "values": ["plain", "zeros", "outlier", "ties", "tiny"],
        "inputs": ["packed", "views"],
        "run": ["once", "repeat"],
    }
    strength = {"smoke": 1, "quick": 2, "full": 3}[level]
    for choice in covering(axes, strength=strength):
        yield QuantizePerTensorParams(**choice)
    if level != "smoke" and can_capture(implementation, facts):
        yield QuantizePerTensorParams(shape="heads", source="bf16", target="e4m3", run="graph")
