# SPDX-License-Identifier: Apache-2.0
"""Curves as an SVG, without a plotting library: the same text for the same points on every machine, so it can be compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

_WIDTH: Final = 880
"""Of the picture, so that a title fits: two panels in a row, or one that is as wide."""
_HEIGHT: Final = 300
"""Of a panel, with its labels; then its margins."""
_LEFT: Final = 58
_RIGHT: Final = 14
_TOP: Final = 36
_BOTTOM: Final = 44
_LEGEND: Final = 28
"""Of a line of the legend, and of a heading."""
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
"""Okabe and Ito's, which most colour-blind readers can tell apart."""
_GREY: Final = "#777777"


@dataclass(frozen=True, slots=True)
class Curve:
    """name: in the legend; panels share it. points: (x, y), both above 0. dashed: grey and dashed, such as a bound."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


def panels_svg(title: str, groups: Mapping[str, Mapping[str, Sequence[Curve]]], *, x: str, y: str) -> str:
    """Heading -> label -> curves as panels, two in a row, with logarithmic axes and one legend for all.

    The panels under one heading have axes of the same range: every x that occurs there is a tick, and the range upwards is that
    of the curves that are not dashed; what lies outside of it is cut off.

    Raises: ValueError where there is no point, or one that is not above 0.
    """
    names = {curve.name: curve.dashed for panels in groups.values() for curves in panels.values() for curve in curves}
    names = dict(sorted(names.items(), key=lambda found: found[1]))  # what is dashed comes last
    solid = [name for name, dashed in names.items() if not dashed]
    colours = {name: _GREY if names[name] else _COLOURS[solid.index(name) % len(_COLOURS)] for name in names}
    columns = min(2, max(map(len, groups.values()), default=1))
    lines: list[str] = [f'<text x="12" y="24" font-size="17" font-weight="bold">{escape(title)}</text>']
    for number, name in enumerate(names):
        line = 34 + _LEGEND * number + 12
        lines.append(f'<path d="M14 {line - 5}H54" {_stroke(colours[name], names[name])}/>')
        lines.append(f'<text x="64" y="{line}">{escape(name)}</text>')
    top = 34 + _LEGEND * len(names)
    for heading, panels in groups.items():
        if heading:
            top += _LEGEND
            lines.append(f'<text x="12" y="{top - 6}" font-weight="bold">{escape(heading)}</text>')
        ticks, limits = _ranges([curve for curves in panels.values() for curve in curves])
        for number, (label, curves) in enumerate(panels.items()):
            corner = _WIDTH // columns * (number % columns), top + _HEIGHT * (number // columns)
            lines += _panel(label, curves, colours, corner, _WIDTH // columns, ticks, limits, (x, y))
        top += _HEIGHT * math.ceil(len(panels) / columns)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" font-family="sans-serif" font-size="15" '
        f'role="img" aria-label="{escape(title)}">'
    )
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{top}" fill="white"/>', *lines, "</svg>"]) + "\n"


def _ranges(curves: Sequence[Curve]) -> tuple[list[float], tuple[float, float]]:
    """The ticks across, and the lowest and the highest y that is drawn."""
    points = [point for curve in curves for point in curve.points]
    if not points or min(min(point) for point in points) <= 0:
        raise ValueError("expected points above 0")
    heights = [point[1] for curve in curves for point in curve.points if not curve.dashed]
    heights = heights or [point[1] for point in points]
    return sorted({point[0] for point in points}), (min(heights) / 2.5, max(heights) * 1.2)


def _panel(
    label: str,
    curves: Sequence[Curve],
    colours: Mapping[str, str],
    corner: tuple[int, int],
    width: int,
    ticks: Sequence[float],
    limits: tuple[float, float],
    axes: tuple[str, str],
) -> list[str]:
    left, right = corner[0] + _LEFT, corner[0] + width - _RIGHT
    top, bottom = corner[1] + _TOP, corner[1] + _HEIGHT - _BOTTOM
    across = _scale(ticks[0], ticks[-1], left + 10, right - 10)
    up = _scale(*limits, bottom, top)
    clip = f"panel-{corner[0]}-{corner[1]}"
    lines = [
        f'<clipPath id="{clip}"><rect x="{left}" y="{top}" width="{right - left}" height="{bottom - top}"/></clipPath>',
        f'<text x="{(left + right) / 2:g}" y="{top - 10}" text-anchor="middle">{escape(label)}</text>',
        f'<rect x="{left}" y="{top}" width="{right - left}" height="{bottom - top}" fill="none" stroke="#bbbbbb"/>',
        f'<text x="{(left + right) / 2:g}" y="{bottom + 38}" text-anchor="middle">{escape(axes[0])}</text>',
        f'<text x="{left - 44}" y="{top - 10}" font-size="13">{escape(axes[1])}</text>',
    ]
    for tick in ticks:
        at = across(tick)
        lines.append(f'<path d="M{at:.1f} {top}V{bottom}" stroke="#eeeeee"/>')
        lines.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle" font-size="13">{tick:,g}</text>')
    for tick in _decades(*limits):
        at = up(tick)
        lines.append(f'<path d="M{left} {at:.1f}H{right}" stroke="#eeeeee"/>')
        lines.append(f'<text x="{left - 6}" y="{at + 5:.1f}" text-anchor="end" font-size="13">{tick:,g}</text>')
    for curve in curves:
        placed = [(across(x), up(y)) for x, y in sorted(curve.points)]
        colour = colours[curve.name]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        lines.append(f'<path d="M{path}" fill="none" clip-path="url(#{clip})" {_stroke(colour, curve.dashed)}/>')
        if not curve.dashed:
            lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in placed]
    return lines


def _stroke(colour: str, dashed: bool) -> str:
    return f'stroke="{colour}" stroke-width="2.5"' + (' stroke-dasharray="5 5"' if dashed else "")


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = math.log(high / low) or 1.0

    def place(value: float) -> float:
        return start + (end - start) * math.log(value / low) / span

    return place


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between both."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**power for power in powers for step in (1, 2, 5) if low <= step * 10.0**power <= high]
