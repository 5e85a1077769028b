# SPDX-License-Identifier: Apache-2.0
"""The route for a spec under the registry's policy, and its decision in one line, for logs and `doctor`."""

from __future__ import annotations

import torch

from mla_portable.attention import AttentionSpec, RouteDecision
from mla_portable.attention.layer_registry import LayerRegistry
from mla_portable.attention.routes import choose_route
from mla_portable.registry import Registry


def decide_route(registry: Registry, spec: AttentionSpec, device: torch.device, *, probe: bool = True) -> RouteDecision:
    """The routes for layers of `spec` on `device`, ranked; probes implementations that were not tried before, if `probe`."""
    demand = LayerRegistry(registry, None, probe=probe)
    return choose_route(spec, registry.facts(device), demand)


def served_by(decision: RouteDecision) -> str:
    """What serves each primitive of the chosen route; where nothing serves, the reasons against every route."""
    if decision.chosen is None:
        return "; ".join(f"{verdict.route}: {verdict}" for verdict in decision.verdicts)
    parts = decision.verdict.parts
    return ", ".join(dict.fromkeys(f"{part.decision.request.primitive} {part.decision.chosen}" for part in parts))
