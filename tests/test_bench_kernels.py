# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark: its problems are what they claim, wrong results get no time, baselines stand beside ours."""

from __future__ import annotations

import json
import subprocess
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
from xml.etree import ElementTree

import pytest
import torch
import torch_reference as reference
from fake_plugins import implementation, make_plugin
from machines import H200
from spoiled import NAME, WRONG, WRONG_TIMED, Spoiled, registry_with
from typer.testing import CliRunner

from mla_portable.accelerator import Accelerator
from mla_portable.contracts import (
    SPLIT_KV,
    Baseline,
    BaselineCall,
    Implementation,
    InvalidArgument,
    PluginError,
    Primitive,
    ProgramShape,
    Reason,
    Registrar,
    Request,
    ScheduleKind,
    SplitSchedule,
    Support,
    hookimpl,
    split_kv_kind,
)
from mla_portable.dispatch import serving
from mla_portable.layouts import LAYOUTS
from mla_portable.primitives import (
    CACHE_WRITE,
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    INDEXER_SELECT,
    MERGE_STATES,
    SPARSE_DECODE,
    SPARSE_PREFILL,
    TOPK_SELECT,
)
from mla_portable.problems.bench import BenchProblem, KernelCase, Workshop, kernel_cases, timed_primitives
from mla_portable.registry import Registry
from mla_portable.tools.bench import kernel_machine, timing
from mla_portable.tools.bench.candidates import decode_schedule, our_candidates
from mla_portable.tools.bench.kernel_records import append_lines, kernel_lines, kernel_run, read_runs
from mla_portable.tools.bench.kernels import KernelReport, time_kernels
from mla_portable.tools.bench.offers import load_baselines
from mla_portable.tools.bench.plot import lines_of_records, plot_lines
from mla_portable.tools.bench.roofline import Ceilings, measure_ceilings
from mla_portable.tools.cli.app import app
from mla_portable.tools.matrix.table import find_records
from mla_portable_nvidia.tile_schedules import FLASHMLA_TILES, TileSchedule

CPU = torch.device("cpu")
ATTENTION = (SPARSE_DECODE, SPARSE_PREFILL)
TIMED = timed_primitives()
SMALL: dict[Primitive, KernelCase] = {
    SPARSE_DECODE: KernelCase(SPARSE_DECODE, 3, "fp8_ds_mla", 2, 16, 64),
    SPARSE_PREFILL: KernelCase(SPARSE_PREFILL, 5, "bf16", 2, 16, 64, 50),
    TOPK_SELECT: KernelCase(TOPK_SELECT, 5, topk=16, width=64),
    CONVERT_INDICES: KernelCase(CONVERT_INDICES, 5, topk=16),
    GATHER_UPCONVERT: KernelCase(GATHER_UPCONVERT, 130, "fp8_ds_mla"),
    CACHE_WRITE: KernelCase(CACHE_WRITE, 5, "fp8_ds_mla"),
    INDEXER_SELECT: KernelCase(INDEXER_SELECT, 3, "index_fp8", 2, 16, 100),
}


def workshop(**options: Any) -> Workshop:
    return Workshop(CPU, registry_with().facts(CPU), **options)


def run(*cases: KernelCase, registry: Registry | None = None, **options: Any) -> KernelReport:
    return time_kernels(cases, device=CPU, registry=registry or registry_with(), repeat=2, **options)


# ---------------------------------------------------------------------- cases


