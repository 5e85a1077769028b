# SPDX-License-Identifier: Apache-2.0
"""The route for a spec under the registry's policy, and its decision in one line, for logs and `doctor`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mla_portable.attention import AttentionSpec, RouteDecision, RoutePart
from mla_portable.attention.layer_registry import LayerRegistry
from mla_portable.attention.routes import choose_route
from mla_portable.registry import Registry


def decide_route(registry: Registry, spec: AttentionSpec, device: torch.device, *, probe: bool = True) -> RouteDecision:
    """The routes for layers of `spec` on `device`, ranked; probes implementations that were not tried before, if `probe`."""
    demand = LayerRegistry(registry, None, probe=probe)
    return choose_route(spec, registry.facts(device), demand)


def serving(decision: RouteDecision) -> tuple[tuple[str, str], ...]:
    """(primitive, implementation) of each part of the chosen route, each once. Raises: UnsupportedRoute where there is none."""
    return _pairs(decision.verdict.parts)


def served_by(decision: RouteDecision) -> str:
    """What serves each primitive of the chosen route; where nothing serves, the reasons against every route."""
    if decision.chosen is None:
        return "; ".join(f"{verdict.route}: {verdict}" for verdict in decision.verdicts)
    return _named(serving(decision))


def attention_served_by(decision: RouteDecision) -> str:
    """`served_by` for a SlotAttention, which converts no indices."""
    return served_by(decision) if decision.chosen is None else _named(attention_serving(decision))


def attention_serving(decision: RouteDecision) -> tuple[tuple[str, str], ...]:
    """`serving` for a SlotAttention."""
    return _pairs(part for part in decision.verdict.parts if part.role != "convert")


def _named(pairs: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{primitive} {implementation}" for primitive, implementation in pairs)


def _pairs(parts: Iterable[RoutePart]) -> tuple[tuple[str, str], ...]:
    return tuple(dict.fromkeys((str(part.decision.request.primitive), str(part.decision.chosen)) for part in parts))
