# SPDX-License-Identifier: Apache-2.0
"""Probing: is an implementation's library there, does it bind, and does it compute small problems correctly?

The results are compared with those of the reference implementation on the CPU. Whatever the implementation does wrong is a
reason not to use it: an exception from `check`, `bind` or a call, a wrong value, a call that does not finish. Out of memory
and device faults are raised to the caller instead, with the implementation's name, because they say nothing about it or leave
the device unusable. A launch that the driver refuses (no code for this architecture, too many resources) ran nothing and is
a reason. Exceptions of the registry's own code (making a problem, reading results back, the reference) are raised unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import torch

from mla_portable.accelerator import accelerator
from mla_portable.contracts import (
    DeviceFacts,
    Implementation,
    InvalidArgument,
    Primitive,
    Reason,
    Request,
    neutral_defaults,
)
from mla_portable.registry.faults import blame, first_line, is_fatal
from mla_portable.registry.limits import PluginTimeout
from mla_portable.registry.sandbox import isolated

if TYPE_CHECKING:  # problems need the primitives, which need the registry
    from mla_portable.registry.judge import Results
    from mla_portable.registry.tiny import Call, TinyCase

__all__ = ["BindReference", "ProbeReport", "Stage", "probe_implementation", "run_check"]

Stage = Literal["check", "bind", "compute", "compare"]
STAGES: Final[tuple[Stage, ...]] = ("check", "bind", "compute", "compare")
BindReference = Callable[[Request], Any]
"""Binds the reference implementation for a request on the CPU; None when none is registered for its primitive."""

_CPU: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What a probe found.

    Attributes:
        implementation, primitive: what was probed. layout: the cache layout, None for all of them or none.
        ok: nothing speaks against using it here. reasons: what does.
        seconds: the probe took, compilation included.
        stage: the last one that every problem reached. "compute" and ok means that there was no reference to compare
            with; "check" and ok means the reference itself.
    """

    implementation: str
    primitive: Primitive
    layout: str | None
    ok: bool
    reasons: tuple[Reason, ...]
    seconds: float
    stage: Stage

    @classmethod
    def merged(cls, reports: Iterable[ProbeReport]) -> ProbeReport:
        """One report for several layouts of the same implementation: bad where any is."""
        parts = list(reports)
        return cls(
            implementation=parts[0].implementation,
            primitive=parts[0].primitive,
            layout=parts[0].layout if len(parts) == 1 else None,
            ok=all(part.ok for part in parts),
            reasons=tuple(dict.fromkeys(reason for part in parts for reason in part.reasons)),
            seconds=sum(part.seconds for part in parts),
            stage=_earliest(part.stage for part in parts),
        )


def _earliest(stages: Iterable[Stage]) -> Stage:
    return STAGES[min(map(STAGES.index, stages))]


def run_check(implementation: Implementation, facts: DeviceFacts, device: torch.device, limit: float) -> tuple[Reason, ...]:
    """The implementation's own reasons why it cannot work here; an exception in `check` is one too, unless fatal.

    limit: seconds that it may take.
    """

    def check() -> tuple[object, ...]:
        return tuple(implementation.check(facts))

    try:
        reasons = isolated(f"check of {_name(implementation)}", device, limit, check)
    except PluginTimeout:
        return (_unfinished(implementation, "check", limit, "stage check"),)
    except (Exception, SystemExit) as error:
        if is_fatal(error, device.type):
            blame(error, f"raised in check by {_name(implementation)}")
            raise
        return (_reason(implementation, f"check raised {first_line(error)}", "stage check"),)
    for reason in reasons:
        if not isinstance(reason, Reason):
            return (_reason(implementation, f"check returned {type(reason).__name__}, expected Reasons", "stage check"),)
    return tuple(reason for reason in reasons if isinstance(reason, Reason))


def probe_implementation(
    implementation: Implementation,
    device: torch.device,
    layout: str | None,
    check: tuple[Reason, ...],
    cases: Iterable[TinyCase],
    bind_reference: BindReference,
    limit: float,
) -> ProbeReport:
    """Bind, compute and compare, on this machine.

    Args:
        device: where. layout: the cache layout of the cases. check: what `run_check` found; nothing is computed where that is
            a reason. cases: the problems; none for the reference itself. limit: seconds that each problem may take.
    Raises: whatever `is_fatal` says must not count against the implementation; InvalidArgument under CUDA graph capture,
        which a probe would break.
    """
    begin = time.perf_counter()
    reasons, stage = check, _earliest(STAGES)
    if not reasons:
        outcomes: list[Outcome] = []
        with neutral_defaults(), torch.no_grad():
            for case in cases:
                require_no_capture(implementation, device)
                outcomes.append(solve(implementation, case, device, bind_reference, limit))
                if not outcomes[-1].finished:
                    break
        # one reason per symptom: a library that cannot be bound fails every case in the same way
        reasons = tuple({found.given: found for _, found, _ in reversed(outcomes) if found is not None}.values())[::-1]
        stage = _earliest(outcome.stage for outcome in outcomes) if outcomes else stage
    return ProbeReport(
        implementation=implementation.name,
        primitive=implementation.primitive,
        layout=layout,
        ok=not reasons,
        reasons=reasons,
        seconds=time.perf_counter() - begin,
        stage=stage,
    )


