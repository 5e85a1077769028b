# SPDX-License-Identifier: Apache-2.0
"""Probing: is an implementation's library there, does it bind, and does it compute small problems correctly?

The results are judged by the float64 oracle, with the tolerances of the conformance suite. Where a graph is asked for and the
implementation does not know whether one can hold its calls (`Support.probes_graph`), a call is captured and replayed too.

Whatever the implementation does wrong is a reason not to use it: anything that `check`, `bind` or a call raises (SystemExit and
panics of extension modules included), a wrong value, a call that does not finish. Out of memory and device faults are raised to
the caller instead, with the implementation's name, because they say nothing about it or leave the device unusable. A launch
that the driver refuses (no code for this architecture, too many resources) ran nothing and is a reason. What making or judging
a problem raises, which is code of the primitive, of its oracle and of the cache layout, is a fault of the problem (`Unjudged`):
the implementation is not offered, for nothing is known about it. An interrupt by the user is raised unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar

import torch

from mla_portable.accelerator import Accelerator, accelerator
from mla_portable.choose.faults import blame, contained, first_line, is_fatal, text_of
from mla_portable.choose.limits import PluginTimeout, isolated
from mla_portable.contracts import DeviceFacts, Implementation, InvalidArgument, Primitive, Reason
from mla_portable.errors import printable
from mla_portable.kit.defaults import neutral_defaults
from mla_portable.kit.rules import extent

if TYPE_CHECKING:
    from mla_portable.judge.problems.probe import ProbeCase
    from mla_portable.judge.problems.stage import Problem, Results

T = TypeVar("T")
Stage = Literal["check", "bind", "compute", "compare"]
STAGES: Final[tuple[Stage, ...]] = ("check", "bind", "compute", "compare")


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What a probe found.

    Attributes:
        implementation, primitive: what was probed. layout: the cache layout, None for all of them or none.
        ok: nothing speaks against using it here. reasons: what does.
        solved, failed: the names of its problems, by outcome.
        seconds: the probe took, compilation included.
        stage: the last one that every problem reached. "check" and ok means that there was no problem: the reference itself.
    """

    implementation: str
    primitive: Primitive
    layout: str | None
    ok: bool
    reasons: tuple[Reason, ...]
    seconds: float
    stage: Stage
    solved: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()

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
            stage=min(parts, key=lambda part: STAGES.index(part.stage)).stage,
            solved=tuple(part._name_of(case) for part in parts for case in part.solved),
            failed=tuple(part._name_of(case) for part in parts for case in part.failed),
        )

    def _name_of(self, case: str) -> str:
        """A problem's name beside those of other layouts."""
        return case if self.layout is None else f"{case} on {self.layout}"


class Unfinished(Reason):
    """Code of an implementation did not finish within its limit."""


class Unjudged(Reason):
    """The problem of an implementation could not be built or judged: it is not known whether the implementation is right."""


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
    except Exception as error:
        if is_fatal(error, device.type):
            blame(error, f"raised in check by {_name(implementation)}")
            raise
        return (_reason(implementation, f"check raised {first_line(error)}", "stage check"),)
    for reason in reasons:
        if not isinstance(reason, Reason):
            return (_reason(implementation, f"check returned {type(reason).__name__}, expected Reasons", "stage check"),)
    given = (reason for reason in reasons if isinstance(reason, Reason))
    return tuple(Reason(*map(_plain_text, (each.subject, each.given, each.limit, each.remedy))) for each in given)


def _plain_text(value: object) -> str:
    return printable(text_of(value))


