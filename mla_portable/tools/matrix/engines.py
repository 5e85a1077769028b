# SPDX-License-Identifier: Apache-2.0
"""Evidence from engines: small models that generated through this project's vLLM plugin, each comparison judged.

An engine is no primitive of a plugin: its records belong to the adapter, and are bound to the adapter, the attention layer and
the planner. They show in a table of their own, and no level of a cell follows from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import mla_portable
from mla_portable.contracts import DeviceFacts
from mla_portable.registry.names import CORE_DISTRIBUTION
from mla_portable.tools.matrix.evidence import Evidence, series_of
from mla_portable.tools.matrix.levels import Hashes
from mla_portable.tools.matrix.record import document_of, facts_of
from mla_portable.tools.matrix.records import engine_hash
from mla_portable.tools.matrix.reports import ENGINE
from mla_portable.tools.matrix.trust import Trust
from mla_portable.tools.provenance import Provenance


def engine_report(
    engine: str,
    suite: str,
    lines: Iterable[tuple[str, bool | None, str]],
    run: Provenance,
    *,
    device: DeviceFacts,
    driver: str | None,
    clocks: Mapping[str, float],
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """A run of comparisons.

    Args:
        engine: name and version, e.g. "vllm 0.26.0". suite: which comparisons. lines: (name, passed, figures) of each;
            `passed` is None for a line that only informs. driver, clocks: as in `conformance_report`.
    """
    implementation, primitive = ENGINE
    claim = {
        "implementation": implementation,
        "primitive": primitive,
        "arch": device.arch,
        "distribution": CORE_DISTRIBUTION,
        "version": mla_portable.__version__,
        "support": {},
        "source_hash": engine_hash(),
        "mode": "native",
    }
    return {
        **document_of(run, "engine"),
        "device": facts_of(device),
        "driver": driver,
        "clocks": dict(clocks),
        "versions": dict(versions),
        "engine": engine,
        "suite": suite,
        "claims": [claim],
        "lines": [{"name": name, "passed": passed, "text": text} for name, passed, text in lines],
    }


def engine_lines(evidence: Iterable[Evidence], hashes: Hashes) -> tuple[tuple[str, ...], ...]:
    """(engine, device, suite, state, figures, date and commit) of the newest run of each suite; see `Table.engines`."""
    engines = [each for each in evidence if each.kind == "engine"]
    trust, newest = Trust(engines), {series_of(each): each for each in engines}
    found: list[tuple[str, ...]] = []
    for each in newest.values():
        data = each.data
        stale = "stale" if hashes.changed(each) else trust.of(each)
        state = "failing" if each.failed else stale
        commit = str(data["commit"] or "no commit")[:12] + (" with uncommitted changes" if data["dirty"] else "")
        counts = f"{each.passed} of {each.passed + each.failed} comparisons passed"
        found.append((data["engine"], data["device"]["name"], data["suite"], state, counts, f"{each.recorded[:10]}, {commit}"))
    return tuple(sorted(found))
