# SPDX-License-Identifier: Apache-2.0
"""Kernel times over rows: a panel for each head count, a row of panels for each primitive and layout. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from mla_portable.contracts import InvalidArgument

Line = Mapping[str, Any]
_BOUND: Final = "roofline bound"
_OURS: Final = "mla_portable, its fastest kernel"
_PORTABLE: Final = "triton.portable"
_STYLES: Final = ("o-", "s--", "^-.", "D:", "v-", "x--", "P-.")


def lines_of_records(records: Iterable[Mapping[str, Any]]) -> list[Line]:
    """Benchmarks of one device as lines to draw: of each size our fastest, Triton alone, and the fastest baseline."""
    lines: dict[tuple[Any, ...], Line] = {}
    for each in records:
        size = each["primitive"], each["layout"], next(iter(each["heads"]), 0), each["rows"]
        common = dict(zip(("primitive", "layout", "heads", "rows"), size, strict=True)) | {
            "device": each["device"],
            "day": each["recorded"][:10],
            "overlap": each["overlap"],
            "bound_us": each["bound"]["median_us"],
        }
        baseline = each["baseline"]
        offered = [("ours", _OURS, each["median_us"]), ("baseline", f"{baseline['name']} directly", baseline["median_us"])]
        if each["implementation"] == _PORTABLE:
            offered.append(("portable", f"{_PORTABLE} alone", each["median_us"]))
        for role, name, us in offered:
            there = lines.get((*size, role))
            if there is None or us < there["median_us"]:
                lines[(*size, role)] = common | {"role": role, "name": name, "median_us": us}
    return list(lines.values())


def plot_lines(lines: Sequence[Line], path: Path) -> None:
    """Draw lines of `kernel_lines` or `lines_of_records` into a file of the kind that its suffix names, such as .svg.

    Lines without a time and those with an overlap are left out; of several times of one candidate the last counts.
    Raises: InvalidArgument where matplotlib is not installed, does not know the suffix, or no line has a time.
    """
    try:
        from matplotlib import rc_context
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
    across = max(map(len, grid.values()))
    names = list(dict.fromkeys(line["name"] for line in sorted(shown, key=lambda line: line["role"] != "ours")))
    days = sorted({line["day"] for line in shown if line.get("day")})
    with rc_context({"font.size": 13, "axes.titlesize": 12, "svg.hashsalt": "mla_portable", "font.family": "sans-serif"}):
        figure = Figure(figsize=(max(4.6 * across, 6), 3.7 * len(grid) + 0.9), layout="constrained")
        figure.suptitle(f"{shown[0]['device']['name']}{', ' + days[-1] if days else ''}: time of one call (lower is better)")
        panels = figure.subplots(len(grid), across, squeeze=False, sharey="row", sharex=True)
        drawn: dict[str, Any] = {}
        for row, (title, by_heads) in zip(panels, grid.items(), strict=True):
            for panel in row[len(by_heads) :]:
                panel.remove()
            for panel, (heads, found) in zip(row, sorted(by_heads.items()), strict=False):
                for number, name in enumerate(names):
                    points = sorted({line["rows"]: line["median_us"] for line in found if line["name"] == name}.items())
                    if points:
                        style, width = _STYLES[number % len(_STYLES)], 1.5 if number else 3
                        (drawn[name],) = panel.plot(*zip(*points, strict=True), style, color=f"C{number}", linewidth=width)
                bounds = sorted({line["rows"]: line["bound_us"] for line in found}.items())
                (drawn[_BOUND],) = panel.plot(*zip(*bounds, strict=True), color="0.45", linestyle=":", linewidth=2)
                panel.set(title=f"{title}, {heads} heads" if heads else title, xscale="log", yscale="log")
                panel.set_xticks([rows for rows, _ in bounds], labels=[f"{rows:g}" for rows, _ in bounds], minor=False)
                panel.minorticks_off()
                panel.yaxis.set_major_formatter("{x:g}")
                panel.grid(color="0.9")
            times = [line["median_us"] for found in by_heads.values() for line in found]
            row[0].set(ylabel="microseconds", ylim=(min(times) / 2, max(times) * 1.5))
        for panel in panels[-1]:
            panel.set_xlabel("rows (query tokens of the call)")
        figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=2, frameon=False)
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        except ValueError as error:
            raise InvalidArgument("plot", "--plot", got=path, expected=str(error)) from error
