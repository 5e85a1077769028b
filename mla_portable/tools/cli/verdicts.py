# SPDX-License-Identifier: Apache-2.0
"""Decisions for a person: what was asked, the candidates with cost and reasons, and what the costs mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from rich.console import RenderableType
from rich.text import Text

from mla_portable.tools.cli.output import columns, hanging

if TYPE_CHECKING:
    from mla_portable.attention import RouteDecision, RouteVerdict
    from mla_portable.contracts import Decision, Verdict

State = Callable[["Decision", str], "str | None"]
"""(decision, implementation) -> its state in the matrix, on a device that is not here."""
_TIMES: Final = ", us by rows "
"""In the source of a measured cost, before its times."""


def decision_lines(decision: Decision, state: State | None = None) -> Iterator[RenderableType]:
    """One primitive: what is chosen, what was asked, a row for each candidate. state: of a device that is not here."""
    request = decision.request
    if decision.chosen:
        verb = "would be tried first" if state else f"by {decision.control}" if decision.forced else "chosen"
        yield Text(f"{request.primitive}: ").append(decision.chosen, "bold green").append(f" ({verb})")
    else:
        yield Text(decision.failure_text().partition("\n")[0], "bold red")
    yield hanging("asked", str(request))
    shown = [verdict for verdict in decision.verdicts if not _of_another_vendor(verdict)]
    if shown:
        rows = [[v.implementation, f"{v.cost:g} {v.cost_source.partition(' ')[0]}", _words(decision, v, state)] for v in shown]
        yield columns(["implementation", "cost", "verdict; us by rows" if any(v.measured for v in shown) else "verdict"], rows)
    others = Counter(v.implementation.partition(".")[0] for v in decision.verdicts if _of_another_vendor(v))
    if others:
        counts = ", ".join(f"{count} of {backend}" for backend, count in others.items())
        yield hanging("others", f"{counts}: for other vendors' devices")
    yield from (hanging(name, f"plugin {why}") for name, why in decision.plugin_failures)
    for where in dict.fromkeys(v.cost_source.partition(_TIMES)[0] for v in shown if v.measured):
        yield hanging("times", where)
    if not decision.chosen:
        yield from (hanging("remedy", remedy) for remedy in decision.remedies)


def cost_lines(decisions: Iterable[Decision]) -> Iterator[RenderableType]:
    """What the costs mean that occur."""
    measured = {verdict.measured for each in decisions for verdict in each.verdicts if not _of_another_vendor(verdict)}
    if True in measured:
        yield Text("cost measured: 10 is the fastest time on record for that device and size, 20 is twice as slow", "dim")
    if False in measured:
        yield Text("cost declared: the author's estimate; behind all that were timed", "dim")


def _of_another_vendor(verdict: Verdict) -> bool:
    return any(reason.subject == "vendor" for reason in verdict.reasons)


def _words(decision: Decision, verdict: Verdict, state: State | None) -> str:
    chosen = verdict.implementation == decision.chosen
    words = ("would be tried first" if chosen else "not checked") if state else ("chosen" if chosen else "can run")
    words = "; ".join(map(str, verdict.reasons)) or words
    where = state(decision, verdict.implementation) if state else None
    times = verdict.cost_source.partition(_TIMES)[2].rstrip(";")
    return "; ".join(filter(None, (words, f"matrix: {where}" if where else "", times)))


def route_lines(decision: RouteDecision, state: State | None = None) -> Iterator[RenderableType]:
    """How a layer composes the primitives: a row for each route, then what serves the chosen one's primitives."""
    from mla_portable.attention.routes import WEIGHTS_TEXT

    if decision.chosen is None:
        yield Text(decision.failure_text().partition("\n")[0], "bold red")
        why = [[each.route, "; ".join(f"{r.subject} {r.given}" for r in each.reasons)] for each in decision.verdicts]
        yield columns(["route", "why not"], why)
        refused = (part.decision for each in decision.verdicts for part in each.parts if part.decision.chosen is None)
        for each in {each.request.primitive: each for each in refused}.values():
            yield ""
            yield from decision_lines(each, state)
        return
    verb = "would be tried first" if state else "forced" if decision.forced else "chosen"
    yield Text("route: ").append(decision.chosen, "bold green").append(f" ({verb})")
    rows = [[each.route, f"{each.cost:.4g}" if each.can_run else "", _made_of(each)] for each in decision.verdicts]
    yield columns(["route", "cost", "made of"], rows)
    yield ""
    for part in {str(each.decision.request): each.decision for each in decision.verdict.parts}.values():
        yield from decision_lines(part, state)
        yield ""
    yield Text(WEIGHTS_TEXT, "dim")


def _made_of(verdict: RouteVerdict) -> str:
    if verdict.reasons:
        return "; ".join(map(str, verdict.reasons))
    terms = [f"{part.role} {part.cost:g}" + ("" if part.weight == 1 else f" x {part.weight:g}") for part in verdict.parts]
    terms = [term for term, part in zip(terms, verdict.parts, strict=True) if part.weight]
    terms += [f"{verdict.fixed_cost:g}"] if verdict.fixed_cost else []
    workspace = f"workspace of {verdict.workspace_bytes / 1e6:,.0f} MB" if verdict.workspace_bytes else ""
    share = f"{verdict.memory_share:.1%} of the memory, added to the cost" if verdict.memory_share else ""
    return "; ".join(filter(None, (" + ".join(terms), workspace, share, verdict.note)))
