# SPDX-License-Identifier: Apache-2.0
"""RouteDecision: the route that serves a layer, with a verdict on every route, as data; its text for logs, errors and CLI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from mla_portable.attention.spec import AttentionSpec
from mla_portable.choose.select import Standing
from mla_portable.contracts import ROUTES, Decision, DeviceFacts, Reason, UnsupportedRequest
from mla_portable.contracts.decision import grouped
from mla_portable.contracts.values import check_type, refuse
from mla_portable.times.prefill import PrefillTimes

Role = Literal["convert", "decode", "prefill", "gather", "in_place"]
"""What a primitive does on a route: converts indices, serves decode tokens, serves prefill tokens, gathers their contexts, or
serves prefill tokens that `split` does not gather."""
NOT_SERVED: Final = "not served"
"""What the reason against a route says of a primitive that nothing can run."""
NOT_OFFERED: Final = "no installed plugin offers it"
"""Its limit, where there is no candidate."""
_SHOWN_SHARE: Final = 1e-3
"""Of the memory: below it the price of a workspace is not worth a term in the text."""
_UNMEASURED_SHARE: Final = 0.1
"""Of the weights of a route that counts as measured."""
_WIDTH: Final = max(map(len, ROUTES))


@dataclass(frozen=True, slots=True)
class RoutePart:
    """One primitive of a route.

    Attributes:
        role: one part of each on a route, but for "decode", of which others may serve smaller batches.
        decision: on the implementation. weight: of its cost.
        most_rows: of a decode batch that this part serves; None for the part of the largest batches, and in every other role.
    """

    role: Role
    decision: Decision
    weight: float = 0.0
    most_rows: int | None = None

    @property
    def label(self) -> str:
        """The role, for people; of smaller decode batches with the rows that it serves."""
        return self.role if self.most_rows is None else f"{self.role} <= {self.most_rows} rows"

    @property
    def cost(self) -> float:
        """Of the chosen implementation; 0 where there is none."""
        return next((v.cost for v in self.decision.verdicts if v.implementation == self.decision.chosen), 0.0)

    @property
    def measured(self) -> bool:
        """The cost was measured."""
        return any(v.measured for v in self.decision.verdicts if v.implementation == self.decision.chosen)


@dataclass(frozen=True, slots=True)
class RouteVerdict:
    """What was found about one route.

    Attributes:
        route: one of ROUTES. parts: its primitives. reasons: all reasons against it; empty means it can serve.
        fixed_cost: cost beyond its parts'. note: what else its rank depends on, beside its parts.
        workspace_bytes: bf16 rows that a layer on this route allocates. memory_share: of the device's memory, 0 where that is
            not known.
        prefill_times: by which a planner decides what is gathered; None where all is, or nothing.
    """

    route: str
    parts: tuple[RoutePart, ...]
    reasons: tuple[Reason, ...]
    fixed_cost: float = 0.0
    note: str = ""
    workspace_bytes: int = 0
    memory_share: float = 0.0
    prefill_times: PrefillTimes | None = None

    @property
    def can_run(self) -> bool:
        return not self.reasons

    @property
    def cost(self) -> float:
        """Weighted sum of the parts' costs, and the price of the workspace; smaller is preferred."""
        return (sum(part.cost * part.weight for part in self.parts) + self.fixed_cost) * (1 + self.memory_share)

    @property
    def measured(self) -> bool:
        """Its parts were measured, but for a tenth of the weights, and it has no fixed cost.

        The gather before a prefill has less: a device whose attention kernels were timed is ranked by those times.
        """
        unknown = sum(part.weight for part in self.parts if not part.measured)
        return not self.fixed_cost and unknown <= _UNMEASURED_SHARE * sum(part.weight for part in self.parts)

    @property
    def standing(self) -> Standing:
        """What it is ranked by."""
        return Standing(self.measured, self.cost)

    def part(self, role: Role) -> RoutePart | None:
        """The part of `role` without a limit of rows, None where the route has none."""
        return next((part for part in self.parts if part.role == role and part.most_rows is None), None)

    def __str__(self) -> str:
        if self.reasons:
            return "; ".join(map(str, self.reasons))
        terms = [f"{part.label} {part.decision.chosen} {part.cost:g} x {part.weight:g}" for part in self.parts if part.weight]
        terms += [f"{self.fixed_cost:g}"] if self.fixed_cost else []
        total = " + ".join(terms)
        notes = [self.note] if self.note else []
        if self.workspace_bytes:
            notes.insert(0, f"workspace of {self.workspace_bytes / 1e6:,.1f} MB")
        if self.memory_share >= _SHOWN_SHARE:
            total, notes[0] = f"({total}) x {1 + self.memory_share:.4g}", f"{notes[0]}, {self.memory_share:.1%} of the memory"
        return f"{total} = {self.cost:.4g}" + (f" ({'; '.join(notes)})" if notes else "")


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """Which route serves a layer, and why not the others.

    Attributes:
        spec, device: what was asked, where. chosen: the route, None when none is possible. forced: the forced one, or None.
        verdicts: every route that was considered, best first; those that cannot serve last.
    """

    spec: AttentionSpec
    device: DeviceFacts
    chosen: str | None
    forced: str | None
    verdicts: tuple[RouteVerdict, ...] = ()

    @property
    def verdict(self) -> RouteVerdict:
        """The verdict on the chosen route. Raises: UnsupportedRoute if there is none."""
        for verdict in self.verdicts:
            if verdict.route == self.chosen:
                return verdict
        raise UnsupportedRoute(self)

    def text(self) -> str:
        """The decision for a person: the route, the others with their reasons, then the choice for each primitive."""
        control = "forced by route=" if self.forced else "automatic"
        lines = [f"route: {self.chosen or 'none can serve'} ({control})", *self._routes()]
        if self.chosen:
            lines += dict.fromkeys(part.decision.text() for part in self.verdict.parts)
        return "\n".join(lines)

    def failure_text(self, *, all: bool = False) -> str:
        """The message of UnsupportedRoute: the request, the routes, the causes, what to do; or each primitive's own text."""
        subject = f"route {self.forced!r} cannot serve" if self.forced else "no route serves"
        spec = self.spec
        lines = [f"{subject} sparse attention of {spec.num_heads} heads, topk {spec.topk}, {spec.kv_layout}, on {self.device}"]
        refused = list(
            {d.request.primitive: d for v in self.verdicts for p in v.parts if not (d := p.decision).chosen}.values()
        )
        if all:
            return "\n".join([*lines, *self._routes(), *dict.fromkeys(each.failure_text(all=True) for each in refused)])
        for v in self.verdicts:
            against = [f"{r.subject} {r.given}" + ("" if r.given == NOT_SERVED else f" ({r.limit})") for r in v.reasons]
            lines.append(f"  {v.route:<{_WIDTH}}  {'; '.join(against)}")
        for each in refused:
            forced = f"{each.forced} is forced by {each.control}: " if each.forced else ""
            lines.append(f"  {each.request.primitive}  {forced}{'; '.join(grouped(each.causes)) or NOT_OFFERED}")
        remedies = dict.fromkeys(remedy for each in refused for remedy in each.remedies)
        return "\n".join([*lines, *(f"  remedy    {remedy}" for remedy in remedies)])

    def _routes(self) -> list[str]:
        return [f"  {verdict.route:<{_WIDTH}}  {verdict}" for verdict in self.verdicts]

    def as_dict(self) -> dict[str, Any]:
        """The same for `--json`."""
        return {
            "chosen": self.chosen,
            "forced": self.forced,
            "routes": [
                {
                    "route": verdict.route,
                    "can_run": verdict.can_run,
                    "cost": verdict.cost,
                    "measured": verdict.measured,
                    "note": verdict.note,
                    "workspace_bytes": verdict.workspace_bytes,
                    "reasons": [str(reason) for reason in verdict.reasons],
                    "parts": [{"role": part.label, "weight": part.weight, **part.decision.as_dict()} for part in verdict.parts],
                }
                for verdict in self.verdicts
            ],
        }