def test_the_default_sweep_has_the_sizes_of_a_serving_rank():
    decode = kernel_cases([SPARSE_DECODE], layouts=["fp8_ds_mla"])
    assert [case.num_heads for case in decode[::6]] == [16, 32, 64, 128]
    assert [case.rows for case in decode[:6]] == [1, 4, 16, 64, 128, 256]
    assert all(case.width // case.rows >= 2048 for case in decode), "each row has a context of its own"
    prefill = kernel_cases([SPARSE_PREFILL], layouts=["bf16"], overlaps=(0, 80))
    assert {(case.rows, case.width) for case in prefill} == {(256, 8192), (1024, 8192), (4096, 65536)}
    assert {case.overlap for case in prefill} == {0, 80}
    assert {case.primitive for case in kernel_cases()} == set(TIMED)


def test_a_selection_alone_has_neither_layout_nor_heads_and_every_width():
    cases = kernel_cases([TOPK_SELECT], heads=(64,), rows=(1, 16), widths=(4096, 32768))
    assert [(case.rows, case.width) for case in cases] == [(1, 4096), (16, 4096), (1, 32768), (16, 32768)]
    assert {(case.kv_layout, case.num_heads, case.topk) for case in cases} == {(None, None, 2048)}


@pytest.mark.parametrize(
    ("sizes", "word"),
    [
        ({"rows": (0,)}, "rows"),
        ({"heads": (0,)}, "num_heads"),
        ({"topk": 64, "widths": (63,)}, "width"),
        ({"overlaps": (101,)}, "overlap"),
        ({"layouts": ("fp4",)}, "kv_layout"),
        ({"scale_format": "ue8m0"}, "scale_format"),
    ],
)
def test_a_size_that_cannot_be_made_is_refused(sizes, word):
    with pytest.raises(InvalidArgument, match=word):
        kernel_cases([SPARSE_PREFILL], **sizes)


def test_layouts_go_to_the_primitives_that_have_them():
    cases = kernel_cases(layouts=["bf16", "index_bf16"])
    assert {case.kv_layout for case in cases if case.primitive is INDEXER_SELECT} == {"index_bf16"}
    assert {case.kv_layout for case in cases if case.primitive is SPARSE_DECODE} == {"bf16"}
    assert {case.primitive for case in kernel_cases(layouts=["bf16"])} == set(TIMED) - {INDEXER_SELECT}
    with pytest.raises(InvalidArgument, match="got 'bf16', expected one of index_bf16, index_fp8"):
        kernel_cases([INDEXER_SELECT], layouts=["bf16"])


def test_selection_is_timed_as_decode_and_as_a_chunk_of_prefill():
    decode, prefill = (workshop().make(KernelCase(INDEXER_SELECT, rows, "index_fp8", 1, 8, 300)) for rows in (3, 256))
    assert decode.arguments["query_start_loc"].tolist() == [0, 1, 2, 3] and decode.arguments["block_table"].shape == (3, 5)
    assert prefill.arguments["query_start_loc"].tolist() == [0, 256] and prefill.arguments["block_table"].shape == (1, 5)
    scored = {problem: problem.flops for problem in (decode, prefill)}  # e4m3 products count half
    assert scored[decode] == 3 * 300 * 128 and scored[prefill] == sum(range(45, 301)) * 128
    for problem in (decode, prefill):
        assert not any(finding.message for finding in problem.check(problem.call(reference.indexer_select)))


def test_a_primitive_that_is_not_timed_is_refused():
    with pytest.raises(InvalidArgument, match="merge_states"):
        kernel_cases([MERGE_STATES])


# ---------------------------------------------------------------------- problems


def test_decode_rows_read_contexts_of_their_own():
    problem = workshop().make(KernelCase(SPARSE_DECODE, 4, "bf16", 1, 16, 128))
    rows = problem.arguments["indices"][:, 0]
    assert rows.shape == (4, 16)
    assert len(rows.unique()) == 64
    assert (rows // 32 == torch.arange(4)[:, None]).all()


def test_where_the_cache_is_too_small_rows_share_it_and_its_bytes_count_once():
    case = KernelCase(SPARSE_DECODE, 8, "fp8_ds_mla", 1, 64, 64)
    problem = workshop().make(case)
    assert all(len(row.unique()) == 64 for row in problem.arguments["indices"][:, 0])
    q, out, lse, indices = (problem.arguments[name].nbytes for name in ("q", "out", "lse_out", "indices"))
    assert problem.bytes_moved == 64 * 656 + q + out + lse + indices
    assert problem.flops == 2 * 8 * 64 * (576 + 512)


@pytest.mark.parametrize("percent", [0, 50, 100])
def test_neighbouring_tokens_share_what_the_case_says(percent):
    problem = workshop().make(KernelCase(SPARSE_PREFILL, 4, "bf16", 1, 32, 256, percent))
    rows = [set(row.tolist()) for row in problem.arguments["indices"]]
    assert all(len(row) == 32 for row in rows)
    assert all(len(a & b) == 32 * percent // 100 for a, b in pairwise(rows))


@pytest.mark.parametrize(("primitive", "layout"), [(p, layout) for p in TIMED for layout in p.layouts or (None,)])
def test_the_reference_passes_and_what_is_spoiled_does_not(primitive, layout):
    case = replace(SMALL[primitive], kv_layout=layout)
    problem = workshop().make(case)
    problem.poison()
    assert not any(finding.message for finding in problem.check(problem.call(getattr(reference, str(primitive)))))
    assert any(finding.message for finding in problem.check(problem.call(WRONG_TIMED[str(primitive)])))


@pytest.mark.parametrize("primitive", [each for each in TIMED if each not in (CONVERT_INDICES, TOPK_SELECT)])
def test_fp8_rows_have_the_scales_that_the_case_says(primitive):
    layout, plain = (next(n for n in map(LAYOUTS.get, primitive.layouts) if n.is_quantized == is_so) for is_so in (True, False))
    one, other = (
        workshop().make(replace(SMALL[primitive], kv_layout=layout.name, scale_format=name)) for name in ("pow2", "amax")
    )
    for problem in (one, other):
        problem.poison()
        assert not any(finding.message for finding in problem.check(problem.call(getattr(reference, str(primitive)))))
        cache = next(problem.arguments[name] for name in ("kv", "kv_cache", "index_cache") if name in problem.arguments)
        rows = torch.cat([part.flatten(0, 1) for part in layout.parts(cache)], dim=1)
        rows = rows[problem.arguments.get("slot_mapping", torch.arange(3))]
        end = layout.rope_offset if layout.rope_width else layout.row_bytes
        mantissas = rows[:, layout.scale_offset : end].contiguous().view(torch.float32).frexp().mantissa
        assert bool((mantissas == 0.5).all()) == (problem.case.scale_format == "pow2")
        assert problem.request.scale_format == problem.case.scale_format
    assert other.case.shape == f"{one.case.shape}, amax scales", "a record of one is not compared with the other's"
    bf16 = replace(SMALL[primitive], kv_layout=plain.name, scale_format="amax")
    assert "amax" not in bf16.shape and workshop().make(bf16).request.scale_format is None


@pytest.mark.parametrize("primitive", TIMED)
def test_what_was_not_written_is_not_right(primitive):
    problem = workshop().make(SMALL[primitive])
    arguments = problem.arguments
    problem.call(getattr(reference, str(primitive)))
    problem.poison()
    left = {
        CACHE_WRITE: lambda: arguments["kv_cache"],
        GATHER_UPCONVERT: lambda: arguments["out"],
        TOPK_SELECT: lambda: arguments["out"],
        CONVERT_INDICES: lambda: arguments["out"],
        INDEXER_SELECT: lambda: arguments["out"],
    }.get(primitive, lambda: (arguments["out"], arguments["lse_out"]))
    assert any(finding.message for finding in problem.check(left()))


def test_the_same_seed_makes_the_same_problem():
    one, other, third = (workshop(seed=seed).make(SMALL[SPARSE_DECODE]).arguments for seed in (1, 1, 2))
    assert torch.equal(one["q"], other["q"]) and torch.equal(one["kv_cache"], other["kv_cache"])
    assert not torch.equal(one["q"], third["q"])


# ---------------------------------------------------------------------- candidates


def schedule_of(problem: BenchProblem, kind: ScheduleKind | None) -> Any:
    made = Implementation(
        "acme.v1",
        SPARSE_DECODE,
        Support(source="this test", device_types=("cpu",), kv_layouts=("fp8_ds_mla",)),
        lambda request: reference.sparse_decode,
        schedule_kind=kind,
    )
    return decode_schedule(made, problem.case, problem.request, CPU)


def test_decode_gets_the_schedule_that_the_planner_makes():
    problem = workshop().make(KernelCase(SPARSE_DECODE, 4, "fp8_ds_mla", 16, 128, 512))
    assert schedule_of(problem, None) is None
    split = schedule_of(problem, SPLIT_KV)
    assert isinstance(split, SplitSchedule) and (split.num_rows, split.num_heads, split.topk) == (4, 16, 128)
    problem = replace(problem, request=problem.request.but(device=H200))
    tiles = schedule_of(problem, FLASHMLA_TILES)
    assert isinstance(tiles, TileSchedule) and (tiles.num_rows, tiles.num_heads, tiles.num_sm_parts) == (4, 64, 132)


def test_the_schedule_is_cut_for_the_configuration_that_is_bound():
    """Of a tuning table or of an attempt to tune: else a tile is timed with the splits of another."""
    problem = workshop().make(KernelCase(SPARSE_DECODE, 4, "fp8_ds_mla", 16, 512, 1024))
    tall = problem.request.but(device=H200, configuration=(("block_n", 256),))
    kind = split_kv_kind(lambda request: ProgramShape(tile=dict(request.configuration or ())["block_n"]))
    made = schedule_of(replace(problem, request=tall), kind)
    assert (made.num_splits, made.split_len) == (2, 256)


def test_ours_and_only_ours_are_timed_without_baselines():
    report = run(*SMALL.values())
    assert report.ok and not report.defects()
    for case in report.cases:
        assert [each.name for each in case.times] == ["reference.torch"]
        (each,) = case.times
        assert case.best_baseline_us is None and case.lead_of(each) is None and case.bound_us > 0
        assert each.timing is not None and each.timing.n == 2 and each.errors


def test_a_wrong_result_gets_no_time_and_a_failure_is_reported():
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no such kernel")

    spoiled = Spoiled({"sparse_decode": WRONG["sparse_decode"], "sparse_prefill": broken})
    report = run(*(SMALL[each] for each in ATTENTION), registry=registry_with(("spoiled", spoiled), probe=False))
    decode, prefill = ({each.name: each for each in case.times} for case in report.cases)
    assert decode[NAME].timing is None and "out[" in decode[NAME].wrong[0] and not decode[NAME].failure
    assert prefill[NAME].timing is None and prefill[NAME].failure == "RuntimeError: no such kernel"
    assert decode["reference.torch"].ok and prefill["reference.torch"].ok
    assert not report.ok and len(report.defects()) == 2
    lines = {(line["primitive"], line["name"]): line for line in kernel_lines(report)}
    assert lines["sparse_decode", NAME]["median_us"] is None and lines["sparse_decode", NAME]["wrong"]
    assert lines["sparse_prefill", NAME]["failure"]


@pytest.mark.parametrize("declared", [False, True])
def test_an_implementation_without_lse_is_timed_and_judged_without(declared):
    def quiet(*args: Any, **options: Any) -> Any:
        return reference.sparse_decode(*args, **options)[0], torch.empty(0)

    spoiled = Spoiled({"sparse_decode": quiet}, lse=declared)
    (case,) = run(SMALL[SPARSE_DECODE], registry=registry_with(("spoiled", spoiled), probe=False)).cases
    each = next(each for each in case.times if each.name == NAME)
    assert "lse" not in each.errors and each.remark == ("" if declared else "returns no lse")
    assert each.ok != declared, "an lse that is declared has to be returned"


def test_backends_can_be_named_and_one_that_is_switched_off_says_so():
    registry = registry_with(("spoiled", Spoiled()), probe=False, environ={"MLA_PORTABLE_DISABLE": "reference"})
    (case,) = run(SMALL[CACHE_WRITE], registry=registry).cases
    assert [each.name for each in case.times] == [NAME]
    assert [(each.name, each.reasons[0].subject) for each in case.refused] == [("reference.torch", "disabled")]
    assert run(SMALL[CACHE_WRITE], registry=registry, backends=["reference.torch"]).cases[0].times == ()


def test_a_backend_forced_by_the_environment_does_not_narrow_the_benchmark():
    registry = registry_with(("spoiled", Spoiled()), probe=False, environ={"MLA_PORTABLE_BACKEND": "reference"})
    (case,) = run(SMALL[CACHE_WRITE], registry=registry).cases
    assert [each.name for each in case.times] == ["reference.torch", NAME]


# ---------------------------------------------------------------------- baselines


def decode_baseline(name: str = "other.v1", *, factor: float = 1.0, reasons: tuple[Reason, ...] = ()) -> Baseline:
    def prepare(request: Request, arguments: Any) -> BaselineCall:
        q, kv, indices = (arguments[name] for name in ("q", "kv_cache", "indices"))
        last: list[Any] = []

        def work() -> None:
            last[:] = reference.sparse_decode(q, kv, indices, softmax_scale=arguments["softmax_scale"])

        return BaselineCall(work, lambda: (last[0] * factor, last[1]))

    return Baseline(name, SPARSE_DECODE, lambda request: reasons, prepare, "nothing is padded")


class BaselinePlugin:
    def __init__(self, *baselines: Any) -> None:
        self.baselines = baselines

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        raise AssertionError("the benchmark asks for baselines alone")

    @hookimpl
    def mla_portable_register_baselines(self, registrar: Registrar) -> None:
        for baseline in self.baselines:
            registrar.add(baseline)


def test_a_baseline_is_judged_and_timed_like_ours():
    absent = Reason("library", "absent", "needed")
    baselines = [
        decode_baseline(),
        decode_baseline("other.wrong", factor=1.1),
        decode_baseline("other.absent", reasons=(absent,)),
    ]
    report = run(*(SMALL[each] for each in ATTENTION), baselines=baselines)
    decode, prefill = report.cases
    by_name = {each.name: each for each in decode.times}
    assert by_name["other.v1"].ok and by_name["other.v1"].implementation is None
    assert by_name["other.v1"].remark == "nothing is padded"
    assert not by_name["other.wrong"].ok
    assert report.ok, "a baseline's mistake is not ours"
    assert [(each.name, each.reasons) for each in decode.refused] == [("other.absent", (absent,))]
    ours, baseline = by_name["reference.torch"], by_name["other.v1"]
    assert decode.best_baseline_us == baseline.median_us
    assert decode.lead_of(ours) == pytest.approx(baseline.median_us / ours.median_us)
    assert decode.lead_of(baseline) is None and decode.lead_of(by_name["other.wrong"]) is None
    assert {each.name for each in prefill.times} == {"reference.torch"}, "a baseline of one primitive is none of another"


def test_a_plugin_whose_baselines_fail_costs_only_its_own():
    class Broken:
        @hookimpl
        def mla_portable_register_baselines(self, registrar: Registrar) -> None:
            registrar.add(decode_baseline("broken.v1"))
            raise OSError("no library")

    given = [
        ("good", BaselinePlugin(decode_baseline())),
        ("broken", Broken()),
        ("twice", BaselinePlugin(decode_baseline())),
        ("none", BaselinePlugin("a baseline")),
        ("without", "mla_portable.reference"),
    ]
    found = load_baselines(given)
    assert [baseline.name for baseline in found.found] == ["other.v1"]
    assert dict(found.failures) == {
        "broken": "OSError: no library",
        "twice": "PluginError: other.v1 / sparse_decode: already registered by the plugin 'good'",
        "none": "PluginError: expected a Baseline, got str",
    }


def test_a_baseline_must_be_named_and_have_a_primitive():
    with pytest.raises(PluginError, match="in lower case"):
        decode_baseline("Other")
    with pytest.raises(PluginError, match="is not one of"):
        Baseline("other.v1", "sparse_decode_", lambda request: (), lambda request, arguments: None)


def test_the_registry_takes_no_notice_of_baselines():
    class Both(Spoiled):
        @hookimpl
        def mla_portable_register_baselines(self, registrar: Registrar) -> None:
            raise AssertionError("asked by a registry")

    registry = registry_with(("both", Both()), probe=False)
    assert [report.ok for report in registry.plugin_reports] == [True, True]


# ---------------------------------------------------------------------- roofline bound, records, plot


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
        "--primitive merge_states",
    ],
)
def test_what_cannot_be_meant_is_code_2(words):
    command(*words.split(), code=2)


# ---------------------------------------------------------------------- what only a GPU has, told by pretence


def test_a_graph_holds_so_many_calls_and_keeps_what_they_read(monkeypatch):
    cuda = MagicMock()
    cuda.device.side_effect = cuda.stream.side_effect = cuda.graph.side_effect = lambda *args: nullcontext()
    gpu = Accelerator(torch.device("cuda", 0))
    gpu.module = cuda
    monkeypatch.setattr(timing, "accelerator", lambda device: gpu)

    class Call:
        made = 0

        def __call__(self) -> None:
            self.made += 1

    call = Call()
    replay = timing.captured(call, torch.device("cuda", 0), calls=5)
    assert call.made == 2 + 5
    alive = weakref.ref(call)
    del call
    assert alive() is not None, "what a graph reads may be known to its call alone"
    replay()
    cuda.CUDAGraph.return_value.replay.assert_called_once_with()
    del replay
    assert alive() is None


class PretendedGpu:
    """Work advances the clock where it is enqueued; events read it."""

    device = CPU

    def __init__(self) -> None:
        self.now, self.looks = 0.0, 0

    def perf_counter(self) -> float:
        return self.now

    def guard(self):
        return nullcontext()

    def synchronize(self) -> None:
        self.looks += 1

    def properties(self) -> SimpleNamespace:
        return SimpleNamespace(L2_cache_size=16)

    def event(self, *, timing: bool) -> Any:
        made = SimpleNamespace(at=None)
        made.record = lambda: setattr(made, "at", self.now)
        made.elapsed_time = lambda other: 1e3 * (other.at - made.at)
        return made


@pytest.mark.parametrize(
    ("seconds", "runs", "looks"), [(1e-3, 30, 5), (0.1, 6, 8)], ids=["a look in ten rounds", "a look after each long one"]
)
def test_rounds_on_a_gpu_end_once_they_took_too_long(monkeypatch, seconds, runs, looks):
    gpu = PretendedGpu()
    monkeypatch.setattr(timing, "accelerator", lambda device: gpu)
    monkeypatch.setattr(timing, "time", gpu)

    def call(share: float) -> None:
        gpu.now += share * seconds

    calls = [partial(call, 0.25), partial(call, 0.75)]
    short, long = timing.measure_in_turns(calls, device=torch.device("cuda", 0), repeat=30, max_seconds=0.55)
    assert (short.n, long.n, gpu.looks) == (runs, runs, looks)
    assert short.median_ms == pytest.approx(250 * seconds) and long.median_ms == pytest.approx(750 * seconds)
    assert short.clock == "device events" and short.cold_l2


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


def test_plain_torch_is_timed_on_a_gpu_where_it_is_named_and_a_plugin_that_was_not_imported_is_left_out():
    plugins = [("reference", "mla_portable.reference"), ("acme", make_plugin(implementation("acme.v1")))]
    registry = Registry(plugins=plugins, facts={"cuda": H200}, environ={"MLA_PORTABLE_DISABLE": "acme"})
    problem = SimpleNamespace(request=Request(MERGE_STATES, H200, lse=True))
    for backends, wanted in (((), []), (("reference",), ["reference.torch"])):
        found, refused = our_candidates(problem, registry, torch.device("cpu"), backends)
        assert [each.name for each in found] == wanted
        assert [each.name for each in refused] == ([] if wanted else ["reference.torch"])
