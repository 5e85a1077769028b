# SPDX-License-Identifier: Apache-2.0
"""Measured costs: how much longer an implementation takes than the fastest one that was timed on a device.

The cost is 10 times the implementation's time over the least time on record for the same number of rows, over all plugins and
either layout, so that routes which read different layouts stay comparable. Without `rows` in the request the sum over all row
counts that were timed decides (`time_spent`); with `rows`, the nearest count does.

Each implementation is ranked at its own nearest head count: the least that was timed and is no smaller, as a kernel that pads
would run it; else the greatest below, as many times as cover the heads. `topk` must be equal. Where installed sources differ
from those that were timed, or anything was not timed, there is no measured cost.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final

from mla_portable.contracts import Implementation, Request
from mla_portable.sources import SourceNotFound, source_hash, sources_of

_FASTEST: Final = 10.0


@dataclass(frozen=True, slots=True, order=True)
class MeasuredTime:
    """One median. device: as its driver names it. recorded: the day. source_hash: of what was timed. `us`: microseconds.

    The rest as in Request.
    """

    device: str
    primitive: str
    layout: str | None
    heads: int | None
    topk: int | None
    rows: int
    implementation: str
    us: float
    recorded: str
    source_hash: str


@dataclass(frozen=True, slots=True)
class _Estimate:
    """What an implementation takes for a head count: its times at `heads`, `calls` times."""

    heads: int | None
    calls: int
    by_rows: Mapping[int, MeasuredTime]

    def us(self, rows: int) -> float:
        return self.calls * self.by_rows[rows].us

    def source(self, wanted: int | None, sizes: Iterable[int]) -> str:
        times = [self.by_rows[rows] for rows in sorted(sizes)]
        listed = ", ".join(f"{each.rows}: {us:{'.0f' if us >= 100 else '.3g'}}" for each in times if (us := self.us(each.rows)))
        heads = "" if self.heads is None else f", {self.heads} heads"
        if self.heads != wanted:
            heads = f", {f'{self.calls} x ' if self.calls > 1 else ''}{self.heads} heads for {wanted}"
        return f"measured {max(each.recorded for each in times)} on {times[0].device}{heads}, us by rows {listed};"


def time_spent(us: Iterable[float]) -> float:
    """By what several sizes are ranked where one choice serves them all: their sum, for time is spent on large steps."""
    return sum(us)


@lru_cache(maxsize=512)
def installed_hash(sources: tuple[str, ...], arch: str = "") -> str | None:
    """The hash of an implementation's sources as they are installed, read once; None where it has none or one is missing."""
    try:
        return source_hash(sources, arch) if sources else None
    except (SourceNotFound, OSError):
        return None


