# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark times ours and baselines side by side; wrong results get no time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from threading import Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch_reference as reference
from fake_plugins import implementation, make_plugin
from kernel_bench import ATTENTION, CPU, SMALL, decode_baseline, run, workshop
from machines import H200
from spoiled import NAME, WRONG, Spoiled, registry_with

from mla_portable.accelerator import Accelerator
from mla_portable.bench import timing
from mla_portable.bench.candidates import decode_schedule, our_candidates
from mla_portable.bench.kernel_records import kernel_lines
from mla_portable.choose import Registry
from mla_portable.contracts import (
    Baseline,
    Implementation,
    PluginError,
    Reason,
    Registrar,
    Request,
    ScheduleKind,
    Support,
    hookimpl,
)
from mla_portable.judge.problems.bench import BenchProblem, KernelCase
from mla_portable.kit.split_kv import SPLIT_KV, ProgramShape, SplitSchedule, split_kv_kind
from mla_portable.primitives import CACHE_WRITE, MERGE_STATES, SPARSE_DECODE
from mla_portable_common.flash_mla.tile_schedules import FLASHMLA_TILES, TileSchedule


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
    assert made.num_splits == 2


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
def test_attention_is_timed_and_judged_without_lse(declared):
    def quiet(*args: Any, **options: Any) -> Any:
        return reference.sparse_decode(*args, **options)[0], torch.empty(0)

    spoiled = Spoiled({"sparse_decode": quiet}, lse=declared)
    (case,) = run(SMALL[SPARSE_DECODE], registry=registry_with(("spoiled", spoiled), probe=False)).cases
    each = next(each for each in case.times if each.name == NAME)
    assert each.ok and "lse" not in each.errors and each.remark == ("" if declared else "returns no lse")


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


class BaselinePlugin:
    def __init__(self, *baselines: Any) -> None:
        self.baselines = baselines

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        registrar.add_baselines(lambda: self.baselines)


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
    class Broken(Spoiled):
        @hookimpl
        def mla_portable_register(self, registrar: Registrar) -> None:
            super().mla_portable_register(registrar)
            registrar.add_baselines(self.baselines)

        def baselines(self) -> Iterator[Baseline]:
            yield decode_baseline("broken.v1")
            raise OSError("no library")

    class Exits:
        @hookimpl
        def mla_portable_register(self, registrar: Registrar) -> None:
            raise SystemExit("no licence")

    class Hangs:
        @hookimpl
        def mla_portable_register(self, registrar: Registrar) -> None:
            registrar.add_baselines(lambda: go.wait(20) and ())

    go = Event()
    given = [
        ("good", BaselinePlugin(decode_baseline())),
        ("spoiled", Broken()),
        ("hangs", Hangs()),
        ("exits", Exits()),
        ("twice", BaselinePlugin(decode_baseline())),
        ("none", BaselinePlugin("a baseline")),
        ("reference", "mla_portable.reference"),
    ]
    registry = Registry(plugins=given, environ={"MLA_PORTABLE_PLUGIN_TIMEOUT": "2"})
    found = registry.baselines()
    go.set()
    assert [baseline.name for baseline in found.found] == ["other.v1"]
    assert dict(found.failures) == {
        "spoiled": "OSError: no library",
        "hangs": "PluginTimeout: loading the baselines of the plugin hangs did not finish within 2 s; "
        "MLA_PORTABLE_PLUGIN_TIMEOUT sets another limit, 0 none",
        "exits": "SystemExit: no licence",
        "twice": "PluginError: other.v1 / sparse_decode: already registered by the plugin 'good'",
        "none": "PluginError: expected a Baseline, got str",
    }
    assert NAME in [each.name for each in registry.implementations()], "the plugin's implementations stay"


def test_what_brings_baselines_can_be_called():
    class Eager:
        @hookimpl
        def mla_portable_register(self, registrar: Registrar) -> None:
            registrar.add_baselines([decode_baseline()])

    (_, report) = registry_with(("eager", Eager())).plugin_reports
    assert report.error == "PluginError: add_baselines: expected a function that returns the baselines, got list"


def test_a_baseline_must_be_named_and_have_a_primitive():
    with pytest.raises(PluginError, match="in lower case"):
        decode_baseline("Other")
    with pytest.raises(PluginError, match="is not one of"):
        Baseline("other.v1", "sparse_decode_", lambda request: (), lambda request, arguments: None)


def test_the_registry_takes_no_notice_of_baselines():
    class Both(Spoiled):
        @hookimpl
        def mla_portable_register(self, registrar: Registrar) -> None:
            super().mla_portable_register(registrar)
            registrar.add_baselines(lambda: asked.append("baselines") or ())
            registrar.add_tunables(lambda: asked.append("tunables") or ())

    asked: list[str] = []
    registry = registry_with(("spoiled", Both()), probe=False)
    assert [report.ok for report in registry.plugin_reports] == [True, True]
    run(SMALL[CACHE_WRITE], registry=registry)
    assert asked == []
    assert registry.tunables().found == registry.baselines().found == () and asked == ["tunables", "baselines"]


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


@pytest.mark.parametrize("gpu", [None, PretendedGpu()], ids=["host", "device"])
def test_every_round_begins_with_the_next_call(monkeypatch, gpu):
    if gpu:
        monkeypatch.setattr(timing, "accelerator", lambda device: gpu)
    order: list[str] = []
    device = torch.device("cuda", 0) if gpu else CPU
    timing.measure_in_turns([partial(order.append, name) for name in "abc"], device=device, repeat=4)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert timing.measure_in_turns([], device=device, repeat=2) == []


def test_plain_torch_is_timed_on_a_gpu_where_it_is_named_and_a_plugin_that_was_not_imported_is_left_out():
    plugins = [("reference", "mla_portable.reference"), ("acme", make_plugin(implementation("acme.v1")))]
    registry = Registry(plugins=plugins, facts={"cuda": H200}, environ={"MLA_PORTABLE_DISABLE": "acme"})
    problem = SimpleNamespace(request=Request(MERGE_STATES, H200, lse=True))
    for backends, wanted in (((), []), (("reference",), ["reference.torch"])):
        found, refused = our_candidates(problem, registry, torch.device("cpu"), backends)
        assert [each.name for each in found] == wanted
        assert [each.name for each in refused] == ([] if wanted else ["reference.torch"])
