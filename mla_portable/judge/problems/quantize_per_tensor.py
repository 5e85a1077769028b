# SPDX-License-Identifier: Apache-2.0
"""How quantize_per_tensor is tried and judged: the scale, and that each value becomes the nearest one of the target dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DeviceFacts, Implementation
from mla_portable.judge.problems import exact
from mla_portable.judge.problems.base import STRENGTH, Params, Problems, one_variant
from mla_portable.judge.problems.bench import Bench, BenchProblem, KernelCase, Workshop
from mla_portable.judge.problems.compare import Finding, Tolerance, close, limit_of
from mla_portable.judge.problems.draw import generator
from mla_portable.judge.problems.shapes import can_capture
from mla_portable.judge.problems.stage import Problem, Results, Stage
from mla_portable.layouts import KV_LORA_RANK
from mla_portable.primitives import QUANTIZE_PER_TENSOR

SHAPES: Final[dict[str, tuple[int, ...]]] = {
    "rows": (3, 129), "heads": (2, 3, 576), "scalar": (), "one": (1,), "long": (70_001,), "empty": (0, 4),
}  # fmt: skip
INPUTS: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TARGETS: Final = {"e4m3": (torch.float8_e4m3fn, 3, -6), "e5m2": (torch.float8_e5m2, 2, -14)}
"""dtype, bits of mantissa, exponent of the smallest normal number."""
TOLERANCES: Final = {
    ("any", "scale"): Tolerance(0, 3e-7, "a float32 division, correctly rounded or not"),
    ("any", "x_q"): Tolerance(0, 1.001, "the nearest value of the target dtype", "step"),
}


def quantize_per_tensor(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """x_q of `dtype`, float8_e4m3fn or float8_e5m2, and its scale, 0-d float32."""
    values = x.detach().cpu().double()
    amax = float(values.abs().max()) if values.numel() else 0.0
    least = float(torch.tensor(1e-10, dtype=torch.float32, device="cpu"))
    scale = exact.float32(torch.tensor(max(amax, least) / exact.greatest(dtype), dtype=torch.float64, device="cpu"))
    return exact.nearest_code(exact.float32(values / scale), dtype).view(dtype), scale.to(torch.float32)


def findings(storage: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> Iterator[Finding]:
    """x_q and its scale. want: "x", what was quantised, and "scale", float32."""
    x_q, scale, want_scale = got["x_q"].cpu(), got["scale"].cpu(), want["scale"]
    ideal = want["x"].cpu().double() / want_scale.double()
    mantissa_bits, least_exponent = next(each[1:] for each in TARGETS.values() if each[0] == x_q.dtype)
    exponent = torch.frexp(ideal)[1] - 1  # of |y| = 1.m * 2**exponent
    half_step = 2.0 ** (exponent.clamp(min=least_exponent) - mantissa_bits - 1).double()

    def of_scale(where: tuple[int, ...]) -> tuple[str, str]:
        value, expected = float(scale), float(want_scale)
        hint = " (it looks like the inverse)" if math.isclose(value * expected, 1.0, rel_tol=1e-4) else ""
        return f"scale is {value:.6g}, expected {expected:.6g}{hint}", ""

    def of_code(where: tuple[int, ...]) -> tuple[str, str]:
        return f"x_q is {float(x_q[where].float()):g}, expected {float(ideal[where]):g} rounded", f"element {list(where)}"

    yield close("scale", scale, want_scale, limit_of(TOLERANCES, storage, "scale"), symptom=of_scale)
    yield close("x_q", x_q.float(), ideal, limit_of(TOLERANCES, storage, "x_q"), steps=half_step, symptom=of_code)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizePerTensorParams(Params):
    """One quantize_per_tensor call.

    Attributes:
        shape, source, target: keys of SHAPES, INPUTS, TARGETS.
        values: "plain"; "zeros"; "outlier", one value drowns the others; "ties", halves between target values; "tiny".
        inputs: "packed" or "views".
    """

    primitive = QUANTIZE_PER_TENSOR
    says = "{shape}! {source}! {target}! {values}! in{inputs}"
    shape: str
    source: str
    target: str
    values: str = "plain"
    inputs: str = "packed"

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
        dtype, x = TARGETS[self.target][0], self._values(g)
        args = {"x": stage.read("x", x, strided=self.inputs == "views" and x.dim() > 0)}
        want = {"x": x, "scale": quantize_per_tensor(x, dtype)[1]}

        returns = {"x_q": (tuple(x.shape), dtype), "scale": ((), torch.float32)}
        return Problem(stage, {**args, "dtype": dtype}, {}, returns, partial(findings, "any", want=want))


def _params(implementation: Implementation, facts: DeviceFacts, level: str) -> Iterator[QuantizePerTensorParams]:
    """What a level asks of an implementation of quantize_per_tensor."""
    axes: dict[str, list[Any]] = {
        "shape": [name for name in SHAPES if name != "long" or facts.device_type != "cpu" or level == "full"],
        "source": list(INPUTS),
        "target": list(TARGETS),
        "values": ["plain", "zeros", "outlier", "ties", "tiny"],
        "inputs": ["packed", "views"],
        "run": ["once", "repeat"],
    }
    yield from QuantizePerTensorParams.covering(implementation, facts, axes, strength=STRENGTH[level])
    if level != "smoke" and can_capture(implementation, facts):
        yield QuantizePerTensorParams(shape="heads", source="bf16", target="e4m3", run="graph")


def _make(workshop: Workshop, case: KernelCase) -> BenchProblem:
    """A case that is timed: the latents of some tokens."""
    x = workshop.normal(case.rows, KV_LORA_RANK)

    def judge(results: Results) -> Iterator[Finding]:
        yield from findings("any", results, {"x": x, "scale": quantize_per_tensor(x)[1]})

    none = workshop.empty(0, dtype=torch.float32)  # results are the call's own
    targets = {"x_q": none, "scale": none}
    return BenchProblem(case, workshop.request(case), {"x": x}, 1, targets, x.nbytes + x.numel(), 0, judge)


PROBLEMS: Final = Problems(
    primitive=QUANTIZE_PER_TENSOR,
    oracle=quantize_per_tensor,
    tolerances=TOLERANCES,
    findings=findings,
    params=_params,
    of_request=lambda request, name: QuantizePerTensorParams(shape="rows", source="bf16", target="e4m3"),
    variants=one_variant("odd size"),
    bench=Bench(rows=(128, 4_096), heads=(), make=_make, shape=lambda case: f"T {case.rows}"),
)
