# SPDX-License-Identifier: Apache-2.0
"""A layer's attention over whole batches: every route and layout against the float64 oracle, and what a step does."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch
from attention_steps import (
    BATCHES,
    BLOCK,
    BLOCKS,
    HEADS,
    LAYOUTS,
    MODEL_LEN,
    ROUTES,
    SPEC,
    TOPK,
    Step,
    assert_matches,
    make_layer,
    make_step,
    plan_for,
    recorded_layer,
)
from recorder import Recorder, registry_of
from shares import shared
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mla_portable.attention import SparseMLAAttention, UnsupportedRoute
from mla_portable.choose import Registry
from mla_portable.contracts import (
    Batch,
    ContextShare,
    DecodeSchedule,
    InvalidArgument,
    PlanMismatch,
    ScheduleKind,
    ScheduleLimits,
)
from mla_portable.contracts.share import WHOLE
from mla_portable.kit.split_kv import SPLIT_KV, SplitSchedule
from mla_portable.planner import Planner
from mla_portable.primitives import CONVERT_INDICES
from mla_portable_common.flash_mla.tile_schedules import FLASHMLA_TILES

# results


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("route", ROUTES)
def test_route_agrees_with_the_oracle(route: str, layout: str, name: str):
    step = make_step(name, layout)
    layer = make_layer(route, layout, BATCHES[name][1])
    if layer.buffers.workspace is not None:
        layer.buffers.workspace.fill_(math.nan)
    out = torch.full((step.q.shape[0], HEADS, 512), math.nan, dtype=torch.bfloat16)
    lse = torch.full((step.q.shape[0], HEADS), math.nan)
    given = layer.forward(step.q, step.kv_cache, step.topk_indices, plan_for(layer, step.batch), out=out, lse_out=lse)
    assert given[0] is out and given[1] is lse
    assert_matches(step, out, lse)


def with_stale_positions(step: Step, share: ContextShare = WHOLE) -> tuple[Tensor, Batch]:
    """Positions that the requests do not have where a row names none, and a block table that names blocks behind them.

    Of the last block, of blocks of the table that hold another request's tokens or NaN, and from behind the table.
    """
    lengths, topk = torch.from_numpy(step.batch.seq_lens), step.topk_indices.clone()
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.from_numpy(np.diff(step.batch.query_start_loc)).long())
    beyond = torch.tensor([0, 1, BLOCK, 2 * BLOCK + 1, MODEL_LEN, 2**31 - 1 - MODEL_LEN])[torch.arange(TOPK) % 6]
    stale = (lengths[owner].unsqueeze(1) + beyond).to(torch.int32)
    rows = topk[: len(owner)]
    topk[: len(owner)] = torch.where(rows < 0, stale, rows)
    table = step.batch.block_table.clone()
    table[table < 0] = torch.arange(int((table < 0).sum()), dtype=torch.int32) % BLOCKS
    own_lengths = torch.from_numpy(share.lengths(step.batch.seq_lens))
    return topk, replace(step.batch, block_table=table, seq_lens_device=own_lengths)


@pytest.mark.parametrize("name", [name for name in BATCHES if "nothing" not in name and "only" not in name])
@pytest.mark.parametrize("layout", ["fp8_ds_mla", "bf16"])
@pytest.mark.parametrize("route", ROUTES)
def test_positions_that_a_request_does_not_have_are_absent_on_every_route(route: str, layout: str, name: str):
    """Stale lists, as of drafts. No row attends to another request's tokens, or to what was never written."""
    step = make_step(name, layout)
    layer = make_layer(route, layout, BATCHES[name][1])
    topk, batch = with_stale_positions(step)
    assert not torch.equal(topk, step.topk_indices)
    assert_matches(step, *layer(step.q, step.kv_cache, topk, plan_for(layer, batch)))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("share", [ContextShare(2, 1), ContextShare(3, 0, 4)], ids=str)
