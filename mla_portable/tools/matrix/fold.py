# SPDX-License-Identifier: Apache-2.0
"""Which reports may be removed, because others say more: the rule of `fold` and of the gate `history`.

Records are of one series when the same was run in the same way: implementation, primitive, kind and mode, layout, device or
architecture, level and filter, shape. A record is superseded when a later one of its series remains, but

- a record with a failure only by one without;
- a record of the same sources only by one that is as whole: no more cases skipped, no narrower declaration, no uncommitted
  changes where there were none;
- of benchmarks the fastest stays as well, since regressions are measured against it;
- what is reproduced stays so: of runs of the same sources two from different machines or days remain.

A report may go when all of its records may. `fold` keeps besides
what today's sources are bound to, whatever was recorded later of other sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mla_portable.tools.matrix.claims import wider
from mla_portable.tools.matrix.evidence import Evidence, series_of, sources_in
from mla_portable.tools.matrix.trust import apart


def superseded(old: Evidence, remaining: Sequence[Evidence]) -> bool:
    """Records of the same series that remain make `old` superfluous."""
    later = [each for each in remaining if each.recorded > old.recorded]
    if old.kind == "benchmark":
        faster = any(each.data["median_us"] <= old.data["median_us"] for each in remaining)
        return faster and _repeat(old, [each for each in later if each.data["dirty"] <= old.data["dirty"]])
    return _repeat(old, [each for each in later if _says_more(each, old)])


def _repeat(old: Evidence, later: Sequence[Evidence]) -> bool:
    """What stays is as well reproduced without `old`."""
    same = [each for each in later if sources_in(each) == sources_in(old)]
    if len(same) < len(later):
        return bool(later)
    return any(not apart(each, old) or any(apart(each, other) for other in same) for each in same)


def _says_more(new: Evidence, old: Evidence) -> bool:
    if old.failed:
        return not new.failed and new.passed > 0
    if sources_in(old) != sources_in(new):
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


def superfluous(evidence: Sequence[Evidence], current: Callable[[Evidence], bool]) -> list[str]:
    """SHA-256 of the reports that no record that is kept comes from. evidence, current: as for `fold`."""
    kept = {each.report for each in fold(evidence, current)}
    return [sha for sha in dict.fromkeys(each.report for each in evidence) if sha not in kept]


def wrongly_removed(before: Iterable[Evidence], now: Iterable[Evidence]) -> list[str]:
    """Records of reports that have gone, though nothing that remains supersedes them.

    A record that was changed while its report stays is not derived from it.
    """
    remaining: dict[tuple[Any, ...], list[Evidence]] = {}
    reports: set[str] = set()
    for each in now:
        remaining.setdefault(series_of(each), []).append(each)
        reports.add(each.report)
    found: dict[str, None] = {}
    for record in (each for each in before if each.report not in reports):
        if not superseded(record, remaining.get(series_of(record), [])):
            failing = "; it has a failure, which only a later run without one supersedes" if record.failed else ""
            what = f"{record.data['implementation']} / {record.data['primitive']}, {record.recorded}"
            problem = f"gone, and no record that remains supersedes it{failing}; restore it"
            found[f"report {record.report[:16]} ({what}): {problem}"] = None
    return list(found)
