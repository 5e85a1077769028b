# SPDX-License-Identifier: Apache-2.0
"""Times of choosing keys, ours beside an engine's own kernels: their files, and what follows for a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from machines import B200, H200
from test_bench_command import timed

from mla_portable.bench.kernel_records import selection_records
from mla_portable.capability.run import Baseline, Run
from mla_portable.choose.own_times import OwnTimes
from mla_portable.contracts import Request
from mla_portable.primitives import INDEXER_SELECT
from mla_portable.times.adding import add_to_file
from mla_portable.times.files import TimesFile, parse_times, times_text
from mla_portable.times.measured import MeasuredCosts
from mla_portable.times.selection import form_of, has_selection_times, selection_times

OURS, THEIRS = "nvidia.native", "vllm.indexer"
REQUEST = Request(INDEXER_SELECT, H200, num_heads=64, topk=2048, kv_layout="index_fp8", block_size=64)


def row(name: str, keys: int, us: dict[int, float], **changes: Any) -> dict[str, Any]:
    named = {"implementation": name, "primitive": "indexer_select", "layout": "index_fp8", "heads": 64, "topk": 2048}
    return named | {"form": form_of(keys), "us": {str(rows): value for rows, value in us.items()}} | changes


def file_of(ours: dict[int, dict[int, float]], theirs: dict[int, dict[int, float]], **changes: Any) -> TimesFile:
    document = {
        "device": "NVIDIA H200",
        "recorded": "2026-11-30",
        "times": [row(OURS, keys, us, **changes) for keys, us in ours.items()],
        "baselines": [row(THEIRS, keys, us, **changes) for keys, us in theirs.items()],
    }
    found = parse_times(json.dumps(document), {(OURS, "indexer_select")})
    assert not found.problems
    return found


FILE = file_of(
    {4096: {1: 10, 64: 40}, 65536: {1: 30, 64: 700}},
    {4096: {1: 13, 64: 30}, 65536: {1: 25, 64: 600}},
)


def test_a_step_goes_to_whom_it_takes_less_time():
    times = selection_times([FILE], REQUEST, OURS, THEIRS)
    assert times is not None and "measured 2026-11-30 on NVIDIA H200" in times.text
    assert times.ours_is_faster(1, 4096) and times.ours_is_faster(1, 100)
    assert not times.ours_is_faster(64, 4096) and not times.ours_is_faster(1, 65536)
    # linear between two sizes: 13.6 rows, 34,816 + 1,229 keys
    assert times.ours_is_faster(14, 4096) and not times.ours_is_faster(16, 4096)
    assert times.ours_is_faster(1, 26_000) and not times.ours_is_faster(1, 28_000 + 14_000)


@pytest.mark.parametrize(("rows", "keys"), [(0, 4096), (65, 4096), (1, 65_537), (1, 0)])
def test_what_was_not_timed_stays_the_engines(rows: int, keys: int):
    fast = file_of({4096: {1: 1, 64: 1}, 65536: {1: 1, 64: 1}}, {4096: {1: 9, 64: 9}, 65536: {1: 9, 64: 9}})
    times = selection_times([fast], REQUEST, OURS, THEIRS)
    assert times is not None and times.ours_is_faster(64, 65_536)
    assert not times.ours_is_faster(rows, keys)
    assert times.ours_is_faster_up_to(rows, keys) == (rows == 1)  # a graph holds more steps than long ones


def test_a_graph_goes_to_whom_all_lengths_take_less_time():
    times = selection_times([FILE], REQUEST, OURS, THEIRS)
    assert times is not None
    assert times.ours_is_faster_up_to(1, 4096) and times.ours_is_faster_up_to(1, 65_535) and times.ours_is_faster_up_to(1, 64)
    assert not times.ours_is_faster_up_to(1, 163_840)  # 40 and 38


@pytest.mark.parametrize(
    ("changes", "request_"),
    [
        ({"heads": 32}, REQUEST),
        ({"topk": 1024}, REQUEST),
        ({"layout": "index_bf16"}, REQUEST),
        ({"form": "long"}, REQUEST),
        ({"configuration": {"block_n": 32}}, REQUEST),
        ({}, REQUEST.but(device=B200)),
    ],
)
def test_times_of_another_call_say_nothing(changes: dict[str, Any], request_: Request):
    file = file_of({4096: {1: 10}}, {4096: {1: 13}}, **changes)
    assert selection_times([file], request_, OURS, THEIRS) is None
    assert has_selection_times([file], request_, THEIRS) == (changes.get("form") == "long")


def test_both_sides_are_needed_at_the_same_sizes():
    assert selection_times([file_of({4096: {1: 10}}, {16384: {1: 13}})], REQUEST, OURS, THEIRS) is None
    assert selection_times([file_of({4096: {1: 10}}, {4096: {16: 13}})], REQUEST, OURS, THEIRS) is None
    times = selection_times([file_of({4096: {1: 10, 256: 9}}, {4096: {1: 13, 16: 13}})], REQUEST, OURS, THEIRS)
    assert times is not None and times.most_rows == 1


def test_a_later_file_replaces_an_earlier_one():
    times = selection_times([FILE, file_of({4096: {1: 20}}, {})], REQUEST, OURS, THEIRS)
    assert times is not None and not times.ours_is_faster(1, 4096)


def test_they_rank_nothing():
    costs = MeasuredCosts(FILE.times)
    assert costs._timed(type("Named", (), {"name": OURS})(), REQUEST)[1] is None


def test_a_file_is_written_as_it_is_read(tmp_path: Path):
    text = times_text(FILE.times, baselines=FILE.baselines)
    again = parse_times(text)
    assert not again.problems and set(again.times) == set(FILE.times) and set(again.baselines) == set(FILE.baselines)
    path = tmp_path / "own.json"
    path.write_text(text)
    add_to_file(path, FILE.times[:1])
    assert set(parse_times(path.read_text()).baselines) == set(FILE.baselines)


def test_a_users_own_baselines_are_read(tmp_path: Path):
    (tmp_path / "own.json").write_text(times_text(baselines=FILE.baselines))
    own = OwnTimes.read({"MLA_PORTABLE_TIMES": str(tmp_path)}, {(OURS, "indexer_select")})
    assert has_selection_times(own.files, REQUEST, THEIRS)


def test_records_of_a_run():
    size = {"primitive": "indexer_select", "layout": "index_fp8", "heads": 64, "bound": 1.0}
    fastest = Baseline(name="deepgemm.cooperative_topk", us=12.904)
    times = [
        timed(OURS, 10.001, rows=1, width=4096, **size).model_copy(update={"baseline": fastest}),
        timed("triton.portable", 14, rows=1, width=4096, **size).model_copy(update={"baseline": fastest}),
        timed(OURS, 11, rows=1, width=16384, **size).model_copy(update={"baseline": None}),
        timed(OURS, 99, rows=256, width=4096, **size).model_copy(update={"baseline": fastest}),
    ]
    run = Run.model_construct(times=times, versions={}, device={"name": "NVIDIA H200"}, date="2026-11-30", release="0.3.0")
    ours, theirs = selection_records(run, {}, THEIRS, "nvidia")
    assert [(each.implementation, each.form, each.rows, each.us) for each in (*ours, *theirs)] == [
        (OURS, "4096 keys", 1, 10.0),
        (THEIRS, "4096 keys", 1, 12.9),
    ]


def test_the_command_writes_both_sides(tmp_path: Path):
    from typer.testing import CliRunner

    from mla_portable.capability.run import read_run
    from mla_portable.cli.app import app

    path = Path(__file__).parents[1] / "capability" / "0.2.0" / "h200-2026-11-27-maintainers.json.gz"
    out = tmp_path / "indexer.json"
    done = CliRunner().invoke(app, ["bench", "costs", str(path), "--backend", "nvidia", "--beside", THEIRS, "--out", str(out)])
    assert done.exit_code == 0, done.output
    file = parse_times(out.read_text())
    kept = [each for each in read_run(path).times if each.primitive == "indexer_select" and each.rows < 256]
    assert kept and {each.rows for each in file.baselines} == {each.rows for each in kept if each.baseline}
    assert {each.implementation for each in file.baselines} == {THEIRS}
    assert {each.implementation.partition(".")[0] for each in file.times} == {"nvidia"}


def test_the_command_says_what_is_missing():
    from typer.testing import CliRunner

    from mla_portable.cli.app import app

    path = Path(__file__).parents[1] / "capability" / "0.1.0" / "h200-2026-11-23-maintainers-e08dc6e5.json.gz"
    done = CliRunner().invoke(app, ["bench", "costs", str(path), "--beside", THEIRS])
    assert done.exit_code == 2 and "beside a baseline" in " ".join(done.output.replace("│", " ").split())
