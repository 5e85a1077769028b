# SPDX-License-Identifier: Apache-2.0
"""The table on a terminal: a grid of letters that fits 80 columns, every row behind it, and the evidence."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Final

from rich.console import RenderableType
from rich.table import Table as Grid
from rich.text import Text

from mla_portable.tools.matrix.render import coverage_lines
from mla_portable.tools.matrix.table import Table
from mla_portable.tools.matrix.words import LETTERS, STATES, TRUST, family

_STYLES: Final = {
    "measured": "bold white on dark_green",
    "verified": "black on green3",
    "compiled+run": "black on grey82",
    "interpreted": "black on grey70",
    "compiled": "grey74",
    "declared": "grey50",
}
_BAD: Final = "bold white on red"


def _style(state: str) -> str:
    return _STYLES.get(state, _BAD if family(state) == "bad" else "")


def grid(table: Table) -> Iterator[RenderableType]:
    """A line a device and a letter a place, with a legend of the letters that occur."""
    width = max(len(device.name) for device, _ in table.rows) + 2
    groups = [[index for index, _ in found] for _, found in groupby(enumerate(table.columns), lambda c: c[1].primitive)]
    yield Text(f"Capability matrix, records up to {table.recorded}", style="bold")
    for number, group in enumerate(groups):
        stems = "".join("|".ljust(len(each) + 1) for each in groups[:number])
        yield Text(" " * width + stems + table.columns[group[0]].primitive, no_wrap=True)
    for device, entries in table.rows:
        line = Text(device.name.ljust(width), no_wrap=True)
        for group in groups:
            for index in group:
                state = entries[index].known.state
                line.append(LETTERS[state], _style(state))
            line.append(" ")
        yield line
    yield ""
    shown = {entry.known.state for _, entries in table.rows for entry in entries}
    for title, of_family in (("ran on this device", "ran"), ("never ran on it", "other"), ("", "bad"), ("", "none")):
        states = [state for state in STATES if state in shown and family(state) == of_family]
        words = Text(f"{title}: " if title and states else "")
        for state in states:
            words.append(LETTERS[state], _style(state)).append(f" {state}  ")
        if states:
            yield words
    layouts = dict.fromkeys(tuple(filter(None, (table.columns[index].word for index in group))) for group in groups)
    said = " or ".join(", ".join(words) for words in layouts if words)
    yield Text(f"A letter for each cache layout of a primitive: {said}.")
    yield Text("--device PROFILE --all: each implementation; --evidence: what the states mean and rest on.")


def rows(table: Table) -> Iterator[RenderableType]:
    """Every implementation that does not exclude the device, the best of each place first."""
    for device in table.devices:
        shown = Grid(title=f"{device.name} ({device.slug}, {device.arch})", title_justify="left", title_style="bold", box=None)
        for heading in ("primitive", "implementation", "state", "why no more"):
            shown.add_column(heading, overflow="fold", header_style="bold")
        for offer in table.offers:
            known = offer.devices.get(device.slug)
            if known is not None:
                state = Text(known.state, _style(known.state)).append(f" ({known.trust})" if known.trust else "", "none")
                why = table.note(known).removeprefix(f"{offer.implementation}: ")
                shown.add_row(offer.column.heading, offer.implementation, state, why)
        yield shown


def evidence(table: Table) -> Iterator[RenderableType]:
    """What the states mean, how many places stand in each, and the runs behind them."""
    for title, lines in (
        ("States", [f"{LETTERS[state]} {state}: {meaning}" for state, meaning in STATES.items()]),
        ("Trust", [f"{trust}: {meaning}" for trust, meaning in TRUST.items()]),
        ("Coverage", coverage_lines(table)),
        ("Notes", [f"{number}. {text}" for number, text in enumerate(table.notes, 1)]),
        ("Engines", [", ".join(row) for row in table.engines]),
        ("Evidence", list(table.sources)),
        ("Plugins that did not load", [f"{name}: {why}" for name, why in table.missing]),
    ):
        if lines:
            yield Text(title, style="bold")
            for line in lines:
                hanging = Grid.grid(padding=(0, 1))
                hanging.add_row("-", Text(line))
                yield hanging