class MeasuredCosts:
    """A CostTable over measured times; a pure function of them, the request and the installed sources."""

    def __init__(
        self,
        times: Iterable[MeasuredTime],
        devices: Mapping[str, str] | None = None,
        *,
        hash_of: Callable[[tuple[str, ...], str], str | None] = installed_hash,
    ) -> None:
        """devices: name of a device's profile -> regular expression for the names that its drivers report."""
        self._devices, self._hash_of = dict(devices or {}), hash_of
        # (device, primitive, topk) -> (implementation, layout) -> heads -> rows -> time
        self._places: dict[tuple[Any, ...], dict[tuple[str, str | None], dict[int | None, dict[int, MeasuredTime]]]] = {}
        for each in times:
            place = self._places.setdefault((self.device_of(each.device), each.primitive, each.topk), {})
            by_heads = place.setdefault((each.implementation, each.layout), {})
            by_heads.setdefault(each.heads, {})[each.rows] = each

    @property
    def device_names(self) -> frozenset[str]:
        """The devices that were timed, as `device_of` names them."""
        return frozenset(device for device, *_ in self._places)

    def device_of(self, name: str) -> str:
        """The name of the profile that a driver's `name` matches; `name` itself where there is none, or it is a profile's."""
        return next((profile for profile, pattern in self._devices.items() if re.fullmatch(pattern, name)), name)

    def __call__(self, implementation: Implementation, request: Request) -> tuple[float, str] | None:
        """(cost, where it comes from); None where this implementation, as it is installed, was not timed for such a request."""
        own, sizes = self._timed(implementation, request)
        if own is None or not sizes:
            return None
        wanted = request.rows
        if wanted is not None:
            sizes = [min(sizes, key=lambda rows: abs(math.log(rows / max(wanted, 1))))]
        place = self._place(request)
        estimates = [found for by_heads in place.values() if (found := _estimate(by_heads, request.num_heads))]
        least = time_spent(min(each.us(rows) for each in estimates if rows in each.by_rows) for rows in sizes)
        cost = _FASTEST * time_spent(map(own.us, sizes)) / least
        return round(cost, 2), own.source(request.num_heads, sizes)

    def times(self, implementation: Implementation, request: Request) -> dict[int, float]:
        """Rows -> microseconds, of every size that the cost is computed from; empty where there is none."""
        own, sizes = self._timed(implementation, request)
        return {} if own is None else {rows: own.us(rows) for rows in sorted(sizes)}

    def _place(self, request: Request) -> dict[tuple[str, str | None], dict[int | None, dict[int, MeasuredTime]]]:
        return self._places.get((self.device_of(request.device.name), str(request.primitive), request.topk), {})

    def _timed(self, implementation: Implementation, request: Request) -> tuple[_Estimate | None, list[int]]:
        """Its times at its nearest head count, and the row counts that were timed with the installed sources."""
        place = self._place(request)
        timed = place.get((implementation.name, request.kv_layout)) or place.get((implementation.name, None))
        own = _estimate(timed, request.num_heads) if timed else None
        if own is None:
            return None, []
        installed = self._hash_of(sources_of(implementation), request.device.arch)
        return own, [rows for rows, time in own.by_rows.items() if time.source_hash == installed]


def _estimate(by_heads: Mapping[int | None, Mapping[int, MeasuredTime]], wanted: int | None) -> _Estimate | None:
    """From the nearest head count; None where heads play a part on one side only."""
    if wanted is None or None in by_heads:
        return _Estimate(None, 1, by_heads[None]) if wanted is None and None in by_heads else None
    counts = [heads for heads in by_heads if heads is not None]
    heads = min((count for count in counts if count >= wanted), default=max(counts))
    return _Estimate(heads, -(-wanted // heads), by_heads[heads])


def costs_text(times: Iterable[MeasuredTime], devices: Mapping[str, str] | None = None) -> str:
    """What `Registrar.add_costs` takes: a line for times that differ in rows alone, in an order that depends on them alone."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for each in sorted(times, key=lambda each: tuple("" if v is None else f"{v:>12}" for v in asdict(each).values())):
        fields = asdict(each)
        rows, us = fields.pop("rows"), fields.pop("us")
        groups.setdefault(tuple(fields.values()), {**fields, "us": {}})["us"][str(rows)] = us
    lines = ",\n".join(json.dumps(group) for group in groups.values())
    return f'{{"devices": {json.dumps(dict(sorted((devices or {}).items())))},\n"times": [\n{lines}\n]}}\n'


def parse_costs(text: str) -> tuple[list[MeasuredTime], dict[str, str]]:
    """(times, devices), what `costs_text` was given. Raises: ValueError or TypeError for anything else."""
    document = json.loads(text)
    if not isinstance(document, dict) or document.keys() != {"devices", "times"}:  # pyright: ignore[reportUnknownMemberType]
        raise ValueError("expected an object of devices and times")
    found: list[MeasuredTime] = []
    for group in document["times"]:
        by_rows = group.pop("us")
        found += [MeasuredTime(**group, rows=int(rows), us=us) for rows, us in by_rows.items()]
    return found, dict(document["devices"])