def probe_implementation(
    implementation: Implementation,
    device: torch.device,
    layout: str | None,
    check: tuple[Reason, ...],
    cases: Iterable[ProbeCase],
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
    reasons, stage = check, STAGES[0]
    outcomes: list[Outcome] = []
    names: list[str] = []
    if not reasons:
        with neutral_defaults(), torch.no_grad():
            for case in _drawn(implementation, device, layout, cases):
                require_no_capture(implementation, device)
                if isinstance(case, Unjudged):
                    names.append("problem")
                    outcomes.append(Outcome(STAGES[0], case))
                    break
                names.append(case.name)
                outcomes.append(solve(implementation, case, device, limit))
                if isinstance(outcomes[-1].reason, Unfinished):
                    break
        # one reason per symptom: a library that cannot be bound fails every case in the same way
        reasons = tuple({o.reason.given: o.reason for o in reversed(outcomes) if o.reason is not None}.values())[::-1]
        if outcomes:
            stage = min(outcomes, key=lambda outcome: STAGES.index(outcome.stage)).stage
    return ProbeReport(
        implementation=implementation.name,
        primitive=implementation.primitive,
        layout=layout,
        ok=not reasons,
        reasons=reasons,
        seconds=time.perf_counter() - begin,
        stage=stage,
        solved=tuple(name for name, outcome in zip(names, outcomes, strict=True) if outcome.reason is None),
        failed=tuple(name for name, outcome in zip(names, outcomes, strict=True) if outcome.reason is not None),
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
    """Of one problem: the stage reached and what is wrong, if anything."""

    stage: Stage
    reason: Reason | None


def solve(implementation: Implementation, case: ProbeCase, device: torch.device, limit: float) -> Outcome:
    """One problem: only what `bind` and the calls do counts against the implementation."""
    where = f"case {case.name}"
    replayed = implementation.support.probes_graph and case.request.graph

    def build() -> tuple[Problem, Problem | None]:
        return case.build(device), case.build(device) if replayed else None

    built = _of_problem("built", implementation, device, where, build)
    if isinstance(built, Unjudged):
        return Outcome(STAGES[0], built)
    problem, fresh = built
    given = [True]  # whether each call is given its outputs
    if case.repeat:  # without outputs twice: each call must return memory of its own
        given += [False, False] if problem.outputs else [True]
    reached: Stage = "bind"
    kept: list[object] = []  # a graph's results lie in its memory

    def run() -> list[object] | str:
        nonlocal reached
        bound: object = implementation.bind(case.request)
        if not callable(bound):
            return f"bind returned {type(bound).__name__}, expected a callable"
        reached = "compute"
        returned = [problem.call(bound, given=each) for each in given]
        if fresh is not None:
            graph, result = _captured(lambda: problem.call(bound), accelerator(device))
            if isinstance(result, str):
                return result
            problem.load(fresh)  # nothing is computed there yet
            graph.replay()
            kept.append(graph)
            returned.append(result)
            given.append(True)
        accelerator(device).synchronize()  # a fault of a kernel surfaces here
        return returned

    try:
        returned = isolated(f"probe of {_name(implementation)} ({where})", device, limit, run)
    except PluginTimeout:
        return Outcome(reached, _unfinished(implementation, reached, limit, where))
    except Exception as error:
        if is_fatal(error, device.type):
            blame(error, f"raised in {reached} by {_name(implementation)} (probe, {where})")
            raise
        return Outcome(reached, _reason(implementation, f"{reached} raised {first_line(error)}", where))
    if isinstance(returned, str):
        return Outcome(reached, _reason(implementation, returned, where))
    compared = _of_problem("judged", implementation, device, where, partial(_compare, problem, given, returned))
    if isinstance(compared, Unjudged):
        return Outcome("compute", compared)
    stage, symptom, place = compared
    if not symptom:
        return Outcome(stage, None)
    return Outcome(stage, _reason(implementation, symptom, f"{where}, {place}" if place else where))


def _drawn(
    implementation: Implementation, device: torch.device, layout: str | None, cases: Iterable[ProbeCase]
) -> Iterator[ProbeCase | Unjudged]:
    """The cases, each made when it is asked for; last an Unjudged where making one failed."""
    left, where = iter(cases), "its sizes" if layout is None else f"its sizes on {layout}"
    while (case := _of_problem("built", implementation, device, where, lambda: next(left, None))) is not None:
        yield case


def _of_problem(
    done: Literal["built", "judged"], implementation: Implementation, device: torch.device, where: str, work: Callable[[], T]
) -> T | Unjudged:
    """What `work` on a problem returns; an Unjudged where it raises. done: what it does with the problem.

    Raises: out of memory and faults of the device, with the implementation's name.
    """
    try:
        return contained(work)
    except Exception as error:
        if is_fatal(error, device.type):
            blame(error, f"raised while the problem of {_name(implementation)} was {done} (probe, {where})")
            raise
        remedy = "the problem is at fault, not what it tries: report it to the authors of the primitive, or of the cache layout"
        return Unjudged("probe", f"problem could not be {done}: {first_line(error)}", where, remedy)


def _captured(call: Callable[[], object], where: Accelerator) -> tuple[Any, object]:
    """A graph of `call`, and what the call returned or why it cannot be captured; the words may be those of a device fault."""
    graph = where.graph()
    try:
        with where.capture(graph):
            return graph, call()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        where.synchronize()  # raises after a device fault
        return graph, f"a call cannot be captured in a graph: {first_line(error)}"


def _compare(problem: Problem, given: list[bool], returned: list[object]) -> tuple[Stage, str, str]:
    """Hold what each call returned against its contract and against the oracle.

    Returns: the stage reached, what is wrong, "" if nothing, and where.
    """
    found: list[Results] = []
    for with_outputs, each in zip(given, returned, strict=True):
        results = problem.results_of(each, given=with_outputs)
        if isinstance(results, str):
            return "compute", results, ""
        own = results if not with_outputs else {n: t for n, t in results.items() if n not in problem.stage.writes}
        shared = [name for earlier in found if (name := _shared_memory(earlier, own))]
        if shared:
            return "compare", f"returned {shared[0]} in the memory of an earlier call's results", ""
        found.append(results)
    for finding in problem.changed():
        if finding.message:
            return "compare", finding.symptom, ""
    for results in found:
        for finding in problem.judged(results):
            if finding.message:
                return "compare", f"wrong values: {finding.symptom or finding.message}", finding.place
    return "compare", "", ""


def _shared_memory(earlier: Results, later: Results) -> str | None:
    """The name of a result of `later` that lies in the memory of a result of `earlier`, None when each call had its own."""
    spans = [extent(value) for value in earlier.values()]
    for name, value in later.items():
        begin, end = extent(value)
        if any(max(begin, other) < min(end, other_end) for other, other_end in spans):
            return name
    return None


def _name(implementation: Implementation) -> str:
    return f"{implementation.name} / {implementation.primitive}"


def _unfinished(implementation: Implementation, stage: str, limit: float, where: str) -> Reason:
    found = _reason(implementation, f"{stage} did not finish within {limit:g} s", where)
    remedy = f"{found.remedy}; set MLA_PORTABLE_PLUGIN_TIMEOUT to more seconds, in a new process, if it is only slow"
    return Unfinished(found.subject, found.given, found.limit, remedy)


def _reason(implementation: Implementation, symptom: str, where: str) -> Reason:
    backend = implementation.backend
    remedy = f"`mla-portable conform {backend}` shows the failing cases, for you or for the authors of {backend}"
    return Reason("probe", symptom, where, remedy)
