# SPDX-License-Identifier: Apache-2.0
"""Kernel times over rows: a panel for each head count and top-k, a row of panels for each primitive and layout.

Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mla_portable.bench.kernels import KernelReport
from mla_portable.capability.run import Time
from mla_portable.contracts import InvalidArgument

_BOUND: Final = "roofline bound"
_OURS: Final = "mla_portable, its fastest kernel"
_PORTABLE: Final = "triton.portable"
_STYLES: Final = ("o-", "s--", "^-.", "D:", "v-", "x--", "P-.")
_NEVER_BELOW: Final = 0.99
"""Times are rounded."""


@dataclass(frozen=True, slots=True)
class Line:
    """A point. name: of the curve. us, bound: microseconds. first: the curve is drawn first and wide."""

    name: str
    primitive: str
    layout: str | None
    heads: int
    topk: int
    rows: int
    us: float
    bound: float
    first: bool = False


def lines_of_times(times: Iterable[Time]) -> list[Line]:
    """Of each size our fastest time, Triton's alone, and the fastest baseline's. Times with an overlap are left out."""
    lines: dict[tuple[Any, ...], Line] = {}
    for each in times:
        if each.overlap:
            continue
        size = each.primitive, each.layout, each.heads or 0, each.topk or 0, each.rows
        offered = [Line(_OURS, *size, each.us, each.bound, first=True)]
        if each.implementation == _PORTABLE:
            offered.append(Line(f"{_PORTABLE} alone", *size, each.us, each.bound))
        if each.baseline is not None:
            offered.append(Line(f"{each.baseline.name} directly", *size, each.baseline.us, each.bound))
        for line in offered:
            key = *size, each.width, "baseline" if line.name.endswith(" directly") else line.name
            if key not in lines or line.us < lines[key].us:
                lines[key] = line
    return list(lines.values())


def lines_of_report(report: KernelReport) -> list[Line]:
    """Every candidate that has a time. Cases with an overlap are left out."""
    return [
        Line(
            each.name,
            str(case.case.primitive),
            case.case.kv_layout,
            case.case.num_heads or 0,
            case.case.topk or 0,
            case.case.rows,
            each.median_us,
            case.bound_us,
        )
        for case in report.cases
        for each in case.times
        if each.median_us is not None and not case.case.overlap
    ]


def plot_lines(lines: Sequence[Line], path: Path, *, title: str) -> None:
    """Draw lines into a file of the kind that its suffix names, such as .svg. Of several times of one point the last counts.

    Raises: InvalidArgument where matplotlib is not installed, does not know the suffix, there is no line, or a time is below
        the bound that is drawn under it.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidArgument("plot", "--plot", got=path, expected="matplotlib to be installed") from error
    if not lines:
        raise InvalidArgument("plot", "lines", got="none with a time", expected="at least one")
    for line in lines:
        if line.us < _NEVER_BELOW * line.bound:
            got = f"{line.us:g} us for {line.rows} rows, {line.heads} heads, K {line.topk} by {line.name}"
            expected = f"no less than the roofline bound of that size, {line.bound:g} us"
            raise InvalidArgument("plot", "lines", got=got, expected=expected, remedy="Time it again: one of both is wrong.")
    grid: dict[str, dict[tuple[int, int], list[Line]]] = {}
    for line in lines:
        place = f"{line.primitive} {line.layout or ''}".strip()
        grid.setdefault(place, {}).setdefault((line.heads, line.topk), []).append(line)
    across = max(map(len, grid.values()))
    names = list(dict.fromkeys(line.name for line in sorted(lines, key=lambda line: not line.first)))
    several = len({line.topk for line in lines}) > 1
    with rc_context({"font.size": 13, "axes.titlesize": 12, "svg.hashsalt": "mla_portable", "font.family": "sans-serif"}):
        figure = Figure(figsize=(max(4.6 * across, 6), 3.7 * len(grid) + 0.9), layout="constrained")
        figure.suptitle(f"{title}: time of one call (lower is better)")
        panels = figure.subplots(len(grid), across, squeeze=False, sharey="row", sharex=True)
        drawn: dict[str, Any] = {}
        for row, (place, by_size) in zip(panels, grid.items(), strict=True):
            for panel in row[len(by_size) :]:
                panel.remove()
            for panel, ((heads, topk), found) in zip(row, sorted(by_size.items()), strict=False):
                for number, name in enumerate(names):
                    points = sorted({line.rows: line.us for line in found if line.name == name}.items())
                    if points:
                        style, width = _STYLES[number % len(_STYLES)], 1.5 if number else 3
                        (drawn[name],) = panel.plot(*zip(*points, strict=True), style, color=f"C{number}", linewidth=width)
                bounds = sorted({line.rows: line.bound for line in found}.items())
                (drawn[_BOUND],) = panel.plot(*zip(*bounds, strict=True), color="0.45", linestyle=":", linewidth=2)
                words = [place, f"{heads} heads" if heads else "", f"K {topk:,}" if topk and several else ""]
                panel.set(title=", ".join(filter(None, words)), xscale="log", yscale="log")
                panel.set_xticks([rows for rows, _ in bounds], labels=[f"{rows:g}" for rows, _ in bounds], minor=False)
                panel.minorticks_off()
                panel.yaxis.set_major_formatter("{x:g}")
                panel.grid(color="0.9")
            times = [line.us for found in by_size.values() for line in found]
            row[0].set(ylabel="microseconds", ylim=(min(times) / 2, max(times) * 1.5))
        for panel in panels[-1]:
            panel.set_xlabel("rows (query tokens of the call)")
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=2, frameon=False)
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        except ValueError as error:
            raise InvalidArgument("plot", "--plot", got=path, expected=str(error)) from error
