# SPDX-License-Identifier: Apache-2.0
"""Measured costs: how much longer an implementation takes than the fastest one that was timed on a device.

The cost is 10 times the implementation's time over the least time on record for the same number of rows, over all plugins and
either layout, so that routes which read different layouts stay comparable. Without `rows` in the request the sum over all row
counts that were timed decides (`time_spent`), with `rows` its shares of them (`rows.shares`).

Each implementation is ranked at its own nearest head count: the least that was timed and is no smaller, as a kernel that pads
would run it; else the greatest below, as many times as cover the heads. `topk` and `form` must be equal. What was not timed has
no measured cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from mla_portable.contracts import DeviceFacts, Implementation, Request
from mla_portable.times.records import MeasuredTime, Measurement
from mla_portable.times.rows import shares, time_spent

_FASTEST: Final = 10.0


@dataclass(frozen=True, slots=True)
class _Estimate:
    """What an implementation takes for a head count: its times at `heads`, `calls` times."""

    heads: int | None
    calls: int
    by_rows: Mapping[int, MeasuredTime]

    def us(self, rows: int) -> float:
        return self.calls * self.by_rows[rows].us

    def source(self, wanted: int | None, sizes: Iterable[int], device: DeviceFacts) -> str:
        times = [self.by_rows[rows] for rows in sorted(sizes)]
        listed = ", ".join(f"{each.rows}: {us:{'.0f' if us >= 100 else '.3g'}}" for each in times if (us := self.us(each.rows)))
        heads = "" if self.heads is None else f", {self.heads} heads"
        if self.heads != wanted:
            heads = f", {f'{self.calls} x ' if self.calls > 1 else ''}{self.heads} heads for {wanted}"
        newest = max((each.measurement for each in times), key=lambda each: each.recorded)
        return f"{newest.text(device)}{heads}, us by rows {listed};"


_Timed = dict[int | None, dict[int, MeasuredTime]]
"""Heads -> rows -> time, of one implementation and layout."""
_Place = dict[tuple[str, str | None], _Timed]
"""(implementation, layout) -> its times, for one primitive, topk and form on one device."""


class MeasuredCosts:
    """A CostTable over measured times; a pure function of them and the request.

    All times whose measurement matches a device's name are compared with one another, whatever they call the device. Of two
    for the same size a user's own counts, else the newest.
    """

    def __init__(self, times: Iterable[MeasuredTime], own: Iterable[MeasuredTime] = ()) -> None:
        """own: the user's, which come before `times`."""

        def ranking(given: Iterable[MeasuredTime]) -> list[MeasuredTime]:
            kept = (each for each in given if each.configuration is None)
            return sorted(kept, key=lambda each: each.measurement.recorded)

        self._times = [*ranking(times), *ranking(own)]
        self._of_device: dict[str, dict[tuple[str, int | None, str], _Place]] = {}

    @property
    def measurements(self) -> frozenset[Measurement]:
        """Where the times come from."""
        return frozenset(each.measurement for each in self._times)

    def __call__(self, implementation: Implementation, request: Request) -> tuple[float, str] | None:
        """(cost, where it comes from); None where this implementation was not timed for such a request."""
        place, own = self._timed(implementation, request)
        if own is None:
            return None
        sizes = sorted(own.by_rows)
        share_of = dict.fromkeys(sizes, 1.0) if request.rows is None else shares(sizes, request.rows)
        estimates = [found for by_heads in place.values() if (found := _estimate(by_heads, request.num_heads))]
        least = time_spent(
            share * min(each.us(rows) for each in estimates if rows in each.by_rows) for rows, share in share_of.items()
        )
        cost = _FASTEST * time_spent(share * own.us(rows) for rows, share in share_of.items()) / least
        return round(cost, 2), own.source(request.num_heads, share_of, request.device)

    def times(self, implementation: Implementation, request: Request) -> dict[int, float]:
        """Rows -> microseconds, of every size that the cost is computed from; empty where there is none."""
        _, own = self._timed(implementation, request)
        return {} if own is None else {rows: own.us(rows) for rows in sorted(own.by_rows)}

    def _timed(self, implementation: Implementation, request: Request) -> tuple[_Place, _Estimate | None]:
        """All times of such requests on the device, and the implementation's own at its nearest head count."""
        places = self._of_device.get(request.device.name)
        if places is None:
            places = self._of_device.setdefault(request.device.name, self._places(request.device.name))
        place = places.get((str(request.primitive), request.topk, request.form), {})
        timed = place.get((implementation.name, request.kv_layout)) or place.get((implementation.name, None))
        return place, _estimate(timed, request.num_heads) if timed else None

    def _places(self, name: str) -> dict[tuple[str, int | None, str], _Place]:
        """The times of a device of that name, by (primitive, topk, form)."""
        matching = {each for each in self.measurements if each.matches(name)}
        places: dict[tuple[str, int | None, str], _Place] = {}
        for each in self._times:
            if each.measurement in matching:
                place = places.setdefault((each.primitive, each.topk, each.form), {})
                timed = place.setdefault((each.implementation, each.layout), {})
                timed.setdefault(each.heads, {})[each.rows] = each
        return places


def _estimate(by_heads: _Timed, wanted: int | None) -> _Estimate | None:
    """From the nearest head count; None where heads play a part on one side only."""
    if wanted is None or None in by_heads:
        return _Estimate(None, 1, by_heads[None]) if wanted is None and None in by_heads else None
    counts = [heads for heads in by_heads if heads is not None]
    heads = min((count for count in counts if count >= wanted), default=max(counts))
    return _Estimate(heads, -(-wanted // heads), by_heads[heads])
