# SPDX-License-Identifier: Apache-2.0
"""Times of engines: kept in the file of a run, checked, and printed as tables."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import bench as release
import pytest
from check import check_run
from engine_tables import load_tables, origin, time_tables
from machines import PROFILES
from page import PAGE, benchmark_pages
from pydantic import ValidationError
from suite import ListedSuite
from test_runs import RELEASE, made

from mla_portable.capability.run import EngineLoad, EngineTime, Run, combined, read_run, run_text, write_run


def time(backend: str, us: float, *, quantity: str = "first_token", requests: int = 8, heads: int = 16, **more: str | int):
    given = {"engine": "vllm 1.0", "backend": backend, "heads": heads, "quantity": quantity, "tokens": 3000}
    return EngineTime.model_validate({**given, "requests": requests, "us": us, **more})


def run(*times: EngineTime, loads: Iterable[EngineLoad] = ()) -> Run:
    return made().model_copy(update={"engine_times": list(times), "engine_loads": list(loads)})


def shown(run: Run) -> str:
    return "\n\n".join([origin(run), *time_tables(run), *load_tables(run)])


def load(backend: str, turn: int, tokens_s: float, **more: object) -> EngineLoad:
    """Waits are thousandths of `tokens_s`, p99 twice as long."""
    waits = {"mean": tokens_s / 1000, "p50": tokens_s / 1000, "p99": tokens_s / 500}
    given = {"engine": "vllm 1.0", "backend": backend, "heads": 16, "layers": 31, "mode": "default, drafts", "turn": turn}
    given |= {"requests": 72, "tokens_s": tokens_s, "first_ms": waits, "between_ms": waits}
    return EngineLoad.model_validate({**given, **more})


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

| vllm 1.0, 16 heads, without torch.compile, ms | stock | plugin | plugin / stock |
|---|---|---|---|
| first token of 8 x 3,000 | 300.0 | 150.0 | 0.500 |
| a decode step of 1 x 3,000 of context | 10.00 | 12.35 | 1.235 |

| GPU time of a layer, 16 heads, without torch.compile, 8 x 3,000 tokens, us | stock | plugin | plugin / stock |
|---|---|---|---|
| attention | 140.0 | 70.00 | 0.500 |
| masks | - | 5.00 | - |
| all kernels | 140.0 | 75.00 | 0.536 |

| vllm 1.0, 128 heads, without torch.compile, ms | stock |
|---|---|
| first token of 2 x 3,000 | 4,000 |"""


def test_times_are_printed_as_tables():
    assert shown(MADE_UP) == TABLES


@pytest.mark.parametrize(("us", "kept"), [(104.0, True), (96.0, True), (106.0, False), (94.0, False)])
def test_a_profile_of_two_clocks_is_not_shown(us: float, kept: bool):
    """The unchanged kernels of a step say how fast the GPU ran; another step of the same engines stays."""
    step = [time(who, 50.0, quantity="layer", kernels="attention") for who in ("stock", "plugin")]
    step += [time(who, 100.0, quantity="layer", kernels="MoE") for who in ("stock", "plugin")]
    step += [
        time("stock", 100.0, quantity="layer", kernels="other GEMMs"),
        time("plugin", us, quantity="layer", kernels="other GEMMs"),
    ]
    step += [time("plugin", 7.0, quantity="layer", kernels="other GEMMs", requests=9)]
    text = shown(run(*step))
    assert ("| MoE |" in text) == kept and ("differ: other GEMMs 1.06." in text) != kept
    assert "9 x 3,000 tokens, us | stock" in text


@pytest.mark.parametrize(
    ("first", "kernels", "words"),
    [
        ((1000.0, 811.0), (100.0, 115.5), "plugin / stock is 1.16 for all kernels and 0.81 for the first token of this size"),
        ((1000.0, 1140.0), (100.0, 40.4), "plugin / stock is 0.40 for all kernels and 1.14 for the first token of this size"),
        ((1000.0, 950.0), (100.0, 120.0), ""),
        ((1000.0, 700.0), (100.0, 105.0), ""),
        ((1000.0, 700.0), (100.0, 30.0), ""),
        ((1000.0, 700.0), (400.0, 200.0), "the kernels of all layers take stock 1.2 ms, more than the first token, 1.0 ms"),
        ((1000.0, 700.0), (300.0, 240.0), "the kernels of all layers take plugin 0.7 ms, more than the first token, 0.7 ms"),
    ],
)
def test_a_profile_that_contradicts_the_first_token_is_not_shown(
    first: tuple[float, float], kernels: tuple[float, float], words: str
):
    """Of three layers. First tokens of another size, of another engine and of another way of starting it say nothing of it."""
    names = "stock", "plugin"
    step = [time(who, us, quantity="layer", kernels="attention", layers=3) for who, us in zip(names, kernels, strict=True)]
    others = [time(who, us, **more) for who in names for us, more in OTHERS]
    assert "| attention |" in shown(run(*step, *others))
    text = shown(run(*step, *others, *(time(who, us) for who, us in zip(names, first, strict=True))))
    assert ("| attention |" in text) != bool(words)
    title = "GPU time of a layer, 16 heads, without torch.compile, 8 x 3,000 tokens, us"
    assert f"{title}: not shown, because {words}." in text if words else f"| {title} |" in text


