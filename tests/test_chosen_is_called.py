# SPDX-License-Identifier: Apache-2.0
"""What was chosen is what runs, also where an implementation is right without a layer's promises and wrong with them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_steps import SPEC, make_step, plan_for
from recorder import Recorder, registry_of

import mla_portable.reference
from mla_portable import use
from mla_portable.attention import HeadDims, PromptAttention, SlotAttention, SparseMLAAttention
from mla_portable.choose import Registry, reset_registry
from mla_portable.contracts import (
    Implementation,
    InvalidArgument,
    Primitive,
    Registrar,
    Request,
    ScheduleKind,
    Support,
    hookimpl,
)
from mla_portable.engines.common.routing import decide_route
from mla_portable.engines.sglang import serving as sglang
from mla_portable.kit.split_kv import SPLIT_KV, SplitSchedule
from mla_portable.planner.prompts import plan_prompts
from mla_portable.primitives import CACHE_WRITE, MASKED_PREFILL, SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_common.flash_mla.tile_schedules import FLASHMLA_TILES

CPU = torch.device("cpu")


class Pair:
    """A fast implementation, wrong for requests with `promise`, and a slow one that is right; `calls` names who was called."""

    def __init__(
        self, primitive: Primitive, promise: str, kinds: tuple[ScheduleKind | None, ScheduleKind | None] = (None, None)
    ):
        self.primitive, self.promise, self.kinds = primitive, promise, kinds
        self.calls: list[tuple[str, Any]] = []

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        lengths = self.promise == "lengths"
        for name, preference, kind in (("acme.fast", 1.0, self.kinds[0]), ("acme.slow", 2.0, self.kinds[1])):
            support = Support(
                source="a test",
                device_types=None,
                kv_layouts=None if self.primitive is MASKED_PREFILL else ("bf16",),
                needs_bf16=False,
                lengths=lengths,
                selection=True,
                attn_sink=True,
            )

            def bind(request: Request, name: str = name) -> Any:
                return self._bound(name, request)

            own = {"schedule_kind": kind} if kind else {}
            registrar.add(Implementation(name, self.primitive, support, bind, preference=preference, **own))

    def _bound(self, name: str, request: Request) -> Any:
        reference = self.primitive.reference

        def call(*args: Any, **named: Any) -> Any:
            self.calls.append((name, named.get("schedule")))
            out, lse = reference(*args, **named)
            if name == "acme.fast" and getattr(request, self.promise):
                out.zero_()
            return out, lse

        return call

    @property
    def registry(self) -> Registry:
        return Registry(plugins=[("reference", mla_portable.reference), ("acme", self)], environ={})


BF16 = replace(SPEC, kv_layout="bf16", scale_format=None)


@pytest.mark.parametrize("promise", ["clean_indices", "follows_in_order", "lengths"])
def test_a_layer(promise: str):
    """The schedule of a step is of the kind that the called one takes."""
    pair = Pair(SPARSE_DECODE, promise, (FLASHMLA_TILES, SPLIT_KV))
    layer = SparseMLAAttention(BF16, device=CPU, registry=pair.registry, backend={"sparse_decode": "acme"})
    part = layer.route_decision.verdict.part("decode")
    assert part is not None
    served = part.decision.chosen
    # FlashMLA's tiles assume K keys in every row, so lengths are not asked for; the reference ends in order on a CPU
    wrong = promise == "clean_indices" or (promise == "follows_in_order" and part.decision.request.follows_in_order)
    assert served == ("acme.slow" if wrong else "acme.fast")
    assert served in layer.explain() and layer.planner_config().schedule_kind is (SPLIT_KV if wrong else FLASHMLA_TILES)
    if not wrong:
        return  # no plan of tiles can be made for a CPU
    pair.calls.clear()
    step = make_step("decodes", "bf16")
    out, _ = layer(step.q, step.kv_cache, step.topk_indices, plan_for(layer, step.batch))
    assert [name for name, _ in pair.calls] == [served] and isinstance(pair.calls[0][1], SplitSchedule)
    right = SparseMLAAttention(BF16, device=CPU, registry=pair.registry, backend="reference")
    assert torch.equal(out, right(step.q, step.kv_cache, step.topk_indices, plan_for(right, step.batch))[0])


def test_lengths_are_left_out_where_the_chosen_implementation_is_wrong_with_them():
    """The indices are then not compacted, either."""
    pair = Pair(SPARSE_DECODE, "lengths")
    backend = {"sparse_decode": "acme"}
    layer = SparseMLAAttention(replace(BF16, route="fused"), device=CPU, registry=pair.registry, backend=backend)
    requests = {part.role: part.decision.request for part in layer.route_decision.verdict.parts}
    assert layer.route_decision.verdict.part("decode").decision.chosen == "acme.fast"  # type: ignore[union-attr]
    assert not requests["decode"].lengths and not requests["convert"].compact


@pytest.mark.parametrize("clean", [False, True])
def test_slot_attention(clean: bool):
    pair = Pair(SPARSE_PREFILL, "clean_indices")
    spec = replace(BF16, need_lse=False, route="direct")
    backend = {"sparse_prefill": "acme", "sparse_decode": "reference"}
    attention = SlotAttention(spec, device=CPU, registry=pair.registry, backend=backend, clean_slots=clean)
    part = attention.route_decision.verdict.part("prefill")
    assert part is not None and part.decision.chosen == ("acme.slow" if clean else "acme.fast")
    pair.calls.clear()
    q, kv = torch.ones((4, spec.num_heads, 576), dtype=torch.bfloat16), torch.ones((8, 576), dtype=torch.bfloat16)
    slots = torch.zeros((4, spec.topk), dtype=torch.int32)
    out = attention.forward(q, kv, slots, softmax_scale=spec.softmax_scale, decodes=False)
    assert [name for name, _ in pair.calls] == [part.decision.chosen] and (out == 1).all()


class Asked:
    """Counts what a registry is asked to decide, by request, and what plugins compute in probes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: Counter[Request] = Counter()
        decide = Registry.decide

        def counted(registry: Registry, request: Request, **named: Any) -> Any:
            self.requests[request] += 1
            return decide(registry, request, **named)

        monkeypatch.setattr(Registry, "decide", counted)


