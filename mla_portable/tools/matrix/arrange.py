# SPDX-License-Identifier: Apache-2.0
"""The table, made of the records: devices by primitives, with numbered notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from mla_portable.contracts import Primitive
from mla_portable.tools.matrix.engines import engine_lines
from mla_portable.tools.matrix.levels import Cell
from mla_portable.tools.matrix.predicted import predicted_lines
from mla_portable.tools.matrix.records import Records
from mla_portable.tools.matrix.table import Column, Device, Known, Offer, Table
from mla_portable.tools.matrix.words import LEVELS

_HOW: Final = {"interpreter": " in the interpreter", "stand_in": " on a stand-in"}


def make_table(records: Records) -> Table:
    """Arrange the cells; a pure function of the records."""
    cells = records.cells()
    columns = [Column(primitive=str(p), layout=layout) for p in Primitive.all() for layout in (p.layouts or (None,))]
    claimed = {(cell.device, cell.primitive, cell.layout) for cell in cells if cell.state != "never"}
    notes: dict[str, int] = {"": 0}
    offers: list[Offer] = []
    for column in columns:
        mine = [cell for cell in cells if (cell.primitive, cell.layout) == (column.primitive, column.layout)]
        by_name: dict[str, dict[str, Known]] = {}
        for cell in sorted(mine, key=lambda cell: cell.preference):
            if cell.state == "never" and (cell.device, cell.primitive, cell.layout) in claimed:
                continue
            number = notes.setdefault(f"{cell.implementation}: {', '.join(cell.reasons)}" if cell.reasons else "", len(notes))
            level, trust = ("", cell.trust) if cell.state in LEVELS else (cell.level, "")
            known = Known(state=cell.state, level=level, trust=trust, note=number)
            by_name.setdefault(cell.implementation, {})[cell.device] = known
        offers += [Offer(implementation=name, column=column, devices=devices) for name, devices in by_name.items()]
    profiles = sorted(records.profiles.values(), key=lambda p: (p.vendor == "cpu", p.vendor, len(p.arch), p.arch, p.slug))
    claims = records.declarations
    return Table(
        recorded=max((each.recorded[:10] for each in records.evidence), default=""),
        plugins=tuple(sorted(claims.plugins)),
        missing=claims.missing,
        devices=tuple(Device(slug=p.slug, name=p.name, vendor=p.vendor, arch=p.arch) for p in profiles),
        columns=tuple(columns),
        notes=tuple(notes)[1:],
        sources=_sources(cells),
        offers=tuple(offers),
        engines=engine_lines(records.evidence, records.hashes),
        predicted=predicted_lines(records.timed, records.profiles),
        predicted_for=records.timed.title if records.timed else "",
    )


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