def check_decided(where: str, decision: RouteDecision, spec: AttentionSpec, device: DeviceFacts, *, converts: bool) -> None:
    """A decision that was made before is for such a layer.

    Args:
        converts: the layer's slots are made by convert_indices; False where they are given to it.
    Raises: InvalidArgument; UnsupportedRoute where the decision chose no route.
    """
    check_type(where, "route_decision", decision, RouteDecision, "a RouteDecision, or None to decide now")
    remedy = "Build the layer with the decision's own spec, on its device."
    if decision.spec != spec:
        refuse(where, "route_decision", "a decision for another spec", f"one for the layer's: {spec}", remedy)
    if decision.device != device:
        refuse(where, "route_decision", f"a decision for {decision.device}", f"one for {device}", remedy)
    if (decision.verdict.part("convert") is not None) != converts:
        made = "choose_route without `clean_slots`" if converts else "choose_slot_route"
        refuse(where, "route_decision", "a decision for other indices", f"one of {made}")


class UnsupportedRoute(UnsupportedRequest):
    """No route, or not the forced one, can serve a layer.

    Attributes:
        route_decision: every route with its reasons. decision: of the first primitive that nothing can run, if there is one.
    """

    def __init__(self, route_decision: RouteDecision) -> None:
        self.route_decision = route_decision
        decisions = [part.decision for verdict in route_decision.verdicts for part in verdict.parts]
        self.decision = next((d for d in decisions if d.chosen is None), decisions[0])
        RuntimeError.__init__(self, route_decision.failure_text())
