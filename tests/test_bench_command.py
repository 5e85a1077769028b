# SPDX-License-Identifier: Apache-2.0
"""`mla-portable bench kernels` and `bench plot`: the roofline bound, lines of records, pictures, what the command prints."""

from __future__ import annotations

import json
import subprocess
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from kernel_bench import CPU, SMALL, TIMED, decode_baseline, run
from spoiled import WRONG, Spoiled, registry_with
from typer.testing import CliRunner

from mla_portable.contracts import InvalidArgument, Reason
from mla_portable.dispatch import serving
from mla_portable.primitives import CACHE_WRITE, SPARSE_DECODE
from mla_portable.problems.bench import KernelCase
from mla_portable.registry import Registry
from mla_portable.tools.bench import kernel_machine
from mla_portable.tools.bench.kernel_records import append_lines, kernel_lines, kernel_run, read_runs
from mla_portable.tools.bench.offers import Brought
from mla_portable.tools.bench.plot import lines_of_records, plot_lines
from mla_portable.tools.bench.roofline import Ceilings, measure_ceilings
from mla_portable.tools.cli.app import app
from mla_portable.tools.matrix.table import find_records


def test_the_roofline_bound_is_the_longer_of_moving_and_multiplying():
    ceilings = Ceilings(bytes_per_second=1e12, flops_per_second=1e14, copy_bytes=1, side=1)
    assert ceilings.bound_us(10**6, 10**6) == pytest.approx(1.0)
    assert ceilings.bound_us(10**6, 10**9) == pytest.approx(10.0)
    measured = measure_ceilings(CPU)
    assert measured.bytes_per_second > 1e8 and measured.flops_per_second > 1e8


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    cases = [KernelCase(SPARSE_DECODE, rows, "bf16", heads, 16, 64) for heads in (1, 2) for rows in (1, 2, 4)]
    return kernel_lines(run(*cases, SMALL[CACHE_WRITE], baselines=[decode_baseline()]))


def test_a_line_says_what_ran_where_and_how(lines, tmp_path):
    path = tmp_path / "new" / "times.jsonl"
    header = kernel_run(run(SMALL[CACHE_WRITE]), "the command", CPU)
    append_lines(path, [header, *lines[:1]])
    append_lines(path, lines[1:])
    append_lines(path, [header])
    assert [list(each) for each in read_runs(path)] == json.loads(json.dumps([[header, lines], [header, []]]))
    assert header["versions"]["torch"] == torch.__version__ and header["driver"] is None
    assert (header["command"], len(header["machine"]), header["tuned"]) == ("the command", 16, False)
    assert header["commit"] is not None and header["files"] is None, "these tests run in a checkout"
    ours, baseline = lines[0], lines[1]
    assert (ours["name"], ours["role"], baseline["name"], baseline["role"]) == (
        "reference.torch",
        "implementation",
        "other.v1",
        "baseline",
    )
    assert (ours["rows"], ours["heads"], ours["topk"], ours["layout"], ours["width"]) == (1, 1, 16, "bf16", 64)
    assert len(ours["source_hash"]) == 64 and baseline["source_hash"] is None
    assert ours["p10_us"] <= ours["median_us"] <= ours["p90_us"] and ours["runs"] == 2


def test_a_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "other.jsonl"
    for text in ("{", '{"kind": "conformance"}', '{"kind": "kernel_time", "schema": 3}'):
        path.write_text(text)
        with pytest.raises(InvalidArgument, match=r"other\.jsonl:1"):
            read_runs(path)


def test_the_plot_shows_every_candidate_that_has_a_time(lines, tmp_path):
    path = tmp_path / "times.svg"
    spoiled = [{**line, "median_us": None} if line["role"] == "baseline" else line for line in lines]
    for given in (lines, spoiled):
        plot_lines(given, path)
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
        text = path.read_text()
        assert all(f"<!-- sparse_decode bf16, {heads} heads -->" in text for heads in (1, 2)) and "<!-- cache_write" in text
        assert text.count("<!-- roofline bound -->") == 1 and "<!-- reference.torch -->" in text, "one legend for all"
        assert ("<!-- other.v1 -->" in text) == (given is lines)
    for bad, to in (([], path), (lines, tmp_path / "times.nonsense")):
        with pytest.raises(InvalidArgument, match="plot"):
            plot_lines(bad, to)


def test_records_are_drawn_as_one_line_a_choice(tmp_path):
    path = tmp_path / "decode.svg"
    words = ["bench", "plot", str(path), "--device", "h200", "--heads", "16,128", "--json"]
    answer = json.loads(CliRunner().invoke(app, words).stdout)
    records = [json.loads(line) for file in (find_records() / "evidence/h200").glob("*.jsonl") for line in file.open()]
    times = [each for each in records if each["kind"] == "benchmark" and each["primitive"] == "sparse_decode"]
    mine = [each for each in times if each["heads"] == [16] and each["layout"] == "bf16" and each["rows"] == 64]
    assert answer["ok"] and 0 < answer["records"] < len(times) and "<!-- triton.portable alone -->" in path.read_text()
    drawn = {line["role"]: line["median_us"] for line in lines_of_records(mine)}
    assert drawn["ours"] == min(each["median_us"] for each in mine) < drawn["portable"] and len(drawn) == 3 < len(mine)
    assert CliRunner().invoke(app, [*words[:4], "h2000"]).exit_code == 2


