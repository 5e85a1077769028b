# SPDX-License-Identifier: Apache-2.0
"""Time over rows as SVG: a panel for each head count, a row of panels for each primitive and layout, both axes logarithmic.

Lines are told apart by dashes, markers and a legend as well as by colour. Drawn by hand: an SVG of text and polylines needs
no library, and its text can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final
from xml.sax.saxutils import escape

__all__ = ["plot_lines"]

_PANEL_WIDTH, _PANEL_HEIGHT = 300, 230
_LEFT, _TOP, _GAP, _TITLE = 56, 30, 26, 34
_LEGEND_LINE: Final = 18
_FLOOR: Final = "floor"
_COLOURS: Final = ("#1b4965", "#c1121f", "#2a9d8f", "#7b2cbf", "#bc6c25", "#555555", "#0077b6", "#6a994e")
_DASHES: Final = ("", "7 3", "2 3", "9 3 2 3")
_DECADES: Final = (1, 2, 5)

Line = Mapping[str, Any]
Series = dict[str, list[tuple[float, float]]]


def plot_lines(lines: Sequence[Line]) -> str:
    """An SVG document. lines: of `kernel_lines`; those without a time are left out, and only an overlap of 0 is drawn."""
    shown = [line for line in lines if line["median_us"] is not None and not line["overlap"]]
    names = list(dict.fromkeys(line["name"] for line in sorted(shown, key=lambda line: line["role"])))
    grid: dict[tuple[str, str], dict[int, list[Line]]] = {}
    for line in shown:
        heads = grid.setdefault((line["primitive"], line["layout"] or ""), {})
        heads.setdefault(line["heads"] or 0, []).append(line)
    columns = max((len(heads) for heads in grid.values()), default=1)
    row_height = _TITLE + _TOP + _PANEL_HEIGHT + _GAP
    width = columns * (_LEFT + _PANEL_WIDTH) + _GAP
    legend_top = row_height * len(grid) + 10
    height = legend_top + _LEGEND_LINE * (len(names) + 1) + 10
    device = lines[0]["device"]["name"] if lines else "nothing was timed"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Kernel times on {escape(device)}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, ((primitive, layout), heads) in enumerate(grid.items()):
        top = number * row_height
        title = f"{primitive} {layout}".strip()
        parts.append(
            f'<text x="{_LEFT}" y="{top + 20}" font-size="14">{escape(title)} on {escape(device)}, us over rows</text>'
        )
        for column, count in enumerate(sorted(heads)):
            x, y = _LEFT + column * (_LEFT + _PANEL_WIDTH), top + _TITLE + _TOP
            caption = f"{count} heads" if count else ""
            parts += _panel(x, y, caption, _series(heads[count]), names)
    for number, name in enumerate((*names, _FLOOR)):
        y = legend_top + _LEGEND_LINE * number
        colour, dash = _style(name, names)
        parts.append(f'<path d="M{_LEFT} {y + 6}h44" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>')
        parts.append(_marker(_LEFT + 22, y + 6, name, names))
        parts.append(f'<text x="{_LEFT + 54}" y="{y + 10}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _series(lines: Sequence[Line]) -> Series:
    """Name -> (rows, us) by rows; the floor among them. Of several times of one candidate the last counts."""
    found: dict[str, dict[float, float]] = {_FLOOR: {}}
    for line in lines:
        found.setdefault(line["name"], {})[line["rows"]] = line["median_us"]
        found[_FLOOR][line["rows"]] = line["floor_us"]
    return {name: sorted(points.items()) for name, points in found.items()}


def _panel(x: float, y: float, caption: str, series: Series, names: Sequence[str]) -> list[str]:
    points = [point for each in series.values() for point in each]
    rows = sorted({row for row, _ in points})
    ticks = _ticks(min(us for _, us in points), max(us for _, us in points))

    def across(row: float) -> float:
        return x + _PANEL_WIDTH * _share(row, rows[0], rows[-1])

    def down(us: float) -> float:
        return y + _PANEL_HEIGHT * (1 - _share(us, ticks[0], ticks[-1]))

    parts = [f'<text x="{x + _PANEL_WIDTH / 2:g}" y="{y - 8}" text-anchor="middle">{escape(caption)}</text>']
    for tick in ticks:
        at = down(tick)
        parts.append(f'<path d="M{x} {at:.1f}h{_PANEL_WIDTH}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x - 5}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for row in rows:
        parts.append(f'<text x="{across(row):.1f}" y="{y + _PANEL_HEIGHT + 15}" text-anchor="middle">{row:g}</text>')
    for name, each in series.items():
        colour, dash = _style(name, names)
        line = " ".join(f"{across(row):.1f},{down(us):.1f}" for row, us in each)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>')
        if name != _FLOOR:
            parts += [
                f"<g><title>{escape(name)}, {row:g} rows: {us:.1f} us</title>{_marker(across(row), down(us), name, names)}</g>"
                for row, us in each
            ]
    return parts


def _share(value: float, least: float, most: float) -> float:
    """Where a value lies between two others on a logarithmic axis, 0 to 1; the middle where these are one."""
    return 0.5 if most <= least else math.log(value / least) / math.log(most / least)


def _ticks(least: float, most: float) -> list[float]:
    """1, 2, 5 times powers of ten, from the last one below `least` to the first above `most`."""
    first, last = math.floor(math.log10(least)), math.ceil(math.log10(most))
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in _DECADES]
    below = [tick for tick in ticks if tick <= least]
    above = [tick for tick in ticks if tick >= most]
    return [tick for tick in ticks if below[-1] <= tick <= above[0]]


def _style(name: str, names: Sequence[str]) -> tuple[str, str]:
    """Colour and dashes."""
    if name == _FLOOR:
        return "#000000", "1 2"
    place = names.index(name)
    return _COLOURS[place % len(_COLOURS)], _DASHES[place // 2 % len(_DASHES)]


def _marker(x: float, y: float, name: str, names: Sequence[str]) -> str:
    """A shape for each line: circle, square, diamond or triangle, filled or not."""
    if name == _FLOOR:
        return ""
    place, colour = names.index(name), _style(name, names)[0]
    fill = colour if place % 2 == 0 else "#ffffff"
    style = f'fill="{fill}" stroke="{colour}" stroke-width="1.5"'
    shape = place // 2 % 4
    if shape == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {style}/>'
    outlines = {1: "m-4 -4h8v8h-8z", 2: "m0 -5l5 5l-5 5l-5 -5z", 3: "m0 -5l5 9h-10z"}
    return f'<path d="M{x:.1f} {y:.1f}{outlines[shape]}" {style}/>'
