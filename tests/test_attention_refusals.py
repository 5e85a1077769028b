# SPDX-License-Identifier: Apache-2.0
"""What a layer refuses, before anything runs."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from attention_steps import (
    BLOCK,
    BLOCKS,
    HEADS,
    PORTABLE,
    REFERENCE,
    SPEC,
    TOPK,
    assert_matches,
    make_layer,
    make_step,
    plan_for,
    recorded_layer,
    route_of,
)
from recorder import Recorder
from torch import Tensor

from mla_portable.attention import HeadDims, PromptAttention, SlotAttention, SparseMLAAttention, StepBuffers, checks
from mla_portable.contracts import InvalidArgument, PlanMismatch, StepPlan
from mla_portable.kit.split_kv import SplitSchedule
from mla_portable.planner import Planner
from mla_portable_common.flash_mla.tile_schedules import TileSchedule

# what is refused


@pytest.mark.parametrize("kind", [SparseMLAAttention, SlotAttention, PromptAttention], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"registry": 5}, "registry: got 5, expected a Registry"),
        ({"backend": {"no_primitive": "triton"}}, "backend: got 'no_primitive', expected keys among"),
        ({"backend": 5}, "backend: got 5"),
    ],
    ids=str,
)
def test_a_registry_and_backends_are_refused_by_the_class_that_was_built(kind: type, given: dict[str, object], text: str):
    spec = replace(SPEC, need_lse=kind is not SlotAttention, concat_query=False)
    more = (HeadDims(),) if kind is PromptAttention else ()
    with pytest.raises(InvalidArgument, match=f"^{kind.__name__}: {text}"):
        kind(spec, *more, device="cpu", **{"registry": REFERENCE, **given})


def over(memory: Tensor, *shape: int) -> Tensor:
    """A tensor on the first elements of other memory."""
    return memory.view(-1)[: math.prod(shape)].view(shape)


def tiles_for(plan: StepPlan) -> TileSchedule:
    """A schedule of the other kind for a plan's decode call."""
    rows, words = plan.num_decodes, {"dtype": torch.int32}
    return TileSchedule(rows, plan.decode_query_len, 64, TOPK, 2, torch.zeros(2, 8, **words), torch.zeros(rows + 1, **words))


def padded(plan: StepPlan, tokens: int) -> StepPlan:
    ids = plan.req_id_per_token.new_zeros(tokens)
    return replace(plan, num_padded_tokens=tokens, req_id_per_token=ids, prefill_request_ids=ids - 1)


def split_in_two(plan: StepPlan, width: int = 512) -> SplitSchedule:
    shape = 2, plan.num_decode_tokens, HEADS
    return SplitSchedule(shape[1], HEADS, TOPK, 2, torch.zeros(*shape, width), torch.zeros(shape), width)


def out_in_the_scratch(plan: StepPlan) -> dict[str, object]:
    cut = split_in_two(plan)
    return {"plan": replace(plan, decode_schedule=cut), "out": over(cut.partial_out.view(torch.bfloat16), 14, HEADS, 512)}


def scratch_in_one_place(plan: StepPlan) -> StepPlan:
    cut = split_in_two(plan)
    return replace(plan, decode_schedule=replace(cut, partial_lse=over(cut.partial_out, *cut.partial_lse.shape)))


