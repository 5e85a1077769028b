# SPDX-License-Identifier: Apache-2.0
"""The one table behind every rendering: devices by primitives, each entry the best known claim, with numbered notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from mla_portable.contracts import Primitive
from mla_portable.layouts import LAYOUTS
from mla_portable.tools.matrix.levels import LEVELS, Cell
from mla_portable.tools.matrix.records import Records

__all__ = ["STATES", "Coverage", "Entry", "Row", "Table", "make_table"]

STATES: Final[dict[str, str]] = {
    "measured": "verified, and benchmarked beside a roofline bound and a baseline in the same run",
    "verified": "the conformance suite passed on that device at level quick or full, nothing skipped",
    "compiled+run": "the code compiled for the architecture passed the conformance suite on a newer device, named in the note",
    "interpreted": "the numerics hold on a CPU, in an interpreter with the configuration for unknown devices or against a "
    "strict stand-in of the vendor's library; what compiles ahead of time is compiled too",
    "compiled": "every configuration compiles for the architecture and fits its shared memory",
    "declared": "claimed by the plugin with a source; never run",
    "failing": "the newest evidence has a failure",
    "stale": "there was more evidence, but the sources changed since",
    "partial": "there is more evidence, but it does not cover all that is claimed",
    "unknown": "a hardware fact that decides is not published",
    "never": "the declarations exclude this device, or nothing claims it",
}
"""State -> what it means, best first."""
_WORD: Final = {None: "", "fp8_ds_mla": "FP8", "bf16": "BF16"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One place of the table. cells: all claims, best first; () where nobody claims anything. notes: numbers of notes."""

    cells: tuple[Cell, ...]
    notes: tuple[int, ...]

    @property
    def state(self) -> str:
        return self.cells[0].state if self.cells else "never"

    @property
    def implementation(self) -> str:
        return self.cells[0].implementation if self.cells and self.state not in ("never", "unknown") else ""


@dataclass(frozen=True, slots=True)
class Row:
    """One device."""

    device: str
    name: str
    vendor: str
    arch: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Of one vendor's devices: how many places of the table stand in each state."""

    vendor: str
    places: int
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Table:
    """Everything that a rendering shows.

    Attributes:
        columns: (primitive, layout). notes: text of note n at index n - 1. missing: plugins that did not load.
        sources: evidence that the table rests on, one line each: what ran, where, when, from which commit.
    """

    columns: tuple[tuple[str, str | None], ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    coverage: tuple[Coverage, ...]
    sources: tuple[str, ...]
    missing: tuple[tuple[str, str], ...]
    cells: tuple[Cell, ...]

    def headings(self) -> list[str]:
        """A heading per column: the primitive and, where it matters, the layout."""
        return [f"{primitive} {_WORD.get(layout, layout or '')}".strip() for primitive, layout in self.columns]


def make_table(records: Records) -> Table:
    """Arrange the cells; a pure function of the records."""
    cells = records.cells()
    columns = tuple((str(p), layout) for p in Primitive.all() for layout in (tuple(LAYOUTS) if p.has_layout else (None,)))
    places: dict[tuple[str, str, str | None], list[Cell]] = {}
    for cell in cells:
        places.setdefault((cell.device, cell.primitive, cell.layout), []).append(cell)
    notes: dict[str, int] = {}
    rows: list[Row] = []
    for profile in sorted(records.profiles.values(), key=lambda p: (p.vendor == "cpu", p.vendor, len(p.arch), p.arch, p.slug)):
        entries: list[Entry] = []
        for primitive, layout in columns:
            found = sorted(places.get((profile.slug, primitive, layout), []), key=lambda c: (-c.rank, c.preference))
            text = _note(found)
            numbers = (notes.setdefault(text, len(notes) + 1),) if text else ()
            entries.append(Entry(tuple(found), numbers))
        rows.append(Row(profile.slug, profile.name, profile.vendor, profile.arch, tuple(entries)))
    return Table(columns, tuple(rows), tuple(notes), _coverage(rows), _sources(cells), records.declarations.missing, cells)


def _note(found: Sequence[Cell]) -> str:
    """Why a place stands where it stands; "" where there is nothing to add."""
    if not found:
        return "no plugin that is installed offers this"
    best = found[0]
    if best.state in LEVELS and not best.reasons:
        return ""
    who = [best] if best.state not in ("never", "unknown") else found
    return "; ".join(dict.fromkeys(f"{cell.implementation}: {', '.join(cell.reasons)}" for cell in who))


def _coverage(rows: Sequence[Row]) -> tuple[Coverage, ...]:
    found: list[Coverage] = []
    for vendor in dict.fromkeys(row.vendor for row in rows):
        states = [entry.state for row in rows if row.vendor == vendor for entry in row.entries]
        found.append(Coverage(vendor, len(states), {state: states.count(state) for state in STATES if state in states}))
    return tuple(found)


def _sources(cells: Sequence[Cell]) -> tuple[str, ...]:
    """What the good proofs rest on, grouped: one line per run."""
    groups: dict[str, tuple[str, set[str], int]] = {}
    for proof in {proof.evidence.where: proof for cell in cells for proof in cell.proofs if proof.status == "ok"}.values():
        data: dict[str, Any] = dict(proof.evidence.data)
        device = data["device"]["name"] if "device" in data else "no device"
        how = {"interpreter": " in the interpreter", "stand_in": " on a stand-in"}.get(data.get("mode", ""), "")
        commit = f"commit {data['commit'][:12]}" if data["commit"] else "no commit"
        commit += " with uncommitted changes" if data["dirty"] else ""
        versions = ", ".join(f"{name} {data['versions'][name]}" for name in ("torch", "triton") if name in data["versions"])
        what = f"{proof.level}: {data['implementation']} on {device}{how}"
        key = f"{what}, {data['recorded'][:10]}, {versions}, {commit}: `{data['command']}`"
        first, kinds, count = groups.setdefault(key, (key, set(), 0))
        kinds.add(data["target"] if "target" in data else data["primitive"])
        groups[key] = (first, kinds, count + (data["cases"]["passed"] if "cases" in data else 1))
    return tuple(
        f"{key} ({_counted(key.partition(':')[0], count)}; {', '.join(sorted(kinds))})"
        for key, (_, kinds, count) in sorted(
            groups.items(), key=lambda item: (-LEVELS.index(item[0].partition(":")[0]), item[0])
        )
    )


def _counted(level: str, count: int) -> str:
    """What a run consists of, e.g. "9 cases"."""
    unit = {"compiled": "kernel variant", "measured": "benchmark"}.get(level, "case")
    twice = ", one that serves two primitives counted twice" if level == "compiled" else ""
    return f"{count} {unit}{'' if count == 1 else 's'}{twice}"
