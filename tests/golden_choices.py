# SPDX-License-Identifier: Apache-2.0
"""What every device profile is served by, as text: a change of structure changes no line, a change of a choice is seen.

    python tests/golden_choices.py    writes tests/golden_choices.txt

A line of a route ends with a digest of the whole decision: every candidate, cost and reason of the plugins in PLUGINS. A plugin
that came later is not among them, so that adding one changes no line. `backends/amd/tests` say what AMD's changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from mla_portable.attention import AttentionSpec, HeadDims
from mla_portable.attention.layer_registry import LayerRegistry
from mla_portable.attention.prompts import prompt_requests
from mla_portable.attention.route_decision import RouteDecision
from mla_portable.attention.routes import choose_route
from mla_portable.capability.profiles import all_profiles
from mla_portable.choose import Registry
from mla_portable.layouts import CORE_LAYOUTS, layout_names
from mla_portable.times.prompts import Counts

RECORD = Path(__file__).with_suffix(".txt")
PLUGINS = [
    ("reference", "mla_portable.reference"),
    *((name, f"mla_portable_{name}") for name in ("iluvatar", "nvidia", "triton")),
]
HEADS = (8, 16, 64, 128)
PROMPTS = ([1000], [8000], [2000, 100, 3000], [16000], [100] * 8)
CONTEXTS = (0, 4000, 60000)


def specs() -> Iterator[tuple[str, AttentionSpec]]:
    """Of every layout of the core and head count, with and without graphs."""
    sizes = {"softmax_scale": 0.1, "max_num_tokens": 8192, "max_num_reqs": 256, "max_model_len": 32768}
    for layout in (name for name in layout_names() if name in CORE_LAYOUTS):  # not a plugin's
        for heads in HEADS:
            for graph in (False, True):
                spec = AttentionSpec(heads, **sizes, kv_layout=layout, graph=graph)
                yield f"{layout} {heads} heads{' graph' if graph else ''}", spec


def line(decision: RouteDecision) -> str:
    """The route, what serves each of its parts, and a digest of all that was considered."""
    digest = hashlib.sha256(json.dumps(decision.as_dict(), sort_keys=True).encode()).hexdigest()[:12]
    if decision.chosen is None:
        return f"none [{digest}]"
    parts = " ".join(f"{part.label}={part.decision.chosen}" for part in decision.verdict.parts)
    return f"{decision.chosen} {decision.verdict.cost:.4g}: {parts} [{digest}]"


def routes(device: str, registry: Registry) -> Iterator[str]:
    """A line for each spec."""
    layers = LayerRegistry(registry, None)
    facts = layers.facts(torch.device(device))
    for name, spec in specs():
        yield f"  {name}: {line(choose_route(spec, facts, layers))}"


def prompts(device: str, registry: Registry) -> Iterator[str]:
    """What attends to keys of each head, and the microseconds a layer that this saves, for batches of prompts."""
    layers = LayerRegistry(registry, None)
    facts = layers.facts(torch.device(device))
    sizes = {"softmax_scale": 0.1, "max_num_tokens": 16384, "max_num_reqs": 256, "max_model_len": 131072}
    for dims in (HeadDims(), HeadDims(192, 64, 256)):
        for heads in HEADS:
            spec = AttentionSpec(heads, **sizes)
            requests = prompt_requests(spec, dims, facts)
            decisions = {name: layers.decide(requests[name]) for name in ("masked", "dense")}
            found = f"  prompts {dims.query} x {dims.value}, {heads} heads:"
            found += "".join(f" {name}={each.chosen}" for name, each in decisions.items())
            times = layers.prompt_times(decisions["masked"])
            if times is not None:
                saved = [times.saves(counts, masked=masked) for counts in batches() for masked in (False, True)]
                found += f" saves {' '.join(f'{us:.1f}' for us in saved)}"
            yield found


def batches() -> Iterator[Counts]:
    """Of prompts with and without context."""
    for new in PROMPTS:
        for context in CONTEXTS:
            query_lens = np.array(new, dtype=np.int32)
            yield Counts.of(query_lens, query_lens + context, 2048, 16384)


def lines() -> Iterator[str]:
    """All lines."""
    for slug, profile in all_profiles().items():
        facts = profile.device_facts()
        registry = Registry(plugins=PLUGINS, environ={}, probe=False, costs="measured", facts={facts.device_type: facts})
        yield f"{slug}:"
        yield from routes(facts.device_type, registry)
        yield from prompts(facts.device_type, registry)


if __name__ == "__main__":
    RECORD.write_text("\n".join(lines()) + "\n")