@pytest.mark.parametrize("clean", [False, True])
def test_slots_take_the_decision_that_was_made(clean: bool, monkeypatch: pytest.MonkeyPatch):
    """One decision, and each request is decided and tried once."""
    pair, asked = Pair(SPARSE_PREFILL, "clean_indices"), Asked(monkeypatch)
    registry = pair.registry
    decision = decide_route(replace(BF16, need_lse=False), CPU, registry=registry, clean_slots=clean)
    decided, tried = Counter(asked.requests), len(pair.calls)
    assert tried
    attention = SlotAttention(decision.spec, device=CPU, registry=registry, clean_slots=clean, route_decision=decision)
    assert attention.route_decision is decision
    assert decided and set(asked.requests.values()) == {1}
    assert all(request.lengths for request in asked.requests - decided)  # of calls with lengths, which a route does not decide
    assert len(pair.calls) == tried, "nothing is tried again"
    part = decision.verdict.part("prefill")
    assert part is not None and part.decision.chosen == ("acme.slow" if clean else "acme.fast")
    pair.calls.clear()
    q, kv = torch.ones((4, BF16.num_heads, 576), dtype=torch.bfloat16), torch.ones((8, 576), dtype=torch.bfloat16)
    slots = torch.zeros((4, BF16.topk), dtype=torch.int32)
    out = attention.forward(q, kv, slots, softmax_scale=0.1, decodes=False)
    assert [name for name, _ in pair.calls] == [part.decision.chosen] and (out == 1).all()


def test_a_layer_takes_the_decision_that_was_made(monkeypatch: pytest.MonkeyPatch):
    pair, asked = Pair(SPARSE_DECODE, "clean_indices"), Asked(monkeypatch)
    registry = pair.registry
    decision = decide_route(BF16, CPU, registry=registry)
    decided, tried = Counter(asked.requests), len(pair.calls)
    layer = SparseMLAAttention(decision.spec, device=CPU, registry=registry, route_decision=decision)
    assert layer.route_decision is decision and layer.route == decision.chosen
    assert set(asked.requests.values()) == {1} and len(pair.calls) == tried
    assert {request.primitive for request in asked.requests - decided} == {CACHE_WRITE}