def test_positions_that_a_request_does_not_have_are_absent_on_every_rank(share: ContextShare, route: str):
    step = make_step("decodes and prefills in chunks", "bf16")
    batch, cache = shared(step, share)
    layer = make_layer(route, "bf16", share=share)
    clean = [each.clone() for each in layer(step.q, cache, step.topk_indices, plan_for(layer, batch))]
    topk, batch = with_stale_positions(replace(step, batch=batch), share)
    for found, wanted in zip(layer(step.q, cache, topk, plan_for(layer, batch)), clean, strict=True):
        assert torch.equal(found, wanted)


def test_lengths_reach_only_a_conversion_that_takes_them():
    for takes in (False, True):
        plugin = Recorder(support={"seq_lens": takes})
        layer = SparseMLAAttention(SPEC, device="cpu", registry=registry_of(plugin))
        step, planner = make_step("decodes", "fp8_ds_mla"), Planner(layer.planner_config())
        lengths = torch.from_numpy(step.batch.seq_lens)
        for given in (None, torch.cat([lengths, lengths])):
            layer(step.q, step.kv_cache, step.topk_indices, planner.plan(replace(step.batch, seq_lens_device=given)))
        calls = [kwargs for name, _, kwargs in plugin.calls if name == "convert_indices"]
        assert "seq_lens" not in calls[0] and ("seq_lens" in calls[1]) is takes
        if takes:
            assert torch.equal(calls[1]["seq_lens"], lengths)
        bound = [request for request in plugin.bound if request.primitive is CONVERT_INDICES]
        assert bound and all(request.seq_lens is takes for request in bound)


@pytest.mark.parametrize("route", ROUTES)
def test_one_layer_walks_step_after_step(route: str):
    layer = make_layer(route)
    planner = Planner(layer.planner_config())
    for name in ("decodes", "decodes and prefills in chunks", "nothing", "one token", "prefills alone", "decodes"):
        step = make_step(name, "fp8_ds_mla")
        assert_matches(step, *layer(step.q, step.kv_cache, step.topk_indices, planner.plan(step.batch)))


@pytest.mark.parametrize("route", ROUTES)
def test_queries_and_outputs_may_be_cut_from_wider_rows(route: str):
    step = make_step("two-token decodes and prefills", "fp8_ds_mla")
    layer = make_layer(route, query_len=2)
    rows = step.q.shape[0]
    q, out = torch.zeros(rows, HEADS + 1, 640).bfloat16(), torch.full((rows, HEADS + 2, 600), math.nan).bfloat16()
    lse = torch.full((rows, HEADS + 2), math.nan)
    q[:, 1:, :576] = step.q
    plan = plan_for(layer, step.batch)
    layer(q[:, 1:, :576], step.kv_cache, step.topk_indices, plan, out=out[:, :HEADS, :512], lse_out=lse[:, :HEADS])
    assert_matches(step, out[:, :HEADS, :512], lse[:, :HEADS])
    assert out[:, HEADS:].isnan().all() and out[..., 512:].isnan().all() and lse[:, HEADS:].isnan().all()


@pytest.mark.parametrize("route", ROUTES)
def test_a_sink_reaches_every_part_of_a_route(route: str):
    sink = torch.tensor([0.0, -math.inf, 3.0])
    step = make_step("decodes and prefills in chunks", "fp8_ds_mla", sink)
    layer = make_layer(route, attn_sink=sink)
    assert_matches(step, *layer(step.q, step.kv_cache, step.topk_indices, plan_for(layer, step.batch)))


@pytest.mark.parametrize("route", ROUTES)
def test_layers_that_share_an_object_have_sinks_of_their_own(route: str):
    """The tensor is read in each call: an engine loads its weights after the object was built."""
    steps = "decodes and prefills in chunks", "fp8_ds_mla"
    built_with, other = torch.zeros(HEADS), torch.tensor([0.0, -math.inf, 3.0])
    layer = make_layer(route, attn_sink=built_with)
    step = make_step(*steps, built_with)
    plan, own = plan_for(layer, step.batch), torch.full((HEADS,), math.nan)
    inputs = step.q, step.kv_cache, step.topk_indices, plan
    assert_matches(step, *layer(*inputs))
    own.copy_(other)
    assert_matches(make_step(*steps, other), *layer(*inputs, attn_sink=own))
    assert_matches(step, *layer(*inputs))