def mismatch(change) -> str:
    """The message that a step with something changed is refused with; nothing ran."""
    plugin, layer = recorded_layer()
    step = make_step("two-token decodes and prefills", "fp8_ds_mla")
    arguments = {"q": step.q, "kv_cache": step.kv_cache, "topk_indices": step.topk_indices}
    arguments["plan"] = plan_for(layer, step.batch)
    arguments.update(change(layer, step, arguments["plan"]))
    with pytest.raises((PlanMismatch, InvalidArgument)) as caught:
        layer.forward(**arguments)
    assert plugin.calls == []
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda a, s, p: {"q": s.q[:13]}, ("PlanMismatch", "q has 13 tokens", "made for 14")),
        (lambda a, s, p: {"plan": replace(p, route="fused")}, ("PlanMismatch", "'split'", "'fused'")),
        (lambda a, s, p: {"plan": padded(p, 65), "q": s.q[:1].expand(65, -1, -1)}, ("65 tokens", "most 64")),
        (
            lambda a, s, p: {"plan": replace(p, prefill_chunks=(replace(p.prefill_chunks[0], workspace_rows=65),))},
            ("PlanMismatch", "needs 65 workspace rows", "has 64"),
        ),
        (
            lambda a, s, p: {"plan": replace(p, decode_schedule=replace(p.decode_schedule, topk=11))},
            ("PlanMismatch", "topk 12", "topk 11"),
        ),
        (lambda a, s, p: {"q": s.q.float()}, ("InvalidArgument", "q: got torch.float32", "bfloat16")),
        (lambda a, s, p: {"q": (s.q[..., :512], s.q[..., :512])}, ("q[1]", "[14, 3, 512]", "[14, 3, 64]")),
        (lambda a, s, p: {"kv_cache": s.kv_cache[..., :640]}, ("kv_cache", "640", "656")),
        (lambda a, s, p: {"kv_cache": s.kv_cache[:, :4].contiguous()}, ("kv_cache", "block_size 4", "block_size 8")),
        (lambda a, s, p: {"kv_cache": torch.zeros(40, 8, 576).bfloat16()}, ("kv_cache", "bf16", "fp8_ds_mla")),
        (lambda a, s, p: {"topk_indices": s.topk_indices[:9]}, ("topk_indices", "[9, 12]", "[14, 12]")),
        (lambda a, s, p: {"topk_indices": s.topk_indices.long()}, ("topk_indices", "int64", "int32")),
        (lambda a, s, p: {"out": torch.zeros(14, HEADS, 576).bfloat16()}, ("out", "576", "512")),
        (lambda a, s, p: {"out": s.q[..., :512]}, ("out", "overlaps q", "of its own")),
        (lambda a, s, p: {"q": None}, ("InvalidArgument", "q: got None", "the pair")),
        (lambda a, s, p: {"q": torch.tensor(1.0)}, ("InvalidArgument", "q: got shape []", "[T, H, 576]")),
        (lambda a, s, p: {"q": (s.q[..., :512],)}, ("InvalidArgument", "a tuple of 1")),
        (lambda a, s, p: {"q": (s.q[..., :512], None)}, ("InvalidArgument", "q[1]: got None")),
        (lambda a, s, p: {"topk_indices": torch.tensor(1)}, ("InvalidArgument", "topk_indices: got shape []")),
        (lambda a, s, p: {"plan": None}, ("InvalidArgument", "plan: got None", "a StepPlan")),
        (lambda a, s, p: {"kv_cache": s.kv_cache.to("meta")}, ("kv_cache", "on meta", "on cpu")),
        (
            lambda a, s, p: {"plan": replace(p, req_id_per_token=p.req_id_per_token.to("meta"))},
            ("PlanMismatch", "layer is on cpu", "made on meta"),
        ),
        (
            lambda a, s, p: {"plan": replace(p, decode_schedule=tiles_for(p))},
            ("PlanMismatch", "TileSchedule", "takes a SplitSchedule", "planner_config()"),
        ),
        (lambda a, s, p: {"out": torch.zeros(1, HEADS, 512).bfloat16().expand(14, -1, -1)}, ("out", "strides [0, 512, 1]")),
        (lambda a, s, p: {"lse_out": torch.zeros(30).as_strided((14, HEADS), (2, 1))}, ("lse_out", "strides [2, 1]")),
        (lambda a, s, p: {"out": over(a.buffers.workspace, 14, HEADS, 512)}, ("out", "overlaps the layer's buffers.workspace")),
        (lambda a, s, p: {"q": over(a.buffers.workspace, 14, HEADS, 576)}, ("q", "overlaps the layer's buffers.workspace")),
        (
            lambda a, s, p: {"q": (over(a.buffers.query, 14, HEADS, 512), s.q[..., 512:])},
            ("q[0]", "overlaps the layer's buffers.query"),
        ),
        (lambda a, s, p: {"topk_indices": a.buffers.indices}, ("topk_indices", "overlaps the layer's buffers.indices")),
        (
            lambda a, s, p: {"lse_out": over(a.buffers.counts.view(torch.float32), 14, HEADS)},
            ("lse_out", "overlaps the layer's buffers.counts"),
        ),
        (lambda a, s, p: out_in_the_scratch(p), ("out", "overlaps schedule.partial_out", "of its own")),
        (lambda a, s, p: {"plan": scratch_in_one_place(p)}, ("schedule.partial_lse", "overlaps schedule.partial_out")),
        (
            lambda a, s, p: {"plan": replace(p, decode_schedule=split_in_two(p, width=8))},
            ("schedule.value_width: got 8", "512, the width"),
        ),
        (lambda a, s, p: {"q": torch._neg_view(s.q)}, ("InvalidArgument", "negative bit", "resolve_neg")),
        (lambda a, s, p: {"q": s.q.to_sparse()}, ("InvalidArgument", "q: got", "dense tensor")),
    ],
)
def test_a_step_that_does_not_fit_is_refused_before_anything_runs(change, parts):
    message = mismatch(change)
    for part in parts:
        assert part in message


