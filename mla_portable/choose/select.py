# SPDX-License-Identifier: Apache-2.0
"""Choosing: a pure function from a request, the candidates and the policy to a Decision.

Whether a candidate can run (its reasons) and whether it should (its cost) are two questions. What needs the machine, `check`
and the numeric probe, comes in as functions that are called only where their answer matters: in order of rank, up to
the first candidate that passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from mla_portable.choose.names import AUTO, REFERENCE
from mla_portable.choose.policy import Policy, disabled_reason
from mla_portable.contracts import Decision, DeviceFacts, Implementation, Primitive, Reason, Request, Verdict
from mla_portable.contracts.support import ONLY_WHEN_FORCED
from mla_portable.layouts import CORE_LAYOUTS

Finding = Callable[[Implementation], tuple[Reason, ...]]
"""Looks at the machine: the reasons why an implementation must not be used there."""

DEVICE_TYPE: Final = "device type"
"""The subject of a reason against all devices of a type, of a declaration or of a check."""
_TIE: Final = 0.03
"""Measured costs that exceed the least by this share of it, or less, are a tie."""


class CostTable(Protocol):
    """Measured costs, and the times that they come from."""

    def __call__(self, implementation: Implementation, request: Request) -> tuple[float, str] | None:
        """(cost, record it was measured in) where an implementation was timed, 10 for the fastest; None elsewhere."""
        ...

    def times(self, implementation: Implementation, request: Request) -> Mapping[int, float]:
        """Rows -> microseconds; empty where there is no cost."""
        ...


class Standing(NamedTuple):
    """What an implementation or a route is ranked by: `measured` says whether `cost` was; a smaller cost is better."""

    measured: bool
    cost: float


class Ranking:
    """The rule by which implementations and routes are ranked.

    What was measured ranks before what was only declared. Measured costs rank among themselves, and a tie with the least counts
    as the least.
    """

    def __init__(self, able: Iterable[Standing], *, terms: int = 1) -> None:
        """able: of all that can serve. terms: how many costs each is the sum of; a tie is as narrow as that of one of them."""
        measured = [each for each in able if each.measured]
        self._least = min((each.cost for each in measured), default=0.0)
        self._most_tied = self._least * (1 + _TIE / terms)

    def tied(self, standing: Standing) -> bool:
        """The cost was measured, and is the least or a tie with it."""
        return standing.measured and self._least <= standing.cost <= self._most_tied

    def key(self, standing: Standing) -> tuple[bool, float]:
        """Smaller is better; equal for a tie."""
        return not standing.measured, self._least if self.tied(standing) else standing.cost


@dataclass(slots=True, eq=False)
class _Candidate:
    implementation: Implementation
    cost: float
    cost_source: str
    measured: bool
    reasons: tuple[Reason, ...]
    fits_device: bool
    reads_layout: bool
    """It declares the cache layout that is asked for, on whatever device; of the core's layouts that counts for any."""
    disabled: bool
    lacks_type: bool = False
    """Its check says that it does not run on devices of this type."""
    checked: bool = False
    probed: bool = False
    passed_over: bool = False
    reserved: Reason | None = None
    """Of the reference: the reason that holds while something else may run on the device."""

    def examine(self, check: Finding | None, probe: Finding | None) -> None:
        """Ask the machine, once each: `check` where the device is right, `probe` where nothing speaks against a run."""
        if check and not self.checked and self.fits_device and not self.disabled:
            found = check(self.implementation)
            self.lacks_type = any(reason.subject == DEVICE_TYPE for reason in found)
            self.reasons += found
            self.checked = True
        if probe and not self.probed and not self.reasons:
            self.reasons += probe(self.implementation)
            self.probed = True

    @property
    def standing(self) -> Standing:
        return Standing(self.measured, self.cost)

    def verdict(self) -> Verdict:
        return Verdict(self.implementation.name, self.reasons, self.cost, self.cost_source, self.fits_device, self.passed_over)


def decide(
    request: Request,
    candidates: Iterable[Implementation],
    policy: Policy,
    *,
    check: Finding | None = None,
    probe: Finding | None = None,
    thorough: bool = False,
    costs: CostTable | None = None,
    plugin_failures: Sequence[tuple[str, str]] = (),
) -> Decision:
    """Choose the implementation for `request`.

    Args:
        candidates: implementations; those of other primitives only help to explain a forced choice.
        policy: what users force and disable; its names are checked already.
        check, probe: what the machine says of an implementation; None on a device that is not at hand.
        thorough: examine every candidate, for an explanation, instead of stopping at the first that can run.
        costs: measured costs. An implementation without one ranks by its declared cost.
        plugin_failures: (plugin, what became of it), handed through to the decision.
    Returns: the first candidate without a reason, by `Ranking`, then declared cost, then name; among the forced ones when a
        backend is forced. When nothing can run, `chosen` is None and every candidate that fits the device was checked.
        An automatic choice gives an accelerator to the reference only where no other candidate reads the cache layout on any
        device, or none fits the device: by its declaration, and by its check where that has a reason on the device type.
    """
    everyone = list(candidates)
    rule = policy.rule_for(request.primitive)
    ranked = [_first_look(c, request, policy, costs) for c in everyone if c.primitive is request.primitive]
    unloaded = _unloaded(policy, everyone)
    if rule.target == AUTO:
        _reserve_reference(ranked, request.device, maybe_others=bool(unloaded))
    compared = [c for c in ranked if not c.reasons]
    ranking = Ranking(c.standing for c in compared)
    _tell_ties([c for c in compared if ranking.tied(c.standing)])

    def rank(c: _Candidate) -> tuple[bool, tuple[bool, float], float, str]:
        low = (
            c.implementation.support.accuracy == "low" and c.implementation.name != rule.target
        )  # a backend's others come first
        return low, ranking.key(c.standing), c.implementation.preference, c.implementation.name

    ranked.sort(key=rank)
    pool = [c for c in ranked if rule.target in (AUTO, c.implementation.backend, c.implementation.name)]
    chosen: _Candidate | None = None
    for candidate in pool:
        if candidate.reserved is not None and not _another_fits(ranked, maybe_others=bool(unloaded)):
            candidate.reasons = tuple(reason for reason in candidate.reasons if reason is not candidate.reserved)
        candidate.examine(check, probe)
        if not candidate.reasons:
            chosen = candidate
            break
    if chosen is not None:
        for candidate in pool[: pool.index(chosen)]:
            candidate.passed_over = candidate.measured or not chosen.measured
    if thorough or chosen is None:
        for candidate in ranked:
            candidate.examine(check, probe if thorough else None)
    forced = None if rule.target == AUTO else rule.target
    verdicts = [c.verdict() for c in sorted(ranked, key=lambda c: (c not in pool, bool(c.reasons)))]
    verdicts += unloaded
    if forced and not pool and forced not in {v.implementation for v in unloaded}:
        verdicts.insert(0, _not_offered(forced, request.primitive, everyone, policy))
    return Decision(
        request=request,
        chosen=chosen.implementation.name if chosen else None,
        control=rule.control,
        forced=forced,
        verdicts=tuple(verdicts),
        plugin_failures=tuple(plugin_failures),
    )