def test_a_pair_of_queries_is_joined_at_one_address():
    step = make_step("decodes and prefills in chunks", "fp8_ds_mla")
    layer = make_layer("direct")
    plan, pair = plan_for(layer, step.batch), (step.q[..., :512].contiguous(), step.q[..., 512:].contiguous())
    address = layer.buffers.query.data_ptr()
    for _ in range(2):
        assert_matches(step, *layer(pair, step.kv_cache, step.topk_indices, plan))
        assert layer.buffers.query.data_ptr() == address
        assert torch.equal(layer.buffers.query[: step.q.shape[0]], step.q)


def test_without_need_of_an_lse_none_is_returned():
    step = make_step("decodes and prefills in chunks", "fp8_ds_mla")
    layer = make_layer("split", need_lse=False)
    out, lse = layer(step.q, step.kv_cache, step.topk_indices, plan_for(layer, step.batch))
    assert lse is None
    assert_matches(step, out, None)


def test_layers_share_buffers():
    step = make_step("decodes and prefills in chunks", "fp8_ds_mla")
    first = make_layer("split")
    second = make_layer("split", buffers=first.buffers)
    plan = plan_for(first, step.batch)
    assert second.buffers is first.buffers
    outs = [layer(step.q, step.kv_cache, step.topk_indices, plan) for layer in (first, second, first)]
    for out, lse in outs:
        assert_matches(step, out, lse)


@pytest.mark.parametrize("name", ["decodes", "decodes and prefills in chunks", "mixed, padded"])
@pytest.mark.parametrize("route", ROUTES)
def test_layers_of_one_selection_convert_it_once(route: str, name: str):
    step = make_step(name, "fp8_ds_mla")
    first = make_layer(route)
    second, plan = make_layer(route, buffers=first.buffers), plan_for(first, step.batch)
    wanted = first(step.q, step.kv_cache, step.topk_indices, plan)
    written = [tensor.clone() for tensor in first.buffers.kept]
    for tensor in first.buffers.kept:
        tensor.fill_(-1)  # a layer that reads again finds nothing, one that converts writes it again
    out, lse = second(step.q, step.kv_cache, step.topk_indices, plan, same_selection=True)
    assert not out.any() and (lse == -torch.inf).all()
    for tensor, value in zip(first.buffers.kept, written, strict=True):
        tensor.copy_(value)
    for layer in (first, second):
        out, lse = layer(step.q, step.kv_cache, step.topk_indices, plan, same_selection=True)
        assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    assert_matches(step, *wanted)


def conversions(plugin: Recorder) -> int:
    return sum(name == "convert_indices" for name, _, _ in plugin.calls)


@pytest.mark.parametrize("changed", ["nothing", "tensor", "plan", "cache", "buffers", "no promise", "another step between"])
def test_a_selection_is_read_again_only_where_it_is_the_same(changed: str):
    plugin, layer = recorded_layer("direct", query_len=1)
    step = make_step("decodes", "fp8_ds_mla")
    planner = Planner(layer.planner_config())
    plan, topk, cache = planner.plan(step.batch), step.topk_indices, step.kv_cache
    layer(step.q, cache, topk, plan, same_selection=True)
    assert conversions(plugin) == 1  # the first forward has nothing to read
    if changed == "plan":
        plan = planner.plan(step.batch)
    elif changed == "tensor":
        topk = topk.clone()
    elif changed == "cache":
        cache = cache[:-1]
    elif changed == "buffers":
        layer.buffers = replace(layer.buffers, kept=None)
        layer(step.q, cache, topk, plan)
    elif changed == "another step between":
        layer(step.q, cache, topk.clone(), plan)
    before = conversions(plugin)
    layer(step.q, cache, topk, plan, same_selection=changed != "no promise")
    assert conversions(plugin) - before == (0 if changed == "nothing" else 1)