def test_the_query_may_be_written_into_the_query_buffer():
    plugin, layer = recorded_layer()
    step = make_step("two-token decodes and prefills", "fp8_ds_mla")
    plan = plan_for(layer, step.batch)
    query = layer.step(plan).query
    assert query is not None
    layer(query.copy_(step.q), step.kv_cache, step.topk_indices, plan)
    assert plugin.calls


def test_a_plan_whose_numbers_were_overwritten_is_refused():
    layer = make_layer("direct", "bf16")
    planner = Planner(layer.planner_config())
    first, second = make_step("decodes and prefills in chunks", "bf16"), make_step("prefills alone", "bf16")
    plan, later = planner.plan(first.batch), planner.plan(second.batch)
    with pytest.raises(PlanMismatch, match=r"a later plan\(\) .* plan again"):
        layer(first.q, first.kv_cache, first.topk_indices, plan)
    assert_matches(second, *layer(second.q, second.kv_cache, second.topk_indices, later))
    plan = planner.plan(first.batch)
    assert_matches(first, *layer(first.q, first.kv_cache, first.topk_indices, plan))
    planner.invalidate()
    with pytest.raises(PlanMismatch, match="plan again"):
        layer(first.q, first.kv_cache, first.topk_indices, plan)


def test_a_kept_plan_may_be_captured(monkeypatch):
    plugin, layer = recorded_layer("direct")
    planner = Planner(layer.planner_config())
    step = make_step("decodes", "fp8_ds_mla")
    plan = planner.plan(step.batch)
    planner.plan(make_step("prefills alone", "fp8_ds_mla").batch)
    monkeypatch.setattr(checks, "_is_capturing", lambda device: True)
    layer(step.q, step.kv_cache, step.topk_indices, plan)
    assert plugin.calls


def test_a_copy_of_a_layer_has_buffers_of_its_own():
    step = make_step("decodes and prefills in chunks", "bf16")
    layer = copy.deepcopy(make_layer("split", "bf16"))
    plan = plan_for(layer, step.batch)
    assert_matches(step, *layer(step.q, step.kv_cache, step.topk_indices, plan))
    with pytest.raises(InvalidArgument, match=r"overlaps the layer's buffers.workspace"):
        layer(step.q, step.kv_cache, step.topk_indices, plan, out=over(layer.buffers.workspace, 21, HEADS, 512))


def test_layers_that_share_buffers_may_divide_a_plan_differently():
    first = make_layer("direct")
    second = make_layer("direct", buffers=first.buffers)
    step = make_step("decodes and prefills in chunks", "fp8_ds_mla")
    plan = plan_for(first, step.batch)
    apart, together = (first.buffers.step(plan, decodes=decodes) for decodes in (True, False))
    assert apart.decode is not None and together.decode is None
    assert [(part.begin, part.end) for part in together.prefills] == [(0, 21)]
    assert first.buffers.step(plan, decodes=False) is together is second.buffers.step(plan, decodes=False)


@pytest.mark.parametrize("device", ["gpu9", "cuda:99", None, 3])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(InvalidArgument, match=r"SparseMLAAttention: device: got .*expected a device that torch can use"):
        SparseMLAAttention(SPEC, device=device, registry=REFERENCE)


