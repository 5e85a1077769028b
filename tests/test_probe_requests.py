# SPDX-License-Identifier: Apache-2.0
"""What a choice probes: one problem of the request's own sizes, within a time limit, and what that must not be blamed for."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_plugins import make_plugin
from faulty import (
    BOTH,
    CONVERT,
    DECODE,
    GATHER,
    INDEXER,
    KEYS,
    MASKED,
    MERGE,
    PACK,
    PREFILL,
    RAGGED,
    RIGHT,
    SELECT,
    WRITE,
    Kernel,
    candidate,
    change,
    in_place,
    probe,
    registry,
    symptoms,
)
from machines import CPU, H200
from torch import Tensor

from mla_portable.choose import Registry
from mla_portable.choose import probe as probing
from mla_portable.contracts import Implementation, InvalidArgument, Primitive, Request, UnsupportedRequest
from mla_portable.judge.problems import attention_problem, draw
from mla_portable.judge.problems import probe as probe_problems
from mla_portable.judge.problems.base import cases_for
from mla_portable.judge.problems.probe import request_case
from mla_portable.judge.problems.stage import Problem
from mla_portable.kit.rules import check_cache
from mla_portable.primitives import TOPK_SELECT

# A choice computes one problem of the request's own sizes

LARGE = {"kv_layout": "bf16", "num_heads": 16, "topk": 2048, "block_size": 64, "query_len": 1, "lse": True}


def chosen(implementation: Implementation, **fields: Any) -> tuple[str | None, str]:
    """Which implementation an automatic choice takes, and the reasons against the first."""
    reg = registry(implementation)
    decision = reg.decide(Request(implementation.primitive, reg.facts("cpu"), **{**LARGE, **fields}))
    against = next(v.reasons for v in decision.verdicts if v.implementation == implementation.name)
    return decision.chosen, " | ".join(map(str, against))


def wrong_beyond(heads: int, topk: int) -> Kernel:
    def after(results: Any, q: Tensor, kv: Tensor, indices: Tensor, **kwargs: Any) -> Any:
        results[0][..., heads:, :] = 0
        return in_place(results, out=results[0] * 1.5) if indices.shape[-1] > topk else results

    return change(DECODE, after=after)


def returns_the_same_memory() -> Kernel:
    kept: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def after(results: Any, q: Tensor, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Any:
        return results if out is not None else in_place(kept.setdefault(tuple(q.shape), results), *results)

    return change(DECODE, after=after)


def changes_an_input_later() -> Kernel:
    calls: list[int] = []

    def after(results: Any, q: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            q.zero_()
        return results

    return change(DECODE, after=after)


def ignores_out_when_large(*args: Any, **kwargs: Any) -> Any:
    if args[2].shape[-1] > 64:
        kwargs.update(out=None, lse_out=None)
    return RIGHT[DECODE](*args, **kwargs)


@pytest.mark.parametrize(
    ("kernel", "symptom"),
    [
        (wrong_beyond(heads=2, topk=10**6), "out is off by"),
        (wrong_beyond(heads=10**6, topk=64), "out is off by"),
        (ignores_out_when_large, "another tensor than the `out`"),
        (returns_the_same_memory(), "returned out in the memory of an earlier call's results"),
        (changes_an_input_later(), "it changed its input q"),
        (change(DECODE, after=lambda r, *a, **k: (r[0], None) if a[2].shape[-1] > 64 else r), "returned NoneType as lse"),
    ],
    ids=["heads", "topk", "ignores out", "same memory", "input", "no lse"],
)
def test_what_is_wrong_at_the_requests_own_sizes_does_not_serve(kernel: Kernel, symptom: str):
    name, against = chosen(candidate(DECODE, kernel))
    assert name == "reference.torch" and symptom in against


def test_a_forced_choice_that_is_wrong_at_the_requests_sizes_fails_with_the_reason():
    reg = registry(candidate(DECODE, wrong_beyond(heads=2, topk=64)))
    with pytest.raises(UnsupportedRequest, match="out is off by"):
        reg.bind(Request(DECODE, reg.facts("cpu"), **LARGE), backend="faulty")


def test_memory_of_its_own_is_asked_of_primitives_without_outputs_too():
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def after(results: Any, *args: Any) -> Any:
        return in_place(kept.setdefault(results[0].numel(), results), *results)

    assert "in the memory of an earlier call" in symptoms(probe(candidate(MERGE, change(MERGE, after=after))))
    assert "in the memory of an earlier call" in chosen(candidate(MERGE, change(MERGE, after=after)))[1]


@pytest.mark.parametrize("primitive", Primitive.all())
def test_the_problem_has_the_sizes_and_features_of_the_request(primitive: Primitive):
    made = candidate(primitive, RIGHT[primitive])
    features = {"attn_sink": True, "lengths": True, "compact": True, "prefill_workspace": True, "scale_format": "pow2"}
    layout = {"index": "index_fp8"}.get(primitive.cache, "fp8_ds_mla")
    request = Request(primitive, H200, **{**LARGE, "kv_layout": layout, "num_heads": 128, "query_len": 3}, **features)
    (case,) = request_case(made, request)
    dims = {"qk_head_dim": 192, "v_head_dim": 128} if primitive is MASKED else {}  # the request leaves them open
    assert case.request == request.but(rows=case.request.rows, **dims) and case.repeat
    call = case.build(torch.device("cpu"))
    shapes = {name: tuple(value.shape) for name, value in {**call.args, **call.kwargs}.items() if isinstance(value, Tensor)}
    if primitive is DECODE:
        assert shapes["q"] == (1, 3, 128, 576) and shapes["indices"] == (1, 3, 2048) and shapes["kv_cache"][1:] == (64, 656)
        assert shapes["lengths"] == (1, 3) and 0 < torch.isinf(call.kwargs["attn_sink"]).sum() < 128
    elif primitive is PREFILL:
        assert shapes["q"] == (3, 128, 576) and shapes["indices"] == (3, 2048) and shapes["kv"][1:] == (64, 656)
    elif primitive is MASKED:
        assert shapes["q"][1:] == (128, 192) and shapes["v"][1:] == (128, 128)
    elif primitive is PACK:
        assert shapes["topk_indices"][1] == 2048
    elif primitive is CONVERT:
        assert shapes["topk_indices"] == (6, 2048) and call.kwargs["compact"] and "prefill_request_ids" in shapes
    elif primitive in (GATHER, WRITE):
        assert shapes["kv_cache"][1:] == (64, 656)
    elif primitive in (INDEXER, SELECT):
        assert shapes["q"][1] == 128 and shapes["index_cache"][1:] == (64, 132)
    elif primitive is RAGGED:
        assert shapes["q"][1] == 128 and call.args["keys"].dtype == torch.float8_e4m3fn
    elif primitive is KEYS:
        assert shapes["index_cache"][1:] == (64, 132) and call.kwargs["scale_format"] == "pow2"
    if primitive is SELECT:  # or no score would decide anything
        assert call.kwargs["topk"] == 2048 and (call.args["seq_lens"] > 2048 + 64).any()


def alignment_of(problem: Problem) -> int:
    """That of both caches of a call, as sparse_decode finds it."""
    tensors = problem.args | problem.kwargs
    caches = [tensors[name] for name in ("kv_cache", "extra_kv_cache") if name in tensors]
    return min(check_cache("test", "kv_cache", cache, torch.device("cpu")).cache_alignment for cache in caches)


@pytest.mark.parametrize(("block_size", "extra_block_size"), [(69, None), (61, None), (64, 53), (1, 2)])
@pytest.mark.parametrize("alignment", [8, 16])
def test_the_caches_of_the_problem_are_as_aligned_as_the_request_says(block_size, extra_block_size, alignment):
    """A block of an odd number of fp8_v4 rows is no multiple of 16 bytes long; engines pad it."""
    made = candidate(DECODE, RIGHT[DECODE], kv_layouts=("fp8_v4",), extra_cache=True, cache_alignment=alignment)
    second = {} if extra_block_size is None else {"extra_topk": 64, "extra_block_size": extra_block_size}
    sizes = {"num_heads": 2, "topk": 64, "block_size": block_size, "cache_alignment": alignment}
    (case,) = request_case(made, Request(DECODE, CPU, kv_layout="fp8_v4", **sizes, **second))
    assert case.request.cache_alignment == alignment == alignment_of(case.build(torch.device("cpu")))


@pytest.mark.parametrize("alignment", [1, 16])
def test_the_caches_of_a_case_are_as_aligned_as_it_asks(alignment):
    made = candidate(DECODE, RIGHT[DECODE], kv_layouts=("fp8_v4",), extra_cache=True, cache_alignment=alignment)
    cases = [case for case in cases_for(made, CPU, "quick") if case.params.rows and case.params.blocks != "address"]
    odd = [case for case in cases if case.params.block_size in (1, 53)]
    assert {case.request.cache_alignment for case in odd} == ({16} if alignment == 16 else {8, 16})
    for case in [*odd[:6], *[case for case in odd if case.params.extra_topk][:4], cases[-1]]:
        problem = case.params.build(1, torch.device("cpu"), CPU)
        assert alignment_of(problem) == case.request.cache_alignment, case.id


def sized(made: Implementation, request: Request) -> Request:
    return next(request_case(made, request)).request


def test_sizes_beyond_the_limits_are_cut_where_the_support_allows_it():
    request = Request(DECODE, CPU, **{**LARGE, "num_heads": 128, "block_size": 4096})
    cut = sized(candidate(DECODE, max), request)
    assert (cut.num_heads, cut.topk, cut.block_size) == (8, 128, 1024)
    exact = sized(candidate(DECODE, max, num_heads=(128,), topk_multiple=384, block_sizes=(4096,)), request)
    assert (exact.num_heads, exact.topk, exact.block_size) == (128, 384, 4096)
    assert sized(candidate(DECODE, max), request.but(device=H200)).topk == 2048


def test_requests_that_differ_in_rows_and_graph_alone_share_a_probe(monkeypatch: pytest.MonkeyPatch):
    bound: list[Request] = []
    made = candidate(DECODE, RIGHT[DECODE])
    spy = Implementation("faulty.v1", DECODE, made.support, bind=lambda request: bound.append(request) or RIGHT[DECODE])
    reg = registry(spy)
    cpu = replace(reg.facts("cpu"), graph_capture=True)
    request = Request(DECODE, cpu, **LARGE)
    machine = reg._machine
    assert machine.try_request(spy, torch.device("cpu"), request) == () and len(bound) == 1
    monkeypatch.setattr(probing, "require_no_capture", refuse)
    captured = request.but(rows=4096, graph=True)
    assert machine.try_request(spy, torch.device("cpu"), captured) == () and len(bound) == 1
    for changed in ({"topk": 64}, {"num_heads": 8}, {"attn_sink": True}, {"clean_indices": True}, {"lse": False}):
        with pytest.raises(InvalidArgument, match="under CUDA graph capture"):
            machine.try_request(spy, torch.device("cpu"), request.but(**changed))
    assert len(bound) == 1


def refuse(implementation: Implementation, device: torch.device) -> None:
    raise InvalidArgument("probe", implementation.name, got="a stream under CUDA graph capture", expected="an ordinary stream")


def test_results_for_requests_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mla_portable.choose.machine.REQUEST_LIMIT", 3)
    made = candidate(MERGE, RIGHT[MERGE])
    reg = registry(made)
    for heads in range(1, 7):
        reg._machine.try_request(made, torch.device("cpu"), Request(MERGE, reg.facts("cpu"), num_heads=heads))
    assert len(reg._machine._requests) == 3


def test_a_result_belongs_to_its_device():
    """Two devices of different facts, both played by the CPU."""
    seen: list[str] = []
    made = candidate(MERGE, RIGHT[MERGE])
    spy = Implementation(
        "faulty.v1", MERGE, made.support, bind=lambda request: seen.append(request.device.name) or RIGHT[MERGE]
    )
    reg = registry(spy)
    here, machine = reg.facts("cpu"), reg._machine
    for name in ("one", "two", "one"):
        machine.try_request(spy, torch.device("cpu"), Request(MERGE, replace(here, name=name)))
    assert seen == ["one", "two"]
    for name in ("one", "two", "one"):
        machine._facts["cpu"] = replace(here, name=name)
        machine._devices.setdefault(machine._facts["cpu"], torch.device("cpu"))
        machine.probe(spy, torch.device("cpu"))
    assert seen == ["one", "two"] * 2


# What the problem is to be blamed for


@pytest.mark.parametrize("place", ["build", "read_back", "oracle"])
def test_an_error_of_a_problem_is_a_reason_that_blames_it(place: str, monkeypatch: pytest.MonkeyPatch):
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such operation in this build of torch")

    if place == "build":
        monkeypatch.setattr(draw, "cached_rows", fail)
    elif place == "read_back":
        monkeypatch.setattr(Problem, "judged", fail)
    else:
        monkeypatch.setattr(attention_problem, "attend", fail)
    made = candidate(DECODE, RIGHT[DECODE])
    done = "judged" if place == "read_back" else "built"  # which is when a problem asks its oracle
    said = {each.given for each in probe(made).reasons}
    assert said == {f"problem could not be {done}: RuntimeError: no such operation in this build of torch"}
    served, against = chosen(made)
    assert served == "reference.torch" and f"problem could not be {done}: RuntimeError: no such" in against


def test_a_result_on_another_device_is_a_reason():
    report = probe(candidate(GATHER, lambda kv, *a, out: out.to("meta")))
    assert "returned out on meta, expected cpu" in symptoms(report)


# Time limits


@pytest.mark.parametrize("stage", ["check", "bind", "compute"])
def test_what_does_not_finish_is_given_up_with_a_reason(stage: str, caplog: pytest.LogCaptureFixture):
    release, calls = threading.Event(), list[str]()

    def wait(name: str) -> None:
        calls.append(name)
        if name == stage:
            release.wait(60)

    def bind(request: Request) -> Kernel:
        wait("bind")
        return lambda *args, **kwargs: wait("compute") or RIGHT[DECODE](*args, **kwargs)

    made = Implementation(
        "slow.v1", DECODE, candidate(DECODE, max).support, bind=bind, check=lambda facts: wait("check") or (), preference=1
    )
    plugins = [("reference", "mla_portable.reference"), ("slow", make_plugin(made))]
    reg = Registry(plugins=plugins, environ={"MLA_PORTABLE_PLUGIN_TIMEOUT": "0.05"})
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        decision = reg.decide(Request(DECODE, reg.facts("cpu"), **LARGE))
        assert torch.get_default_dtype() is torch.float64, "though the thread that was left behind goes on"
        assert decision.chosen == "reference.torch"
        (reason,) = next(v.reasons for v in decision.verdicts if v.implementation == "slow.v1")
        assert reason.given == f"{stage} did not finish within 0.05 s" and "MLA_PORTABLE_PLUGIN_TIMEOUT" in reason.remedy
        count = len(calls)
        reg.decide(Request(DECODE, reg.facts("cpu"), **LARGE))
        assert len(calls) == count, "remembered"
        assert not reg.probe(made, "cpu").ok, "and doctor waits once, not once for each problem"
        assert len(calls) <= count + 2 * len(BOTH)
    finally:
        release.set()
        torch.set_default_dtype(before)


@pytest.mark.parametrize("stage", ["check", "bind", "compute"])
def test_what_does_not_finish_costs_one_limit_for_all_kinds_of_request(stage: str):
    release, waits = threading.Event(), list[Primitive]()

    def slow(primitive: Primitive) -> Implementation:
        def wait(name: str) -> None:
            if name == stage:
                waits.append(primitive)
                release.wait(60)

        def bind(request: Request) -> Kernel:
            wait("bind")
            return lambda *args, **kwargs: wait("compute")

        support = candidate(primitive, max).support
        return Implementation("slow.v1", primitive, support, bind=bind, check=lambda facts: wait("check") or (), preference=1)

    decode, merge = slow(DECODE), slow(MERGE)
    plugins = [("reference", "mla_portable.reference"), ("slow", make_plugin(decode, merge))]
    reg = Registry(plugins=plugins, environ={"MLA_PORTABLE_PLUGIN_TIMEOUT": "0.05"})
    try:
        for heads in range(1, 11):
            decision = reg.decide(Request(DECODE, reg.facts("cpu"), **{**LARGE, "num_heads": heads}))
            assert decision.chosen == "reference.torch"
            (reason,) = next(v.reasons for v in decision.verdicts if v.implementation == "slow.v1")
            assert reason.given == f"{stage} did not finish within 0.05 s"
        assert not reg.probe(decode, "cpu").ok and waits == [DECODE]
        assert len([each for each in threading.enumerate() if "slow.v1" in each.name]) == 1
        assert reg.decide(Request(MERGE, reg.facts("cpu"))).chosen == "reference.torch"
        alone = [DECODE, MERGE]  # a kernel of another primitive is another one; what finds the library is not asked again
        assert waits == ([DECODE] if stage == "check" else alone)
    finally:
        release.set()


def test_a_detector_that_does_not_finish_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    release, asked = threading.Event(), list[str]()

    def hangs(device: torch.device) -> None:
        asked.append(str(device))
        release.wait(60)

    plugin = make_plugin(candidate(DECODE, RIGHT[DECODE]), detectors=(hangs, lambda device: H200))
    reg = Registry(plugins=[("faulty", plugin)], environ={"MLA_PORTABLE_PLUGIN_TIMEOUT": "0.05"})
    monkeypatch.setattr("mla_portable.choose.machine.resolve_device", torch.device)
    try:
        assert reg.facts("cuda:0") is reg.facts("cuda:1") is H200
        (report,) = reg.plugin_reports
        assert "detector of faulty on cuda:0 did not finish within 0.05 s" in report.error
        assert asked == ["cuda:0"], "the second device does not wait for it again"
    finally:
        release.set()


def test_a_plugin_that_calls_the_registry_from_its_kernel_is_refused_at_once():
    made: list[Registry] = []

    def kernel(*args: Any, **kwargs: Any) -> Any:
        request = Request(DECODE, made[0].facts("cpu"), **LARGE)
        return made[0].bind(request)(*args, **kwargs)

    made.append(registry(candidate(DECODE, kernel)))
    decision = made[0].decide(Request(DECODE, made[0].facts("cpu"), **LARGE))
    assert decision.chosen == "reference.torch"
    (reason,) = decision.verdicts[-1].reasons
    assert "the plugin called the registry" in reason.given


@pytest.mark.parametrize("topk", [16, 64, 300])
def test_of_equal_scores_the_lower_positions_are_probed(topk: int):
    """Among them those at the K-th place, and more scores than K, whatever K is."""

    def later(logits: Tensor, row_starts: Tensor, row_ends: Tensor, *, topk: int, out: Tensor | None = None) -> Tensor:
        width = logits.shape[1]
        starts, ends = row_starts.clamp(0, width), row_ends.clamp(0, width)
        found = TOPK_SELECT.reference(logits.flip(1), width - ends, width - starts, topk=topk)
        kept = torch.where(found >= 0, (ends - starts).unsqueeze(1) - 1 - found, width).sort(dim=1).values
        kept = torch.where(kept < width, kept, -1).to(torch.int32)
        return kept if out is None else out.copy_(kept)

    reg = registry(candidate(TOPK_SELECT, later, kv_layouts=()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(probe_problems.MOST_ON_A_CPU, "topk", 4096)
        decision = reg.decide(Request(TOPK_SELECT, reg.facts("cpu"), topk=topk), backend="faulty")
    (verdict,) = [each for each in decision.verdicts if each.implementation == "faulty.v1"]
    assert [reason.given.partition(":")[0] for reason in verdict.reasons] == ["wrong values"]