def test_steps_larger_than_what_is_kept_are_converted_in_each_layer():
    plugin, layer = recorded_layer("direct", query_len=1)
    layer.buffers = replace(layer.buffers, kept=tuple(tensor[:3].clone() for tensor in layer.buffers.kept))
    for name, once in (("decodes", True), ("decodes, padded", False)):  # three tokens, five
        step = make_step(name, "fp8_ds_mla")
        plan, before = plan_for(layer, step.batch), conversions(plugin)
        for same in (False, True, True):
            layer(step.q, step.kv_cache, step.topk_indices, plan, same_selection=same)
        assert conversions(plugin) - before == (1 if once else 3)


def test_a_conversion_that_failed_is_not_read_again():
    layer, step = make_layer("direct"), make_step("decodes", "fp8_ds_mla")
    plan = plan_for(layer, step.batch)
    wanted, _ = layer(step.q, step.kv_cache, step.topk_indices, plan)
    working = layer._bound

    def fails(*args, out, **named):
        out[0].fill_(-1)
        raise RuntimeError("a kernel that stopped halfway")

    layer._bound = replace(working, convert=replace(working.convert, call=fails))
    with pytest.raises(RuntimeError, match="halfway"):
        layer(step.q, step.kv_cache, step.topk_indices, plan)
    layer._bound = working
    out, _ = layer(step.q, step.kv_cache, step.topk_indices, plan, same_selection=True)
    assert torch.equal(out, wanted)


def test_decode_behind_no_conversion_is_promised_nothing_about_what_is_in_front():
    plugin = Recorder(support={"ends_in_order": True})
    layer = SparseMLAAttention(replace(SPEC, route="direct"), device="cpu", registry=registry_of(plugin))
    step = make_step("decodes", "fp8_ds_mla")
    plan = plan_for(layer, step.batch)
    for same in (False, True):
        layer(step.q, step.kv_cache, step.topk_indices, plan, same_selection=same)
    decodes = [request.follows_in_order for request in plugin.called if str(request.primitive) == "sparse_decode"]
    assert decodes == [True, False] and conversions(plugin) == 1


@pytest.mark.parametrize(("built", "stepped"), [(True, False), (False, True)])
def test_a_layer_may_be_built_and_stepped_in_different_modes(built: bool, stepped: bool):
    step = make_step("decodes and prefills in chunks", "fp8_ds_mla")
    with torch.inference_mode(built):
        layer = make_layer("split")
        plan = plan_for(layer, step.batch)
    with torch.inference_mode(stepped):
        pair = step.q[..., :512], step.q[..., 512:]
        assert_matches(step, *layer(pair, step.kv_cache, step.topk_indices, plan))


def test_a_given_workspace_is_used():
    workspace = torch.zeros(80, 576, dtype=torch.bfloat16)
    layer = make_layer("split", workspace=workspace)
    step = make_step("prefills alone", "fp8_ds_mla")
    layer(step.q, step.kv_cache, step.topk_indices, plan_for(layer, step.batch))
    assert layer.buffers.workspace is workspace
    assert workspace.any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cache_write_makes_what_attention_reads(layout: str):
    layer = make_layer("fused", layout, scale_format="amax" if layout == "fp8_ds_mla" else None)
    cache = torch.zeros_like(make_step("one token", layout).kv_cache)
    row = layer.spec.layout
    kv_c, k_pe = torch.randn(5, row.value_width).bfloat16(), torch.randn(5, row.rope_width).bfloat16()
    slots = torch.tensor([3, -1, 17, 319, 320])
    expected = oracle.cache_write(kv_c, k_pe, cache, slots, scale_format="amax")
    layer.cache_write(kv_c, k_pe, cache, slots)
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