def _unloaded(policy: Policy, everyone: Sequence[Implementation]) -> list[Verdict]:
    """A verdict on each backend that is disabled and whose plugin was not imported: what it offers is not known."""
    loaded = {each.backend for each in everyone}
    names = {name: control for name, control in policy.disabled if name.partition(".")[0] not in loaded}
    return [Verdict(name, (disabled_reason(name, control, name),), math.inf) for name, control in names.items()]


def _reserve_reference(candidates: Sequence[_Candidate], device: DeviceFacts, *, maybe_others: bool) -> None:
    """Give the reference a reason where it would serve an accelerator in the place of an implementation made for it.

    A plugin that is disabled, and so not imported, may have one (`maybe_others`). The reason falls where checks find out later
    that nothing else runs on this type of device.
    """
    if device.device_type == "cpu" or not _another_fits(candidates, maybe_others=maybe_others):
        return
    reason = Reason(
        DEVICE_TYPE,
        device.device_type,
        "plain torch serves an accelerator only where it is named or nothing else fits",
        'backend="reference" runs it slowly, in plain torch',
    )
    for candidate in candidates:
        if candidate.implementation.name == REFERENCE:
            candidate.reasons += (reason,)
            candidate.reserved = reason


def _another_fits(candidates: Sequence[_Candidate], *, maybe_others: bool) -> bool:
    """Something else than the reference may run on the device, as far as declarations, and the checks so far, say.

    A plugin's cache layout that nothing else reads, on any device, is the reference's wherever it is.
    """
    others = [c for c in candidates if c.implementation.name != REFERENCE]
    fits = any(c.fits_device and not c.lacks_type for c in others)
    return maybe_others or (fits and any(c.reads_layout for c in others))


def _tell_ties(tied: Sequence[_Candidate]) -> None:
    """Say it where declared costs decide among measured costs."""
    for candidate in tied if len(tied) > 1 else ():
        candidate.cost_source += f" tie within {_TIE:.0%}, declared cost {candidate.implementation.preference:g} decides;"


def _only_when_forced(candidate: Implementation) -> Reason:
    """Why an implementation of low accuracy is not chosen automatically."""
    return Reason("low accuracy", "", ONLY_WHEN_FORCED, f'backend="{candidate.name}" takes it')


def _first_look(candidate: Implementation, request: Request, policy: Policy, costs: CostTable | None) -> _Candidate:
    """What can be said without the machine: switched off, unsupported, and the cost."""
    off = policy.against(candidate)
    if candidate.support.accuracy == "low" and policy.rule_for(request.primitive).target == AUTO:
        off += (_only_when_forced(candidate),)
    measured = costs(candidate, request) if costs else None
    cost, source = measured or (candidate.preference, "declared")
    layout = request.kv_layout
    return _Candidate(
        implementation=candidate,
        cost=cost,
        cost_source=source,
        measured=measured is not None,
        reasons=off + candidate.support.reasons(request),
        fits_device=not any(candidate.support.device_reasons(request.device)),
        reads_layout=layout is None or layout in CORE_LAYOUTS or layout in candidate.support.layouts,
        disabled=bool(policy.against(candidate)),
    )


def _not_offered(forced: str, primitive: Primitive, everyone: Sequence[Implementation], policy: Policy) -> Verdict:
    """The verdict on a forced name that has no implementation of this primitive."""
    backend, rule = forced.partition(".")[0], policy.rule_for(primitive)
    control = dict(policy.disabled).get(backend)
    if control is not None:
        return Verdict(forced, (disabled_reason(backend, control, forced),), cost=0.0)
    offers = dict.fromkeys(str(i.primitive) for i in everyone if forced in (i.backend, i.name))
    limit = f"{forced} offers {', '.join(offers)}" if offers else f"{forced} offers nothing here"
    remedy = f"force {forced} for what it offers only, primitive by primitive" if offers and rule.primitive is None else ""
    return Verdict(forced, (Reason(str(primitive), "not offered", limit, remedy),), cost=0.0)
