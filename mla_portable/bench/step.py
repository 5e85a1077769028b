# SPDX-License-Identifier: Apache-2.0
"""The main job: a DeepSeek-V3.2-shaped step from cache write to output, each primitive checked and timed.

The layer itself (`SparseMLAAttention`) walks the step, as an engine would have it; then every primitive is run by itself at the
step's sizes, on the problems of the benchmark, those that the route taken does not need included.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.accelerator import accelerator
from mla_portable.attention import AttentionSpec, RouteDecision, SparseMLAAttention
from mla_portable.attention.layer_registry import ForcedBackend, LayerRegistry
from mla_portable.attention.routes import route_requests
from mla_portable.bench.candidates import prepared
from mla_portable.bench.kernels import Progress
from mla_portable.bench.timing import Timing, measure, run_and_measure
from mla_portable.choose import Registry, get_registry
from mla_portable.contracts import Decision, DeviceFacts, InvalidArgument, Request
from mla_portable.judge.problems import Finding
from mla_portable.judge.problems.attention import SOFTMAX_SCALE, attend, findings
from mla_portable.judge.problems.bench import Workshop
from mla_portable.judge.problems.convert_indices import convert_indices
from mla_portable.judge.problems.step import StepInputs, StepShape, make_inputs, step_bytes, step_cases
from mla_portable.layouts import KV_LORA_RANK, LAYOUTS
from mla_portable.planner import Planner
from mla_portable.primitives import SPARSE_PREFILL

_PREFILLS: Final = {False: "sparse_prefill (cache)", True: "sparse_prefill (workspace)"}
"""Names of sparse_prefill's cases, by whether it reads gathered rows."""


@dataclass(frozen=True, slots=True)
class PrimitiveResult:
    """What became of one primitive.

    Attributes:
        name: of the primitive, with a remark where it appears twice. on_route: the step itself needs it.
        decision: the choice, with the reasons against the others. shape: of the call.
        findings: error and limit of each quantity; empty where nothing serves. timing: None likewise.
    """

    name: str
    on_route: bool
    decision: Decision
    shape: str
    findings: tuple[Finding, ...] = ()
    timing: Timing | None = None

    @property
    def implementation(self) -> str | None:
        return self.decision.chosen

    @property
    def ok(self) -> bool:
        """Nothing that ran is wrong; a primitive off the route that nothing serves is no failure."""
        return not any(finding.message for finding in self.findings) and (self.decision.chosen is not None or not self.on_route)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "primitive": str(self.decision.request.primitive),
            "on_route": self.on_route,
            "implementation": self.implementation,
            "ok": self.ok,
            "shape": self.shape,
            "findings": [asdict(finding) for finding in self.findings],
            "timing": asdict(self.timing) if self.timing else None,
            "decision": self.decision.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class StepReport:
    """What became of a step.

    Attributes:
        shape: its size. device: where, as torch names it; facts: what that is. checked: how much of `out` was judged.
        route_decision: the route taken, and why not the others. plan: host time of `Planner.plan`. forward: time of the layer.
        findings: of the layer's out and lse. primitives: one by one.
    """

    shape: StepShape
    device: str
    facts: DeviceFacts
    route_decision: RouteDecision
    plan: Timing
    forward: Timing
    checked: str
    findings: tuple[Finding, ...]
    primitives: tuple[PrimitiveResult, ...]

    @property
    def route(self) -> str:
        return self.route_decision.verdict.route

    @property
    def ok(self) -> bool:
        """Every error is within its limit, and everything that the route needs was served."""
        return not any(finding.message for finding in self.findings) and all(result.ok for result in self.primitives)

    def failures(self) -> list[str]:
        """A line for each quantity beyond its limit."""
        named = [("step", self.findings), *((result.name, result.findings) for result in self.primitives)]
        return [f"{name}: {finding.message}" for name, findings in named for finding in findings if finding.message]

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "device": self.device,
            "facts": asdict(self.facts),
            "shape": asdict(self.shape),
            "route": self.route,
            "routes": self.route_decision.as_dict()["routes"],
            "plan": asdict(self.plan),
            "step": {
                "checked": self.checked,
                "findings": [asdict(finding) for finding in self.findings],
                "timing": asdict(self.forward),
            },
            "primitives": [result.as_dict() for result in self.primitives],
            "failures": self.failures(),
        }


