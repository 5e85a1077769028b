# SPDX-License-Identifier: Apache-2.0
"""A layer's attention over whole batches: every route and layout against the float64 oracle, and what a step may not do."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from machines import H200
from recorder import Recorder, registry_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mla_portable.attention import AttentionSpec, SparseMLAAttention, StepBuffers, checks
from mla_portable.contracts import (
    Batch,
    InvalidArgument,
    PlanMismatch,
    Primitive,
    StepPlan,
    TileSchedule,
    UnsupportedRequest,
    pack_fp8,
)
from mla_portable.planner import Planner
from mla_portable.reference import oracle
from mla_portable.registry import Registry

HEADS, TOPK, BLOCK, BLOCKS, MODEL_LEN = 3, 12, 8, 40, 48
ROUTES = ("fused", "split", "direct", "upconvert")
LAYOUTS = ("fp8_ds_mla", "bf16")
SPEC = AttentionSpec(
    num_heads=HEADS,
    softmax_scale=0.06,
    max_num_tokens=64,
    max_num_reqs=12,
    max_model_len=MODEL_LEN,
    block_size=BLOCK,
    topk=TOPK,
    scale_format="pow2",
    prefill_workspace_tokens=64,  # less than two of the longest sequences, so that prefills come in chunks
)

# name -> (query length, sequence length) of each request, decode query length, padded tokens
BATCHES: dict[str, tuple[list[tuple[int, int]], int, int | None]] = {
    "decodes": ([(1, 17), (1, 1), (1, 48)], 1, None),
    "decodes of two tokens": ([(2, 17), (2, 2), (2, 48)], 2, None),
    "decodes, padded": ([(1, 17), (1, 30)], 1, 5),
    "decodes of two tokens, padded by half a request": ([(2, 17), (2, 30)], 2, 5),
    "one token": ([(1, 1)], 1, None),
    "decodes and prefills in chunks": ([(1, 20), (1, 9), (7, 40), (3, 3), (5, 31), (4, 48)], 1, None),
    "two-token decodes and prefills": ([(2, 20), (2, 9), (7, 40), (3, 30)], 2, None),
    "prefills alone": ([(6, 6), (9, 33), (2, 48)], 1, None),
    "empty requests between": ([(1, 20), (0, 7), (1, 9), (0, 0), (6, 40), (0, 12), (4, 30), (0, 48)], 1, None),
    "mixed, padded": ([(1, 20), (5, 31), (3, 48)], 1, 16),
    "nothing": ([], 1, None),
    "nothing, padded": ([], 1, 4),
    "only empty requests": ([(0, 5), (0, 9)], 1, None),
}


@dataclass(frozen=True)
class Step:
    """A batch with its tensors, and what the oracle says of it."""

    batch: Batch
    q: Tensor
    kv_cache: Tensor
    topk_indices: Tensor
    out: Tensor
    lse: Tensor


def make_step(name: str, layout: str, sink: Tensor | None = None) -> Step:
    requests, _, padded = BATCHES[name]
    generator = torch.Generator().manual_seed(len(name))
    query_lens = np.array([query for query, _ in requests], dtype=np.int32)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    seq_lens = np.array([total for _, total in requests], dtype=np.int32)
    num_tokens, rows = int(starts[-1]), padded or int(starts[-1])
    blocks = torch.randperm(BLOCKS, generator=generator).to(torch.int32)
    table = torch.full((len(requests), MODEL_LEN // BLOCK), -1, dtype=torch.int32)
    used = 0
    for request, total in enumerate(seq_lens.tolist()):
        count = -(-total // BLOCK)
        table[request, :count] = blocks[used : used + count]
        used += count
    cache = written_cache(layout, table, seq_lens.tolist(), generator)
    # an engine's buffer: longer than the batch, and what the batch does not use is absent
    topk = torch.full((SPEC.max_num_tokens, TOPK), -1, dtype=torch.int32)
    slots = torch.full((rows, TOPK), -1, dtype=torch.int64)
    for request, (query, total) in enumerate(requests):
        for offset in range(query):
            token, position = int(starts[request]) + offset, total - query + offset
            chosen = torch.randperm(position + 1, generator=generator)[:TOPK]
            where = torch.randperm(TOPK, generator=generator)[: len(chosen)]  # absent entries anywhere in the row
            if (token, len(name) % 2) == (1, 1):
                chosen, where = chosen[:0], where[:0]
            topk[token, where] = chosen.to(torch.int32)
            slots[token, where] = table[request, chosen // BLOCK].long() * BLOCK + chosen % BLOCK
    q = torch.randn(rows, HEADS, 576, generator=generator).bfloat16()
    q[num_tokens:] = math.nan  # padding rows hold anything
    flat = cache.view(-1, cache.shape[-1]) if layout == "bf16" else cache
    out, lse = oracle.sparse_prefill(q, flat, slots, softmax_scale=SPEC.softmax_scale, attn_sink=sink)
    return Step(Batch(starts, seq_lens, table, padded), q, cache, topk, out, lse)


def written_cache(layout: str, table: Tensor, seq_lens: list[int], generator: torch.Generator) -> Tensor:
    """Rows of the requests' tokens; every other byte is 0xFF, which is NaN in every format."""
    width = 1152 if layout == "bf16" else 656
    cache = torch.full((BLOCKS, BLOCK, width), 0xFF, dtype=torch.uint8)
    for request, total in enumerate(seq_lens):
        position = torch.arange(total)
        latent = torch.randn(total, 576, generator=generator)
        rows = latent.bfloat16().view(torch.uint8) if layout == "bf16" else pack_fp8(latent[:, :512], latent[:, 512:])
        cache[table[request, position // BLOCK].long(), position % BLOCK] = rows
    return cache.view(torch.bfloat16) if layout == "bf16" else cache


REFERENCE = Registry(environ={})


def make_layer(route: str = "auto", layout: str = "fp8_ds_mla", query_len: int = 1, **changes) -> SparseMLAAttention:
    scale_format = "pow2" if layout == "fp8_ds_mla" else None
    arguments = {name: changes.pop(name) for name in ("attn_sink", "buffers", "workspace") if name in changes}
    fields = {"route": route, "kv_layout": layout, "decode_query_len": query_len, "scale_format": scale_format, **changes}
    spec = replace(SPEC, **fields, attn_sink="attn_sink" in arguments)
    return SparseMLAAttention(spec, device="cpu", registry=REFERENCE, backend="reference", **arguments)


def plan_for(layer: SparseMLAAttention, batch: Batch) -> StepPlan:
    return Planner(layer.planner_config()).plan(batch)


def assert_matches(step: Step, out: Tensor, lse: Tensor | None) -> None:
    torch.testing.assert_close(out.double(), step.out, rtol=1e-2, atol=8e-3)
    if lse is not None:
        torch.testing.assert_close(lse.double(), step.lse, rtol=1e-5, atol=1e-5)


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


def test_padding_rows_are_zero_and_minus_infinity():
    for route in ROUTES:
        step = make_step("decodes of two tokens, padded by half a request", "fp8_ds_mla")
        layer = make_layer(route, query_len=2)
        out, lse = layer(step.q, step.kv_cache, step.topk_indices, plan_for(layer, step.batch))
        assert out[4:].eq(0).all() and lse[4:].eq(-math.inf).all()


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
    kv_c, k_pe = torch.randn(5, 512).bfloat16(), torch.randn(5, 64).bfloat16()
    slots = torch.tensor([3, -1, 17, 319, 320])
    expected = oracle.cache_write(kv_c, k_pe, cache, slots, scale_format="amax")
    layer.cache_write(kv_c, k_pe, cache, slots)
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


# which route


FLASH = Recorder(
    "flash.mla",
    "flashmla_tiles",
    support={"kv_layouts": ("fp8_ds_mla",), "padded_heads": (64, 128)},
    primitives=(Primitive.SPARSE_DECODE,),
)
FLASH_PREFILL = Recorder("flashp.mla", support={"kv_layouts": ("bf16",)}, primitives=(Primitive.SPARSE_PREFILL,))
PORTABLE = Recorder("portable.kernels", "split_kv", preference=50.0)
SLOW = Recorder("slow.torch", preference=1000.0, support={"graph": False})
MOVERS = Recorder("movers.kernels", preference=50.0, primitives=(Primitive.GATHER_UPCONVERT, Primitive.CONVERT_INDICES))
PLODDING = Recorder("plodding.decode", preference=90.0, primitives=(Primitive.SPARSE_DECODE,))
VENDOR_BF16 = Recorder("vendor.bf16", support={"kv_layouts": ("bf16",)}, primitives=(Primitive.SPARSE_PREFILL,))


def route_of(*plugins: Recorder, **changes) -> SparseMLAAttention:
    """A layer built for what claims to be an H200; its kernels only write down that they were called."""
    return SparseMLAAttention(replace(SPEC, **changes), device="cpu", registry=registry_of(*plugins, facts={"cpu": H200}))


@pytest.mark.parametrize(
    ("plugins", "changes", "route"),
    [
        ((FLASH, FLASH_PREFILL, PORTABLE, SLOW), {"num_heads": 16}, "fused"),
        ((FLASH, FLASH_PREFILL, PORTABLE, SLOW), {"num_heads": 64}, "split"),
        ((FLASH, FLASH_PREFILL, PORTABLE, SLOW), {"num_heads": 64, "kv_layout": "bf16", "scale_format": None}, "direct"),
        ((PORTABLE, SLOW), {"num_heads": 16}, "direct"),
        ((SLOW,), {}, "direct"),
        ((VENDOR_BF16, MOVERS, SLOW), {}, "upconvert"),
        ((VENDOR_BF16, PORTABLE, SLOW), {}, "split"),
        ((VENDOR_BF16, MOVERS, PLODDING, SLOW), {}, "split"),
        ((FLASH, FLASH_PREFILL, PORTABLE, SLOW), {"num_heads": 16, "route": "split"}, "split"),
    ],
    ids=[
        "few heads for FlashMLA",
        "many heads for FlashMLA",
        "a bf16 cache",
        "portable kernels",
        "the reference alone",
        "bf16 kernels, FP8 by the reference only",
        "bf16 kernels, FP8 by portable ones",
        "bf16 kernels, FP8 by plodding ones: better than to gather in every step",
        "forced",
    ],
)
def test_route_is_ranked_by_what_serves_it(plugins, changes, route):
    assert route_of(*plugins, **changes).route == route


def test_without_a_decode_kernel_prefill_serves_all_tokens():
    kernels = Recorder(
        "vendor.sparse", primitives=(Primitive.SPARSE_PREFILL, Primitive.CONVERT_INDICES), support={"kv_layouts": ("bf16",)}
    )
    layer = route_of(kernels, kv_layout="bf16", scale_format=None)
    step = make_step("decodes and prefills in chunks", "bf16")
    layer(step.q, step.kv_cache, step.topk_indices, plan_for(layer, step.batch))
    assert layer.route == "direct"
    assert [(name, args[0].shape[0]) for name, args, _ in kernels.calls] == [("convert_indices", 21), ("sparse_prefill", 21)]
    with pytest.raises(UnsupportedRequest) as caught:
        layer.cache_write(step.q[:, 0, :512], step.q[:, 0, 512:], step.kv_cache, torch.zeros(21, dtype=torch.int64))
    assert caught.value.decision.request.primitive is Primitive.CACHE_WRITE


APART = [("sparse_decode", 2), ("sparse_prefill", 19)]


@pytest.mark.parametrize(
    ("prefills_as", "changes", "batch", "calls"),
    [
        ("vendor.sparse", {}, "decodes and prefills in chunks", [("sparse_prefill", 21)]),
        ("vendor.sparse", {}, "decodes", [("sparse_decode", 3)]),
        ("vendor.sparse", {"route": "split"}, "decodes and prefills in chunks", None),
        ("vendor.sparse", {"batch_invariant": True}, "decodes and prefills in chunks", APART),
        ("vendor.other", {}, "decodes and prefills in chunks", APART),
        ("", {}, "decodes and prefills in chunks", APART),
    ],
)
def test_one_kernel_serves_a_mixed_step_in_one_call(prefills_as, changes, batch, calls):
    kernels = Recorder("vendor.sparse", support={"batch_invariant": True}, prefills_as=prefills_as)
    layer = route_of(kernels, **changes)
    step = make_step(batch, "fp8_ds_mla")
    layer(step.q, step.kv_cache, step.topk_indices, plan_for(layer, step.batch))
    attended = [(name, args[0].shape[0]) for name, args, _ in kernels.calls if name.startswith("sparse")]
    if calls is None:
        assert attended[0] == ("sparse_decode", 2) and sum(rows for _, rows in attended) == 21
    else:
        assert attended == calls


def test_a_bf16_cache_is_not_copied_to_bf16_rows():
    verdicts = {v.route: v for v in route_of(PORTABLE, kv_layout="bf16", scale_format=None).route_decision.verdicts}
    for route in ("split", "upconvert"):
        assert [reason.subject for reason in verdicts[route].reasons] == ["kv_layout"]
    assert verdicts["direct"].can_run and verdicts["fused"].can_run


def test_the_decision_tells_why():
    layer = route_of(FLASH, FLASH_PREFILL, PORTABLE, SLOW, num_heads=16)
    decision = layer.route_decision
    assert [verdict.route for verdict in decision.verdicts] == ["fused", "split", "direct", "upconvert"]
    assert decision.verdicts[0].cost == pytest.approx(1.5 * 10)
    text = layer.explain()
    assert text.startswith("route: fused (automatic)")
    assert "fewer than 32 heads" in text
    assert "gather portable.kernels 50 x 0.05" in text
    assert "sparse_decode: flash.mla" in text
    assert [route["route"] for route in decision.as_dict()["routes"]] == ["fused", "split", "direct", "upconvert"]


def test_no_route_is_an_error_with_the_reasons_against_each():
    narrow = Recorder("narrow.decode", primitives=(Primitive.SPARSE_DECODE,), support={"num_heads": (64,)})
    with pytest.raises(UnsupportedRequest) as caught:
        route_of(narrow)
    text = str(caught.value)
    for route in ROUTES:
        assert f"  {route}" in text
    assert "num_heads 3 (supports 64)" in text
    assert "convert_indices not served" in text
    assert caught.value.decision.chosen is None
    assert not any(verdict.can_run for verdict in caught.value.route_decision.verdicts)


def test_a_forced_route_never_falls_back():
    with pytest.raises(UnsupportedRequest, match="route 'upconvert' cannot serve") as caught:
        route_of(PORTABLE, route="upconvert", graph=True)
    (verdict,) = caught.value.route_decision.verdicts
    assert [reason.subject for reason in verdict.reasons] == ["graph"]


def test_graph_capture_passes_over_what_cannot_be_captured():
    layer = route_of(Recorder("fast.eager", support={"graph": False}), PORTABLE, graph=True)
    chosen = {part.role: part.decision.chosen for part in layer.route_decision.verdict.parts}
    assert chosen["decode"] == chosen["convert"] == "portable.kernels"


def test_backend_may_differ_by_primitive():
    demanded = {"convert_indices": "slow", "sparse_decode": "slow.torch"}
    spec = replace(SPEC, route="direct")
    layer = SparseMLAAttention(spec, device="cpu", registry=registry_of(PORTABLE, SLOW), backend=demanded)
    chosen = {part.role: part.decision.chosen for part in layer.route_decision.verdict.parts}
    assert chosen == {"convert": "slow.torch", "decode": "slow.torch", "prefill": "portable.kernels"}


def test_planner_config_follows_the_decoder():
    config = route_of(FLASH, FLASH_PREFILL, PORTABLE, num_heads=64).planner_config()
    assert (config.route, config.schedule_kind, config.num_heads) == ("split", "flashmla_tiles", 64)
    assert (config.arch, config.num_sms, config.kernel_heads) == ("sm90", 132, 128)
    assert config.workspace_tokens == SPEC.workspace_rows
    assert route_of(PORTABLE).planner_config().workspace_tokens == 0


# what a step does


def recorded_layer(route: str = "split", query_len: int = 2) -> tuple[Recorder, SparseMLAAttention]:
    plugin = Recorder(schedule_kind="split_kv")
    spec = replace(SPEC, route=route, decode_query_len=query_len)
    return plugin, SparseMLAAttention(spec, device="cpu", registry=registry_of(plugin))


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


@pytest.mark.parametrize(
    ("kind", "support", "told"),
    [
        ("split_kv", {}, {"sparse_decode", "sparse_prefill"}),
        ("flashmla_tiles", {}, {"sparse_prefill"}),  # a plan of tiles is made for K keys in every row
        ("split_kv", {"lengths": False}, set()),
        ("split_kv", {"compact": False}, set()),
    ],
)
def test_rows_shorter_than_topk_are_compacted_for_who_can_skip_the_rest(kind: str, support: dict[str, bool], told: set[str]):
    plugin = Recorder(schedule_kind=kind, support=support)
    spec = replace(SPEC, route="split", decode_query_len=2)
    layer = SparseMLAAttention(spec, device="cpu", registry=registry_of(plugin))
    assert {str(request.primitive) for request in plugin.bound if request.lengths} == told
    assert any(request.compact for request in plugin.bound) is bool(told)
    if kind == "flashmla_tiles":
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
    assert "clean_indices" not in layer.explain()  # it decides nothing


@pytest.mark.parametrize(("most", "query_len"), [(4, 1), (256, 2)])
def test_decode_is_chosen_for_the_largest_batch_of_the_deployment(most: int, query_len: int):
    plugin = Recorder(schedule_kind="split_kv")
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


# what is refused


def over(memory: Tensor, *shape: int) -> Tensor:
    """A tensor on the first elements of other memory."""
    return memory.view(-1)[: math.prod(shape)].view(shape)


def tiles_for(plan: StepPlan) -> TileSchedule:
    """A schedule of the other kind for a plan's decode call."""
    rows, words = plan.num_decodes, {"dtype": torch.int32}
    return TileSchedule(rows, plan.decode_query_len, 64, TOPK, 2, torch.zeros(2, 8, **words), torch.zeros(rows + 1, **words))


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
        (lambda a, s, p: {"plan": replace(p, num_padded_tokens=65), "q": s.q[:1].expand(65, -1, -1)}, ("65 tokens", "most 64")),
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
        (
            lambda a, s, p: {"lse_out": a.buffers.indices.view(torch.float32).view(-1)[:42].view(14, HEADS)},
            ("lse_out", "overlaps the layer's buffers", "of its own"),
        ),
        (lambda a, s, p: {"q": None}, ("InvalidArgument", "q: got None", "the pair")),
        (lambda a, s, p: {"q": [s.q, s.q]}, ("InvalidArgument", "q: got list", "the pair")),
        (lambda a, s, p: {"q": torch.tensor(1.0)}, ("InvalidArgument", "q: got shape []", "[T, H, 576]")),
        (lambda a, s, p: {"q": (s.q[..., :512],)}, ("InvalidArgument", "a tuple of 1")),
        (lambda a, s, p: {"q": (s.q[..., :512], s.q[..., 512:], s.q)}, ("InvalidArgument", "a tuple of 3")),
        (lambda a, s, p: {"q": (s.q[..., :512], None)}, ("InvalidArgument", "q[1]: got None")),
        (lambda a, s, p: {"topk_indices": None}, ("InvalidArgument", "topk_indices: got None")),
        (lambda a, s, p: {"topk_indices": torch.tensor(1)}, ("InvalidArgument", "topk_indices: got shape []")),
        (lambda a, s, p: {"plan": None}, ("InvalidArgument", "plan: got None", "a StepPlan")),
        (lambda a, s, p: {"kv_cache": None}, ("InvalidArgument", "kv_cache: got None")),
        (lambda a, s, p: {"topk_indices": s.topk_indices.to("meta")}, ("topk_indices", "on meta", "on cpu")),
        (lambda a, s, p: {"kv_cache": s.kv_cache.to("meta")}, ("kv_cache", "on meta", "on cpu")),
        (
            lambda a, s, p: {"plan": replace(p, req_id_per_token=p.req_id_per_token.to("meta"))},
            ("PlanMismatch", "layer is on cpu", "made on meta"),
        ),
        (
            lambda a, s, p: {"plan": replace(p, decode_schedule=tiles_for(p))},
            ("PlanMismatch", "TileSchedule", "takes a SplitSchedule", "planner_config()"),
        ),
        (lambda a, s, p: {"plan": replace(p, decode_schedule="x")}, ("PlanMismatch", "the plan has a str")),
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


def test_torch_defaults_of_the_caller_do_not_matter():
    step = make_step("decodes and prefills in chunks", "fp8_ds_mla")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            layer = make_layer("split", need_lse=True)
            buffers = layer.buffers
            tensors = [buffers.indices, buffers.counts, buffers.query, buffers.workspace]
            without_lse = StepBuffers.allocate(replace(SPEC, need_lse=False), layer.device, has_workspace=False)
            recorder, recorded = recorded_layer("split", query_len=1)
            out, lse = recorded(step.q, step.kv_cache, step.topk_indices, plan_for(recorded, step.batch))
    finally:
        torch.set_default_dtype(before)
    assert [tensor.device.type for tensor in (*tensors, out, lse, without_lse.lse)] == ["cpu"] * 7
    assert (out.dtype, lse.dtype, without_lse.lse.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert not buffers.indices.is_inference() and recorder.calls


@pytest.mark.parametrize("device", ["gpu9", "cuda:99", None, 3])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(InvalidArgument, match=r"SparseMLAAttention: device: got .*expected a device that torch can use"):
        SparseMLAAttention(SPEC, device=device, registry=REFERENCE)


@pytest.mark.parametrize("backend", [5, ["reference"], {"sparse_decode": 5}])
def test_a_backend_is_a_name(backend):
    with pytest.raises(InvalidArgument, match=r"SparseMLAAttention: backend: got .*expected the name of a backend"):
        SparseMLAAttention(SPEC, device="cpu", registry=REFERENCE, backend=backend)


def test_what_is_no_spec_is_refused():
    with pytest.raises(InvalidArgument, match="SparseMLAAttention: spec: got None, expected an AttentionSpec"):
        SparseMLAAttention(None, device="cpu", registry=REFERENCE)


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


@pytest.mark.parametrize("sink", [None, torch.zeros(HEADS)])
def test_sink_and_spec_must_agree(sink):
    with pytest.raises(InvalidArgument, match="attn_sink"):
        SparseMLAAttention(
            replace(SPEC, attn_sink=sink is None), device="cpu", registry=REFERENCE, backend="reference", attn_sink=sink
        )


def test_backend_mapping_names_primitives():
    with pytest.raises(InvalidArgument, match="sparse_decod"):
        SparseMLAAttention(SPEC, device="cpu", registry=REFERENCE, backend={"sparse_decod": "reference"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_heads", 0),
        ("topk", 0),
        ("block_size", -64),
        ("max_num_tokens", 0),
        ("decode_query_len", 0),
        ("softmax_scale", 0.0),
        ("softmax_scale", math.nan),
        ("kv_layout", "fp8"),
        ("scale_format", "e8m0"),
        ("route", "mixed"),
        ("max_scratch_bytes", -1),
        ("prefill_workspace_tokens", MODEL_LEN - 1),
        ("num_heads", 1.5),
        ("num_heads", "3"),
        ("num_heads", None),
        ("topk", True),
        ("max_model_len", math.nan),
        ("max_model_len", 10**400),
        ("max_num_tokens", torch.tensor(64)),
        ("prefill_workspace_tokens", 64.0),
        ("max_scratch_bytes", 1e9),
        ("softmax_scale", True),
        ("softmax_scale", "0.06"),
        ("softmax_scale", 1e39),
        ("softmax_scale", 1e-50),
        ("softmax_scale", 10**400),
        ("softmax_scale", torch.tensor(0.06)),
        ("softmax_scale", None),
        ("need_lse", "no"),
        ("attn_sink", 0),
        ("graph", None),
        ("contiguous_blocks", 1),
        ("kv_layout", None),
        ("kv_layout", ["bf16"]),
        ("route", 3),
        ("cache_alignment", 0),
        ("cache_alignment", 12),
        ("cache_alignment", 32),
        ("cache_alignment", 8.0),
    ],
)
def test_spec_refuses_what_means_nothing(field: str, value: object):
    with pytest.raises(InvalidArgument) as caught:
        replace(SPEC, **{field: value})
    assert caught.value.argument == field


def test_workspace_holds_five_sequences_by_default():
    assert replace(SPEC, prefill_workspace_tokens=None).workspace_rows == 5 * MODEL_LEN
