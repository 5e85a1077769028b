# SPDX-License-Identifier: Apache-2.0
"""How far a record is to be believed: said once, or repeated by another run; computed from the records alone.

A record is *self-reported* until another run of the same series and sources, on another machine or another day, agrees with it:
a suite passed with as many cases, a time is within `SPREAD`. It is *reproduced* then. A signed record was made by the
project's own runner, whose key `capability/signers` lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mla_portable.tools.matrix.evidence import Evidence, series_of, sources_in
from mla_portable.tools.matrix.words import REPRODUCED, SELF_REPORTED, SIGNED, SPREAD


def apart(one: Evidence, other: Evidence) -> bool:
    """Two runs on different machines or days."""
    day, machine = one.recorded[:10], one.data.get("machine")
    return machine != other.data.get("machine") or day != other.recorded[:10]


class Trust:
    """Of records, held against each other."""

    def __init__(self, evidence: Iterable[Evidence]) -> None:
        self._runs: dict[tuple[Any, ...], list[Evidence]] = {}
        for each in evidence:
            self._runs.setdefault((series_of(each), sources_in(each)), []).append(each)

    def of(self, record: Evidence) -> str:
        """REPRODUCED, SIGNED or SELF_REPORTED."""
        others = self._runs.get((series_of(record), sources_in(record)), ())
        if any(apart(record, each) and _agree(record, each) for each in others):
            return REPRODUCED
        return SIGNED if record.data.get("signer") else SELF_REPORTED

    def ships(self, record: Evidence) -> bool:
        """Its time may rank what users run."""
        return self.of(record) != SELF_REPORTED


def _agree(one: Evidence, other: Evidence) -> bool:
    if one.data["dirty"] or other.data["dirty"]:
        return False
    if one.kind == "benchmark":
        times = sorted(each.data["median_us"] for each in (one, other))
        return times[1] <= SPREAD * times[0]
    whole = not (one.failed or other.failed or one.skipped or other.skipped)
    return whole and one.passed == other.passed
