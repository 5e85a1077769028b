# SPDX-License-Identifier: Apache-2.0
"""Tuning: every configuration of a kernel on the same problems, judged and timed in turns; the fastest that is right wins."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial

import torch

from mla_portable.contracts import Implementation, Request, Tunable
from mla_portable.problems.bench import KernelCase, Workshop
from mla_portable.registry import Registry
from mla_portable.registry.costs import time_spent
from mla_portable.registry.tuned import TunedEntry
from mla_portable.tools.bench.candidates import Candidate, prepared
from mla_portable.tools.bench.kernels import KernelTime, time_candidates

__all__ = ["Attempt", "TuneResult", "tune"]

Configuration = Mapping[str, int]
_Group = tuple[str, "str | None", "int | None"]
"""(primitive, layout, heads): what an entry of the table holds for."""


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
        attempts: the first is the configuration that holds without tuning. device, recorded: where and when.
    """

    implementation: str
    primitive: str
    layout: str | None
    heads: int | None
    attempts: tuple[Attempt, ...]
    device: str
    recorded: str

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

    def entry(self) -> TunedEntry | None:
        """For the user's table; None where nothing was right."""
        best = self.best
        if best is None:
            return None
        return TunedEntry(
            device=self.device,
            implementation=self.implementation,
            primitive=self.primitive,
            layout=self.layout,
            heads=self.heads,
            configuration=dict(best.configuration),
            us={str(rows): round(us, 2) for rows, us in sorted(best.us.items())},
            recorded=self.recorded,
        )


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
    progress: Callable[[str, int, int], None] | None = None,
) -> list[TuneResult]:
    """Time all configurations of every tunable that can serve the cases, one result for each (primitive, layout, heads).

    Args:
        cases: sizes of one kind of request count together. backends: only these backends or implementations; empty means all.
    Raises: errors that leave the device unusable.
    """
    facts = registry.facts(device)
    recorded = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    workshop = Workshop(device, facts, seed=seed, check_rows=check_rows)
    offered = {(each.name, each.primitive): each for each in registry.implementations()}
    groups: dict[_Group, list[KernelCase]] = {}
    for case in cases:
        groups.setdefault((str(case.primitive), case.kv_layout, case.num_heads), []).append(case)
    found: list[TuneResult] = []
    with torch.no_grad():
        for number, ((primitive, layout, heads), sizes) in enumerate(groups.items()):
            for tunable in tunables:
                implementation = offered.get((tunable.implementation, tunable.primitive))
                if implementation is None or str(tunable.primitive) != primitive:
                    continue
                if backends and not {implementation.name, implementation.backend} & set(backends):
                    continue
                if progress is not None:
                    progress(" ".join(map(str, (primitive, layout or "", heads or ""))), number, len(groups))
                attempts = _attempts(tunable, implementation, sizes, workshop, registry, device, repeat)
                if attempts:
                    found.append(TuneResult(implementation.name, primitive, layout, heads, attempts, facts.name, recorded))
    return found


def _attempts(
    tunable: Tunable,
    implementation: Implementation,
    sizes: Sequence[KernelCase],
    workshop: Workshop,
    registry: Registry,
    device: torch.device,
    repeat: int,
) -> tuple[Attempt, ...]:
    """Every configuration on every size; () where the implementation cannot serve such requests here."""
    configurations: list[Configuration] = []
    times: list[list[tuple[int, KernelTime]]] = []
    for case in sizes:
        problem = workshop.make(case)
        if not configurations:
            request = problem.request.but(rows=None)
            decision = registry.decide(request, backend="auto", probe=False, thorough=True)
            if not any(verdict.implementation == implementation.name and verdict.can_run for verdict in decision.verdicts):
                return ()
            configurations = [dict(each) for each in tunable.configurations(request)]
            times = [[] for _ in configurations]
        candidates = [
            Candidate(
                _words(configuration),
                implementation,
                "",
                partial(prepared, problem, implementation, _bind(implementation, configuration), device),
            )
            for configuration in configurations
        ]
        for timed, each in zip(times, time_candidates(problem, candidates, device=device, repeat=repeat), strict=True):
            timed.append((case.rows, each))
    return tuple(_attempt(configuration, timed) for configuration, timed in zip(configurations, times, strict=True))


def _bind(implementation: Implementation, configuration: Configuration) -> Callable[[Request], Callable[..., object]]:
    return lambda request: implementation.bind(request.but(configuration=tuple(configuration.items())))


def _words(configuration: Configuration) -> str:
    return " ".join(f"{name}={value}" for name, value in configuration.items())


def _attempt(configuration: Configuration, timed: Iterable[tuple[int, KernelTime]]) -> Attempt:
    us: dict[int, float] = {}
    why: dict[str, None] = {}
    for rows, each in timed:
        if each.median_us is None:
            why[each.failure or "; ".join(each.wrong)] = None
        else:
            us[rows] = each.median_us
    return Attempt(configuration, us, "; ".join(why))
