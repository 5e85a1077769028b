# SPDX-License-Identifier: Apache-2.0
"""Decisions for a person: what was asked, the candidates with cost and reasons, and what the costs mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from rich.console import RenderableType
from rich.text import Text

from mla_portable.cli.output import columns, hanging

if TYPE_CHECKING:
    from mla_portable.attention import RouteDecision, RouteVerdict
    from mla_portable.attention.route_decision import RoutePart
    from mla_portable.contracts import Decision, Verdict

State = Callable[["Decision", str], "str | None"]
"""(decision, implementation) -> its state in the matrix, on a device that is not here."""
_TIMES: Final = ", us by rows "
"""In the source of a measured cost, before its times."""


def decision_lines(decision: Decision, state: State | None = None, *, part: str = "") -> Iterator[RenderableType]:
    """One primitive: what is chosen, what was asked, a row for each candidate.

    Args:
        state: of a device that is not here. part: of a route, that the primitive plays.
    """
    request = decision.request
    subject = f"{part} ({request.primitive})" if part else str(request.primitive)
    if decision.chosen:
        verb = "would be tried first" if state else f"by {decision.control}" if decision.forced else "chosen"
        yield Text(f"{subject}: ").append(decision.chosen, "bold green").append(f" ({verb})")
    else:
        yield Text(decision.failure_text().partition("\n")[0], "bold red")
    yield hanging("asked", str(request))
    shown = [verdict for verdict in decision.verdicts if not decision.is_aside(verdict)]
    if shown:
        rows = [[v.implementation, f"{v.cost:g} {v.cost_source.partition(' ')[0]}", _words(decision, v, state)] for v in shown]
        yield columns(["implementation", "cost", "verdict; us by rows" if any(v.measured for v in shown) else "verdict"], rows)
    others = Counter(v.implementation.partition(".")[0] for v in decision.verdicts if decision.is_aside(v))
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
    measured = {verdict.measured for each in decisions for verdict in each.verdicts if not each.is_aside(verdict)}
    if True in measured:
        yield Text("cost measured: 10 is the fastest time on record for that device and size, 20 is twice as slow", "dim")
    if False in measured:
        yield Text("cost declared: the author's estimate; behind all that were timed", "dim")


def _words(decision: Decision, verdict: Verdict, state: State | None) -> str:
    chosen = verdict.implementation == decision.chosen
    words = ("would be tried first" if chosen else "not checked") if state else ("chosen" if chosen else "can run")
    words = "; ".join(map(str, verdict.reasons)) or words
    where = state(decision, verdict.implementation) if state else None
    times = verdict.cost_source.partition(_TIMES)[2].rstrip(";")
    return "; ".join(filter(None, (words, f"matrix: {where}" if where else "", times)))


def route_lines(
    decision: RouteDecision, beside: Mapping[str, Decision], state: State | None = None, *, every: bool = False
) -> Iterator[RenderableType]:
    """How a layer composes the primitives: what serves each part of the chosen route, prompts and the indexer.

    Args:
        beside: "prompts", over keys of each head, and "indexer", the selection of keys.
        every: show all routes, and all candidates for each part with the reasons.
    """
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
    parts = [_part_row(each, state) for each in decision.verdict.parts]
    if "prompts" in beside:
        parts.append(["prompts", str(beside["prompts"].chosen), "over keys of each head, where faster"])
    if "indexer" in beside:
        parts.append(_indexer_row(beside["indexer"], state))
    spec = decision.spec
    cache, rows = f"{spec.kv_layout} (--layout)", f"{spec.max_num_reqs} decodes (--rows)"
    asked = f"{spec.num_heads} heads, {cache}, {rows}, {'lse' if spec.need_lse else 'no lse'}"
    if not every:
        yield columns(["part", "served by", "why"], parts)
        yield Text(f"{asked}; --all shows more", "dim")
        return
    rows = [[each.route, f"{each.cost:.4g}" if each.can_run else "", _made_of(each)] for each in decision.verdicts]
    yield columns(["route", "cost", "made of"], rows)
    yield ""
    yield columns(["part", "served by", "why"], parts)
    yield ""
    for part in {each.decision.request: each for each in decision.verdict.parts}.values():
        yield from decision_lines(part.decision, state, part=part_name(part))
        yield ""
    for name, each in beside.items():
        yield from decision_lines(each, state, part=name)
        yield ""
    yield Text(WEIGHTS_TEXT, "dim")
    yield Text(f"asked as a layer in vLLM does: {asked}", "dim")


def part_name(part: RoutePart) -> str:
    """What a part of a route does, in words."""
    return "prefill in place" if part.role == "in_place" else part.label


def _part_row(part: RoutePart, state: State | None) -> list[str]:
    """In a few words: what decided, one time, the state in the matrix; `--all` has the rest."""
    return [part_name(part), str(part.decision.chosen), _why(part.decision, state)]


def _indexer_row(decision: Decision, state: State | None) -> list[str]:
    from mla_portable.engines.common.scorer import own_indexer

    if decision.chosen is None:
        return ["indexer", "NOTHING", decision.failure_text().partition("\n")[0]]
    facts = decision.request.device
    own = own_indexer(facts)
    if own:
        return ["indexer", "the engine's own", f"{own}; on request {decision.chosen}"]
    # a vendor's engine may be an older vLLM, whose indexer the plugin leaves alone
    older = "" if facts.vendor in ("nvidia", "cpu") else "; vLLM's own before 0.24"
    return ["indexer", decision.chosen, _why(decision, state) + older]


def _why(decision: Decision, state: State | None) -> str:
    chosen = next(v for v in decision.verdicts if v.implementation == decision.chosen)
    if decision.forced:
        return f"forced by {decision.control}"
    first = chosen.cost_source.partition(_TIMES)[2].partition(",")[0].partition(";")[0]
    rows, _, us = first.partition(": ")
    known = state(decision, chosen.implementation) if state else None
    words = [f"{us} us ({rows} rows)" if us else "", known or ""]
    return "; ".join(filter(None, words)) or f"cost {chosen.cost:g} {chosen.cost_source.partition(' ')[0]}"


def _made_of(verdict: RouteVerdict) -> str:
    if verdict.reasons:
        return "; ".join(map(str, verdict.reasons))
    terms = [f"{part.label} {part.cost:g}" + ("" if part.weight == 1 else f" x {part.weight:g}") for part in verdict.parts]
    terms = [term for term, part in zip(terms, verdict.parts, strict=True) if part.weight]
    terms += [f"{verdict.fixed_cost:g}"] if verdict.fixed_cost else []
    workspace = f"workspace of {verdict.workspace_bytes / 1e6:,.0f} MB" if verdict.workspace_bytes else ""
    share = f"{verdict.memory_share:.1%} of the memory, added to the cost" if verdict.memory_share else ""
    return "; ".join(filter(None, (" + ".join(terms), workspace, share, verdict.note)))
