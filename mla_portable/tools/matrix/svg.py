# SPDX-License-Identifier: Apache-2.0
"""The table as a drawing for the README: a square per place, told apart by letter and fill, not by colour."""

from __future__ import annotations

from typing import Final
from xml.sax.saxutils import escape, quoteattr

from mla_portable.tools.matrix.table import STATES, Table

__all__ = ["svg"]

_LETTERS: Final = {
    "measured": "M",
    "verified": "V",
    "compiled+run": "R",
    "interpreted": "I",
    "compiled": "C",
    "declared": "D",
    "failing": "!",
    "stale": "S",
    "partial": "P",
    "unknown": "?",
    "never": "-",
}
_FILLS: Final = {
    "measured": "#1b4965",
    "verified": "#2c7da0",
    "compiled+run": "#61a5c2",
    "interpreted": "#89c2d9",
    "compiled": "#cfe8ef",
}
_DARK: Final = ("measured", "verified")
_SIDE, _LEFT, _TOP = 34, 190, 150


def svg(table: Table) -> str:
    """matrix.svg. Fills grow darker with the level; what is no level has a white square."""
    width = _LEFT + _SIDE * len(table.columns) + 120
    legend_top = _TOP + _SIDE * len(table.rows) + 24
    height = legend_top + 20 * ((len(STATES) + 2) // 3) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="Capability matrix" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for column, heading in enumerate(table.headings()):
        x = _LEFT + _SIDE * column + _SIDE / 2
        parts.append(f'<text transform="translate({x:g} {_TOP - 8}) rotate(-50)">{escape(heading)}</text>')
    for index, row in enumerate(table.rows):
        y = _TOP + _SIDE * index
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 21}" text-anchor="end">{escape(row.name)}</text>')
        for column, entry in enumerate(row.entries):
            x = _LEFT + _SIDE * column
            title = f"{row.name}, {table.headings()[column]}: {entry.state} {entry.implementation}".rstrip()
            parts.append(_square(x, y, entry.state, title))
    for index, state in enumerate(STATES):
        x, y = 20 + 200 * (index % 3), legend_top + 20 * (index // 3)
        parts.append(f'<text x="{x}" y="{y + 12}"><tspan font-weight="bold">{_LETTERS[state]}</tspan> {state}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _square(x: int, y: int, state: str, title: str) -> str:
    fill, side = _FILLS.get(state, "#ffffff"), _SIDE - 2
    ink = "#ffffff" if state in _DARK else "#000000"
    return (
        f"<g aria-label={quoteattr(title)}><title>{escape(title)}</title>"
        f'<rect x="{x + 1}" y="{y + 1}" width="{side}" height="{side}" fill="{fill}" stroke="#555555"/>'
        f'<text x="{x + _SIDE / 2:g}" y="{y + 22}" text-anchor="middle" fill="{ink}">{_LETTERS[state]}</text></g>'
    )
