# SPDX-License-Identifier: Apache-2.0
"""Route `split` where both ways of a prefill were timed: each chunk of a step takes the faster one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attention_steps import BATCHES, HEADS, SPEC, TOPK, assert_matches, make_step, plan_for
from machines import H200, costs_of
from recorder import Recorder
from shares import shared

import mla_portable
from mla_portable.attention import SparseMLAAttention, UnsupportedRoute
from mla_portable.choose import Registry
from mla_portable.contracts import ContextShare, PlanMismatch
from mla_portable.kit.split_kv import SPLIT_KV
from mla_portable.planner import Planner
from mla_portable.times.prefill import PrefillTimes
from mla_portable.times.rows import Times

FP8 = "fp8_ds_mla"
DECODE, IN_PLACE, ROWS = ("sparse_decode", FP8), ("sparse_prefill", FP8), ("sparse_prefill", "bf16")
GATHER = ("gather_upconvert", FP8)
US = {
    DECODE: {1: 1.0, 64: 1.0},
    IN_PLACE: {4: 12.0, 64: 192.0},
    ROWS: {4: 8.0, 64: 128.0},
    GATHER: {8: 1.0, 64: 8.0},
}
"""A token costs 3 in place and 2 on bf16 rows, a row of context 0.125 to gather; fewer than 4 tokens were not timed."""


REGISTRY = Registry(environ={}, costs=costs_of({"reference.torch": US}, Registry(environ={}).facts("cpu").name, HEADS, TOPK))


def measured_layer(**changes) -> SparseMLAAttention:
    """On the reference, with the times above."""
    return SparseMLAAttention(replace(SPEC, **changes), device="cpu", registry=REGISTRY, backend="reference")


def recorded(us: dict[tuple[str, str], dict[int, float]] = US, prefills_as: str = "", **changes):
    """(plugin, layer) where calls are only written down, with such times of them."""
    plugin = Recorder("tape.recorder", SPLIT_KV, prefills_as=prefills_as)
    costs = costs_of({plugin.name: us}, H200.name, HEADS, TOPK)
    registry = Registry(plugins=[("tape", plugin)], facts={"cpu": H200}, environ={}, probe=False, costs=costs)
    return plugin, SparseMLAAttention(replace(SPEC, **changes), device="cpu", registry=registry)


def test_times_are_linear_between_and_proportional_above():
    times = Times({100: 20.0, 10: 5.0, 50: 10.0})
    assert [times.us(rows) for rows in (1, 10, 30, 50, 75, 100, 250)] == [5.0, 5.0, 7.5, 10.0, 15.0, 20.0, 50.0]
    assert times.least == 10


@pytest.mark.parametrize(
    ("tokens", "rows", "gathers"),
    [(64, 100, True), (64, 600, False), (8, 8, True), (8, 80, False), (4, 4, True), (3, 1, False)],
)
def test_the_faster_way_is_taken_where_both_were_timed(tokens: int, rows: int, gathers: bool):
    times = PrefillTimes(*(Times(US[key]) for key in (IN_PLACE, ROWS, GATHER)))
    assert times.gathers(tokens, rows) is gathers


@pytest.mark.parametrize(("in_place", "gathered"), [(4, 16), (16, 4)])
def test_nothing_is_gathered_for_fewer_tokens_than_either_way_was_timed_for(in_place: int, gathered: int):
    times = PrefillTimes(Times({in_place: 99.0}), Times({gathered: 1.0}), Times({8: 1.0}))
    assert [times.gathers(tokens, 8) for tokens in (3, 4, 15, 16)] == [False, False, False, True]


@pytest.mark.parametrize("workspace", [64, 32])
@pytest.mark.parametrize("name", BATCHES)
def test_both_ways_in_one_step_agree_with_the_oracle(name: str, workspace: int):
    step, layer = make_step(name, FP8), measured_layer(decode_query_len=BATCHES[name][1], prefill_workspace_tokens=workspace)
    assert layer.route == "split" and layer.buffers.workspace is not None
    layer.buffers.workspace.fill_(math.nan)
    assert_matches(step, *layer(step.q, step.kv_cache, step.topk_indices, plan_for(layer, step.batch)))


@pytest.mark.parametrize("name", ["decodes and prefills in chunks", "prefills alone", "mixed, padded"])
def test_ranks_that_share_sequences_decide_by_their_own_rows(name: str):
    step, parts = make_step(name, FP8), []
    for rank in range(2):
        share = ContextShare(2, rank)
        batch, cache = shared(step, share)
        layer = measured_layer(share=share, prefill_workspace_tokens=24)
        assert layer.route == "split"
        parts.append(layer(step.q, cache, step.topk_indices, plan_for(layer, batch)))
    outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
    assert_matches(step, *mla_portable.merge_states(outs, lses))


def test_a_step_has_parts_of_both_kinds():
    """Chunks of 64 rows: requests of 7 and 3 tokens with 43 rows; of 5 with 31; of 4 with 48."""
    step = make_step("decodes and prefills in chunks", FP8)
    plugin, layer = recorded()
    plan = plan_for(layer, step.batch)
    assert [chunk.tokens for chunk in plan.prefill_chunks] == [slice(2, 12), slice(12, 17)]
    assert plan.prefill_request_ids is not None
    assert plan.prefill_request_ids.tolist() == [-1] * 2 + [0] * 7 + [1] * 3 + [2] * 5 + [-1] * 4
    layer(step.q, step.kv_cache, step.topk_indices, plan)
    names = [name for name, _, _ in plugin.calls]
    assert names == ["convert_indices", "sparse_decode", *["gather_upconvert", "sparse_prefill"] * 2, "sparse_prefill"]
    on = [args[1].shape[-1] for name, args, _ in plugin.calls if name == "sparse_prefill"]
    assert on == [576, 576, 656], "bf16 rows, bf16 rows, the cache itself"
    promised = {
        request.kv_layout: request.clean_indices for request in plugin.bound if str(request.primitive) == "sparse_prefill"
    }
    assert promised == {"bf16": False, FP8: True}


def test_a_context_that_does_not_fit_the_workspace_is_read_in_place():
    step = make_step("prefills alone", FP8)  # 6 tokens of 6 rows, 9 of 33, 2 of 48
    _, layer = recorded(prefill_workspace_tokens=32)
    plan = plan_for(layer, step.batch)
    assert layer.buffers.workspace is not None and layer.buffers.workspace.shape[0] == 32
    assert [(chunk.tokens, chunk.workspace_rows) for chunk in plan.prefill_chunks] == [(slice(0, 6), 6)]
    for route in ("split", "upconvert"):
        with pytest.raises(UnsupportedRoute, match="prefill_workspace_tokens 32"):
            recorded(prefill_workspace_tokens=32, route=route)


def test_what_gathers_nothing_is_planned_like_a_step_of_route_direct():
    step = make_step("prefills alone", FP8)
    plugin, layer = recorded(US | {GATHER: {8: 9.0, 64: 99.0}})
    plan = plan_for(layer, step.batch)
    assert plan.prefill_chunks == () and plan.prefill_request_ids is plan.prefill_workspace_starts is None
    layer(step.q, step.kv_cache, step.topk_indices, plan)
    assert [name for name, _, _ in plugin.calls] == ["convert_indices", "sparse_prefill"]
    assert plugin.calls[1][1][1] is step.kv_cache


@pytest.mark.parametrize(("gather", "decodes"), [(0.1, True), (99.0, False)])
def test_decodes_join_prefills_that_are_read_in_place_before_anything_is_gathered(gather: float, decodes: bool):
    step = make_step("decodes and prefills in chunks", FP8)
    plugin, layer = recorded(US | {GATHER: {8: gather, 64: gather}}, prefills_as="tape.recorder")
    layer(step.q, step.kv_cache, step.topk_indices, plan_for(layer, step.batch))
    names = [name for name, _, _ in plugin.calls]
    assert ("sparse_decode" in names) is decodes and ("gather_upconvert" in names) is decodes
    assert sum(args[0].shape[0] * (args[0].shape[1] if name == "sparse_decode" else 1)
               for name, args, _ in plugin.calls if name.startswith("sparse")) == 21  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "missing"),
    [({"route": "split"}, None), ({"batch_invariant": True}, None), ({}, IN_PLACE), ({}, ROWS), ({}, GATHER)],
)
def test_every_chunk_is_gathered_where_nothing_else_is_asked_or_known(changes, missing):
    us = {key: by_rows for key, by_rows in US.items() if key != missing}
    plugin = Recorder("tape.recorder", SPLIT_KV, support={"batch_invariant": True})
    costs = costs_of({plugin.name: us}, H200.name, HEADS, TOPK)
    registry = Registry(plugins=[("tape", plugin)], facts={"cpu": H200}, environ={}, probe=False, costs=costs)
    layer = SparseMLAAttention(replace(SPEC, **changes), device="cpu", registry=registry)
    split = next(v for v in layer.route_decision.verdicts if v.route == "split")
    assert split.prefill_times is None and split.part("in_place") is None


def test_the_decision_says_that_chunks_may_be_read_in_place():
    _, layer = recorded()
    verdict = layer.route_decision.verdict
    assert layer.route == "split" and "not gathered" in str(verdict)
    in_place = verdict.part("in_place")
    assert in_place is not None and in_place.weight == 0 and in_place.decision.request.kv_layout == FP8
    assert layer.planner_config().prefill_times is verdict.prefill_times is not None


def test_a_plan_that_leaves_tokens_to_the_cache_needs_a_layer_that_reads_it():
    _, adaptive = recorded()
    _, plain = recorded(route="split")
    step = make_step("decodes and prefills in chunks", FP8)
    plan = Planner(replace(adaptive.planner_config(), schedule_kind=SPLIT_KV)).plan(step.batch)
    with pytest.raises(PlanMismatch, match="gathers 15 of 19 prefill tokens, the layer needs all"):
        plain(step.q, step.kv_cache, step.topk_indices, plan)