# ---------------------------------------------------------------------- the command


SIZES = ["--heads", "2", "--rows", "2,3", "--topk", "16", "--width", "64", "--repeat", "2"]
TINY = ["bench", "kernels", "--device", "cpu", *SIZES]


def command(*words: str, registry: Registry | None = None, code: int = 0):
    with serving(registry or registry_with()):
        done = CliRunner().invoke(app, [*TINY, *words])
    assert done.exit_code == code, done.output + repr(done.exception)
    return done


def test_the_command_prints_a_table_for_each_primitive_and_layout():
    text = command("--no-baselines").stdout
    for primitive in TIMED:
        assert str(primitive) in text
    assert "B 3, S 1, H 2, K 16, N 64" in text and "reference.torch" in text and "best baseline" in text
    assert "copy" in text and "bf16 product" in text


def test_every_candidate_of_a_case_has_a_line_in_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("mla_portable.tools.bench.offers.load_baselines", lambda: Brought((decode_baseline(factor=1.0),)))
    text = command("--primitive", "sparse_decode", "--layout", "bf16").stdout
    lines = [line.split() for line in text.splitlines()]
    ours = [words for words in lines if words[:1] == ["reference.torch"]]
    assert [len(words) for words in ours] == [3, 3], "a time and the lead over the baseline for each of two sizes"
    assert all(float(lead) > 0 for _, _, lead in ours)
    assert [len(words) for words in lines if words[:1] == ["other.v1"]] == [2, 2]
    assert text.count("roofline bound") == 2 and max(map(len, text.splitlines())) <= 80


def test_the_command_says_on_request_why_a_candidate_was_skipped(monkeypatch):
    reason = Reason("library", "missing", "other is not installed")
    monkeypatch.setattr(
        "mla_portable.tools.bench.offers.load_baselines", lambda: Brought((decode_baseline(reasons=(reason,)),))
    )
    words = ["--primitive", "sparse_decode", "--layout", "bf16"]
    text = command(*words).stdout
    assert "skipped  other.v1, for some primitives" in text and "not installed" not in text
    assert "other.v1 / sparse_decode: library missing (other is not installed)" in command(*words, "--all").stdout


def test_the_command_writes_lines_and_a_plot(tmp_path):
    out, plot = tmp_path / "times.jsonl", tmp_path / "pictures" / "times.svg"
    words = ["--primitive", "sparse_decode", "--layout", "bf16", "--out", str(out), "--plot", str(plot), "--json"]
    answer = json.loads(command(*words).stdout)
    assert answer["ok"] and [line["rows"] for line in answer["lines"]] == [2, 3]
    ((header, timed),) = read_runs(out)
    assert (header, timed) == (answer["run"], answer["lines"])
    assert ElementTree.fromstring(plot.read_text()).tag.endswith("svg")
    command(*words)
    assert [len(timed) for _, timed in read_runs(out)] == [2, 2], "appended"


def test_the_command_fails_when_one_of_ours_is_wrong():
    spoiled = registry_with(("spoiled", Spoiled({"cache_write": WRONG["cache_write"]})), probe=False)
    done = command("--primitive", "cache_write", "--no-baselines", registry=spoiled, code=1)
    assert "WRONG     cache_write fp8_ds_mla T 2" in done.stdout and "wrong" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        "--heads two",
        "--rows 1;2",
        "--primitive attention",
        "--overlap 101",
        "--topk 0",
        "--layout fp4",
        "--primitive indexer_logits",
    ],
)
def test_what_cannot_be_meant_is_code_2(words):
    command(*words.split(), code=2)


@pytest.mark.parametrize(
    ("answers", "version"),
    [
        ({"nvidia-smi": "580.1\n580.1\n"}, "580.1"),
        ({"cat": "6.12\n"}, "6.12"),
        ({"nvidia-smi": "", "ixsmi": "4.4\n"}, "4.4"),
        ({}, None),
    ],
)
def test_the_driver_is_asked_of_each_vendors_tool_in_turn(monkeypatch, answers, version):
    def run(command, **options):
        if command[0] not in answers:
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(command, 0, answers[command[0]], "")

    monkeypatch.setattr(kernel_machine.subprocess, "run", run)
    assert kernel_machine.driver_version(torch.device("cuda", 0)) == version
    assert kernel_machine.driver_version(torch.device("cpu")) is None
