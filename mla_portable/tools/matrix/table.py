# SPDX-License-Identifier: Apache-2.0
"""The table behind every rendering: what each implementation is known to do on each device, and why no more.

`matrix.json` beside the records holds it. It is generated like MATRIX.md, and a gate holds it against records and sources, so
that a display need not compute it again. Nothing here imports torch or a plugin.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from pydantic import ValidationError

import mla_portable
from mla_portable.tools.matrix.model import Model, RecordError, Text, validation_problems
from mla_portable.tools.matrix.words import STATES, rank

TABLE: Final = "matrix.json"
_WORD: Final = {"fp8_ds_mla": "FP8", "bf16": "BF16", "index_bf16": "BF16", "index_fp8": "FP8"}


class Device(Model):
    """slug: of its profile. name: for readers. vendor, arch: as in DeviceFacts."""

    slug: Text
    name: Text
    vendor: Text
    arch: Text


class Column(Model):
    """A primitive, with a cache layout where one plays a part."""

    primitive: Text
    layout: str | None = None

    @property
    def heading(self) -> str:
        """For readers, e.g. "sparse_decode FP8"."""
        return f"{self.primitive} {self.word}".rstrip()

    @property
    def word(self) -> str:
        """The layout for readers, "" where there is none."""
        return _WORD.get(self.layout or "", self.layout or "")


class Known(Model):
    """One implementation on one device. level: the highest that is proven, "" where that is the state. trust: in the
    evidence of a state that is a level of a device. note: its number, 0 where there is nothing to add."""

    state: Text
    level: str = ""
    trust: str = ""
    note: int = 0


class Offer(Model):
    """One implementation of a column. devices: slug -> what is known; devices that it excludes are left out, except where
    nothing else is there."""

    implementation: Text
    column: Column
    devices: dict[str, Known]


class Entry(Model):
    """The best known implementation of one place; "" where none can be named."""

    implementation: str
    known: Known


class Table(Model):
    """Everything that a rendering shows.

    Attributes:
        recorded: day of the newest record, "" where there is none. plugins: (name, distribution, version) of those that are
            described. missing: plugins that did not load, with why. offers: of a column in order of declared cost.
        notes: text of note n at index n - 1. sources: evidence that the table rests on, a line each: what ran, where, when,
            from which commit. engines: as from `engine_lines`. predicted: as from `predicted_lines`; predicted_for: what of.
    """

    recorded: str
    plugins: tuple[tuple[str, str, str], ...]
    missing: tuple[tuple[str, str], ...]
    devices: tuple[Device, ...]
    columns: tuple[Column, ...]
    notes: tuple[str, ...]
    sources: tuple[str, ...]
    offers: tuple[Offer, ...]
    engines: tuple[tuple[str, ...], ...] = ()
    predicted: tuple[tuple[str, ...], ...] = ()
    predicted_for: str = ""

    @cached_property
    def rows(self) -> tuple[tuple[Device, tuple[Entry, ...]], ...]:
        """Of each device, an entry a column."""
        never = Entry(implementation="", known=Known(state="never"))
        best: dict[tuple[str, Column], Entry] = {}
        for offer in self.offers:
            for slug, known in offer.devices.items():
                name = "" if known.state in ("never", "unknown") else offer.implementation
                entry, found = Entry(implementation=name, known=known), best.get((slug, offer.column))
                if found is None or _rank(found.known) < _rank(known):
                    best[slug, offer.column] = entry
        return tuple((d, tuple(best.get((d.slug, column), never) for column in self.columns)) for d in self.devices)

    def coverage(self) -> dict[str, dict[str, int]]:
        """Vendor -> state -> how many places of its devices stand in it, best first."""
        found: dict[str, Counter[str]] = {}
        for device, entries in self.rows:
            found.setdefault(device.vendor, Counter()).update(entry.known.state for entry in entries)
        return {vendor: {state: counts[state] for state in STATES if state in counts} for vendor, counts in found.items()}

    def note(self, known: Known) -> str:
        """Why a place stands where it stands, "" where there is nothing to add."""
        return self.notes[known.note - 1] if known.note else ""

    def only(self, vendor: str | None, device: str | None) -> Table:
        """The devices of that vendor, or that one; without devices where there is none."""
        chosen = tuple(d for d in self.devices if vendor in (None, d.vendor) and device in (None, d.slug))
        slugs = {each.slug for each in chosen}
        offers = tuple(
            offer.model_copy(update={"devices": {slug: known for slug, known in offer.devices.items() if slug in slugs}})
            for offer in self.offers
        )
        return self.model_copy(update={"devices": chosen, "offers": tuple(each for each in offers if each.devices)})


def _rank(known: Known) -> int:
    return rank(known.state, known.level or known.state)


def table_text(table: Table) -> str:
    """matrix.json: an element a line."""
    parts: list[str] = []
    for name, value in table.model_dump(mode="json", exclude_defaults=True).items():
        lines = ",\n".join(json.dumps(each) for each in value)
        parts.append(f'"{name}": {json.dumps(value)}' if isinstance(value, str) else f'"{name}": [\n{lines}\n]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def find_records(given: Path | None = None) -> Path:
    """The folder that is given; else the records of this installation: those in its wheel, or `capability/` of its checkout.

    Raises: RecordError when there is none.
    """
    if given is None:
        package = Path(mla_portable.__file__).parent
        packaged = package / "tools" / "matrix" / "capability"
        given = packaged if packaged.is_dir() else package.parent / "capability"
    if not given.is_dir():
        raise RecordError(str(given), "no such folder; give one with --records")
    return given


def installed_table() -> Table | None:
    """The table of this installation as it was generated; None where other plugins, or other versions of them, are installed.

    Raises: RecordError for a file that is no table.
    """
    path = find_records() / TABLE
    if not path.is_file():
        return None
    try:
        table = Table.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise RecordError(str(path), "; ".join(validation_problems(error))) from error
    points = entry_points(group="mla_portable.backends")
    return table if {(p.name, p.dist.name, p.dist.version) for p in points if p.dist} == set(table.plugins) else None
