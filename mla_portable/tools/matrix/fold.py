# SPDX-License-Identifier: Apache-2.0
"""Which records of evidence may be removed, because others say more: the rule of `fold` and of the append-only gate.

Records are of one series when the same was run in the same way: implementation, primitive, kind and mode, layout, device or
architecture, level and filter, shape. A record is superseded when a later one of its series remains, but

- a record with a failure only by one without;
- a record of the same sources only by one that is as whole: no more cases skipped, no narrower declaration, no uncommitted
  changes where there were none;
- of benchmarks the fastest stays as well, since regressions are measured against it.

`fold` keeps besides what today's sources are bound to, whatever was recorded later of other sources.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from mla_portable.tools.matrix.claims import wider
from mla_portable.tools.matrix.evidence import Evidence, record_line, without_folders

_SERIES: Final = ("implementation", "primitive", "kind", "mode", "layout", "target", "level", "match", "shape", "overlap")
_HASHES: Final = ("source_hash", "suite_hash")


def series_of(record: Evidence) -> tuple[Any, ...]:
    """What was run, and how. The shape of a benchmark includes heads and top-k; those of a suite follow from its level."""
    data = record.data
    sizes = (str(data["heads"]), str(data["topk"])) if record.kind == "benchmark" else ()
    return (data["device"]["name"] if "device" in data else None, *(data.get(name) for name in _SERIES), *sizes)


def superseded(old: Evidence, remaining: Sequence[Evidence]) -> bool:
    """A record of the same series that remains makes `old` superfluous."""
    later = [each for each in remaining if each.recorded > old.recorded]
    if old.kind == "benchmark":
        return any(each.data["dirty"] <= old.data["dirty"] for each in later) and any(
            each.data["median_us"] <= old.data["median_us"] for each in remaining
        )
    return any(_says_more(each, old) for each in later)


def _says_more(new: Evidence, old: Evidence) -> bool:
    if old.failed:
        return not new.failed and new.passed > 0
    if any(old.data.get(name) != new.data.get(name) for name in _HASHES):
        return True
    whole = new.skipped <= old.skipped and new.data["dirty"] <= old.data["dirty"] and (new.passed > 0 or not old.passed)
    return whole and not wider(new.data["support"], old.data["support"])


def fold(records: Sequence[Evidence], current: Callable[[Evidence], bool]) -> list[Evidence]:
    """The records that can still matter, in their order.

    Args:
        records: in the order they were recorded. current: a record is of today's sources.
    """
    series: dict[tuple[Any, ...], list[Evidence]] = {}
    for each in records:
        series.setdefault(series_of(each), []).append(each)
    kept: set[int] = set()
    for mine in series.values():
        remaining = [min(mine, key=lambda each: each.data["median_us"])] if mine[0].kind == "benchmark" else []
        for each in reversed(mine):
            others = [other for other in remaining if current(other)] if current(each) else remaining
            if each not in remaining and not superseded(each, others):
                remaining.append(each)
        kept |= set(map(id, remaining))
    return [each for each in records if id(each) in kept]


def scrubbed(data: Mapping[str, Any]) -> dict[str, Any]:
    """A record whose command names no folder of the machine that ran it."""
    return {**data, "command": without_folders(data["command"])}


def wrongly_removed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Records that have gone from evidence files, or were changed, though nothing that remains supersedes them.

    Args:
        before, now: path -> text. A command may lose the folders that it names.
    """
    there = {record_line(scrubbed(json.loads(line))) for text in now.values() for line in text.splitlines()}
    remaining: dict[tuple[Any, ...], list[Evidence]] = {}
    for line in there:
        record = Evidence("", json.loads(line))
        remaining.setdefault(series_of(record), []).append(record)
    found: list[str] = []
    for path, text in before.items():
        for number, line in enumerate(text.splitlines(), start=1):
            record = Evidence(f"{path}:{number}", scrubbed(json.loads(line)))
            if record_line(record.data) not in there and not superseded(record, remaining.get(series_of(record), [])):
                failing = "; it has a failure, which only a later run without one supersedes" if record.failed else ""
                found.append(f"{record.where}: gone or changed, and no record that remains supersedes it{failing}; restore it")
    return found
