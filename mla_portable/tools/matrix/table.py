# SPDX-License-Identifier: Apache-2.0
"""The one table behind every rendering: devices by primitives, each entry the best known claim, with numbered notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from mla_portable.contracts import Primitive
from mla_portable.tools.matrix.engines import engine_lines
from mla_portable.tools.matrix.levels import LEVELS, Cell
from mla_portable.tools.matrix.profiles import Profile
from mla_portable.tools.matrix.records import Records
from mla_portable.tools.matrix.trust import REPRODUCED, SELF_REPORTED, SIGNED, SPREAD

__all__ = ["STATES", "TRUST", "Entry", "Table", "make_table"]

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
TRUST: Final[dict[str, str]] = {
    REPRODUCED: f"runs on two machines or days agree: all cases pass, times lie within {SPREAD - 1:.0%}",
    SIGNED: "one run, signed by a runner of this project",
    SELF_REPORTED: "one run, which its report alone shows",
}
"""How far the evidence of a device is to be believed -> what that means."""
_WORD: Final = {"fp8_ds_mla": "FP8", "bf16": "BF16"}
_HOW: Final = {"interpreter": " in the interpreter", "stand_in": " on a stand-in"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One place. implementation: "" where none can be named. note: its number, 0 where there is nothing to add.

    trust: in the evidence of a state that is a level of a device, else "".
    """

    state: str
    implementation: str
    note: int
    trust: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Everything that a rendering shows.

    Attributes:
        headings: of the columns: the primitive and, where it matters, the layout. rows: of each device, an entry a column.
        notes: text of note n at index n - 1. sources: evidence that the table rests on, a line each: what ran, where, when,
        from which commit. engines: as from `engine_lines`. missing: plugins that did not load, with why.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[Profile, tuple[Entry, ...]], ...]
    notes: tuple[str, ...]
    sources: tuple[str, ...]
    engines: tuple[tuple[str, ...], ...]
    missing: tuple[tuple[str, str], ...]
    cells: tuple[Cell, ...]

    def coverage(self) -> dict[str, dict[str, int]]:
        """Vendor -> state -> how many places of its devices stand in it, best first."""
        found: dict[str, Counter[str]] = {}
        for profile, entries in self.rows:
            found.setdefault(profile.vendor, Counter()).update(entry.state for entry in entries)
        return {vendor: {state: counts[state] for state in STATES if state in counts} for vendor, counts in found.items()}


def make_table(records: Records) -> Table:
    """Arrange the cells; a pure function of the records."""
    cells = records.cells()
    columns = [(str(p), layout) for p in Primitive.all() for layout in (p.layouts or (None,))]
    places: dict[tuple[str, str, str | None], list[Cell]] = {}
    for cell in cells:
        places.setdefault((cell.device, cell.primitive, cell.layout), []).append(cell)
    notes: dict[str, int] = {"": 0}
    rows: list[tuple[Profile, tuple[Entry, ...]]] = []
    for profile in sorted(records.profiles.values(), key=lambda p: (p.vendor == "cpu", p.vendor, len(p.arch), p.arch, p.slug)):
        entries: list[Entry] = []
        for column in columns:
            found = sorted(places.get((profile.slug, *column), []), key=lambda c: (-c.rank, c.preference))
            state = found[0].state if found else "never"
            named = "" if state in ("never", "unknown") else found[0].implementation
            trust = found[0].trust if found and state in LEVELS else ""
            entries.append(Entry(state, named, notes.setdefault(_note(found), len(notes)), trust))
        rows.append((profile, tuple(entries)))
    headings = tuple(f"{primitive} {_WORD.get(layout or '', layout or '')}".strip() for primitive, layout in columns)
    engines = engine_lines(records.evidence, records.hashes)
    return Table(headings, tuple(rows), tuple(notes)[1:], _sources(cells), engines, records.declarations.missing, cells)


def _note(found: Sequence[Cell]) -> str:
    """Why a place stands where it stands; "" where there is nothing to add."""
    if not found:
        return "no plugin that is installed offers this"
    best = found[0]
    if best.state in LEVELS and not best.reasons:
        return ""
    who = [best] if best.state not in ("never", "unknown") else found
    return "; ".join(dict.fromkeys(f"{cell.implementation}: {', '.join(cell.reasons)}" for cell in who))


def _sources(cells: Sequence[Cell]) -> tuple[str, ...]:
    """What the good proofs rest on, grouped: one line per run, of the highest levels first."""
    proofs = {proof.evidence.where: proof for cell in cells for proof in cell.proofs if proof.status == "ok"}
    kinds: dict[tuple[int, str], set[str]] = {}
    counts: Counter[tuple[int, str]] = Counter()
    for proof in proofs.values():
        data: dict[str, Any] = dict(proof.evidence.data)
        device = data["device"]["name"] if "device" in data else "no device"
        commit = f"commit {data['commit'][:12]}" if data["commit"] else "no commit"
        commit += " with uncommitted changes" if data["dirty"] else ""
        versions = ", ".join(f"{name} {data['versions'][name]}" for name in ("torch", "triton") if name in data["versions"])
        what = f"{proof.level}: {data['implementation']} on {device}{_HOW.get(data.get('mode', ''), '')}"
        key = -LEVELS.index(proof.level), f"{what}, {data['recorded'][:10]}, {versions}, {commit}: `{data['command']}`"
        kinds.setdefault(key, set()).add(data.get("target") or data["primitive"])
        counts[key] += proof.evidence.passed
    return tuple(f"{key[1]} ({_counted(-key[0], counts[key])}; {', '.join(sorted(kinds[key]))})" for key in sorted(kinds))


def _counted(level: int, count: int) -> str:
    """What a run consists of, e.g. "9 cases"."""
    unit = {"compiled": "kernel variant", "measured": "benchmark"}.get(LEVELS[level], "case")
    twice = ", one that serves two primitives counted twice" if LEVELS[level] == "compiled" else ""
    return f"{count} {unit}{'' if count == 1 else 's'}{twice}"