def test_what_is_no_spec_is_refused():
    with pytest.raises(InvalidArgument, match="SparseMLAAttention: spec: got None, expected an AttentionSpec"):
        SparseMLAAttention(None, device="cpu", registry=REFERENCE)


@pytest.mark.parametrize(
    ("arguments", "argument", "expected"),
    [
        ({"registry": "x"}, "registry", "a Registry"),
        ({"buffers": "x"}, "buffers", "another layer's `buffers`"),
        ({"join_query": 5}, "join_query", "a function of three tensors"),
        ({"device": "meta"}, "device", "a device that torch can use here"),
    ],
)
def test_what_a_layer_cannot_be_built_with_is_refused(arguments, argument, expected):
    with pytest.raises(InvalidArgument) as caught:
        SparseMLAAttention(SPEC, **{"device": "cpu", "registry": REFERENCE, **arguments})
    assert (caught.value.where, caught.value.argument) == ("SparseMLAAttention", argument)
    assert expected in caught.value.expected


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda t: {"kv_c": None}, ("cache_write: kv_c: got None", "a tensor")),
        (lambda t: {"kv_c": t["kv_c"][:3]}, ("k_pe: got shape [4, 64]", "[3, 64]")),
        (lambda t: {"slot_mapping": t["slot_mapping"].int()}, ("slot_mapping: got torch.int32", "int64")),
        (lambda t: {"kv_cache": torch.zeros(40, 8, 576).bfloat16()}, ("kv_cache: got", "(bf16)", "(fp8_ds_mla)")),
        (
            lambda t: {"kv_cache": t["kv_cache"][:, :4].contiguous()},
            ("kv_cache: got block_size 4", "block_size 8, as in the spec"),
        ),
        (lambda t: {"kv_cache": spaced(t["kv_cache"], 4)}, ("cache_write: kv_cache: got address", "cache_alignment=4")),
    ],
)
def test_new_tokens_that_do_not_fit_are_refused_before_anything_is_written(change, parts):
    plugin, layer = recorded_layer()
    cache = make_step("decodes", "fp8_ds_mla").kv_cache
    tokens = {"kv_c": torch.zeros(4, 512).bfloat16(), "k_pe": torch.zeros(4, 64).bfloat16(), "kv_cache": cache}
    tokens["slot_mapping"] = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(InvalidArgument) as caught:
        layer.cache_write(**{**tokens, **change(tokens)})
    for part in parts:
        assert part in str(caught.value)
    assert plugin.calls == []
    layer.cache_write(**tokens)
    assert [name for name, _, _ in plugin.calls] == ["cache_write"]


@pytest.mark.parametrize(
    ("changes", "argument", "expected"),
    [
        ({"num_decode_tokens": 99}, "num_decode_tokens", "2 x 2"),
        ({"num_decodes": 1}, "num_decode_tokens", "1 x 2"),
        ({"decode_query_len": 0}, "decode_query_len", "at least 1"),
        ({"num_decodes": "2"}, "num_decodes", "an integer"),
        ({"num_tokens": 15}, "num_tokens", "at most num_padded_tokens, 14"),
        ({"num_prefill_tokens": 11}, "num_prefill_tokens", "with 4 decode tokens at most num_padded_tokens, 14"),
        ({"num_prefill_tokens": -1}, "num_prefill_tokens", "at least 0"),
        ({"num_prefill_tokens": 9}, "prefill_chunks[1].tokens", "within 11 and 13"),
        ({"num_padded_tokens": 15}, "req_id_per_token", "with 15 rows"),
        ({"prefill_request_ids": torch.zeros(13, dtype=torch.int32)}, "prefill_request_ids", "with 14 rows"),
        ({"block_table": torch.zeros(1, 5, dtype=torch.int32)}, "block_table", "[num_reqs, columns]"),
        ({"req_id_per_token": torch.zeros(14)}, "req_id_per_token", "int32 [num_padded_tokens]"),
        ({"prefill_workspace_starts": [0, 0]}, "prefill_workspace_starts", "int32 [num_prefills]"),
        ({"prefill_chunks": None}, "prefill_chunks", "a tuple of PrefillChunks"),
        ({"prefill_chunks": (None,)}, "prefill_chunks[0]", "a PrefillChunk"),
    ],
)
def test_a_plan_is_of_one_step(changes, argument, expected):
    _, layer = recorded_layer()
    plan = plan_for(layer, make_step("two-token decodes and prefills", "fp8_ds_mla").batch)
    with pytest.raises(InvalidArgument) as caught:
        replace(plan, **changes)
    assert (caught.value.where, caught.value.argument) == ("StepPlan", argument)
    assert expected in caught.value.expected


