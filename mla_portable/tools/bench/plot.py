# SPDX-License-Identifier: Apache-2.0
"""Kernel times over rows: a panel for each head count, a row of panels for each primitive and layout. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from mla_portable.contracts import InvalidArgument

__all__ = ["plot_lines"]

Line = Mapping[str, Any]


def plot_lines(lines: Sequence[Line], path: Path) -> None:
    """Draw lines of `kernel_lines` into a file of the kind that its suffix names, such as .svg.

    Lines without a time and those with an overlap are left out; of several times of one candidate the last counts.
    Raises: InvalidArgument where matplotlib is not installed, does not know the suffix, or no line has a time.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidArgument("plot", "--plot", got=path, expected="matplotlib to be installed") from error
    shown = [line for line in lines if line["median_us"] is not None and not line["overlap"]]
    if not shown:
        raise InvalidArgument("plot", "lines", got="none with a time", expected="at least one")
    grid: dict[str, dict[int, list[Line]]] = {}
    for line in shown:
        title = f"{line['primitive']} {line['layout'] or ''}".strip()
        grid.setdefault(title, {}).setdefault(line["heads"] or 0, []).append(line)
    columns = max(map(len, grid.values()))
    figure = Figure(figsize=(4 * columns, 3.4 * len(grid)), layout="constrained")
    figure.suptitle(f"{shown[0]['device']['name']}: us over rows")
    panels = figure.subplots(len(grid), columns, squeeze=False)
    names = list(dict.fromkeys(line["name"] for line in sorted(shown, key=lambda line: line["role"])))
    styles = dict(zip(names, cycle(("o-", "s--", "D:", "^-.", "v-", "x--", "+:")), strict=False))
    for row, (title, by_heads) in zip(panels, grid.items(), strict=True):
        for panel in row[len(by_heads) :]:
            panel.remove()
        for panel, (heads, of_panel) in zip(row, sorted(by_heads.items()), strict=False):
            for name in names:
                if points := sorted({line["rows"]: line["median_us"] for line in of_panel if line["name"] == name}.items()):
                    panel.plot(*zip(*points, strict=True), styles[name], label=name)
            bounds = sorted({line["rows"]: line["bound_us"] for line in of_panel}.items())
            panel.plot(*zip(*bounds, strict=True), "k:", label="roofline bound")
            panel.set(title=f"{title}, {heads} heads" if heads else title, xscale="log", yscale="log")
            panel.set_xticks([rows for rows, _ in bounds], labels=[f"{rows:g}" for rows, _ in bounds], minor=False)
            panel.legend(fontsize="small")
    try:
        figure.savefig(path)
    except ValueError as error:
        raise InvalidArgument("plot", "--plot", got=path, expected=str(error)) from error
