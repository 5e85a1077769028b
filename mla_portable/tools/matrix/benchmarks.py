# SPDX-License-Identifier: Apache-2.0
"""The times that the registry ranks by, from benchmarks that were reproduced or that a runner of this project signed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

from mla_portable.registry.costs import MeasuredTime
from mla_portable.tools.matrix.evidence import Evidence
from mla_portable.tools.matrix.levels import Hashes
from mla_portable.tools.matrix.trust import Trust


def measured_times(evidence: Sequence[Evidence], hashes: Hashes) -> list[MeasuredTime]:
    """The newest benchmark of each implementation, device and size: of today's sources, from a clean tree, without overlap.

    None of them is a time that one contributor alone says.
    """
    trust = Trust(evidence)
    newest: dict[tuple[Any, ...], MeasuredTime] = {}
    for each in evidence:
        data = each.data
        if each.kind != "benchmark" or data["overlap"] or data["dirty"] or hashes.changed(each) or not trust.ships(each):
            continue
        time = MeasuredTime(
            device=data["device"]["name"],
            primitive=data["primitive"],
            layout=data["layout"],
            heads=next(iter(data["heads"]), None),
            topk=next(iter(data["topk"]), None),
            rows=data["rows"],
            implementation=data["implementation"],
            us=round(data["median_us"], 2),
            recorded=each.recorded.partition("T")[0],
            source_hash=data["source_hash"],
        )
        newest[astuple(replace(time, us=0, recorded="", source_hash=""))] = time
    return list(newest.values())