# what a step does


def test_parts_write_their_rows_of_the_outputs():
    plugin, layer = recorded_layer()
    step = make_step("two-token decodes and prefills", "fp8_ds_mla")
    plan = plan_for(layer, step.batch)
    out, lse = torch.empty(14, HEADS, 512).bfloat16(), torch.empty(14, HEADS)
    layer(step.q, step.kv_cache, step.topk_indices, plan, out=out, lse_out=lse)
    assert [name for name, _, _ in plugin.calls] == [
        "convert_indices",
        "sparse_decode",
        *["gather_upconvert", "sparse_prefill"] * 2,
    ]
    convert, decode, first_gather, first, second_gather, second = plugin.calls
    assert convert[1][0].shape == (14, TOPK)
    assert convert[2]["num_slots"] == BLOCKS * BLOCK
    assert decode[1][0].shape == (2, 2, HEADS, 576)
    assert decode[2]["schedule"] is plan.decode_schedule is not None
    assert first[1][1].shape == first_gather[2]["out"].shape == (40, 576)
    assert second[1][1].shape == second_gather[2]["out"].shape == (30, 576)
    assert first[1][1].data_ptr() == second[1][1].data_ptr() == layer.buffers.workspace.data_ptr()
    for (_, _, given), rows in ((decode, slice(0, 4)), (first, slice(4, 11)), (second, slice(11, 14))):
        assert given["out"].data_ptr() == out[rows].data_ptr() and given["out"].numel() == out[rows].numel()
        assert given["lse_out"].data_ptr() == lse[rows].data_ptr() and given["lse_out"].numel() == lse[rows].numel()


class Halves(DecodeSchedule):
    """A schedule of a kind that the core does not know."""

    def __init__(self, limits: ScheduleLimits, batch: int, query_len: int) -> None:
        self.limits, self.shape = limits, (batch, query_len)

    def check(self, where: str, batch: int, query_len: int, num_heads: int, topk: int, device: torch.device) -> None:
        given, made_for = (batch, query_len, num_heads, topk), (*self.shape, self.limits.num_heads, self.limits.topk)
        if given != made_for:
            raise PlanMismatch(f"{where}: {given}, made for {made_for}")


class HalvesPlanner:
    def __init__(self, limits: ScheduleLimits) -> None:
        self.limits = limits

    def get(self, batch: int, query_len: int) -> Halves:
        return Halves(self.limits, batch, query_len)

    def invalidate(self) -> None:
        pass


def test_a_plugin_brings_schedules_of_its_own_kind():
    plugin = Recorder(schedule_kind=ScheduleKind("halves", Halves, HalvesPlanner))
    spec = replace(SPEC, route="split", decode_query_len=2)
    layer = SparseMLAAttention(spec, device="cpu", registry=registry_of(plugin))
    step = make_step("two-token decodes and prefills", "fp8_ds_mla")
    plan = plan_for(layer, step.batch)
    schedule = plan.decode_schedule
    assert isinstance(schedule, Halves) and schedule.shape == (plan.num_decodes, 2)
    limits = schedule.limits
    assert (limits.num_heads, limits.topk, limits.max_query_len) == (HEADS, TOPK, 2)
    assert limits.request is not None and limits.request.query_len == 2
    layer(step.q, step.kv_cache, step.topk_indices, plan)
    assert {name: given for name, _, given in plugin.calls}["sparse_decode"]["schedule"] is schedule
    with pytest.raises(PlanMismatch, match="made for"):
        layer(step.q, step.kv_cache, step.topk_indices, replace(plan, decode_schedule=Halves(limits, 7, 2)))
    cut = SplitSchedule(plan.num_decode_tokens, HEADS, TOPK, 1)
    with pytest.raises(PlanMismatch, match="takes a Halves"):
        layer(step.q, step.kv_cache, step.topk_indices, replace(plan, decode_schedule=cut))


