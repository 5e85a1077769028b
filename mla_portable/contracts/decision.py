# SPDX-License-Identifier: Apache-2.0
"""Decision: the answer to a Request with a verdict on every candidate, as data; one printer for logs, errors and CLI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mla_portable.contracts.request import Request
from mla_portable.contracts.support import Reason

__all__ = ["Decision", "Verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found about one candidate.

    Attributes:
        implementation: its full name, "<backend>.<variant>".
        reasons: all reasons against it; empty means it can run.
        cost: what candidates are ranked by, smaller is better. cost_source: "declared" or the record it was measured in.
    """

    implementation: str
    reasons: tuple[Reason, ...]
    cost: float
    cost_source: str = "declared"

    @property
    def can_run(self) -> bool:
        return not self.reasons

    @property
    def measured(self) -> bool:
        """The cost was measured."""
        return self.cost_source != "declared"

    @property
    def rank(self) -> tuple[bool, float]:
        """Smaller is better. Measured and declared costs are not comparable: everything measured comes first."""
        return not self.measured, self.cost


@dataclass(frozen=True, slots=True)
class Decision:
    """Who serves a request, and why not the others.

    Attributes:
        request: as asked. chosen: the implementation's full name, None when nothing can run.
        control: who decided: "argument", "use(...)", "MLA_PORTABLE_BACKEND...", "policy file", "default".
        forced: the backend or implementation that was demanded; None for an automatic choice.
        verdicts: every candidate, best first; those that cannot run last.
        plugin_failures: (plugin, what became of it) for each that did not load, or whose detector failed.
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
        if self.forced or self.chosen is None:
            return False
        chosen = next(v for v in self.verdicts if v.implementation == self.chosen)
        return any(v.reasons and v.rank < chosen.rank for v in self.verdicts)

    def failure_text(self) -> str:
        """The message of UnsupportedRequest: the request, every candidate with all its reasons, a remedy."""
        who = f"{self.forced} (forced by {self.control})" if self.forced else "nothing here"
        lines = (
            [f"{who} can run {self.request.primitive}"]
            if not self.forced
            else [f"{who} cannot run {self.request.primitive}, and a forced choice never falls back"]
        )
        lines += self._body()
        remedies = dict.fromkeys(r.remedy for v in self.verdicts for r in v.reasons if r.remedy)
        if self.forced:
            remedies = {f"drop {self.control} to let the registry choose": None, **remedies}
        lines += [f"  remedy    {remedy}" for remedy in remedies] or [
            "  remedy    `mla-portable doctor` shows what is installed"
        ]
        return "\n".join(lines)

    def text(self) -> str:
        """The decision for a person: chosen, by whom, every other candidate with all its reasons."""
        head = f"{self.request.primitive}: {self.chosen or 'nothing can run it'} ({self.control})"
        return "\n".join([head, *self._body()])

    def _body(self) -> list[str]:
        width = max([len(v.implementation) for v in self.verdicts] + [len(n) for n, _ in self.plugin_failures], default=0)
        lines = [f"  request   {self.request}"]
        for v in self.verdicts:
            state = "; ".join(map(str, v.reasons)) or ("chosen" if v.implementation == self.chosen else "can run")
            lines.append(f"  {v.implementation:<{width}}  {state} [{v.cost_source} cost {v.cost:g}]")
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
                    "cost": v.cost,
                    "cost_source": v.cost_source,
                    "reasons": [
                        {"subject": r.subject, "given": r.given, "limit": r.limit, "remedy": r.remedy} for r in v.reasons
                    ],
                }
                for v in self.verdicts
            ],
            "plugin_failures": [{"plugin": name, "error": why} for name, why in self.plugin_failures],
        }
