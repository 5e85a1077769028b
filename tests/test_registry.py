# SPDX-License-Identifier: Apache-2.0
"""The registry: what it chooses, what it hands out, what it says, and that it looks at the machine only where it must."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from fake_plugins import ANYWHERE, implementation, make_plugin
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import CPU, H200, MACHINES

from mla_portable.contracts import (
    DeviceFacts,
    Implementation,
    InvalidArgument,
    PluginError,
    Primitive,
    Reason,
    Request,
    Support,
    UnsupportedRequest,
)
from mla_portable.primitives import CACHE_WRITE, MERGE_STATES, QUANTIZE_PER_TENSOR, SPARSE_DECODE
from mla_portable.registry import Policy, Registry, get_registry, reset_registry, use
from mla_portable.registry.limits import limited
from mla_portable.registry.policy import Rule
from mla_portable.registry.select import decide

GPU_ONLY = Support(source="a test", device_types=("cuda",))
WIDE = Support(source="a test", device_types=("cpu", "cuda"), topk_multiple=64)


@dataclass
class Vendor:
    """Implementations of merge_states that note when they are looked at; `missing` and `wrong` say what is found."""

    name: str
    preference: float = 10
    support: Support = ANYWHERE
    missing: tuple[Reason, ...] = ()
    wrong: bool = False
    checked: list[str] = field(default_factory=list)
    bound: list[Request] = field(default_factory=list)

    def check(self, device: DeviceFacts) -> Iterable[Reason]:
        self.checked.append(device.name)
        return self.missing

    def bind(self, request: Request) -> Callable[..., Any]:
        self.bound.append(request)

        def merge(outs: Any, lses: Any) -> Any:
            if self.wrong:
                raise RuntimeError("not implemented for this build")
            return MERGE_STATES.reference(outs, lses)

        return merge

    def plugin(self) -> tuple[str, object]:
        made = implementation(
            f"{self.name}.v1", support=self.support, bind=self.bind, check=self.check, preference=self.preference
        )
        return self.name, make_plugin(made)


def registry(*vendors: Vendor, **fields: Any) -> Registry:
    return Registry(plugins=[vendor.plugin() for vendor in vendors], **{"environ": {}, **fields})


def merge(reg: Registry, **fields: Any) -> Request:
    return Request(MERGE_STATES, reg.facts("cpu"), **fields)


ABSENT = Reason("libfast", "not found", "needs 2.1", "pip install libfast")


# Choosing


def test_cost_then_name_decides():
    vendors = [Vendor("zeta", 10), Vendor("beta", 10), Vendor("alpha", 20)]
    reg = registry(*vendors)
    decision = reg.decide(merge(reg))
    assert decision.chosen == "beta.v1"
    assert [v.implementation for v in decision.verdicts] == ["beta.v1", "zeta.v1", "alpha.v1"]
    assert not decision.was_fallback


def test_measured_costs_replace_declared_ones():
    def costs(candidate: Implementation, request: Request) -> tuple[float, str] | None:
        return (0.5, "evidence/slow.jsonl") if candidate.backend == "slow" else None

    reg = registry(Vendor("fast", 10), Vendor("slow", 1000), costs=costs)
    decision = reg.decide(merge(reg))
    assert decision.chosen == "slow.v1"
    assert [(v.cost, v.cost_source) for v in decision.verdicts] == [(0.5, "evidence/slow.jsonl"), (10, "declared")]


def test_only_as_many_candidates_are_looked_at_as_the_choice_needs():
    first, second, third = Vendor("first", 1, missing=(ABSENT,)), Vendor("second", 2), Vendor("third", 3)
    reg = registry(first, second, third)
    decision = reg.decide(merge(reg))
    assert decision.chosen == "second.v1"
    assert [len(v.checked) for v in (first, second, third)] == [1, 1, 0]
    assert [len(v.bound) for v in (first, second, third)] == [0, 1, 0], "probed where the check passes"
    thorough = reg.decide(merge(reg), thorough=True)
    assert thorough.chosen == "second.v1"
    assert [len(v.checked) for v in (first, second, third)] == [1, 1, 1], "each once"
    assert [len(v.bound) for v in (first, second, third)] == [0, 1, 1]


def test_a_candidate_that_cannot_run_here_is_not_asked_and_not_probed():
    gpu, disabled, chosen = Vendor("gpu", 1, GPU_ONLY), Vendor("off", 2), Vendor("plain", 3)
    reg = registry(gpu, disabled, chosen, environ={"MLA_PORTABLE_DISABLE": "off"})
    assert reg.decide(merge(reg), thorough=True).chosen == "plain.v1"
    assert (gpu.checked, disabled.checked, gpu.bound, disabled.bound) == ([], [], [], [])


def test_shape_and_library_reasons_come_together():
    vendor, plain = Vendor("fast", 1, WIDE, missing=(ABSENT,)), Vendor("plain", 9)
    reg = registry(vendor, plain)
    decision = reg.decide(merge(reg, topk=100), thorough=True)
    fast = next(v for v in decision.verdicts if v.implementation == "fast.v1")
    assert [r.subject for r in fast.reasons] == ["topk", "libfast"]


def test_scales_of_an_unknown_format_are_read_as_amax():
    support = Support(source="a test", device_types=("cpu",), kv_layouts=("fp8_ds_mla",), scale_formats=("pow2",))
    cpu = DeviceFacts(vendor="cpu", name="cpu", arch="cpu", device_type="cpu")
    request = Request(SPARSE_DECODE, cpu, kv_layout="fp8_ds_mla")
    found = {name: [str(r) for r in support.reasons(request.but(scale_format=name))] for name in (None, "amax", "pow2")}
    assert found["pow2"] == [] and "unknown, read as amax" in found[None][0] and "amax" in found["amax"][0]


def test_a_kernel_for_64_heads_takes_64():
    support = Support(source="a test", device_types=("cpu",), padded_heads=(64,))
    cpu = DeviceFacts(vendor="cpu", name="cpu", arch="cpu", device_type="cpu")
    accepted = [n for n in (1, 63, 64, 65) if not support.reasons(Request(MERGE_STATES, cpu, num_heads=n))]
    assert accepted == [1, 63, 64]


def test_a_failed_probe_passes_over_and_is_told():
    vendors = Vendor("wrong", 1, wrong=True), Vendor("plain", 9)
    reg = registry(*vendors)
    decision = reg.decide(merge(reg))
    assert decision.chosen == "plain.v1" and decision.was_fallback
    (reason,) = decision.verdicts[-1].reasons
    assert (reason.subject, reason.given) == ("probe", "compute raised RuntimeError: not implemented for this build")


def test_probing_can_be_left_out():
    wrong = Vendor("wrong", 1, wrong=True)
    reg = registry(wrong)
    assert reg.decide(merge(reg), probe=False).chosen == "wrong.v1" and wrong.checked and not wrong.bound
    assert reg.decide(merge(reg)).chosen is None
    reg = registry(other := Vendor("wrong", 1, wrong=True), probe=False)
    assert reg.decide(merge(reg)).chosen == "wrong.v1" and not other.bound


@pytest.mark.parametrize("machine", ["H200", "CPU"])
def test_a_machine_that_is_not_here_is_never_touched(machine: str):
    vendor = Vendor("fast", 1, missing=(ABSENT,), wrong=True)
    facts = MACHINES[machine]
    simulated = registry(vendor, facts={facts.device_type: facts})
    request = Request(MERGE_STATES, simulated.facts(facts.device_type))
    assert simulated.decide(request, thorough=True).chosen == "fast.v1"
    assert registry(vendor).decide(Request(MERGE_STATES, facts)).chosen == "fast.v1", "facts from elsewhere"
    assert (vendor.checked, vendor.bound) == ([], [])


def test_a_machine_simulated_on_its_own_like_is_not_touched_either():
    vendor = Vendor("fast", 1)
    here = registry().facts("cpu")
    reg = registry(vendor, facts={"cpu": here})
    assert reg.facts("cpu") is here and reg.decide(merge(reg), thorough=True).chosen == "fast.v1"
    assert (vendor.checked, vendor.bound) == ([], [])


def test_facts_gathered_elsewhere_are_recognised_as_this_machine():
    vendor = Vendor("fast", 1)
    request = merge(registry())
    registry(vendor).decide(request)
    assert vendor.checked and vendor.bound


def test_a_forced_choice_looks_at_nothing_else():
    cheap, dear = Vendor("cheap", 1), Vendor("dear", 100)
    reg = registry(cheap, dear)
    decision = reg.decide(merge(reg), backend="dear")
    assert (decision.chosen, decision.forced, decision.was_fallback) == ("dear.v1", "dear", False)
    assert (cheap.checked, cheap.bound) == ([], [])


def test_a_forced_choice_never_falls_back():
    wrong, plain = Vendor("wrong", 1, WIDE, missing=(ABSENT,)), Vendor("plain", 9)
    reg = registry(wrong, plain, environ={"MLA_PORTABLE_BACKEND": "wrong"})
    with pytest.raises(UnsupportedRequest) as refusal:
        reg.bind(merge(reg, topk=100))
    decision = refusal.value.decision
    assert decision.control == "MLA_PORTABLE_BACKEND"
    assert [r.subject for r in decision.verdicts[0].reasons] == ["topk", "libfast"]
    assert [v.can_run for v in decision.verdicts] == [False, True]
    assert "pip install libfast" in str(refusal.value)
    assert "drop MLA_PORTABLE_BACKEND to let the registry choose" in str(refusal.value)
    assert not plain.bound


def test_a_refusal_does_not_promise_what_it_has_not_looked_at():
    """The others stand in the text of a forced choice that failed: those that fit the device have been checked by then."""
    other = Vendor("other", 2, missing=(ABSENT,))
    reg = registry(Vendor("gpu", 1, GPU_ONLY), other)
    decision = reg.decide(merge(reg), backend="gpu")
    assert [v.can_run for v in decision.verdicts] == [False, False]
    assert len(other.checked) == 1 and not other.bound


def test_a_forced_backend_without_this_primitive_says_what_it_offers():
    reg = registry(Vendor("fast"), facts={"cuda": H200})
    for control, text in (({}, "argument"), ({"MLA_PORTABLE_BACKEND": "fast"}, "MLA_PORTABLE_BACKEND")):
        reg = registry(Vendor("fast"), facts={"cuda": H200}, environ=control)
        decision = reg.decide(Request(SPARSE_DECODE, H200), backend=None if control else "fast")
        assert (decision.chosen, decision.control) == (None, text)
        (verdict,) = decision.verdicts
        assert (verdict.implementation, str(verdict.reasons[0])) == (
            "fast",
            "sparse_decode not offered (fast offers merge_states)",
        )


def test_nothing_can_run_is_told_with_every_reason():
    reg = registry(Vendor("gpu", 1, GPU_ONLY), Vendor("fast", 2, missing=(ABSENT,)))
    with pytest.raises(UnsupportedRequest) as refusal:
        reg.select(merge(reg))
    reasons = {v.implementation: [r.subject for r in v.reasons] for v in refusal.value.decision.verdicts}
    assert reasons == {"gpu.v1": ["device type"], "fast.v1": ["libfast"]}
    with pytest.raises(UnsupportedRequest, match="no installed plugin offers this primitive"):
        reg.select(Request(CACHE_WRITE, reg.facts("cpu")))


# A property: the choice is the least cost among those without a reason

_heads = st.sampled_from((None, (64, 128), (16,), (1, 2, 4, 8)))
_supports = st.builds(
    Support,
    source=st.just("hypothesis"),
    device_types=st.sampled_from((("cuda",), ("cpu",), ("cpu", "cuda"))),
    vendors=st.sampled_from((None, ("nvidia",), ("amd", "iluvatar"))),
    archs=st.sampled_from((None, ("sm90", "sm100"), ("gfx942",), ("ivcore11", "sm80"))),
    kv_layouts=st.sampled_from((("bf16",), ("fp8_ds_mla",), ("bf16", "fp8_ds_mla"))),
    num_heads=_heads,
    max_heads=st.sampled_from((None, 32, 128)),
    padded_heads=st.sampled_from(((), (64, 128))),
    topk_multiple=st.sampled_from((1, 64, 128)),
    block_sizes=st.sampled_from((None, (64,), (1, 16))),
    max_query_len=st.sampled_from((None, 1, 2)),
    attn_sink=st.booleans(),
    graph=st.booleans(),
    needs_fp8_conversion=st.booleans(),
)
_requests = st.builds(
    Request,
    primitive=st.just(SPARSE_DECODE),
    device=st.sampled_from(tuple(MACHINES.values())),
    kv_layout=st.sampled_from(("bf16", "fp8_ds_mla")),
    num_heads=st.sampled_from((1, 16, 64, 128)),
    topk=st.sampled_from((64, 100, 2048)),
    block_size=st.sampled_from((1, 16, 64)),
    query_len=st.sampled_from((1, 2, 4)),
    attn_sink=st.booleans(),
    graph=st.booleans(),
)
_candidates = st.lists(st.tuples(_supports, st.integers(0, 3), st.booleans()), max_size=6)


@settings(max_examples=300, deadline=None)
@given(request=_requests, drawn=_candidates, off=st.sets(st.integers(0, 5)), forced=st.none() | st.integers(0, 5))
def test_the_choice_is_the_cheapest_without_a_reason(request: Request, drawn: list, off: set[int], forced: int | None):
    """Against a brute-force statement: filter, then take the least (cost, name)."""
    candidates = [
        implementation(f"b{rank}.v", SPARSE_DECODE, support, preference=cost) for rank, (support, cost, _) in enumerate(drawn)
    ]
    passes = {f"b{rank}.v": good for rank, (_, _, good) in enumerate(drawn)}
    policy = Policy(
        rules=(Rule(f"b{forced}", "a test"),) if forced is not None else (),
        disabled=tuple((f"b{rank}", "a test") for rank in off),
    )
    decision = decide(
        request, candidates, policy, probe=lambda i: () if passes[i.name] else (Reason("probe", "wrong", "values"),)
    )
    able = [
        (c.preference, c.name)
        for rank, c in enumerate(candidates)
        if not c.support.reasons(request) and passes[c.name] and rank not in off and forced in (None, rank)
    ]
    assert decision.chosen == (min(able)[1] if able else None)
    verdicts = {v.implementation: v for v in decision.verdicts}
    assert {c.name for c in candidates} <= set(verdicts)
    assert decision.chosen is None or verdicts[decision.chosen].can_run
    for rank, c in enumerate(candidates):
        told = verdicts[c.name].reasons
        assert set(c.support.reasons(request)) <= set(told), "every declared reason is told"
        assert any(r.subject == "disabled" for r in told) == (rank in off)


# Binding


def test_bind_hands_out_the_implementations_own_callable_once():
    vendor = Vendor("fast")
    reg = registry(vendor, probe=False)
    request = merge(reg)
    bound = reg.bind(request)
    assert bound.__qualname__ == "Vendor.bind.<locals>.merge", "no wrapper"
    assert reg.bind(merge(reg)) is bound and len(vendor.bound) == 1
    assert reg.bind(request.but(num_heads=2)) is not bound and len(vendor.bound) == 2


def test_the_same_request_under_another_policy_is_bound_anew():
    reg = registry(Vendor("fast", 1), slow := Vendor("slow", 9), probe=False)
    request = merge(reg)
    first = reg.bind(request)
    with use("slow"):
        assert reg.bind(request) is not first and len(slow.bound) == 1
        assert reg.bind(request, backend="fast") is not None
    assert reg.bind(request) is first
    reg.reload_policy()
    assert reg.bind(request) is not first


def test_what_bind_raises_travels_up_and_is_not_remembered():
    failures = [MemoryError("no room for tables")]

    def bind(request: Request) -> Callable[..., Any]:
        if failures:
            raise failures.pop()
        return max

    reg = Registry(plugins=[("fast", make_plugin(implementation("fast.v1", bind=bind)))], environ={}, probe=False)
    with pytest.raises(MemoryError):
        reg.bind(merge(reg))
    assert reg.bind(merge(reg)) is max


def test_many_different_requests_do_not_pile_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mla_portable.registry.registry.CACHE_LIMIT", 8)
    vendor = Vendor("fast")
    reg = registry(vendor, probe=False)
    for rows in range(50):
        reg.bind(merge(reg, rows=rows))
    assert max(len(reg._bound), len(reg._selected)) <= 8
    assert len(vendor.bound) == 50


def test_a_refusal_is_remembered_and_raised_every_time(monkeypatch: pytest.MonkeyPatch):
    reg = registry(Vendor("fast", 1, WIDE))
    request = merge(reg, topk=100)
    refusals: list[UnsupportedRequest] = []
    for _ in range(2):
        with pytest.raises(UnsupportedRequest) as refusal:
            reg.bind(request)
        refusals.append(refusal.value)
        monkeypatch.setattr(Registry, "decide", None)  # not asked a second time
    first, second = refusals
    assert first is not second and first.decision is second.decision
    monkeypatch.undo()
    reg.reload_policy()
    with pytest.raises(UnsupportedRequest) as refusal:
        reg.bind(request)
    assert refusal.value.decision is not first.decision


def test_what_was_checked_and_logged_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mla_portable.registry.registry.CACHE_LIMIT", 4)
    reg = registry(Vendor("fast", 1, WIDE), *(Vendor(f"b{i}", 9) for i in range(8)))
    for i in range(8):
        reg.decide(merge(reg), backend=f"b{i}")
        with use(f"b{i}"):
            reg.decide(merge(reg))
        decision = reg.decide(merge(reg, topk=100))
        passed = replace(decision.verdicts[-1], reasons=(Reason("topk", "100", f"limit {i}"),))
        reg._log_once(replace(decision, verdicts=(*decision.verdicts[:-1], passed)))
    assert 0 < len(reg._names_checked) <= 4 and 0 < len(reg._logged) <= 4


def test_what_was_bound_while_the_policy_changed_is_not_kept():
    """Another thread reloads the policy while `bind` compiles: the callable serves this call, the next one asks again."""
    environ: dict[str, str] = {}
    vendor, other = Vendor("fast", 1), Vendor("other", 9)
    reg = registry(vendor, other, environ=environ, probe=False)
    bind = vendor.bind

    def slow_bind(request: Request) -> Callable[..., Any]:
        environ["MLA_PORTABLE_BACKEND"] = "other"
        reg.reload_policy()
        return bind(request)

    made = next(i for i in reg.implementations() if i.backend == "fast")
    object.__setattr__(made, "bind", slow_bind)
    reg.bind(merge(reg))
    assert (len(vendor.bound), len(other.bound)) == (1, 0)
    reg.bind(merge(reg))
    assert (len(vendor.bound), len(other.bound)) == (1, 1)


def test_bind_runs_under_torchs_own_defaults():
    seen: list[object] = []

    def bind(request: Request) -> Callable[..., Any]:
        seen.append((torch.empty(0).dtype, torch.empty(0).device.type, torch.is_inference_mode_enabled()))
        return max

    reg = Registry(plugins=[("fast", make_plugin(implementation("fast.v1", bind=bind)))], environ={}, probe=False)
    with torch.device("meta"), torch.inference_mode():
        reg.bind(merge(reg))
    assert seen == [(torch.float32, "cpu", False)]


# What is logged


def log_lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "mla_portable.registry"]


def test_passing_over_a_cheaper_candidate_is_logged_once_per_reason(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    reg = registry(Vendor("fast", 1, WIDE), Vendor("plain", 9), facts={"cuda": H200})
    request = Request(MERGE_STATES, H200)
    reg.select(request.but(topk=64))
    assert log_lines(caplog) == []
    for topk in (100, 100, 101):
        reg.select(request.but(topk=topk))
    ((level, text),) = log_lines(caplog)
    assert level == "WARNING" and "topk 100 (a multiple of 64)" in text and "plain.v1" in text
    with use("plain"):
        reg.select(request.but(topk=100))
    assert len(log_lines(caplog)) == 1, "a forced choice is the user's own"


@pytest.mark.parametrize(
    ("vendor", "level"),
    [
        (Vendor("gpu", 1, GPU_ONLY), "INFO"),  # nothing that could be had here
        (Vendor("fast", 1, missing=(ABSENT,)), "INFO"),  # on a CPU nobody waits for speed
        (Vendor("fast", 1, wrong=True), "WARNING"),  # a kernel that computes nonsense is news anywhere
    ],
    ids=["other device", "library absent", "wrong"],
)
def test_the_level_says_whether_something_is_lost(vendor: Vendor, level: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    vendor.checked.clear()
    reg = registry(vendor, Vendor("plain", 9))
    reg.select(merge(reg))
    assert [each for each, _ in log_lines(caplog)] == [level]


def test_what_is_logged_is_the_cause_and_a_count(caplog: pytest.LogCaptureFixture):
    others = [Vendor(f"other{n}", 1, Support(source="a test", archs=("ivcore11",))) for n in range(45)]
    reg = registry(Vendor("fast", 1, WIDE), *others, Vendor("plain", 9), facts={"cuda": H200})
    reg.select(Request(MERGE_STATES, H200, topk=100))
    ((_, text),) = log_lines(caplog)
    lines = text.splitlines()
    assert lines[0].startswith("merge_states: plain.v1") and "fast.v1: topk 100 (a multiple of 64)" in lines[1]
    assert "45 implementations for other devices" in lines[2] and "other1" not in text and len(lines) <= 10


def test_plain_torch_on_an_accelerator_is_a_warning_with_the_plugins_that_are_broken(caplog: pytest.LogCaptureFixture):
    plugins = [("reference", "mla_portable.reference"), ("kernels", "fake_plugins.raises_on_import")]
    reg = Registry(plugins=plugins, facts={"cuda": H200}, environ={})
    for _ in range(2):
        assert reg.select(Request(MERGE_STATES, H200))[0].name == "reference.torch"
    ((level, text),) = log_lines(caplog)
    assert level == "WARNING" and "kernels: plugin did not load: ImportError" in text
    reg.select(Request(QUANTIZE_PER_TENSOR, H200), backend="reference")
    assert len(log_lines(caplog)) == 1, "it was asked for"


# Processes, threads, forks


@pytest.fixture
def own_process_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("MLA_PORTABLE_")]:
        monkeypatch.delenv(name)
    reset_registry()
    yield
    reset_registry()


def test_the_process_has_one_registry_with_the_installed_plugins(own_process_registry: None):
    found: list[Registry] = []
    threads = [threading.Thread(target=lambda: found.append(get_registry())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(reg) for reg in found}) == 1
    (reg,) = set(found)
    assert "reference" in reg.backends and reg is get_registry()
    assert {i.primitive for i in reg.implementations() if i.backend == "reference"} == set(Primitive.all())
    reset_registry()
    assert get_registry() is not reg


def test_a_plugin_that_asks_for_the_registry_while_it_is_built_is_reported(
    own_process_registry: None, monkeypatch: pytest.MonkeyPatch
):
    from mla_portable.contracts import hookimpl
    from mla_portable.registry import sources as loading

    module = make_plugin()
    vars(module)["mla_portable_register"] = hookimpl(lambda registrar: get_registry())
    sources = loading.given_plugins([("nosy", module), Vendor("plain").plugin()])
    monkeypatch.setattr("mla_portable.registry.registry.installed_plugins", lambda: sources)
    nosy, plain = get_registry().plugin_reports
    assert nosy.error.startswith(PluginError.__name__) and "while it is being built" in nosy.error
    assert plain.ok


def test_a_plugin_that_asks_for_the_registry_from_another_thread_is_refused_and_does_not_wait(
    own_process_registry: None, monkeypatch: pytest.MonkeyPatch
):
    from mla_portable.contracts import hookimpl
    from mla_portable.registry import sources as loading

    module = make_plugin()
    vars(module)["mla_portable_register"] = hookimpl(lambda registrar: limited("import of nosy", 20, get_registry))
    sources = loading.given_plugins([("nosy", module), Vendor("plain").plugin()])
    monkeypatch.setattr("mla_portable.registry.registry.installed_plugins", lambda: sources)
    nosy, plain = get_registry().plugin_reports
    assert "while it is being built" in nosy.error and plain.ok


def test_the_second_of_two_equal_gpus_does_not_take_the_place_of_the_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mla_portable.registry.machine.resolve_device", torch.device)
    plugin = make_plugin(implementation("fast.v1"), detectors=(lambda device: H200,))
    machine = Registry(plugins=[("fast", plugin)], environ={})._machine
    assert machine.facts("cuda:0") is machine.facts("cuda:1") is H200
    assert machine.device_of(H200) == torch.device("cuda:0")


def test_one_thread_probes_and_the_others_wait():
    begun, go = threading.Event(), threading.Event()
    calls: list[int] = []

    def check(device: DeviceFacts) -> Iterable[Reason]:
        calls.append(1)
        begun.set()
        go.wait(10)
        return ()

    reg = Registry(plugins=[("fast", make_plugin(implementation("fast.v1", bind=Vendor("x").bind, check=check)))], environ={})
    request = merge(reg)
    chosen: list[str | None] = []
    threads = [threading.Thread(target=lambda: chosen.append(reg.decide(request).chosen)) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    go.set()
    for thread in threads:
        thread.join()
    assert chosen == ["fast.v1"] * 4 and len(calls) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_a_forked_child_is_not_held_up_by_locks_of_its_parent():
    reg = registry(Vendor("fast"))
    request = merge(reg)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with reg._lock, reg._machine._lock:
            held.set()
            release.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    child = os.fork()
    if child == 0:  # in the thread that forked: a new one could be given the identity, and so the locks, of the holder
        signal.alarm(10)
        os._exit(0 if reg.select(request)[0].name == "fast.v1" else 1)
    status = os.waitpid(child, 0)[1]
    release.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


def test_devices_that_are_not_here_are_refused():
    reg = registry(Vendor("fast"))
    with pytest.raises(InvalidArgument, match="expected a torch device"):
        reg.facts("gpu")
    assert reg.facts("cpu") is reg.facts("cpu"), "gathered once"
    with pytest.raises(InvalidArgument, match="simulated"):
        registry(Vendor("fast"), facts={"cpu": CPU}).probe(reg.implementations()[0], "cpu")