@pytest.mark.parametrize(
    ("kind", "support", "told"),
    [
        (SPLIT_KV, {}, {"sparse_decode", "sparse_prefill"}),
        (FLASHMLA_TILES, {}, {"sparse_prefill"}),  # a plan of tiles is made for K keys in every row
        (SPLIT_KV, {"lengths": False}, set()),
        (SPLIT_KV, {"compact": False}, set()),
    ],
)
def test_rows_shorter_than_topk_are_compacted_for_who_can_skip_the_rest(
    kind: ScheduleKind, support: dict[str, bool], told: set[str]
):
    plugin = Recorder(schedule_kind=kind, support=support)
    spec = replace(SPEC, route="split", decode_query_len=2)
    layer = SparseMLAAttention(spec, device="cpu", registry=registry_of(plugin))
    assert {str(request.primitive) for request in plugin.bound if request.lengths} == told
    assert any(request.compact for request in plugin.bound) is bool(told)
    if kind is FLASHMLA_TILES:
        return  # no plan of tiles can be made for a CPU
    step = make_step("two-token decodes and prefills", "fp8_ds_mla")
    layer(step.q, step.kv_cache, step.topk_indices, plan_for(layer, step.batch))
    given = {primitive: keywords for primitive, _, keywords in plugin.calls}
    assert given["convert_indices"]["compact"] is bool(told)
    for primitive in ("sparse_decode", "sparse_prefill"):
        lengths = given[primitive]["lengths"]
        assert (lengths is not None) is (primitive in told)
        assert lengths is None or lengths.untyped_storage().data_ptr() == layer.buffers.counts.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("route", "promised"),
    [
        ("fused", {"sparse_decode"}),
        ("direct", {"sparse_decode", "sparse_prefill"}),
        ("split", {"sparse_decode"}),  # rows of a workspace are not bounded by its end
        ("upconvert", set()),
    ],
)
@pytest.mark.parametrize("need_lse", [False, True])
def test_slots_of_the_cache_are_promised_to_be_clean(route: str, promised: set[str], need_lse: bool):
    plugin = Recorder()
    layer = SparseMLAAttention(replace(SPEC, route=route, need_lse=need_lse), device="cpu", registry=registry_of(plugin))
    assert {str(request.primitive) for request in plugin.bound if request.clean_indices} == promised
    attention = [request for request in plugin.bound if str(request.primitive) in ("sparse_decode", "sparse_prefill")]
    assert attention and all(request.lse is need_lse for request in attention)
    assert ("clean_indices=yes" in layer.explain()) is bool(promised)  # what is decided on is what is bound


@pytest.mark.parametrize("ends_in_order", [False, True])
@pytest.mark.parametrize("route", ["fused", "direct", "split", "upconvert"])
def test_decode_may_start_before_a_conversion_has_ended_that_ends_in_order(route: str, ends_in_order: bool):
    """What is in front of sparse_prefill in the stream may be anything: a decode, a gather, an earlier chunk."""
    plugin = Recorder(support={"ends_in_order": ends_in_order})
    layer = SparseMLAAttention(replace(SPEC, route=route), device="cpu", registry=registry_of(plugin))
    promised = {str(request.primitive) for request in plugin.bound if request.follows_in_order}
    assert promised == ({"sparse_decode"} if ends_in_order and route != "upconvert" else set())
    assert ("follows_in_order=yes" in layer.explain()) is bool(promised)


@pytest.mark.parametrize(("most", "query_len"), [(4, 1), (256, 2)])
def test_decode_is_chosen_for_the_largest_batch_of_the_deployment(most: int, query_len: int):
    plugin = Recorder(schedule_kind=SPLIT_KV)
    spec = replace(SPEC, max_num_reqs=most, max_num_tokens=1024, decode_query_len=query_len)
    SparseMLAAttention(spec, device="cpu", registry=registry_of(plugin))
    rows = {str(request.primitive): request.rows for request in plugin.bound}
    assert rows["sparse_decode"] == most * query_len
    assert {name for name, count in rows.items() if count is not None} == {"sparse_decode"}