def run_step(
    shape: StepShape,
    *,
    device: torch.device,
    registry: Registry | None = None,
    backend: ForcedBackend = None,
    route: str = "auto",
    repeat: int = 5,
    check_rows: int = 64,
    max_seconds: float | None = None,
    progress: Progress | None = None,
) -> StepReport:
    """Run a step of `shape` on `device`, check it against the oracle, time it.

    Args:
        registry: the process's own by default. backend, route: forced, as in `SparseMLAAttention`.
        repeat: timed runs of each part. check_rows: attention rows that the oracle computes, spread over decodes and
            prefills; 0 for all. max_seconds: bound on the timed runs of one part, after at least one.
    Raises: InvalidArgument for check_rows < 0, repeat < 1, or a step that does not fit the device's memory;
        UnsupportedRoute and UnsupportedRequest where no route is served or nothing writes the cache; whatever an
        implementation raises.
    """
    if check_rows < 0:
        raise InvalidArgument("run_step", "check_rows", got=check_rows, expected="0 (all) or more")
    if repeat < 1:
        raise InvalidArgument("run_step", "repeat", got=repeat, expected="at least 1")
    registry = get_registry() if registry is None else registry
    _require_room(shape, _host_memory() if device.type == "cpu" else registry.facts(device).memory_bytes)
    cases = step_cases(shape)
    parts, total = count(), len(cases) + 5

    def begin(what: str) -> None:
        if progress:
            progress(what, next(parts), total)

    with accelerator(device).guard(), torch.no_grad():
        timed = partial(run_and_measure, device=device, repeat=repeat, max_seconds=max_seconds)
        demand = LayerRegistry(registry, backend)
        layer = SparseMLAAttention(_spec(shape, route), device=device, registry=registry, backend=backend)
        begin("drawing the step")
        inputs = make_inputs(shape, device)
        begin("filling the cache")
        for tokens in (
            (inputs.history_kv_c, inputs.history_k_pe, inputs.history_slots),
            (inputs.kv_c, inputs.k_pe, inputs.slot_mapping),
        ):
            kv_c, k_pe, slots = tokens
            layer.cache_write(kv_c, k_pe, inputs.kv_cache, slots)
        begin("planning")
        planner = Planner(layer.planner_config())
        plan_time = measure(lambda: planner.plan(inputs.batch), device=torch.device("cpu"), repeat=max(repeat, 20), warmup=3)
        plan = planner.plan(inputs.batch)
        begin("the step")
        sizes = shape.num_tokens, shape.num_heads
        out = torch.full((*sizes, KV_LORA_RANK), torch.nan, dtype=torch.bfloat16, device=device)
        lse = torch.full(sizes, torch.nan, dtype=torch.float32, device=device)
        _, forward = timed(lambda: layer.forward(inputs.q, inputs.kv_cache, inputs.topk_indices, plan, out=out, lse_out=lse))
        begin("computing the oracle")
        rows = _judged_rows(shape, check_rows)
        found = _judge(inputs, rows, out, lse)

        workshop = Workshop(
            device, layer.facts, seed=shape.seed, check_rows=check_rows or shape.num_tokens, block_size=shape.block_size
        )
        asked, decided = _asked(layer), _decided(layer)

        def run(name: str) -> PrimitiveResult:
            begin(name)
            problem = workshop.make(cases[name])
            decision, on_route = decided.get(name), name in decided
            decision = demand.decide(asked.get(name, problem.request)) if decision is None else decision
            implementation = demand.chosen(decision)
            if implementation is None:
                return PrimitiveResult(name, on_route, decision, cases[name].shape)
            own = registry.configured(implementation, problem.request.but(lse=decision.request.lse, graph=False))
            call, result = prepared(problem, implementation, own, partial(registry.bind_implementation, implementation), device)
            problem.poison()
            _, timing = timed(call)
            return PrimitiveResult(name, on_route, decision, cases[name].shape, tuple(problem.check(result())), timing)

        return StepReport(
            shape=shape,
            device=str(device),
            facts=layer.facts,
            route_decision=layer.route_decision,
            plan=plan_time,
            forward=forward,
            checked=f"{len(rows)} of {shape.num_tokens} rows",
            findings=found,
            primitives=tuple(map(run, cases)),
        )


