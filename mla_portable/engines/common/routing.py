# SPDX-License-Identifier: Apache-2.0
"""What engines ask the registry, for CUDA graphs where anything serves in them; what serves, in one line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final, Literal

import torch

from mla_portable.attention import AttentionSpec, RouteDecision
from mla_portable.attention.layer_registry import LayerRegistry
from mla_portable.attention.routes import choose_route
from mla_portable.attention.slots import choose_slot_route
from mla_portable.choose import Registry, get_registry
from mla_portable.choose.bound import Bound
from mla_portable.contracts import Decision, Request

IF_POSSIBLE: Final = "if possible"
Graph = bool | Literal["if possible"]
"""Calls are captured in CUDA graphs. "if possible": where something serves in them; else the engine runs them outside."""


def bind_for(*requests: Request[Any], graph: Graph = IF_POSSIBLE) -> list[Bound[Any]]:
    """What serves each of the requests, all of them with one answer to `graph`, under the process's registry.

    Raises: UnsupportedRequest for the first one that nothing serves.
    """
    demand = LayerRegistry(get_registry(), None)
    asked = [request.but(graph=bool(graph)) for request in requests]
    if graph == IF_POSSIBLE and not all(demand.decide(request).chosen for request in asked):
        asked = [request.but(graph=False) for request in requests]
    return [demand.resolve(request) for request in asked]


def decide_route(
    spec: AttentionSpec,
    device: torch.device,
    *,
    registry: Registry | None = None,
    clean_slots: bool | None = None,
    probe: bool = True,
) -> RouteDecision:
    """The routes for layers of `spec` on `device`, ranked; without graphs where the spec has them and nothing can be captured.

    Args:
        registry: None for the process's own. clean_slots: None for a SparseMLAAttention; as a SlotAttention is given it, for
            that. probe: try implementations that were not tried before.
    Returns: the decision, whose `spec` says whether layers are captured. Where nothing serves, that without graphs. A layer
        takes it as `route_decision`, with its `spec`, and decides nothing again.
    """
    demand = LayerRegistry(registry, None, probe=probe)
    facts = demand.facts(device)

    def decide(spec: AttentionSpec) -> RouteDecision:
        if clean_slots is None:
            return choose_route(spec, facts, demand)
        return choose_slot_route(spec, facts, demand, clean_slots=clean_slots)

    with demand.guard(device):
        decision = decide(spec)
        return decide(replace(spec, graph=False)) if decision.chosen is None and spec.graph else decision


def route_pairs(decision: RouteDecision) -> tuple[tuple[str, str], ...]:
    """(primitive, implementation) of each part of the chosen route, each once. Raises: UnsupportedRoute where there is none."""
    return pairs(part.decision for part in decision.verdict.parts)


def served_by(decision: RouteDecision) -> str:
    """What serves each primitive of the chosen route; where nothing serves, the reasons against every route."""
    if decision.chosen is None:
        return "; ".join(f"{verdict.route}: {verdict}" for verdict in decision.verdicts)
    return in_words(route_pairs(decision))


def pairs(decisions: Iterable[Decision]) -> tuple[tuple[str, str], ...]:
    """(primitive, implementation) of each decision, each once."""
    return tuple(dict.fromkeys((str(each.request.primitive), str(each.chosen)) for each in decisions))


def in_words(served: Iterable[tuple[str, str]]) -> str:
    """(primitive, implementation) as a line of a log, which `doctor --engine` reads."""
    return ", ".join(f"{primitive} {implementation}" for primitive, implementation in served)
