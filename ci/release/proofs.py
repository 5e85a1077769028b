# SPDX-License-Identifier: Apache-2.0
"""What runs prove: of each implementation on each device, how many of the suite's cases passed in a release."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from suite import LEVELS, Suite

from mla_portable.capability.matrix import Proof
from mla_portable.capability.profiles import Profile, profile_of
from mla_portable.capability.run import Run, name_of


@dataclass(frozen=True, slots=True)
class Results:
    """What became of the cases of one (release, device, target).

    Attributes:
        device: slug of its profile. arch: whose code ran. runs: by date. status: id -> of the newest run that has it.
    """

    release: str
    device: str
    target: str
    arch: str
    runs: tuple[Run, ...]
    status: Mapping[str, str]

    def passed(self, ids: Iterable[str]) -> bool:
        """All of some cases passed, and there is one."""
        states = [self.status.get(each) for each in ids]
        return bool(states) and all(state == "passed" for state in states)


def results_of(runs: Iterable[Run], profiles: Mapping[str, Profile]) -> list[Results]:
    """Runs of one release, device and target together. Raises: RecordError for a device without a profile."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        key = run.release, profile_of(run.device_name, profiles).slug, run.target or ""
        groups.setdefault(key, []).append(run)
    found: list[Results] = []
    for (release, device, target), several in sorted(groups.items()):
        ordered = tuple(sorted(several, key=lambda run: run.date))
        status = {case.id: case.status for run in ordered for case in run.cases}
        found.append(Results(release, device, target, ordered[0].arch, ordered, status))
    return found


def proofs_of(results: Results, suite: Suite) -> list[Proof]:
    """What the results say of each implementation that ran. suite: of their release."""
    ran: dict[tuple[str, str], dict[str, Run]] = {}
    for run in results.runs:
        for case in run.cases:
            ran.setdefault(name_of(case.id), {})[case.id] = run
    found: list[Proof] = []
    for (primitive, implementation), cases in sorted(ran.items()):

        def of_level(level: str, key: tuple[str, str] = (primitive, implementation)) -> Mapping[str, str]:
            return suite.cases(*key, results.arch, level)

        layout_of: dict[str, str] = {}
        for level in LEVELS:
            layout_of |= of_level(level)
        for layout in sorted({layout_of.get(case, "") for case in cases}):
            mine = {case: run for case, run in cases.items() if layout_of.get(case, "") == layout}
            found.append(_proof(results, primitive, implementation, layout, mine, of_level))
    return found


def _proof(
    results: Results,
    primitive: str,
    implementation: str,
    layout: str,
    cases: Mapping[str, Run],
    of_level: Callable[[str], Mapping[str, str]],
) -> Proof:
    missing: dict[str, int] = {}
    for level in LEVELS:
        wanted = [case for case, its in of_level(level).items() if its == layout]
        missing[level] = sum(case not in cases for case in wanted) if wanted else len(cases)
    level = min(missing, key=lambda each: missing[each])
    failed = [case for case in cases if results.status[case] != "passed"]
    newest = max(cases.values(), key=lambda run: run.date)
    fields: dict[str, Any] = {name: getattr(results, name) for name in ("release", "device", "target")}
    return Proof(
        **fields,
        implementation=implementation,
        primitive=primitive,
        layout=layout,
        level=level,
        passed=len(cases) - len(failed),
        failed=len(failed),
        missing=missing[level],
        first_failed=min(failed, default=""),
        date=newest.date,
        commit=newest.commit,
        who=sorted({run.who for run in cases.values()}),
    )
