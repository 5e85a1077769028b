# SPDX-License-Identifier: Apache-2.0
"""Time every implementation of a primitive, and its baselines, on the same problems, in turns; judge each result first.

A result that is wrong gets no time. On a GPU every candidate is one graph, captured once per case and replayed with a
cold last-level cache; what is judged is what the graph wrote into poisoned memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from mla_portable.accelerator import accelerator
from mla_portable.bench.candidates import Candidate, Refusal, baseline_candidates, our_candidates
from mla_portable.bench.kernel_machine import MachineState, machine_state
from mla_portable.bench.roofline import Ceilings, measure_ceilings
from mla_portable.bench.timing import Timing, captured, measure_in_turns
from mla_portable.choose import Registry
from mla_portable.choose.faults import first_line
from mla_portable.contracts import Baseline, DeviceFacts, Implementation
from mla_portable.judge.problems.bench import BenchProblem, KernelCase, Workshop

_SECONDS_PER_CASE: Final = 10.0
"""Rounds end early beyond that, where something is very slow."""

Progress = Callable[[str, int, int], None]
"""Called before each part with (what is being done, parts done, parts in all)."""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One candidate on one case.

    Attributes:
        implementation: None for a baseline. timing: None where the result is wrong or the run failed.
        errors: quantity -> error as the tolerance table measures it. wrong: what is beyond tolerance, in words.
        failure: what the run raised, "" when it did not.
    """

    name: str
    implementation: Implementation | None
    timing: Timing | None
    errors: dict[str, float]
    wrong: tuple[str, ...] = ()
    failure: str = ""
    remark: str = ""

    @property
    def ok(self) -> bool:
        return self.timing is not None

    @property
    def median_us(self) -> float | None:
        return None if self.timing is None else 1e3 * self.timing.median_ms


@dataclass(frozen=True, slots=True)
class CaseTimes:
    """All candidates on one case. bound_us: the roofline bound. refused: ways that cannot do it, with reasons."""

    case: KernelCase
    bound_us: float
    bytes_moved: int
    flops: int
    times: tuple[KernelTime, ...]
    refused: tuple[Refusal, ...]

    @property
    def best_baseline_us(self) -> float | None:
        """Of the fastest baseline, None where none has a time."""
        return min((each.median_us for each in self.times if each.median_us and each.implementation is None), default=None)

    def lead_of(self, each: KernelTime) -> float | None:
        """The best baseline's time over that of one of ours: above 1 where ours is faster; None where either has no time."""
        baseline = self.best_baseline_us
        return None if baseline is None or not each.median_us or each.implementation is None else baseline / each.median_us


@dataclass(frozen=True, slots=True)
class KernelReport:
    """A run of the benchmark."""

    facts: DeviceFacts
    machine: MachineState
    ceilings: Ceilings
    cases: tuple[CaseTimes, ...]

    @property
    def ok(self) -> bool:
        """Something was timed, and no implementation of ours is wrong or failed."""
        ours = [each for case in self.cases for each in case.times if each.implementation is not None]
        return any(each.ok for each in ours) and all(each.ok for each in ours)

    def defects(self) -> list[str]:
        """A line on each candidate that is wrong or failed, baselines included."""
        return [
            f"{case.case}  {each.name}: {each.failure or '; '.join(each.wrong)}"
            for case in self.cases
            for each in case.times
            if not each.ok
        ]


def time_kernels(
    cases: Sequence[KernelCase],
    *,
    device: torch.device,
    registry: Registry,
    baselines: Sequence[Baseline] = (),
    backends: Collection[str] = (),
    repeat: int = 30,
    check_rows: int = 4,
    seed: int = 0,
    progress: Progress | None = None,
    after: Callable[[CaseTimes], None] | None = None,
) -> KernelReport:
    """Run the cases one after the other; they share caches, so that a sweep costs little beside its kernels.

    Args:
        backends: only these backends or implementations; empty means all that can. baselines: beside them.
        repeat: timed runs of each candidate. check_rows: attention rows that the oracle judges. after: called with each case
            that was timed.
    Raises: errors that leave the device unusable. Any other failure of a candidate is noted beside its name.
    """
    facts = registry.facts(device)
    workshop = Workshop(device, facts, seed=seed, check_rows=check_rows)
    ceilings = measure_ceilings(device)
    machine = machine_state(device, facts)
    found: list[CaseTimes] = []
    with torch.no_grad():
        for number, case in enumerate(cases):
            if progress is not None:
                progress(str(case), number, len(cases))
            problem = workshop.make(case)
            ours, refused = our_candidates(problem, registry, device, backends)
            theirs, refused_baselines = baseline_candidates(problem, baselines)
            times = time_candidates(problem, (*ours, *theirs), device=device, repeat=repeat)
            bound = ceilings.bound_us(problem.bytes_moved, problem.flops)
            refusals = (*refused, *refused_baselines)
            found.append(CaseTimes(case, bound, problem.bytes_moved, problem.flops, times, refusals))
            if after is not None:
                after(found[-1])
    return KernelReport(facts, machine, ceilings, tuple(found))


def time_candidates(
    problem: BenchProblem, candidates: Sequence[Candidate], *, device: torch.device, repeat: int
) -> tuple[KernelTime, ...]:
    """Judge each, then time those that are right, in turns. Raises: errors that leave the device unusable."""
    judged = [_judge(problem, candidate, device) for candidate in candidates]
    sound = [place for place, (_, run) in enumerate(judged) if run is not None]
    runs = [run for _, run in judged if run is not None]
    timings = measure_in_turns(runs, device=device, repeat=repeat, max_seconds=_SECONDS_PER_CASE)
    found = dict(zip(sound, timings, strict=True))
    return tuple(replace(each, timing=found.get(place)) for place, (each, _) in enumerate(judged))


def _judge(problem: BenchProblem, candidate: Candidate, device: torch.device) -> tuple[KernelTime, Callable[[], object] | None]:
    """What became of a first run, still without a time; and the call as it will be timed, None unless all of it is right."""
    judged = KernelTime(candidate.name, candidate.implementation, None, {}, remark=candidate.remark)
    try:
        call, result = candidate.prepare()
        run = call if device.type == "cpu" else captured(call, device)
        problem.poison()
        run()
        findings = list(problem.check(result()))
    except Exception as error:  # whatever a kernel raises is that kernel's result here
        try:
            accelerator(device).synchronize()
        except RuntimeError:  # nothing that is timed after it would mean anything
            raise error from None
        return replace(judged, failure=first_line(error)), None
    wrong = tuple(each.message for each in findings if each.message)
    judged = replace(judged, errors={each.quantity: each.error for each in findings}, wrong=wrong)
    return judged, None if wrong else run