class Operations(TorchDispatchMode):
    """Writes down what torch is asked to compute; views are no work."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("route", ROUTES)
def test_a_step_allocates_nothing_and_asks_nobody(route: str, monkeypatch):
    _, layer = recorded_layer(route)
    step = make_step("two-token decodes and prefills", "fp8_ds_mla")
    plan = plan_for(layer, step.batch)
    out, lse = torch.empty(14, HEADS, 512).bfloat16(), torch.empty(14, HEADS)
    for name in ("decide", "select", "bind", "facts", "implementations"):
        monkeypatch.setattr(Registry, name, lambda *_, **__: pytest.fail("a step asked the registry"))
    with Operations() as operations:
        layer(step.q, step.kv_cache, step.topk_indices, plan, out=out, lse_out=lse)
    assert operations.names == []
    with Operations() as operations:
        layer((step.q[..., :512], step.q[..., 512:]), step.kv_cache, step.topk_indices, plan, out=out, lse_out=lse)
    assert operations.names == ["aten.cat.out"]


def test_an_empty_batch_runs_nothing():
    plugin, layer = recorded_layer()
    step = make_step("nothing", "fp8_ds_mla")
    out, lse = layer(step.q, step.kv_cache, step.topk_indices, plan_for(layer, step.batch))
    assert (out.shape, lse.shape, plugin.calls) == ((0, HEADS, 512), (0, HEADS), [])


# queries without a rotary part over rows that have one


@pytest.mark.parametrize("name", ["decodes", "two-token decodes and prefills", "mixed, padded", "nothing, padded"])
@pytest.mark.parametrize("route", ["fused", "direct", "auto"])
def test_without_rope_over_quantised_rows_that_have_one(route: str, name: str):
    """The rows' rotary part, which is not zero here, is not read; a pair's first half is the query, and nothing joins it."""
    step = make_step(name, "fp8_ds_mla", rope=False)
    layer = make_layer(route, "fp8_ds_mla", BATCHES[name][1], nope=True)
    assert layer.buffers.query is None and layer.route in ("direct", "fused")
    plan = plan_for(layer, step.batch)
    latent = step.q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)  # as a batched product leaves it
    for q in (step.q[..., :512], (latent, latent[..., :0])):
        assert_matches(step, *layer(q, step.kv_cache, step.topk_indices, plan))


def test_without_rope_the_rotary_part_is_written_as_zeros():
    layer = make_layer("direct", "fp8_ds_mla", nope=True)
    latent, slots = torch.randn(5, 512).bfloat16(), torch.tensor([3, -1, 17, 40, 8])
    cache = torch.full((BLOCKS, BLOCK, 656), 0xFF, dtype=torch.uint8)
    layer.cache_write(latent, latent[:, :0], cache, slots)
    rows = cache.view(-1, 656)[slots[slots >= 0]]
    assert torch.equal(rows, layer.spec.layout.pack(latent[slots >= 0], torch.zeros(4, 64), "pow2"))
    with pytest.raises(InvalidArgument, match=r"cache_write: k_pe: got shape \[5, 64\], expected \[T, 0\], because spec.nope"):
        layer.cache_write(latent, torch.zeros(5, 64).bfloat16(), cache, slots)


@pytest.mark.parametrize("route", ["split", "upconvert"])
def test_without_rope_rows_are_not_gathered_for_attention(route: str):
    with pytest.raises(UnsupportedRoute, match=r"nope yes \(gathered rows have a rotary part"):
        make_layer(route, "fp8_ds_mla", nope=True)


def test_without_rope_is_for_quantised_rows():
    with pytest.raises(InvalidArgument, match="nope: got True for bf16, expected False"):
        replace(SPEC, kv_layout="bf16", scale_format=None, nope=True)
