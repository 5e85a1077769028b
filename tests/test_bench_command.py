# SPDX-License-Identifier: Apache-2.0
"""`mla-portable bench`: the roofline bound, times of a run, pictures, costs, what the commands print."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import bench as release
import pytest
import torch
from kernel_bench import CPU, SMALL, TIMED, decode_baseline, run
from plot import picture_of
from spoiled import WRONG, Spoiled, registry_with
from typer.testing import CliRunner

from mla_portable.bench import kernel_machine, kernels
from mla_portable.bench.kernel_records import kernel_lines, times_of
from mla_portable.bench.kernels import KernelReport
from mla_portable.bench.roofline import Ceilings, measure_ceilings
from mla_portable.capability.run import Baseline, Time, read_run, write_run
from mla_portable.choose import Registry
from mla_portable.choose.plugins import Brought
from mla_portable.cli.app import app
from mla_portable.contracts import InvalidArgument, Reason
from mla_portable.dispatch import serving
from mla_portable.judge.problems.bench import KernelCase
from mla_portable.primitives import CACHE_WRITE, SPARSE_DECODE
from mla_portable.times.files import parse_times, times_text

ROOT = Path(__file__).parents[1]


def test_the_roofline_bound_is_the_longer_of_moving_and_multiplying():
    ceilings = Ceilings(bytes_per_second=1e12, flops_per_second=1e14, copy_bytes=1, side=1)
    assert ceilings.bound_us(10**6, 10**6) == pytest.approx(1.0)
    assert ceilings.bound_us(10**6, 10**9) == pytest.approx(10.0)
    measured = measure_ceilings(CPU)
    assert measured.bytes_per_second > 1e8 and measured.flops_per_second > 1e8


@pytest.fixture(scope="module")
def report() -> KernelReport:
    cases = [KernelCase(SPARSE_DECODE, rows, "bf16", heads, 16, 64) for heads in (1, 2) for rows in (1, 2, 4)]
    return run(*cases, SMALL[CACHE_WRITE], baselines=[decode_baseline()])


def test_a_line_says_what_ran_and_how(report):
    ours, baseline = kernel_lines(report)[:2]
    assert (ours["name"], ours["role"], baseline["name"], baseline["role"]) == (
        "reference.torch",
        "implementation",
        "other.v1",
        "baseline",
    )
    assert (ours["rows"], ours["heads"], ours["topk"], ours["layout"], ours["width"]) == (1, 1, 16, "bf16", 64)
    assert ours["p10_us"] <= ours["median_us"] <= ours["p90_us"] and ours["runs"] == 2


def test_a_time_stands_beside_the_fastest_baseline(report):
    slow = decode_baseline("slow.v1")
    both = run(report.cases[0].case, baselines=[decode_baseline(), slow, decode_baseline("wrong.v1", factor=2.0)])
    (time,) = times_of(both.cases)
    baselines = {line["name"]: line["median_us"] for line in kernel_lines(both) if line["role"] == "baseline"}
    assert baselines.pop("wrong.v1") is None and time.baseline is not None
    assert time.baseline.name == min(baselines, key=baselines.__getitem__)
    assert time.baseline.us == round(baselines[time.baseline.name], 3)
    assert time.p10 <= time.us <= time.p90 and time.bound == round(both.cases[0].bound_us, 3)
    assert [each.baseline for each in times_of(report.cases) if each.primitive == "cache_write"] == [None]


def timed(name: str, us: float, *, topk: int = 2048, bound: float = 80.0, other: float = 412.0, **changes: Any) -> Time:
    sizes = {"primitive": "sparse_decode", "layout": "fp8_ds_mla", "heads": 128, "rows": 256} | changes
    baseline = Baseline(name="flashmla.decode", us=other)
    return Time(implementation=name, topk=topk, us=us, p10=us, p90=us, bound=bound, baseline=baseline, **sizes)


def labels(svg: str) -> list[str]:
    """Title, legend, headings, and the labels of panels; not the ticks."""
    texts = [each.text or "" for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    return [text for text in texts if text not in ("rows", "us") and not text.replace(",", "").isdigit()]


def points(svg: str) -> int:
    return svg.count("<circle")


def test_times_of_another_top_k_have_a_panel_of_their_own():
    wide = [timed("nvidia.native", 320.0), timed("triton.portable", 700.0)]
    narrow = timed("nvidia.native", 88.0, topk=256, bound=10.0, other=84.0)
    title, svg = picture_of([*wide, narrow, timed("nvidia.native", 1.0, overlap=50)], "A device")
    assert title == "A device: one call of sparse_decode, fp8_ds_mla, 128 heads (lower is better)"
    curves = ["mla_portable, its fastest kernel", "flashmla.decode, called directly", "triton.portable", "roofline bound"]
    assert labels(svg) == [title, *curves, "K 256", "K 2,048"]
    assert points(svg) == 2 + 3, "of K 256 ours and theirs, of K 2,048 Triton's too, nothing with an overlap"


def test_a_curve_is_the_fastest_time_of_each_size():
    times = [timed("slow.v1", 500.0), timed("fast.v1", 320.0, other=400.0), timed("slow.v1", 90.0, rows=1, bound=1.0)]
    _, svg = picture_of(times, "A device")
    assert svg == picture_of(times[1:], "A device")[1]
    assert points(svg) == 4 and "slow" not in svg and "fast.v1" not in svg


def test_primitives_have_headings_and_widths_have_panels():
    decode = timed("nvidia.native", 320.0)
    select = [timed("a.v1", 20.0, primitive="topk_select", layout=None, heads=None, width=n, bound=1.0) for n in (64, 4096)]
    title, svg = picture_of([decode, *select], "A device")
    assert title == "A device: one call, K 2,048 (lower is better)"
    assert labels(svg)[4:] == ["sparse_decode, fp8_ds_mla", "128 heads", "topk_select", "width 64", "width 4,096"]
    heights = {float(each) for each in re.findall(r'<text x="[^"]*" y="([^"]*)" font-weight="bold">', svg)}
    assert len(heights) == 2


def test_a_time_below_its_bound_is_not_drawn():
    below = timed("ours.v1", 88.0, bound=180.0)
    with pytest.raises(InvalidArgument, match=r"88 us for 256 rows, 128 heads, K 2048 by ours\.v1.*no less than.*180 us"):
        picture_of([below], "A device")
    with pytest.raises(InvalidArgument, match="none without an overlap or a selection"):
        picture_of([timed("ours.v1", 88.0, overlap=50)], "A device")


H200 = next(path for path in (ROOT / "capability" / "0.1.0").glob("h200-*-e08dc6e5.json.gz"))


def test_a_run_is_drawn_as_one_line_a_choice(tmp_path, capsys):
    path = tmp_path / "decode.svg"
    assert release.main(["plot", str(H200), str(path), "--heads", "16,128", "--topk", "2048"]) == 0
    times = [each for each in read_run(H200).times if each.primitive == "sparse_decode"]
    mine = [each for each in times if each.heads in (16, 128) and each.topk == 2048]
    assert 0 < len(mine) < len(times) and f"{len(mine)} times" in capsys.readouterr().out
    title, *others = labels(path.read_text())
    assert title == "NVIDIA H200, 2026-11-23: one call of sparse_decode, K 2,048 (lower is better)"
    assert others[-6:] == ["bf16", "16 heads", "128 heads", "fp8_ds_mla", "16 heads", "128 heads"]
    with pytest.raises(SystemExit, match="no such times of gather_upconvert"):
        release.main(["plot", str(H200), str(path), "--primitive", "gather_upconvert"])


@pytest.mark.parametrize("name", ["decode.png", "decode.pdf", "decode"])
def test_a_picture_of_another_kind_is_refused(name, tmp_path):
    with pytest.raises(SystemExit, match=r"must end in \.svg; .*rsvg-convert"):
        release.main(["plot", str(H200), str(tmp_path / name)])
    assert list(tmp_path.iterdir()) == []


def test_costs_are_the_times_of_one_run():
    words = ["bench", "costs", str(H200)]
    everything = parse_times(CliRunner().invoke(app, words).stdout)
    assert {each.implementation.partition(".")[0] for each in everything.times} == {"nvidia", "triton"}
    text = CliRunner().invoke(app, [*words, "--backend", "triton"]).stdout
    read = parse_times(text)
    found = read.times
    run = read_run(H200)
    mine = [each for each in run.times if each.implementation == "triton.portable"]
    assert read.problems == () and {each.implementation for each in found} == {"triton.portable"}
    sizes = {(each.primitive, each.layout, each.heads, each.topk, each.rows): each.us for each in found}
    assert sizes == {
        (each.primitive, each.layout, each.heads, each.topk, each.rows): round(each.us, 2)
        for each in sorted(mine, key=lambda each: each.width)
    }
    (measurement,) = {each.measurement for each in found}
    assert (measurement.device, measurement.names, measurement.recorded) == ("NVIDIA H200", ("NVIDIA H200",), run.date)
    assert (measurement.release, dict(measurement.versions)["triton"]) == ("0.1.0", "3.6.0")
    assert times_text(found) == text


def test_costs_of_a_device_without_a_profile_have_the_name_that_its_driver_reports(tmp_path):
    run, path, out = read_run(H200), tmp_path / "run.json.gz", tmp_path / "new" / "times.json"
    write_run(path, run.model_copy(update={"device": {**run.device, "name": "Nobody's GPU"}}))
    done = CliRunner().invoke(app, ["bench", "costs", str(path), "--out", str(out)])
    assert done.exit_code == 0, done.output
    (measurement,) = {each.measurement for each in parse_times(out.read_text()).times}
    assert (measurement.device, measurement.names) == ("Nobody's GPU", ("Nobody's GPU",))


def test_costs_say_why_there_are_none_and_leave_the_file(tmp_path):
    run = read_run(H200)
    mine = [each for each in run.times if each.implementation == "triton.portable"]
    disturbed = [each.model_copy(update={"p90": 10 * each.p10}) for each in mine]
    path, out = tmp_path / "run.json.gz", tmp_path / "costs.json"
    out.write_text("kept")
    for times, backend, words in (
        (
            disturbed,
            None,
            "RUN run.json.gz has no time that counts: each is of a disturbed size, has an overlap or a model's selections",
        ),
        (disturbed, "triton", "has no time that counts"),
        (mine, "acme", "--backend run.json.gz has times of triton, none of acme"),
        ([], None, "RUN run.json.gz has no times"),
    ):
        write_run(path, run.model_copy(update={"times": times}))
        options = [] if backend is None else ["--backend", backend]
        done = CliRunner().invoke(app, ["bench", "costs", str(path), "--out", str(out), *options])
        assert done.exit_code == 2 and words in " ".join(done.stderr.split()) and done.stdout == ""
        assert out.read_text() == "kept"
    write_run(path, run.model_copy(update={"times": mine}))
    done = CliRunner().invoke(app, ["bench", "costs", str(path), "--out", str(out)])
    assert done.exit_code == 0 and done.stdout == ""
    assert out.read_text() == CliRunner().invoke(app, ["bench", "costs", str(path)]).stdout


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
    monkeypatch.setattr(Registry, "baselines", lambda self: Brought((decode_baseline(factor=1.0),)))
    words = ["--primitive", "sparse_decode", "--layout", "bf16"]
    short = [line for line in command(*words).stdout.splitlines() if line.startswith("  B ")]
    assert len(short) == 2 and all("reference.torch" in line and "other.v1" not in line for line in short)
    assert [len(line.partition("reference.torch")[2].split()) for line in short] == [3, 3], "a time, the lead, the bound"
    text = command(*words, "--all").stdout
    lines = [line.split() for line in text.splitlines()]
    ours = [words for words in lines if words[:1] == ["reference.torch"]]
    assert [len(words) for words in ours] == [3, 3], "a time and the lead over the baseline for each of two sizes"
    assert all(float(lead) > 0 for _, _, lead in ours)
    assert [len(words) for words in lines if words[:1] == ["other.v1"]] == [2, 2]
    assert text.count("roofline bound") == 2 and max(map(len, text.splitlines())) <= 80


def test_the_command_says_on_request_why_a_candidate_was_skipped(monkeypatch):
    reason = Reason("library", "missing", "other is not installed")
    monkeypatch.setattr(Registry, "baselines", lambda self: Brought((decode_baseline(reasons=(reason,)),)))
    words = ["--primitive", "sparse_decode", "--layout", "bf16"]
    text = command(*words).stdout
    assert "skipped  other.v1, for some primitives" in text and "not installed" not in text
    assert "other.v1 / sparse_decode: library missing (other is not installed)" in command(*words, "--all").stdout


def test_the_command_adds_times_to_a_run(tmp_path):
    out = tmp_path / "run.json.gz"
    words = ["--primitive", "sparse_decode", "--layout", "bf16", "--out", str(out), "--json"]
    answer = json.loads(command(*words).stdout)
    assert answer["ok"] and [line["rows"] for line in answer["lines"]] == [2, 3]
    first = read_run(out)
    assert [(each.rows, each.us) for each in first.times] == [(x["rows"], round(x["median_us"], 3)) for x in answer["lines"]]
    again = json.loads(command(*words).stdout)
    second = read_run(out)
    assert [each.us for each in second.times] == [round(line["median_us"], 3) for line in again["lines"]], "the newer ones"
    assert second.cases == [] and second.level is None and second.versions["torch"].startswith(torch.__version__.split("+")[0])
    assert "pow2" in command(*words, "--scale-format", "amax", code=2).output


def test_an_interrupted_benchmark_keeps_what_was_timed(tmp_path, monkeypatch):
    real, rows = kernels.time_candidates, list[int]()

    def second_size_interrupts(problem: Any, *arguments: Any, **options: Any) -> Any:
        rows.append(problem.case.rows)
        if len(rows) == 2:
            raise KeyboardInterrupt
        return real(problem, *arguments, **options)

    monkeypatch.setattr(kernels, "time_candidates", second_size_interrupts)
    out = tmp_path / "run.json.gz"
    command("--primitive", "sparse_decode", "--layout", "bf16", "--out", str(out), code=130)
    assert rows == [2, 3] and [each.rows for each in read_run(out).times] == [2]


def test_the_command_fails_when_one_of_ours_is_wrong():
    spoiled = registry_with(("spoiled", Spoiled({"cache_write": WRONG["cache_write"]})), probe=False)
    done = command("--primitive", "cache_write", "--no-baselines", registry=spoiled, code=1)
    assert "WRONG     cache_write fp8_ds_mla T 2  spoiled.torch" in done.stdout


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
