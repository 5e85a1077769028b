# SPDX-License-Identifier: Apache-2.0
"""Times of engines: kept in the file of a run, checked, and printed as tables."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import bench as release
import pytest
from check import check_run
from engine_tables import engine_tables
from machines import PROFILES
from pydantic import ValidationError
from suite import ListedSuite
from test_runs import RELEASE, made

from mla_portable.capability.run import EngineTime, Run, combined, read_run, run_text, write_run


def time(backend: str, us: float, *, quantity: str = "first_token", requests: int = 8, heads: int = 16, kernels: str = ""):
    given = {"engine": "vllm 1.0", "backend": backend, "heads": heads, "quantity": quantity, "tokens": 3000}
    return EngineTime.model_validate({**given, "requests": requests, "kernels": kernels, "us": us})


def run(*times: EngineTime) -> Run:
    return made().model_copy(update={"engine_times": list(times)})


MADE_UP = run(
    time("plugin", 150_000.0),
    time("plugin", 12_345.0, quantity="decode", requests=1),
    time("plugin", 70.0, quantity="layer", kernels="attention"),
    time("plugin", 5.0, quantity="layer", kernels="masks"),
    time("stock", 300_000.0),
    time("stock", 10_000.0, quantity="decode", requests=1),
    time("stock", 140.0, quantity="layer", kernels="attention"),
    time("stock", 4_000_000.0, heads=128, requests=2),
)

TABLES = """\
NVIDIA H200, driver 580.1; torch 2.11.0, triton 3.6.0, commit 0123456789; 2026-11-20.

| vllm 1.0, 16 heads, ms | stock | plugin | plugin / stock |
|---|---|---|---|
| first token of 8 x 3,000 | 300.0 | 150.0 | 0.500 |
| a decode step of 1 x 3,000 of context | 10.00 | 12.35 | 1.235 |

| GPU time of a layer, 16 heads, 8 x 3,000 tokens, us | stock | plugin | plugin / stock |
|---|---|---|---|
| attention | 140.0 | 70.00 | 0.500 |
| masks | - | 5.00 | - |
| all kernels | 140.0 | 75.00 | 0.536 |

| vllm 1.0, 128 heads, ms | stock |
|---|---|
| first token of 2 x 3,000 | 4,000 |"""


def test_times_are_printed_as_tables():
    assert engine_tables(MADE_UP) == TABLES


@pytest.mark.parametrize(("us", "shown"), [(104.0, True), (96.0, True), (106.0, False), (94.0, False)])
def test_a_profile_of_two_clocks_is_not_shown(us: float, shown: bool):
    """The unchanged kernels of a step say how fast the GPU ran; another step of the same engines stays."""
    step = [time(who, 50.0, quantity="layer", kernels="attention") for who in ("stock", "plugin")]
    step += [time(who, 100.0, quantity="layer", kernels="MoE") for who in ("stock", "plugin")]
    step += [
        time("stock", 100.0, quantity="layer", kernels="other GEMMs"),
        time("plugin", us, quantity="layer", kernels="other GEMMs"),
    ]
    step += [time("plugin", 7.0, quantity="layer", kernels="other GEMMs", requests=9)]
    text = engine_tables(run(*step))
    assert ("| MoE |" in text) == shown and ("differ: other GEMMs 1.06." in text) != shown
    assert "9 x 3,000 tokens, us | stock" in text


def test_the_command_reads_what_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "run.json.gz"
    write_run(path, MADE_UP)
    assert read_run(path) == MADE_UP and run_text(MADE_UP).count('"quantity"') == 8
    assert release.main(["engines", str(path)]) == 0 and capsys.readouterr().out.strip() == TABLES
    write_run(path, run())
    with pytest.raises(SystemExit, match="has no times of engines"):
        release.main(["engines", str(path)])


def test_of_two_times_of_one_thing_the_newer_stays():
    again = run(time("plugin", 140_000.0), time("plugin", 9.0, quantity="layer", kernels="copies"))
    both = combined(MADE_UP, again).engine_times
    assert len(both) == 9 and both[0].us == 140_000.0


def test_what_contradicts_itself_is_found():
    def wrong(*times: EngineTime) -> list[str]:
        name = Path("h200-2026-11-20-somebody.json.gz")
        return check_run(name, run(*times), PROFILES, ListedSuite(RELEASE / "cases.tsv.gz"), date(2026, 11, 21))

    assert not wrong(*MADE_UP.engine_times)
    assert wrong() == ["has no result"]
    assert "times of engines are there twice" in wrong(time("plugin", 1.0), time("plugin", 2.0))[0]
    assert "a layer's has a kind alone" in wrong(time("plugin", 1.0, quantity="layer"))[0]
    assert "a layer's has a kind alone" in wrong(time("plugin", 1.0, kernels="attention"))[0]
    for us in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValidationError):
            time("plugin", us)
