# SPDX-License-Identifier: Apache-2.0
"""What a run of the suite found: a result per case, the worst error per quantity, and where it ran."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal

from mla_portable.contracts import DeviceFacts, Primitive, Reason
from mla_portable.judge.problems.base import Case

_USUAL: Final = 0.8
_BY_CHANCE: Final = 0.2
Status = Literal["passed", "failed", "error"]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What became of one case.

    Attributes:
        status: "passed"; "failed", a result is wrong; "error", it raised.
        errors: what was measured, by quantity. tolerances: what it may be.
        message: one line per finding, or the exception; empty when passed.
        seconds: building, running and judging it.
        traceback: of the exception, "" where there is none.
    """

    case: Case
    status: Status
    errors: dict[str, float]
    tolerances: dict[str, float]
    message: str
    seconds: float
    traceback: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For `--json`. What is exact and holds is left out; infinities become the word, as JSON has none."""
        said = [name for name, limit in self.tolerances.items() if limit or self.errors[name]]
        return {
            "id": self.case.id,
            "implementation": self.case.implementation,
            "primitive": str(self.case.primitive),
            "status": self.status,
            "errors": {name: _plain(self.errors[name]) for name in said},
            "tolerances": {name: _plain(self.tolerances[name]) for name in said},
            "message": self.message,
            "seconds": round(self.seconds, 4),
        }


Progress = Callable[[int, int, CaseResult], None]
"""Called after each case with (cases done, cases in all, its result)."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """An implementation that was not run, because it does not claim this device or does not work on it."""

    implementation: str
    primitive: Primitive
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Worst:
    """The largest error of one quantity, relative to its tolerance, over an implementation's cases."""

    implementation: str
    primitive: Primitive
    quantity: str
    error: float
    tolerance: float
    case: str

    @property
    def share(self) -> float:
        """The error as a share of its tolerance, infinite for any error of what has to be exact."""
        return _share(self.error, self.tolerance)


@dataclass(frozen=True, slots=True)
class Report:
    """A run of the suite.

    Attributes:
        backend, level: as asked. device: where. versions: (name, version) of what may matter.
        results: in the order of the cases. unavailable: implementations of the backend that no case was run for.
    """

    backend: str
    level: str
    device: DeviceFacts
    versions: tuple[tuple[str, str], ...]
    results: tuple[CaseResult, ...]
    unavailable: tuple[Unavailable, ...] = ()

    @property
    def passed(self) -> int:
        return self._count("passed")

    @property
    def failed(self) -> int:
        """Cases with a wrong result, and cases that raised."""
        return self._count("failed") + self._count("error")

    @property
    def skipped(self) -> int:
        """Always 0: a case that does not apply is not generated, and one that cannot run is an error."""
        return len(self.results) - self.passed - self.failed

    @property
    def seconds(self) -> float:
        return sum(result.seconds for result in self.results)

    @property
    def ok(self) -> bool:
        """Something ran, and nothing failed."""
        return self.passed > 0 and self.passed == len(self.results)

    def _count(self, status: Status) -> int:
        return sum(result.status == status for result in self.results)

    def worst(self) -> tuple[Worst, ...]:
        """One row per implementation, primitive and quantity that is not exact by nature."""
        found: dict[tuple[str, Primitive, str], Worst] = {}
        for result in self.results:
            for quantity, error in result.errors.items():
                limit = result.tolerances[quantity]
                key = (result.case.implementation, result.case.primitive, quantity)
                share = _share(error, limit)
                if key not in found or share > _share(found[key].error, found[key].tolerance):
                    found[key] = Worst(*key, error, limit, result.case.id)
        return tuple(row for row in found.values() if row.tolerance or row.error)

    def common(self) -> tuple[str, ...]:
        """What failing cases share, a line for each primitive: "common to all 21 failures of sparse_decode: sink=plus_inf".

        A parameter is named when not nearly all cases have one of the values that the failing ones have, and when as many cases
        taken at random would seldom have them. Of these, a parameter is left out whose values all passed cases have
        that share the rarer parameters with the failures: it tells them apart from none.
        """
        lines: list[str] = []
        for primitive in dict.fromkeys(result.case.primitive for result in self.results):
            own = [(_parameters(r), r.status == "passed") for r in self.results if r.case.primitive is primitive]
            every, passed = [each for each, _ in own], [each for each, is_passed in own if is_passed]
            failed = [each for each, is_passed in own if not is_passed]
            shared: list[tuple[float, str, set[str]]] = []
            for name in [name for name in failed[0] if all(name in each for each in failed)] if failed else []:
                values = {each[name] for each in failed}
                share = sum(each.get(name) in values for each in every) / len(every)
                if share <= _USUAL and share ** len(failed) <= _BY_CHANCE:
                    shared.append((share, name, values))
            telling: list[str] = []
            for _, name, values in sorted(shared, key=lambda each: each[0]):
                alike = [each for each in passed if each.get(name) in values]
                if len(alike) < len(passed):
                    telling.append(name)
                passed = alike
            words = [f"{name}={'|'.join(sorted(values))}" for _, name, values in shared if name in telling]
            if words:
                lines.append(f"common to all {len(failed)} failures of {primitive}: {', '.join(words)}")
        return tuple(lines)

    def counts(self) -> dict[tuple[str, Primitive], Counter[str]]:
        """How many cases ended how, per implementation and primitive."""
        found: dict[tuple[str, Primitive], Counter[str]] = {}
        for result in self.results:
            key = (result.case.implementation, result.case.primitive)
            found.setdefault(key, Counter())[result.status] += 1
        return found

    def as_dict(self) -> dict[str, Any]:
        """Everything, for `--json` and for evidence records."""
        return {
            "backend": self.backend,
            "level": self.level,
            "ok": self.ok,
            "device": asdict(self.device),
            "versions": dict(self.versions),
            "totals": {
                "cases": len(self.results), "passed": self.passed, "failed": self.failed, "skipped": self.skipped,
                "seconds": round(self.seconds, 3),
            },
            "implementations": [
                {"implementation": name, "primitive": str(primitive), **counts}
                for (name, primitive), counts in self.counts().items()
            ],
            "worst": [
                asdict(row) | {"primitive": str(row.primitive), "error": _plain(row.error), "tolerance": _plain(row.tolerance)}
                for row in self.worst()
            ],
            "unavailable": [
                {"implementation": u.implementation, "primitive": str(u.primitive), "reasons": [str(r) for r in u.reasons]}
                for u in self.unavailable
            ],
            "cases": [result.as_dict() for result in self.results],
        }  # fmt: skip


def _parameters(result: CaseResult) -> dict[str, str]:
    params = result.case.params
    return {each.name: str(getattr(params, each.name)) for each in fields(params)}


def _share(error: float, limit: float) -> float:
    return error / limit if limit else (math.inf if error else 0.0)


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