def _decided(layer: SparseMLAAttention) -> dict[str, Decision]:
    """What serves a layer, by the names of `step_cases`."""
    verdict = layer.route_decision.verdict
    found = {"cache_write": layer.write_decision}
    for part in verdict.parts:
        name = str(part.decision.request.primitive)
        if name == str(SPARSE_PREFILL):
            name = _PREFILLS[part.role == "prefill" and verdict.part("gather") is not None]
        if part.most_rows is None:
            found[name] = part.decision
    return found


def _asked(layer: SparseMLAAttention) -> dict[str, Request]:
    """What other routes would ask of the registry, by the names of `step_cases`."""
    routes = route_requests(layer.spec, layer.facts)
    return {
        "convert_indices": routes["workspace_convert" if layer.buffers.workspace is not None else "convert"],
        "gather_upconvert": routes["gather"],
        "sparse_decode": routes["decode"],
        _PREFILLS[False]: routes["cache_prefill"],
        _PREFILLS[True]: routes["bf16_prefill"],
    }


def _judge(inputs: StepInputs, rows: Tensor, out: Tensor, lse: Tensor) -> tuple[Finding, ...]:
    """Some rows of a layer's out [T, H, 512] and lse [T, H] against the oracle, from the bytes that are in the cache."""
    shape = inputs.shape
    slots, _ = convert_indices(
        inputs.topk_indices, inputs.req_id_per_token, inputs.batch.block_table, block_size=shape.block_size
    )
    here = rows.to(out.device)
    want = attend(inputs.q[here], inputs.kv_cache, slots[rows], softmax_scale=SOFTMAX_SCALE, kv_layout=shape.kv_layout)
    layout = LAYOUTS[shape.kv_layout]
    storage = layout.tolerance_of(shape.scale_format if layout.is_quantized else None)
    got = {"out": out[here].cpu(), "lse": lse[here].cpu()}
    return tuple(findings(storage, got, {"out": want[0], "lse": want[1]}, rows=rows))


def _require_room(shape: StepShape, memory_bytes: int) -> None:
    """Raises: InvalidArgument, before anything is allocated, for a step that does not fit the memory of its device."""
    needed = step_bytes(shape)
    if memory_bytes and needed > memory_bytes:
        raise InvalidArgument(
            "run_step",
            "shape",
            got=f"a step of about {needed / 2**30:.1f} GiB",
            expected=f"no more than the {memory_bytes / 2**30:.1f} GiB of the device",
            remedy="Take fewer heads, requests or tokens, a shorter context, or smaller blocks.",
        )


def _host_memory() -> int:
    """Bytes of memory of this machine, 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def _spec(shape: StepShape, route: str) -> AttentionSpec:
    return AttentionSpec(
        num_heads=shape.num_heads,
        softmax_scale=SOFTMAX_SCALE,
        max_num_tokens=shape.num_tokens,
        max_num_reqs=shape.num_reqs,
        max_model_len=shape.context + max(shape.decode_query_len, shape.prefill_tokens),
        kv_layout=shape.kv_layout,
        block_size=shape.block_size,
        topk=shape.topk,
        scale_format=shape.scale_format,
        decode_query_len=shape.decode_query_len,
        route=route,
        concat_query=False,
    )


def _judged_rows(shape: StepShape, count: int) -> Tensor:
    """[n] int64: tokens for the oracle, spread evenly, half of them decodes where both are there; 0 for all."""
    if count == 0 or count >= shape.num_tokens:
        return torch.arange(shape.num_tokens)
    decodes = shape.decodes * shape.decode_query_len
    prefills = shape.num_tokens - decodes
    share = min(decodes, max(count - count // 2, count - prefills))
    parts = (torch.linspace(0, decodes - 1, share), torch.linspace(decodes, shape.num_tokens - 1, min(count - share, prefills)))
    return torch.cat(parts).round().long().unique()