OTHERS: tuple[tuple[float, dict[str, Any]], ...] = (
    (1.0, {"requests": 7}),
    (1.0, {"engine": "vllm 2.0"}),
    (1.0, {"mode": "default"}),
    (1.0, {"quantity": "decode"}),
    (1.0, {"heads": 128}),
)


def test_a_table_says_how_its_engines_were_started():
    several = [
        time(who, us, mode=mode) for mode, us in (("", 4e3), ("default", 2e3), ("eager", 6e3)) for who in ("stock", "plugin")
    ]
    text = shown(combined(run(*several[:2]), run(*several[2:])))
    ways = "without torch.compile", "as by default, with torch.compile", "without torch.compile and CUDA graphs"
    for way, ms in zip(ways, (4, 2, 6), strict=True):
        assert f"| vllm 1.0, 16 heads, {way}, ms | stock | plugin | plugin / stock |\n|---|---|---|---|\n" in text
        assert f"| {ms}.00 | {ms}.00 | 1.000 |" in text
    graphs = [each.model_copy(update={"mode": "graphs", "heads": 128}) for each in several[:2]]
    assert "| vllm 1.0, 128 heads, without torch.compile, ms |" in shown(run(*graphs))


LOADS = """\
| vllm 1.0, 16 heads, 31 layers, as by default, with torch.compile, with draft tokens, 72 requests, median of 2 to 3 turns \
| stock | plugin | plugin / stock |
|---|---|---|---|
| all at once: output tokens/s | 2,000 | 3,000 | 1.500 |
| all at once: ms to the first token, mean | 2.00 | 3.00 | 1.500 |
| all at once: ms to the first token, p50 | 2.00 | 3.00 | 1.500 |
| all at once: ms to the first token, p99 | 4.00 | 6.00 | 1.500 |
| all at once: ms between tokens, mean | 2.00 | 3.00 | 1.500 |
| all at once: ms between tokens, p50 | 2.00 | 3.00 | 1.500 |
| all at once: ms between tokens, p99 | 4.00 | 6.00 | 1.500 |
| 4 requests/s: output tokens/s | - | 500.0 | - |
"""


def test_loads_are_printed_as_tables():
    turns = [load("plugin", turn, tokens_s) for turn, tokens_s in enumerate((1000.0, 9000.0, 3000.0))]
    stock = [load("stock", turn, tokens_s, compiled={"a": 1}) for turn, tokens_s in enumerate((1000.0, 3000.0))]
    slow = [load("plugin", turn, us, rate=4.0, compiled={"b": 2, "a": 1}) for turn, us in enumerate((400.0, 600.0))]
    text = shown(run(loads=[*slow, *turns, *stock]))
    assert LOADS in text
    compiled = "Kernels compiled, or read from the disk, while requests waited, in all of these loads"
    assert text.endswith(f"\n\n{compiled}: stock: `a` 2; plugin: `a` 2, `b` 4.")
    other = shown(
        run(loads=[load("plugin", 0, 8.0, mode="graphs"), load("plugin", 0, 8.0, layers=30), load("plugin", 0, 8.0, heads=8)])
    )
    assert other.count(" | plugin |\n") == 3 and "requests, median of 1 turn | plugin |" in other
    assert "16 heads, 31 layers, without torch.compile, 72" in other and other.count("while requests waited: none.") == 3


def test_the_page_has_the_loads_of_runs_and_says_how_engines_ran(tmp_path: Path):
    def page(of: Run) -> str:
        write_run(tmp_path / "records/0.2.0/a.json.gz", of.model_copy(update={"release": "0.2.0"}))
        return benchmark_pages(tmp_path / "records")[PAGE]

    (tmp_path / "records/profiles").mkdir(parents=True)
    (tmp_path / "records/profiles/h200.toml").write_text((RELEASE.parent / "profiles/h200.toml").read_text())
    sections = page(run(*MADE_UP.engine_times)).split("\n## ")
    assert "Engines without torch.compile, unlike" in sections[1] and "as by default" not in sections[1]
    assert sections[2].startswith("What an operator buys: a mixed load") and sections[2].endswith("no run holds loads.\n")
    turns = [load(who, 0, 2000.0) for who in ("stock", "plugin")]
    sections = page(run(time("stock", 1.0, mode="default"), loads=turns)).split("\n## ")
    assert "Engines started as by default" in sections[1] and "Engines without torch.compile" not in sections[1]
    assert "| all at once: output tokens/s | 2,000 | 2,000 | 1.000 |" in sections[2] and "Not recorded" not in sections[2]
    assert "first token of" not in sections[2] and "output tokens/s |" not in sections[1]


def test_the_command_reads_what_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "run.json.gz"
    write_run(path, MADE_UP)
    assert read_run(path) == MADE_UP and run_text(MADE_UP).count('"quantity"') == 8
    assert release.main(["engines", str(path)]) == 0 and capsys.readouterr().out.strip() == TABLES
    write_run(path, run(loads=[load("plugin", 0, 8.0)]))
    assert release.main(["engines", str(path)]) == 0 and "| all at once: output tokens/s | 8.00 |" in capsys.readouterr().out
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