def test_what_is_no_plan_has_no_parts():
    _, layer = recorded_layer()
    with pytest.raises(InvalidArgument, match="plan: got None, expected a StepPlan"):
        layer.step(None)
    plan = plan_for(layer, make_step("decodes", "fp8_ds_mla").batch)
    with pytest.raises(PlanMismatch, match="'split'"):
        layer.step(replace(plan, route="fused"))


def test_a_pair_without_a_buffer_for_it_is_refused():
    layer = make_layer("direct", concat_query=False)
    step = make_step("one token", "fp8_ds_mla")
    with pytest.raises(InvalidArgument, match="concat_query=True"):
        layer((step.q[..., :512], step.q[..., 512:]), step.kv_cache, step.topk_indices, plan_for(layer, step.batch))
    assert layer.buffers.query is None


def test_a_bf16_cache_of_scattered_blocks_is_refused_where_rows_must_be_flat():
    step = make_step("decodes and prefills in chunks", "bf16")
    wide = torch.zeros(BLOCKS, BLOCK + 1, 576, dtype=torch.bfloat16)
    wide[:, :BLOCK] = step.kv_cache
    layer = make_layer("direct", "bf16")
    with pytest.raises(InvalidArgument, match="contiguous_blocks=False"):
        layer(step.q, wide[:, :BLOCK], step.topk_indices, plan_for(layer, step.batch))
    layer = make_layer("fused", "bf16")
    assert_matches(step, *layer(step.q, wide[:, :BLOCK], step.topk_indices, plan_for(layer, step.batch)))


def spaced(cache: Tensor, gap: int, shift: int = 0) -> Tensor:
    """The same cache with `gap` more elements between its blocks, `shift` elements past an aligned address."""
    blocks, block_size, width = cache.shape
    stride = block_size * width + gap
    memory = torch.zeros(blocks * stride + shift + 128, dtype=cache.dtype)
    start = -memory.data_ptr() // cache.element_size() % 64 + shift
    placed = memory.as_strided(cache.shape, (stride, width, 1), start)
    placed.copy_(cache)
    return placed


@pytest.mark.parametrize(
    ("gap", "shift", "remedy"),
    [
        (4, 0, "cache_alignment=4"),
        (0, 8, "cache_alignment=8"),
        (16, 0, "contiguous_blocks=False"),
        (656, 0, None),
        (0, 0, None),
    ],
)
def test_a_cache_holds_what_the_spec_promises(gap: int, shift: int, remedy: str | None):
    plugin, layer = recorded_layer("direct")
    step = make_step("decodes", "fp8_ds_mla")
    arguments = step.q, spaced(step.kv_cache, gap, shift), step.topk_indices, plan_for(layer, step.batch)
    if remedy is None:
        layer(*arguments)
        return
    with pytest.raises(InvalidArgument, match=remedy):
        layer(*arguments)
    assert plugin.calls == []


def test_a_layer_is_bound_to_what_reads_its_cache():
    picky = Recorder("picky.kernels", preference=1.0, support={"cache_alignment": 16, "needs_whole_rows": True})
    step = make_step("decodes and prefills in chunks", "fp8_ds_mla")
    for changes, cache, chosen in (
        ({}, step.kv_cache, "picky.kernels"),
        ({"cache_alignment": 4, "contiguous_blocks": False}, spaced(step.kv_cache, 4), "portable.kernels"),
        ({"contiguous_blocks": False}, spaced(step.kv_cache, 16), "portable.kernels"),
    ):
        layer = route_of(picky, PORTABLE, route="direct", **changes)
        served = {part.role: part.decision.chosen for part in layer.route_decision.verdict.parts}
        assert (served["decode"], served["prefill"]) == (chosen, chosen)
        layer(step.q, cache, step.topk_indices, plan_for(layer, step.batch))


