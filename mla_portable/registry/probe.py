# SPDX-License-Identifier: Apache-2.0
"""Probing: is an implementation's library there, does it bind, and does it compute a tiny problem correctly?

The yardstick is the reference implementation on the CPU. What goes wrong in a probe is a reason not to use the
implementation, except what says nothing about it or leaves the device unusable: out of memory and device faults are raised
to the caller. A launch that the driver refuses (no code for this architecture, too many resources) ran nothing and is a
reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from mla_portable.contracts import BoundPrimitive, DeviceFacts, Implementation, InvalidArgument, Primitive, Reason, Request
from mla_portable.registry.judge import changed_inputs, collect_results, mismatch
from mla_portable.registry.plugins import first_line
from mla_portable.registry.tiny import TinyCase, tiny_cases

__all__ = ["ProbeReport", "Stage", "Yardstick", "is_fatal", "probe_implementation", "run_check"]

Stage = Literal["check", "bind", "compute", "compare"]
STAGES: Final[tuple[Stage, ...]] = ("check", "bind", "compute", "compare")
Yardstick = Callable[[Request], "BoundPrimitive | None"]
"""Binds the reference implementation for a request on the CPU; None when none is registered for its primitive."""

_CPU: Final = torch.device("cpu")
_REFUSED_LAUNCHES: Final = (
    "no kernel image is available",
    "invalid device function",
    "invalid configuration argument",
    "too many resources requested",
    "operation not supported",
    "invalid argument",
)


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What a probe found.

    Attributes:
        implementation, primitive: what was probed. layout: the cache layout, None for all of them or none.
        ok: nothing speaks against using it here. reasons: what does.
        seconds: the probe took, compilation included.
        stage: the last one that every problem reached. "compute" and ok means that there was no yardstick to compare
            with; "check" and ok means the yardstick itself.
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


def is_fatal(error: BaseException) -> bool:
    """Whether an error must reach the user instead of counting against an implementation.

    Out of memory (the next candidate would fail too, or later), a fault that leaves the device unusable, and an interrupt.
    A library that exits the process is at fault itself.
    """
    if not isinstance(error, (Exception, SystemExit)) or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    accelerator: Any = getattr(torch, "AcceleratorError", ())
    message = str(error)
    if "can't allocate memory" in message:  # torch's CPU allocator, a RuntimeError
        return True
    if isinstance(error, accelerator) or (
        isinstance(error, RuntimeError) and ("CUDA error" in message or "HIP error" in message)
    ):
        return not any(text in message for text in _REFUSED_LAUNCHES)
    return False


def run_check(implementation: Implementation, device: DeviceFacts) -> tuple[Reason, ...]:
    """The implementation's own reasons why it cannot work here; an exception in `check` is one too, unless fatal."""
    try:
        reasons: tuple[object, ...] = tuple(implementation.check(device))
        for reason in reasons:
            if not isinstance(reason, Reason):
                return (_reason(implementation, f"check returned {type(reason).__name__}, expected Reasons", "stage check"),)
    except (Exception, SystemExit) as error:
        if is_fatal(error):
            raise
        return (_reason(implementation, f"check raised {first_line(error)}", "stage check"),)
    return tuple(reason for reason in reasons if isinstance(reason, Reason))


def probe_implementation(
    implementation: Implementation,
    device: torch.device,
    facts: DeviceFacts,
    layout: str | None,
    check: Callable[[DeviceFacts], tuple[Reason, ...]],
    yardstick: Yardstick,
    *,
    compute: bool = True,
) -> ProbeReport:
    """Check, bind, compute and compare, on this machine.

    Args:
        device, facts: where. layout: the cache layout to try, None for primitives that touch no cache.
        check: as `run_check`, perhaps remembered. yardstick: binds the reference.
        compute: False stops after `check`, for the yardstick itself.
    Raises: whatever `is_fatal` says must not be swallowed; InvalidArgument under CUDA graph capture, which a probe
        would break.
    """
    begin = time.perf_counter()
    reasons, stage = check(facts), _earliest(STAGES)
    if compute and not reasons:
        require_no_capture(implementation, device)
        guard = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with guard, torch.no_grad():
            outcomes = [solve(implementation, case, device, yardstick) for case in tiny_cases(implementation, facts, layout)]
        # one reason per symptom: a library that cannot be bound fails every case in the same way
        by_symptom: dict[str, Reason] = {}
        for _, found in outcomes:
            if found is not None:
                by_symptom.setdefault(found.given, found)
        reasons, stage = tuple(by_symptom.values()), _earliest(reached for reached, _ in outcomes)
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
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise InvalidArgument(
            "probe",
            implementation.name,
            got="a stream under CUDA graph capture",
            expected="an ordinary stream",
            remedy="Bind, or call once, before capturing: implementations are chosen and probed then.",
        )


def solve(
    implementation: Implementation, case: TinyCase, device: torch.device, yardstick: Yardstick
) -> tuple[Stage, Reason | None]:
    """One tiny problem: the stage reached and what is wrong, if anything."""
    stage: Stage = "bind"
    try:
        bound: object = implementation.bind(case.request)
        if not callable(bound):
            return stage, _reason(
                implementation, f"bind returned {type(bound).__name__}, expected a callable", f"case {case.name}"
            )
        stage = "compute"
        call = case.make(device)
        returned: object = bound(*call.args.values(), **call.kwargs)
        got = collect_results(case.request.primitive, call, returned, with_lse=implementation.support.lse)
    except (Exception, SystemExit) as error:
        if is_fatal(error):
            raise
        return stage, _reason(implementation, f"{stage} raised {first_line(error)}", f"case {case.name}")
    if isinstance(got, str):
        return stage, _reason(implementation, got, f"case {case.name}")
    pristine = case.make(_CPU)
    touched = changed_inputs(pristine, call)
    if touched:
        return "compare", _reason(implementation, f"it changed its input {touched}", f"case {case.name}")
    reference = yardstick(case.request)
    if reference is None:
        return stage, None
    want = collect_results(case.request.primitive, pristine, reference(*pristine.args.values(), **pristine.kwargs))
    if isinstance(want, str):
        raise RuntimeError(f"the reference implementation of {case.request.primitive} {want}")
    found = mismatch(case.request.primitive, pristine, got, want)
    if found is None:
        return "compare", None
    symptom, where = found
    return "compare", _reason(
        implementation, f"wrong values: {symptom}", f"case {case.name}, {where}" if where else f"case {case.name}"
    )


def _reason(implementation: Implementation, symptom: str, where: str) -> Reason:
    remedy = f"tell the authors of {implementation.backend}; `mla-portable doctor` repeats the probe"
    return Reason("probe", symptom, where, remedy)
