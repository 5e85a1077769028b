# SPDX-License-Identifier: Apache-2.0
"""Decision: the answer to a Request with a verdict on every candidate, as data; one printer for logs, errors and CLI.

Text for a person shows the cause first, in about ten lines; `all=True` lists every candidate. UnsupportedRequest is the error
that carries a decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mla_portable.contracts.request import Request
from mla_portable.contracts.support import Reason
from mla_portable.errors import MLAPortableError

_MOST_CAUSES: Final = 4
_MOST_REMEDIES: Final = 3
_MOST_NAMES: Final = 3
"""Of candidates with the same reasons, in one line."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found about one candidate.

    Attributes:
        implementation: its full name, "<backend>.<variant>".
        reasons: all reasons against it; empty means it can run.
        cost: what candidates are ranked by, smaller is better; infinite where it is not known.
        cost_source: "declared" or the record it was measured in.
        fits_device: no reason comes from the device alone.
        passed_over: it ranks before what was chosen; where that was measured, so was this.
    """

    implementation: str
    reasons: tuple[Reason, ...]
    cost: float
    cost_source: str = "declared"
    fits_device: bool = True
    passed_over: bool = False

    @property
    def can_run(self) -> bool:
        return not self.reasons

    @property
    def measured(self) -> bool:
        """The cost was measured."""
        return self.cost_source != "declared"

    @property
    def for_another_vendor(self) -> bool:
        """It is for other vendors' devices, so that nothing else about it matters on this one."""
        return any(reason.subject == "vendor" for reason in self.reasons)


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice for a request, with the reasons against the others.

    Attributes:
        request: as asked. chosen: the implementation's full name, None when nothing can run.
        control: what decided: "argument", "use(...)", "MLA_PORTABLE_BACKEND...", "default".
        forced: the backend or implementation that was forced; None for an automatic choice.
        verdicts: every candidate, best first; those that cannot run last.
        plugin_failures: (plugin, error) for each that did not load, or whose detector failed.
    """

    request: Request
    chosen: str | None
    control: str
    forced: str | None
    verdicts: tuple[Verdict, ...]
    plugin_failures: tuple[tuple[str, str], ...] = ()

    @property
    def was_fallback(self) -> bool:
        """An automatic choice that passed over a candidate of better rank, for reasons worth a line in the log."""
        return self.chosen is not None and not self.forced and any(v.passed_over for v in self.verdicts)

    def is_forced(self, verdict: Verdict) -> bool:
        """It is on the forced implementation, or on one of the forced backend."""
        return self.forced in (verdict.implementation, verdict.implementation.partition(".")[0])

    def is_aside(self, verdict: Verdict) -> bool:
        """A person sees it counted, without its reasons: it is for other vendors' devices and nobody forced it."""
        return verdict.for_another_vendor and not self.is_forced(verdict)

    @property
    def causes(self) -> tuple[Verdict, ...]:
        """The candidates whose reasons explain the decision: those that fit the device, else all; of a forced backend, its own.

        Where something was chosen, those of better rank only, and only those that fit the device.
        """
        refused = [v for v in self.verdicts if v.reasons]
        if self.forced:
            refused = [v for v in refused if self.is_forced(v)]
        fitting = [v for v in refused if v.fits_device]
        if self.chosen is None:
            return tuple(fitting or refused)
        return tuple(v for v in fitting if v.passed_over)

    @property
    def release(self) -> str:
        """What a user does so that the choice is automatic."""
        if self.control.startswith("MLA_PORTABLE_") and "=" not in self.control:
            return f"unset {self.control}"
        return "leave out the backend" if self.control == "argument" else f"remove it from {self.control}"

    @property
    def remedies(self) -> list[str]:
        """What to do where nothing, or not what is forced, can run; of a forced backend for other vendors' devices, only to
        lift the force."""
        causes = [v for v in self.causes if not (self.forced and v.for_another_vendor)]
        found = list(dict.fromkeys(r.remedy for v in causes for r in _decisive(v) if r.remedy))
        if self.forced:
            found.insert(0, f"{self.release} to let the registry choose")
        return found or ["`mla-portable doctor` shows what is installed"]

    def failure_text(self, *, all: bool = False) -> str:
        """The message of UnsupportedRequest: the causes, the request, remedies."""
        if self.forced:
            head = f"{self.forced} (forced by {self.control}) cannot run {self.request.primitive}, "
            lines = [f"{head}and a forced choice never falls back"]
        else:
            lines = [f"nothing here can run {self.request.primitive}"]
        lines += self._body() if all else self._brief()
        remedies, last = self.remedies, _MOST_REMEDIES - 1
        if not all and remedies[last:]:
            remedies[last:] = ["; ".join(remedies[last:])]
        lines += [f"  remedy    {remedy}" for remedy in remedies]
        return "\n".join(lines)

    def text(self, *, all: bool = True) -> str:
        """The decision for a person: the choice, what decided, all other candidates with reasons; or, in brief, the causes.

        Candidates of another vendor get one line for each backend, unless it is forced.
        """
        head = f"{self.request.primitive}: {self.chosen or 'nothing can run it'} ({self.control})"
        return "\n".join([head, *(self._body() if all else self._brief())])

    def _brief(self) -> list[str]:
        """The causes, how many candidates are left out, the request."""
        causes = self.causes
        lines = [f"{name}: plugin {why}" for name, why in self.plugin_failures] + grouped(causes)
        others = [v for v in self.verdicts if v not in causes and v.implementation != self.chosen]
        elsewhere = sum(not v.fits_device for v in others)
        counts = {"implementations for other devices": elsewhere, "other implementations": len(others) - elsewhere}
        left_out = ", ".join(f"{n} {what if n > 1 else what.replace('ns', 'n', 1)}" for what, n in counts.items() if n)
        if not self.verdicts:
            left_out = "no installed plugin offers this primitive"
        elif left_out:
            left_out += f" (`mla-portable explain {self.request.primitive}` lists all)"
        return [f"  {line}" for line in (*_few(lines, _MOST_CAUSES), left_out, f"request   {self.request}") if line]

    def _body(self) -> list[str]:
        width = max([len(v.implementation) for v in self.verdicts] + [len(n) for n, _ in self.plugin_failures], default=0)
        lines = [f"  request   {self.request}"]
        elsewhere: dict[tuple[str, str], int] = {}
        for v in self.verdicts:
            if self.is_aside(v):
                vendor = next(str(r) for r in v.reasons if r.subject == "vendor")
                of = v.implementation.partition(".")[0], vendor
                elsewhere[of] = elsewhere.get(of, 0) + 1
                continue
            state = "; ".join(map(str, v.reasons)) or ("chosen" if v.implementation == self.chosen else "can run")
            lines.append(f"  {v.implementation:<{width}}  {state} [{v.cost_source} cost {v.cost:g}]")
        for (backend, vendor), count in elsewhere.items():
            lines.append(f"  {backend:<{width}}  {vendor}: {count} implementation{'s'[: count > 1]}")
        lines += [f"  {name:<{width}}  plugin {why}" for name, why in self.plugin_failures]
        if not self.verdicts:
            lines.append("  no installed plugin offers this primitive")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """The same for `--json`."""
        return {
            "primitive": str(self.request.primitive),
            "request": str(self.request),
            "chosen": self.chosen,
            "control": self.control,
            "forced": self.forced,
            "candidates": [
                {
                    "implementation": v.implementation,
                    "can_run": v.can_run,
                    "cost": v.cost if math.isfinite(v.cost) else None,
                    "cost_source": v.cost_source,
                    "reasons": [
                        {"subject": r.subject, "given": r.given, "limit": r.limit, "remedy": r.remedy} for r in v.reasons
                    ],
                }
                for v in self.verdicts
            ],
            "plugin_failures": [{"plugin": name, "error": why} for name, why in self.plugin_failures],
        }