def test_sglangs_layers_take_the_decision_of_their_backend(monkeypatch: pytest.MonkeyPatch):
    made: list[Any] = []
    decide = sglang.decide_route
    monkeypatch.setattr(sglang, "decide_route", lambda *given, **named: made.append(decide(*given, **named)) or made[-1])
    reset_registry()
    try:
        with use("reference"):
            attention = sglang._attention(replace(BF16, need_lse=False, graph=False), CPU, clean=True)
    finally:
        reset_registry()
    assert len(made) == 1 and attention.route_decision is made[0]


REFUSED_DECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no decision": ({}, {"route_decision": "direct"}, "a RouteDecision, or None"),
    "of another spec": ({}, {"spec": replace(BF16, need_lse=False, route="direct", num_heads=8)}, "another spec"),
    "of another promise": ({"clean_slots": True}, {"clean_slots": False}, "clean_slots=True, expected clean_slots=False"),
    "of a layer": ({"clean_slots": None}, {}, "other indices"),
    "of another device": ({}, {"registry": registry_of(Recorder())}, "a decision for"),
}


@pytest.mark.parametrize("what", REFUSED_DECISIONS)
def test_a_decision_on_something_else_is_refused(what: str):
    decided, given, words = REFUSED_DECISIONS[what]
    registry = Pair(SPARSE_PREFILL, "clean_indices").registry
    spec = replace(BF16, need_lse=False, route="direct")
    decision = decide_route(spec, CPU, **{"registry": registry, "clean_slots": False} | decided)
    built = {"spec": decision.spec, "registry": registry, "route_decision": decision, "device": CPU} | given
    with pytest.raises(InvalidArgument, match=words):
        SlotAttention(**built)


def test_a_decision_on_slots_is_no_decision_on_a_layer():
    spec = replace(BF16, need_lse=False, route="direct")
    registry = Pair(SPARSE_PREFILL, "clean_indices").registry
    decision = decide_route(spec, CPU, registry=registry, clean_slots=True)
    with pytest.raises(InvalidArgument, match="route_decision"):
        SparseMLAAttention(spec, device=CPU, registry=registry, route_decision=decision)


def test_the_parts_of_prompts():
    """Several parts of the keys need the lse, which the fast one spoils."""
    pair = Pair(MASKED_PREFILL, "lse")
    dims = HeadDims(16, 64, 16)
    backend = {"masked_prefill": "acme"}
    layer = PromptAttention(BF16, dims, device=CPU, registry=pair.registry, backend=backend, key_rows=64)
    served = {name: layer.decisions[name].chosen for name in ("dense", "masked", "dense part", "masked part")}
    assert served == {"dense": "acme.fast", "masked": "acme.fast", "dense part": "acme.slow", "masked part": "acme.slow"}
    lens = np.array([10], dtype=np.int32)
    for context, expected in ((0, ["acme.fast"]), (100, ["acme.slow"] * 2)):
        table = torch.arange(16, dtype=torch.int32)[None]
        plan = plan_prompts(lens, lens + np.int32(context), table, topk=BF16.topk * 100, key_rows=64)
        pair.calls.clear()
        tokens, cache = 10, torch.zeros((16, BF16.block_size, 576), dtype=torch.bfloat16)
        q = torch.ones((tokens, BF16.num_heads, dims.query), dtype=torch.bfloat16)
        new = torch.ones((tokens, 512), dtype=torch.bfloat16), torch.ones((tokens, 64), dtype=torch.bfloat16)

        def project(rows: torch.Tensor) -> torch.Tensor:
            return rows[:, :1].expand(-1, BF16.num_heads * (dims.nope + dims.value)).contiguous()

        layer(q, *new, project, cache, None, plan)
        assert [name for name, _ in pair.calls] == expected


@pytest.mark.parametrize(("route", "gathers"), [("direct", False), ("fused", False), ("split", True)])
def test_a_forced_route_asks_for_nothing_of_the_others(route: str, gathers: bool, monkeypatch: pytest.MonkeyPatch):
    """Each answer may take a probe."""
    registry = Registry(plugins=[("reference", mla_portable.reference)], environ={}, probe=False)
    asked = list[Request]()
    decide = Registry.decide
    monkeypatch.setattr(
        Registry, "decide", lambda self, request, **named: asked.append(request) or decide(self, request, **named)
    )
    SparseMLAAttention(replace(SPEC, route=route), device=CPU, registry=registry)
    assert any(str(request.primitive) == "gather_upconvert" for request in asked) is gathers
    assert any(request.kv_layout == "bf16" for request in asked) is gathers