def require_no_capture(implementation: Implementation, device: torch.device) -> None:
    """Raise InvalidArgument while the current stream is captured: a probe compiles, allocates and reads back."""
    if accelerator(device).is_capturing():
        raise InvalidArgument(
            "probe",
            implementation.name,
            got="a stream under graph capture",
            expected="an ordinary stream",
            remedy="Bind, or call once, before capturing: implementations are chosen and probed then.",
        )


class Outcome(NamedTuple):
    """Of one problem: the stage reached, what is wrong, if anything, and whether the implementation finished."""

    stage: Stage
    reason: Reason | None
    finished: bool = True


def solve(
    implementation: Implementation, case: TinyCase, device: torch.device, bind_reference: BindReference, limit: float
) -> Outcome:
    """One problem: only what `bind` and the calls do counts against the implementation."""
    call = case.make(device)
    calls = [call]
    if case.repeat:  # without outputs twice: each call must return memory of its own
        calls += [call.without_outputs(), call.without_outputs()] if call.optional else [call]
    reached: Stage = "bind"

    def run() -> list[object] | str:
        nonlocal reached
        bound: object = implementation.bind(case.request)
        if not callable(bound):
            return f"bind returned {type(bound).__name__}, expected a callable"
        reached = "compute"
        returned: list[object] = [bound(*each.args.values(), **each.kwargs) for each in calls]
        accelerator(device).synchronize()  # a fault of a kernel surfaces here
        return returned

    where = f"case {case.name}"
    try:
        returned = isolated(f"probe of {_name(implementation)} ({where})", device, limit, run)
    except PluginTimeout:
        return Outcome(reached, _unfinished(implementation, reached, limit, where), finished=False)
    except (Exception, SystemExit) as error:
        if is_fatal(error, device.type):
            blame(error, f"raised in {reached} by {_name(implementation)} (probe, {where})")
            raise
        return Outcome(reached, _reason(implementation, f"{reached} raised {first_line(error)}", where))
    if isinstance(returned, str):
        return Outcome("bind", _reason(implementation, returned, where))
    stage, symptom, place = _compare(case, calls, returned, bind_reference)
    if not symptom:
        return Outcome(stage, None)
    return Outcome(stage, _reason(implementation, symptom, f"{where}, {place}" if place else where))


def _compare(
    case: TinyCase, calls: list[Call], returned: list[object], bind_reference: BindReference
) -> tuple[Stage, str, str]:
    """Hold what each call returned against its contract and against the reference.

    Returns: the stage reached, what is wrong, "" if nothing, and where.
    """
    from mla_portable.registry.judge import changed_inputs, mismatch, read_back, results_of, shared_memory

    primitive = case.request.primitive
    found: list[Results] = []
    for call, each in zip(calls, returned, strict=True):
        results = results_of(primitive, call, each, with_lse=case.request.lse)
        if isinstance(results, str):
            return "compute", results, ""
        shared = [name for earlier in found if (name := shared_memory(call, earlier, results))]
        if shared:
            return "compare", f"returned {shared[0]} in the memory of an earlier call's results", ""
        found.append(results)
    pristine = case.make(_CPU)
    touched = changed_inputs(pristine, calls[0])
    if touched:
        return "compare", f"it changed its input {touched}", ""
    reference = bind_reference(case.request)
    if reference is None:
        return "compute", "", ""
    expected = results_of(primitive, pristine, reference(*pristine.args.values(), **pristine.kwargs))
    if isinstance(expected, str):
        raise RuntimeError(f"the reference implementation of {primitive} {expected}")
    want = read_back(pristine, expected)
    for call, results in zip(calls, found, strict=True):
        wrong = mismatch(primitive, pristine, read_back(call, results), want)
        if wrong is not None:
            return "compare", f"wrong values: {wrong[0]}", wrong[1]
    return "compare", "", ""


def _name(implementation: Implementation) -> str:
    return f"{implementation.name} / {implementation.primitive}"


def _unfinished(implementation: Implementation, stage: str, limit: float, where: str) -> Reason:
    remedy = "set MLA_PORTABLE_PLUGIN_TIMEOUT to more seconds if it is only slow"
    return Reason("probe", f"{stage} did not finish within {limit:g} s", where, f"{_remedy(implementation)}; {remedy}")


def _reason(implementation: Implementation, symptom: str, where: str) -> Reason:
    return Reason("probe", symptom, where, _remedy(implementation))


def _remedy(implementation: Implementation) -> str:
    return f"report it to the authors of {implementation.backend}; `mla-portable doctor` repeats the probe"