class UnsupportedRequest(MLAPortableError, RuntimeError):
    """No implementation, or not the forced one, can run a well-formed request.

    Attributes:
        decision: the request, every candidate and all reasons against each (`mla_portable.contracts.Decision`).
    """

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        super().__init__(decision.failure_text())


def grouped(verdicts: Iterable[Verdict]) -> list[str]:
    """A line for each set of reasons: the candidates that share it, then the reasons."""
    names: dict[str, list[str]] = {}
    for v in verdicts:
        names.setdefault("; ".join(map(str, _decisive(v))), []).append(v.implementation)
    lines: list[str] = []
    for reasons, those in names.items():
        more = f" and {len(those) - _MOST_NAMES} more" if len(those) > _MOST_NAMES else ""
        lines.append(f"{', '.join(those[:_MOST_NAMES])}{more}: {reasons}")
    return lines


def _decisive(verdict: Verdict) -> Sequence[Reason]:
    """All reasons; of a candidate for another vendor's devices that alone, for the others follow from it."""
    return [reason for reason in verdict.reasons if reason.subject == "vendor"] or verdict.reasons


def _few(lines: Sequence[str], most: int) -> list[str]:
    """At most that many: the first, how many are left out, the last."""
    if len(lines) <= most:
        return list(lines)
    return [*lines[: most - 2], f"... and {len(lines) - most + 1} more", lines[-1]]
