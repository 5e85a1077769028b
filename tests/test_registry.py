# SPDX-License-Identifier: Apache-2.0
"""The registry: what it chooses, what it hands out, what it says, and that it looks at the machine only where it must."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_plugins import implementation, make_plugin
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import CPU, H200, MACHINES, Costs
from vendors import ABSENT, GPU_ONLY, WIDE, Vendor, merge, registry

from mla_portable.choose import Policy, Registry, use
from mla_portable.choose.policy import Rule
from mla_portable.choose.select import decide
from mla_portable.contracts import (
    InvalidArgument,
    Reason,
    Request,
    Support,
    UnsupportedRequest,
)
from mla_portable.primitives import MERGE_STATES, SPARSE_DECODE

# Choosing


@pytest.mark.parametrize(
    ("timed", "order"),
    [
        ({"a": 20.0, "c": 10.0}, "cab"),
        ({"b": 20.0, "c": 10.0}, "cba"),
        ({"c": 10.0}, "cab"),
        ({}, "abc"),
    ],
)
def test_what_was_measured_ranks_before_what_was_only_declared(timed: dict[str, float], order: str):
    costs = Costs(lambda each, _: (timed[each.backend], "evidence") if each.backend in timed else None)
    reg = registry(Vendor("a", 8), Vendor("b", 10), Vendor("c", 50), costs=costs)
    decision = reg.decide(merge(reg), thorough=True)
    assert "".join(verdict.implementation[0] for verdict in decision.verdicts) == order
    assert decision.chosen == f"{order[0]}.v1"


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
    assert "unset MLA_PORTABLE_BACKEND to let the registry choose" in str(refusal.value)
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
    monkeypatch.setattr("mla_portable.choose.registry.CACHE_LIMIT", 8)
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
    monkeypatch.setattr("mla_portable.choose.registry.CACHE_LIMIT", 4)
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


# What it refuses


@pytest.mark.parametrize(
    ("arguments", "argument", "expected"),
    [
        ({"facts": 5}, "facts", "a mapping of device names"),
        ({"facts": {0: CPU}}, "facts", "a mapping of device names"),
        ({"facts": {"cuda": "H200"}}, "facts['cuda']", "DeviceFacts"),
        ({"policy": 5}, "policy", "a Policy"),
        ({"environ": ["MLA_PORTABLE_BACKEND=triton"]}, "environ", "a mapping"),
        ({"environ": {"MLA_PORTABLE_BACKEND": 1}}, "environ['MLA_PORTABLE_BACKEND']", "a string"),
        ({"plugins": 5}, "plugins", "pairs of a name and a module"),
        ({"plugins": [5]}, "plugins[0]", "pairs of a name and a module"),
        ({"plugins": [("reference", "mla_portable.reference"), ("acme",)]}, "plugins[1]", "pairs of a name and a module"),
        ({"plugins": [(5, "mla_portable.reference")]}, "plugins[0]", "pairs of a name and a module"),
        ({"probe": "no"}, "probe", "True or False"),
        ({"costs": 5}, "costs", "a CostTable, 'measured' or None"),
    ],
)
def test_what_no_registry_can_be_made_of_is_refused(arguments: dict[str, Any], argument: str, expected: str):
    with pytest.raises(InvalidArgument) as caught:
        Registry(**{"plugins": [], "environ": {}, **arguments})
    assert (caught.value.where, caught.value.argument) == ("Registry", argument)
    assert expected in caught.value.expected


QUESTIONS = {
    "bind": "request",
    "select": "request",
    "decide": "request",
    "implementations": "primitive",
    "probe": "implementation",
    "configured": "implementation",
    "bind_implementation": "implementation",
    "times": "implementation",
}


@pytest.mark.parametrize("asked", ["merge_states", CPU, 5])
@pytest.mark.parametrize("method", QUESTIONS)
def test_each_question_names_what_it_cannot_be_asked_about(method: str, asked: Any):
    reg, argument = registry(Vendor("fast"), costs="measured"), QUESTIONS[method]
    more = () if argument != "implementation" else ("cpu",) if method == "probe" else (merge(reg),)
    with pytest.raises(InvalidArgument, match=rf"Registry\.{method}: {argument}: got .*, expected an? ") as caught:
        getattr(reg, method)(asked, *more)
    assert caught.value.argument == argument


def test_a_choice_wants_a_request():
    reg = registry(Vendor("fast"))
    for ask in (reg.bind, reg.select, reg.decide):
        with pytest.raises(InvalidArgument, match=r"request: got None, expected a mla_portable\.contracts\.Request"):
            ask(None)
