# SPDX-License-Identifier: Apache-2.0
"""LayerRegistry: the registry for one layer, with the backends that are forced for it.

A name that is forced for everything applies to the primitives that it offers; the others are chosen automatically.
A name that is forced for one primitive must offer it. No route may leave out what a name is forced for (`forced_but_unused`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Final

import torch

from mla_portable.choose import Registry, get_registry
from mla_portable.choose.bound import Bound
from mla_portable.choose.names import AUTO, check_backend
from mla_portable.choose.policy import ARGUMENT, DEFAULT, Rule, active_rules
from mla_portable.contracts import (
    Decision,
    DeviceFacts,
    Implementation,
    InvalidArgument,
    Primitive,
    Reason,
    Request,
    ScheduleKind,
)
from mla_portable.contracts.primitive import F
from mla_portable.contracts.values import check_type
from mla_portable.primitives import CACHE_WRITE, CONVERT_INDICES, GATHER_UPCONVERT, SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.times.prompts import PromptTimes

_ATTENTION: Final = (SPARSE_DECODE, SPARSE_PREFILL)
_LAYERS: Final = (*_ATTENTION, CONVERT_INDICES, GATHER_UPCONVERT, CACHE_WRITE)
"""The primitives of a layer."""

ForcedBackend = str | Mapping[str, str] | None
"""A backend for every primitive that it offers, or one for each primitive named; None lets the registry's policy decide."""


class LayerRegistry:
    """Asks the registry, with the forced backend of each primitive."""

    def __init__(
        self, registry: Registry | None, backend: ForcedBackend, *, probe: bool = True, where: str = "SparseMLAAttention"
    ) -> None:
        """
        Args:
            registry: None for the process's own. probe: False decides by declarations and `check`, and computes nothing.
            where: the layer's class, for messages.
        Raises: InvalidArgument for what is no registry, a mapping that names something that is no primitive, and a backend that
            is no name.
        """
        if registry is not None:
            check_type(where, "registry", registry, Registry, "a Registry, or None for the process's own")
        self._registry = get_registry() if registry is None else registry
        self._probe = probe
        names = [str(primitive) for primitive in Primitive.all()]
        for name in backend if isinstance(backend, Mapping) else ():
            if name not in names:
                expected = f"keys among {', '.join(names)}"
                raise InvalidArgument(where, "backend", got=repr(name), expected=expected)
        for name in backend.values() if isinstance(backend, Mapping) else (backend,):
            check_backend(name, where)
        self._backend = backend
        self._decisions: dict[Request, Decision] = {}

    def facts(self, device: torch.device) -> DeviceFacts:
        """What the registry knows about a device."""
        return self._registry.facts(device)

    def guard(self, device: torch.device) -> AbstractContextManager[object]:
        """Makes a device the current one while something is chosen for it; as `Machine.guard`."""
        return self._registry.guard(device)

    def _argument(self, primitive: Primitive) -> str | None:
        if isinstance(self._backend, Mapping):
            return self._backend.get(str(primitive))
        return self._backend

    def _rule(self, primitive: Primitive) -> Rule | None:
        """What holds in place of a rule for every primitive whose name lacks this one; None where the registry decides."""
        given = self._argument(primitive)
        single = primitive if isinstance(self._backend, Mapping) else None
        first = () if given is None else (Rule(given, ARGUMENT, single),)
        skipped = False
        for rule in (*first, *active_rules(), *self._registry.policy.rules):
            if rule.primitive not in (None, primitive):
                continue
            if rule.primitive is None and self._offers_others(rule.target, primitive):
                skipped = True
            else:
                return rule if skipped else None
        return Rule(AUTO, DEFAULT) if skipped else None

    def _offers_others(self, name: str, primitive: Primitive) -> bool:
        """`name` offers primitives of a layer, but not this one. Who offers none is kept, and fails with its reason."""
        everyone = self._registry.implementations()
        offered = {each.primitive for each in everyone if name in (each.backend, each.name)}
        return primitive not in offered and not offered.isdisjoint(_LAYERS)

    def decide(self, request: Request) -> Decision:
        """The choice for `request`, with the reasons against the others; the same one for equal requests."""
        decision = self._decisions.get(request)
        if decision is None:
            rule = self._rule(request.primitive)
            backend = self._argument(request.primitive) if rule is None else rule.target
            decision = self._registry.decide(request, backend=backend, probe=self._probe)
            decision = decision if rule is None else replace(decision, control=rule.control)
            self._decisions[request] = decision
        return decision

    def also(self, decision: Decision, **features: bool) -> Decision:
        """The choice for the same request with these features, where the same implementation has them; else `decision`."""
        found = self.decide(decision.request.but(**features))
        return found if found.chosen == decision.chosen else decision

    def bound(self, decision: Decision, primitive: Primitive[F]) -> Bound[F]:
        """What a decision of this object chose, bound for its request. Raises: UnsupportedRequest where it chose nothing."""
        return self._registry.bound(decision, primitive)

    def resolve(self, request: Request[F]) -> Bound[F]:
        """What serves `request`. Raises: UnsupportedRequest."""
        return self.bound(self.decide(request), request.primitive)

    def chosen(self, decision: Decision) -> Implementation | None:
        """As `Registry.chosen`."""
        return self._registry.chosen(decision)

    def times(self, decision: Decision) -> Mapping[int, float]:
        """Rows -> microseconds of the chosen implementation, as far as they were measured."""
        found = self.chosen(decision)
        return self._registry.times(found, decision.request) if found else {}

    def prompt_times(self, decision: Decision) -> PromptTimes | None:
        """By which prompts go to what a decision on masked_prefill chose; None where no constants hold for its device."""
        return self._registry.prompt_times(decision)

    def timed_rows(self, request: Request) -> list[int]:
        """The row counts at which any implementation was timed for requests like this, ascending."""
        offered = self._registry.implementations(request.primitive)
        return sorted({rows for each in offered for rows in self._registry.times(each, request)})

    def schedule_kind(self, decision: Decision) -> ScheduleKind | None:
        """What the chosen implementation of sparse_decode takes as a schedule."""
        found = self.chosen(decision)
        return found.schedule_kind if found else None


def forced_but_unused(decision: Decision, on_route: Sequence[Decision]) -> tuple[Reason, ...]:
    """The reason against a route that does not use a primitive for which a backend is forced.

    Such a route computes the tokens by another primitive, which is allowed if the same name is forced for that one too. A
    gather that a route does not need counts only if the forced backend could not do it.

    Args:
        decision: on the primitive. on_route: on the route's own primitives.
    """
    primitive = decision.request.primitive
    if decision.forced is None or primitive in [each.request.primitive for each in on_route]:
        return ()
    if primitive not in _ATTENTION and decision.chosen is not None:
        return ()
    if all(each.forced == decision.forced for each in on_route if each.request.primitive in _ATTENTION):
        return ()
    named = [v for v in decision.verdicts if decision.forced in (v.implementation, v.implementation.partition(".")[0])]
    why = "; ".join(f"{v.implementation}: {', '.join(map(str, v.reasons))}" for v in named if v.reasons)
    unfit = "" if decision.chosen else f", and {decision.forced} cannot serve it: {why}"
    remedy = f"drop {decision.control}, or take a route with {primitive}"
    return (Reason(str(primitive), f"forced to {decision.forced} by {decision.control}", f"left out here{unfit}", remedy),)