def test_a_bf16_cache_with_gaps_takes_a_route_that_reads_blocks():
    bf16 = {"kv_layout": "bf16", "scale_format": None}
    assert route_of(PORTABLE, **bf16).route == "direct"
    layer = route_of(PORTABLE, contiguous_blocks=False, **bf16)
    assert layer.route == "fused"
    (direct,) = (verdict for verdict in layer.route_decision.verdicts if verdict.route == "direct")
    assert [reason.subject for reason in direct.reasons] == ["contiguous_blocks"]
    step = make_step("decodes and prefills in chunks", "bf16")
    layer(step.q, spaced(step.kv_cache, 8), step.topk_indices, plan_for(layer, step.batch))


def other_buffers(**changes) -> StepBuffers:
    return StepBuffers.allocate(replace(SPEC, **changes), torch.device("cpu"), has_workspace=True)


@pytest.mark.parametrize(
    ("arguments", "argument", "got"),
    [
        ({"attn_sink": torch.zeros(HEADS + 1)}, "attn_sink", "[4]"),
        ({"attn_sink": torch.zeros(HEADS).bfloat16()}, "attn_sink", "bfloat16"),
        ({"workspace": torch.zeros(63, 576).bfloat16()}, "workspace", "[63, 576]"),
        ({"workspace": torch.zeros(64, 576)}, "workspace", "float32"),
        ({"workspace": torch.zeros(64, 640).bfloat16()[:, :576]}, "workspace", "not contiguous"),
        ({"buffers": other_buffers(topk=16)}, "indices", "[64, 16]"),
        ({"buffers": other_buffers(max_num_tokens=63)}, "indices", "[63, 12]"),
        ({"buffers": replace(other_buffers(), workspace=None)}, "workspace", "None"),
        ({"buffers": other_buffers(), "workspace": torch.zeros(64, 576).bfloat16()}, "workspace", "a tensor"),
        ({"buffers": other_buffers(concat_query=False)}, "query", "None"),
        ({"workspace": "64 rows"}, "workspace", "str '64 rows'"),
        ({"workspace": torch.zeros(64 * 576 + 1).bfloat16()[1:].view(64, 576)}, "workspace", "address"),
    ],
)
def test_tensors_that_do_not_fit_the_spec_are_refused(arguments, argument, got):
    with pytest.raises(InvalidArgument) as caught:
        make_layer("split", **arguments)
    assert caught.value.argument == argument
    assert got in caught.value.got


def test_sink_and_spec_must_agree():
    with pytest.raises(InvalidArgument, match="attn_sink: got a tensor"):
        SparseMLAAttention(SPEC, device="cpu", registry=REFERENCE, backend="reference", attn_sink=torch.zeros(HEADS))


@pytest.mark.parametrize(
    ("has_sink", "sink", "text"),
    [
        (True, None, "attn_sink: got None, expected .* when the layer is built, or in each call"),
        (True, torch.zeros(HEADS + 1), "attn_sink: got shape"),
        (True, torch.zeros(HEADS).double(), "attn_sink: got torch.float64"),
        (False, torch.zeros(HEADS), "attn_sink: got a tensor, expected None"),
    ],
)
def test_a_call_with_another_sink_than_the_spec_says_is_refused(has_sink: bool, sink, text: str):
    layer = SparseMLAAttention(replace(SPEC, attn_sink=has_sink), device="cpu", registry=REFERENCE, backend="reference")
    step = make_step("decodes and prefills in chunks", SPEC.kv_layout)
    plan, out = plan_for(layer, step.batch), torch.full((len(step.q), HEADS, 512), math.nan).bfloat16()
    with pytest.raises(InvalidArgument, match=text):
        layer(step.q, step.kv_cache, step.topk_indices, plan, attn_sink=sink, out=out)
    assert out.isnan().all()


def test_backend_mapping_names_primitives():
    with pytest.raises(InvalidArgument, match="sparse_decod"):
        SparseMLAAttention(SPEC, device="cpu", registry=REFERENCE, backend={"sparse_decod": "reference"})
