# SPDX-License-Identifier: Apache-2.0
"""docs/benchmarks.md and its pictures: what the runs say, and nothing else."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from page import PAGE, benchmark_pages
from svg import Curve, panels_svg

from mla_portable.capability.run import Time, read_run, runs_in, write_run

ROOT = Path(__file__).parents[1]
RUN = next((ROOT / "capability/0.1.0").glob("h200-*-e08dc6e5.json.gz"))


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return benchmark_pages(ROOT / "capability")


def test_the_files_are_those_that_the_runs_give(pages: dict[str, str]) -> None:
    assert {path.name for path in (ROOT / "docs").glob("benchmarks*")} == set(pages)
    for name, text in pages.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, f"{name}: run `ci/release/bench.py page --write`"


def test_a_line_has_the_times_of_the_run(pages: dict[str, str]) -> None:
    size = "sparse_decode", "fp8_ds_mla", 16, 2048
    of_size: list[Time] = []
    for _, run in sorted(runs_in(ROOT / "capability"), key=lambda found: (found[1].date, found[0].name)):
        if run.device_name == "NVIDIA H200" and not run.target:
            times = [time for time in run.times if (time.primitive, time.layout, time.heads, time.topk) == size]
            of_size = times or of_size
    rows = sorted({time.rows for time in of_size})
    best = [min(time.us for time in of_size if time.rows == each) for each in rows]
    theirs = [min(time.baseline.us for time in of_size if time.rows == each and time.baseline) for each in rows]
    assert len(rows) == 6
    for line in (best, theirs):
        assert f" | {' | '.join(f'{us:.1f}' for us in line)} |" in pages[PAGE]
    ratios = " | ".join(f"{ours / other:.2f}" for ours, other in zip(best, theirs, strict=True))
    assert f"| ratio | {ratios} |" in pages[PAGE]


def test_a_newer_run_replaces_the_sizes_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles/h200.toml").write_text((ROOT / "capability/profiles/h200.toml").read_text())
    old = read_run(RUN)
    write_run(tmp_path / "0.1.0/a.json.gz", old)
    newer = [old.times[0].model_copy(update={"us": 7654.3, "p10": 7654.3, "p90": 7654.3, "baseline": None})]
    write_run(
        tmp_path / "0.1.0/b.json.gz", old.model_copy(update={"times": newer, "cases": [], "suite": None, "date": "2026-11-24"})
    )
    before, after = benchmark_pages(ROOT / "capability")[PAGE], benchmark_pages(tmp_path)[PAGE]
    assert "7654.3" not in before and after.count("7654.3") == 1 and "2026-11-23, 2026-11-24" in after


def test_what_no_run_holds_is_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles/h200.toml").write_text((ROOT / "capability/profiles/h200.toml").read_text())
    pages = benchmark_pages(tmp_path)
    assert list(pages) == [PAGE]
    assert pages[PAGE].count("Not recorded yet") == pages[PAGE].count("\n## ") == 8


def test_a_picture_draws_every_point_inside_of_its_panel() -> None:
    curves = [Curve("ours", ((1, 10.0), (4, 20.0), (256, 320.0))), Curve("bound", ((1, 2.0), (256, 250.0)), dashed=True)]
    text = panels_svg("a <title>", {"": {"16 heads": curves, "32 heads": curves[:1]}}, x="rows", y="us")
    root = ET.fromstring(text)
    circles = [
        (float(each.get("cx", "")), float(each.get("cy", ""))) for each in root.iter("{http://www.w3.org/2000/svg}circle")
    ]
    assert len(circles) == 6
    first = circles[:3]
    assert sorted(first) == first and [y for _, y in first] == sorted((y for _, y in first), reverse=True)
    width, height = map(float, root.get("viewBox", "").split()[2:])
    assert all(0 < x < width and 0 < y < height for x, y in circles)
    # 1 to 4 to 256: a factor of 4, then of 64, which is three times as far on a logarithmic axis
    assert (first[2][0] - first[1][0]) / (first[1][0] - first[0][0]) == pytest.approx(3, rel=0.01)
    assert "a &lt;title&gt;" in text and text == panels_svg(
        "a <title>", {"": {"16 heads": curves, "32 heads": curves[:1]}}, x="rows", y="us"
    )


@pytest.mark.parametrize("points", [(), ((1, 0.0),), ((0, 1.0),)])
def test_a_logarithm_of_nothing_is_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="points above 0"):
        panels_svg("", {"": {"": [Curve("a", points)]}}, x="", y="")
