# SPDX-License-Identifier: Apache-2.0
"""Measured costs: what benchmarks of a device say about who is fastest, on the scale of declared preferences.

An implementation that was timed on the request's device costs 10 (what a vendor's kernel declares) times its time over that of
the fastest at the same rows: the fastest over both layouts, so that routes which read different layouts stay comparable. A
primitive is bound once for steps of many sizes, so a request without `rows` gets the ratio of the sums over all row counts that
were timed (`time_spent`). With `rows`, the nearest count decides.

Devices are told by the name that their driver reports, head counts by the least one timed that is as large, topk exactly.
Where any of them was not timed, the declared preference stands.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from typing import Final

from mla_portable.contracts import Implementation, Request

__all__ = ["COSTS_FILE", "MeasuredCosts", "MeasuredTime", "costs_text", "packaged_costs", "parse_costs", "time_spent"]

COSTS_FILE: Final = "costs.json"
"""Beside this module; generated from the benchmark records in capability/."""
_FASTEST: Final = 10.0


@dataclass(frozen=True, slots=True, order=True)
class MeasuredTime:
    """One median. device: as its driver names it. recorded: the day. The rest as in Request; `us` microseconds."""

    device: str
    primitive: str
    layout: str | None
    heads: int | None
    topk: int | None
    rows: int
    implementation: str
    us: float
    recorded: str


def time_spent(us: Iterable[float]) -> float:
    """By what several sizes are ranked where one choice serves them all: their sum, for time is spent on large steps."""
    return sum(us)


class MeasuredCosts:
    """A CostTable over measured times; a pure function of them and the request."""

    def __init__(self, times: Iterable[MeasuredTime]) -> None:
        # (device, primitive, topk) -> heads -> rows -> times
        self._places: dict[tuple[str, str, int | None], dict[int | None, dict[int, list[MeasuredTime]]]] = {}
        for each in times:
            heads = self._places.setdefault((each.device, each.primitive, each.topk), {})
            heads.setdefault(each.heads, {}).setdefault(each.rows, []).append(each)

    def __call__(self, implementation: Implementation, request: Request) -> tuple[float, str] | None:
        """(cost, where it comes from); None where this implementation was not timed for such a request."""
        by_heads = self._places.get((request.device.name, str(request.primitive), request.topk), {})
        heads = _timed_heads(by_heads, request.num_heads)
        by_rows = by_heads.get(heads, {})
        own = {
            rows: each
            for rows, times in by_rows.items()
            for each in times
            if each.implementation == implementation.name and each.layout in (request.kv_layout, None)
        }
        if not own:
            return None
        wanted = request.rows
        if wanted is not None:
            nearest = min(own, key=lambda rows: abs(math.log(rows / max(wanted, 1))))
            own = {nearest: own[nearest]}
        least = time_spent(min(other.us for other in by_rows[rows]) for rows in own)
        cost = _FASTEST * time_spent(each.us for each in own.values()) / least
        return round(cost, 2), _source(own, heads)


def _timed_heads(by_heads: Mapping[int | None, object], wanted: int | None) -> int | None:
    """The least head count that was timed and is no smaller; None where there is none, or heads play no part."""
    enough = [heads for heads in by_heads if heads is not None and wanted is not None and heads >= wanted]
    return min(enough, default=None)


def _source(own: Mapping[int, MeasuredTime], heads: int | None) -> str:
    first = next(iter(own.values()))
    days = sorted({each.recorded for each in own.values()})
    times = ", ".join(f"{rows}: {own[rows].us:.3g}" for rows in sorted(own))
    count = "" if heads is None else f", {heads} heads"
    return f"measured {days[-1]} on {first.device}{count}, us by rows {times};"


def costs_text(times: Iterable[MeasuredTime]) -> str:
    """The content of COSTS_FILE, a time to a line, in an order that depends on the times alone."""
    ordered = sorted(times, key=lambda each: tuple("" if v is None else f"{v:>12}" for v in asdict(each).values()))
    lines = ",\n".join(json.dumps(asdict(each)) for each in ordered)
    return f"[\n{lines}\n]\n" if lines else "[]\n"


def parse_costs(text: str) -> MeasuredCosts:
    """What `costs_text` wrote. Raises: ValueError or TypeError for anything else."""
    return MeasuredCosts(MeasuredTime(**row) for row in json.loads(text))


@lru_cache(maxsize=1)
def packaged_costs() -> MeasuredCosts:
    """The times that ship with this package."""
    return parse_costs(resources.files("mla_portable.registry").joinpath(COSTS_FILE).read_text(encoding="utf-8"))
