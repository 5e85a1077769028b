# SPDX-License-Identifier: Apache-2.0
"""Figures of a trained model's text: kept in the file of a run, checked, and printed on docs/accuracy.md."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import bench as release
import pytest
from accuracy_page import PAGE, accuracy_pages, accuracy_tables
from check import check_run
from machines import PROFILES
from pydantic import ValidationError
from suite import ListedSuite
from test_runs import RELEASE, made

from mla_portable.capability.run import EngineAccuracy, Run, combined, read_run, runs_in, write_run

ROOT = Path(__file__).parents[1]


def text(**more: Any) -> EngineAccuracy:
    given = {"engine": "vllm 1.0", "model": "v32", "backend": "stock", "cache": "fp8", "per_head": False, "length": 4096}
    given |= {"tokens": 98_280, "perplexity": 8.125, "right": {"5": 3, "95": 1}, "asked": {"5": 4, "95": 4}}
    return EngineAccuracy.model_validate({**given, **more})


def run(*several: EngineAccuracy) -> Run:
    return made().model_copy(update={"engine_accuracy": list(several)})


APART = {"mean": 0.03125, "p99": 0.25, "drift": -0.0001}
PLUGIN = text(backend="plugin", per_head=True, **APART)
SHORT = text(backend="plugin", per_head=True, length=256, right={}, asked={}, scale=-0.00125, **APART)
FAULT = text(backend="plugin", cache="bf16", variant="scale", **APART)


def test_the_page_is_what_the_runs_say() -> None:
    (page,) = accuracy_pages(ROOT / "capability").values()
    assert (ROOT / "docs" / PAGE).read_text(encoding="utf-8") == page, "run `ci/release/bench.py page --write`"
    recorded = any(run.engine_accuracy for _, run in runs_in(ROOT / "capability"))
    assert recorded != ("No run is on record" in page)


def test_figures_are_printed_as_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "0.2.0/a.json.gz"
    write_run(path, run(text(), PLUGIN, SHORT, FAULT).model_copy(update={"release": "0.2.0"}))
    page = accuracy_pages(tmp_path)[PAGE]
    assert "No run is on record" not in page and "## vllm 1.0, v32" in page
    healthy, faulty = page.split("Planted faults")
    plugin = "| plugin, FP8, prompts may go over keys of each head |"
    for line in (
        "| perplexity; answers | 256 tokens | 4,096 tokens |",
        "| stock, FP8, over the cache alone | - | 8.1250; 4/8 |",
        f"{plugin} 8.1250 | 8.1250; 4/8 |",
        f"{plugin} 0.0312; 0.250; -0.00010 | 0.0312; 0.250; -0.00010 |",
        f"{plugin} -0.125 % |",
        "| answers by depth, all lengths | 5 % | 95 % |",
        f"{plugin} 3/4 | 1/4 |",
    ):
        assert line in healthy.splitlines(), line
    assert "| plugin, BF16, over the cache alone, the scale is 2 % too large | 8.125; 0.0312; 0.250; -0.00010 |" in faulty
    assert "too large" not in healthy
    assert release.main(["accuracy", str(path)]) == 0
    assert "\n\n".join(accuracy_tables(read_run(path))) in capsys.readouterr().out
    write_run(path, made())
    with pytest.raises(SystemExit, match="has no figures of a trained model"):
        release.main(["accuracy", str(path)])


def test_of_two_figures_of_one_thing_the_newer_stays() -> None:
    newer = PLUGIN.model_copy(update={"perplexity": 9.0})
    assert combined(run(text(), PLUGIN), run(newer)).engine_accuracy == [text(), newer]


def test_what_contradicts_itself_is_found() -> None:
    def wrong(*several: EngineAccuracy) -> list[str]:
        name = Path("h200-2026-11-20-somebody.json.gz")
        return check_run(name, run(*several), PROFILES, ListedSuite(RELEASE / "cases.tsv.gz"), date(2026, 11, 21))

    assert not wrong(text(), PLUGIN, SHORT, FAULT) and wrong() == ["has no result"]
    assert "is there 2 times" in wrong(PLUGIN, PLUGIN)[0]
    assert "more right answers than questions at depth 5" in wrong(text(right={"5": 5}))[0]
    assert "drift 0.5" in wrong(text(**{**APART, "drift": 0.5}))[0] and "p99 None" in wrong(text(mean=0.1, drift=0.0))[0]
    for name, value in {"perplexity": float("nan"), "mean": -0.1, "cache": "int8", "right": {"5": -1}}.items():
        with pytest.raises(ValidationError):
            text(**{name: value})
