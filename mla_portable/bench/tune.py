# SPDX-License-Identifier: Apache-2.0
"""Tuning: every configuration of a kernel on the same problems, judged and timed in turns; the fastest that is right wins."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from mla_portable.bench.candidates import Candidate, prepared
from mla_portable.bench.kernels import Progress, time_candidates
from mla_portable.bench.origin import measured_here
from mla_portable.choose import Registry
from mla_portable.contracts import Implementation, Tunable
from mla_portable.judge.problems.bench import BenchProblem, KernelCase, Workshop
from mla_portable.times.records import MeasuredTime, Measurement
from mla_portable.times.rows import time_spent

Configuration = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One configuration. us: rows -> median of the sizes where it was right. why: what went wrong elsewhere, "" if nothing."""

    configuration: Configuration
    us: Mapping[int, float]
    why: str = ""

    @property
    def score(self) -> float:
        """What the sizes take together, infinite where one is missing."""
        return math.inf if self.why or not self.us else time_spent(self.us.values())


@dataclass(frozen=True, slots=True)
class TuneResult:
    """What was found for one implementation and one kind of request.

    Attributes:
        attempts: the first is the configuration that holds without tuning. measurement: where, when and with what.
    """

    implementation: str
    primitive: str
    layout: str | None
    heads: int | None
    attempts: tuple[Attempt, ...]
    measurement: Measurement

    @property
    def best(self) -> Attempt | None:
        """The fastest over all sizes, None where none was right on all."""
        found = min(self.attempts, key=lambda attempt: attempt.score)
        return None if math.isinf(found.score) else found

    @property
    def gain(self) -> float | None:
        """The untuned configuration's time over the best one's; None where either is not known."""
        best, first = self.best, self.attempts[0].score
        return None if best is None or math.isinf(first) else first / best.score

    def times(self) -> list[MeasuredTime]:
        """Of the best configuration, for a file of times; none where nothing was right."""
        best = self.best
        if best is None:
            return []
        what = self.implementation, self.primitive, self.layout, self.heads, None
        configuration = tuple(best.configuration.items())
        return [
            MeasuredTime(*what, rows, round(us, 2), self.measurement, configuration=configuration)
            for rows, us in sorted(best.us.items())
        ]


def tune(
    cases: Iterable[KernelCase],
    tunables: Sequence[Tunable],
    *,
    device: torch.device,
    registry: Registry,
    backends: Collection[str] = (),
    repeat: int = 30,
    check_rows: int = 4,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[TuneResult]:
    """Time all configurations of every tunable that can serve the cases, one result for each (primitive, layout, heads).

    Args:
        cases: sizes of one kind of request count together. backends: only these backends or implementations; empty means all.
    Raises: errors that leave the device unusable.
    """
    facts = registry.facts(device)
    measurement = measured_here(facts)
    workshop = Workshop(device, facts, seed=seed, check_rows=check_rows)
    offered = {(each.name, each.primitive): each for each in registry.implementations()}
    groups: dict[tuple[str, str | None, int | None], list[KernelCase]] = {}
    for case in cases:
        groups.setdefault((str(case.primitive), case.kv_layout, case.num_heads), []).append(case)
    found: list[TuneResult] = []
    with torch.no_grad():
        for number, (group, sizes) in enumerate(groups.items()):
            for tunable in tunables:
                implementation = offered.get((tunable.implementation, tunable.primitive))
                if implementation is None or str(tunable.primitive) != group[0]:
                    continue
                if backends and not {implementation.name, implementation.backend} & set(backends):
                    continue
                if progress is not None:
                    progress(" ".join(str(word) for word in group if word), number, len(groups))
                problems = map(workshop.make, sizes)
                attempts = _attempts(tunable, implementation, problems, registry, device, repeat)
                if attempts:
                    found.append(TuneResult(implementation.name, *group, attempts, measurement))
    return found


def _attempts(
    tunable: Tunable,
    implementation: Implementation,
    problems: Iterable[BenchProblem],
    registry: Registry,
    device: torch.device,
    repeat: int,
) -> tuple[Attempt, ...]:
    """Every configuration on every size; () where the implementation cannot serve such requests here."""
    configurations: list[Configuration] = []
    us: list[dict[int, float]] = []
    why: list[dict[str, None]] = []
    for problem in problems:
        if not configurations:
            request = problem.request.but(rows=None)
            decision = registry.decide(request, backend=implementation.name, probe=False, thorough=True)
            if not any(verdict.implementation == implementation.name and verdict.can_run for verdict in decision.verdicts):
                return ()
            configurations = [dict(each) for each in tunable.configurations(request)]
            us, why = [{} for _ in configurations], [{} for _ in configurations]
        requests = [problem.request.but(lse=False, configuration=tuple(each.items())) for each in configurations]
        calls = [partial(prepared, problem, implementation, request, implementation.bind, device) for request in requests]
        candidates = [Candidate(implementation.name, implementation, "", call) for call in calls]
        for number, each in enumerate(time_candidates(problem, candidates, device=device, repeat=repeat)):
            if each.median_us is None:
                why[number][each.failure or "; ".join(each.wrong)] = None
            else:
                us[number][problem.case.rows] = each.median_us
    return tuple(Attempt(each, us[number], "; ".join(why[number])) for number, each in enumerate(configurations))
