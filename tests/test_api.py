# SPDX-License-Identifier: Apache-2.0
"""The convenience functions: what they ask the registry, how often, what they hand over, and how users steer them."""

from __future__ import annotations

import gc
import inspect
import weakref
from dataclasses import fields
from importlib import import_module

import pytest
import torch
from machines import H200
from recorder import Recorder, registry_of

import mla_portable
from mla_portable import dispatch, primitives
from mla_portable.accelerator import Accelerator
from mla_portable.choose import Registry, get_registry, reset_registry
from mla_portable.contracts import Features, InvalidArgument, PlanMismatch, Primitive
from mla_portable.dispatch import serving
from mla_portable.kit.split_kv import SPLIT_KV, SplitSchedule
from mla_portable.layouts import FP8_DS_MLA
from mla_portable.primitives import MERGE_STATES, QUANTIZE_PER_TENSOR
from mla_portable_common.flash_mla.tile_schedules import FLASHMLA_TILES, TileSchedule

B, S, H, K, BLOCKS, BLOCK = 3, 2, 4, 24, 5, 16
SLOTS = BLOCKS * BLOCK


def decode_arguments(heads: int = H, topk: int = K, layout: str = "fp8_ds_mla", seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(SLOTS, 576, generator=generator)
    if layout == "bf16":
        cache = latents.bfloat16().view(BLOCKS, BLOCK, 576)
    else:
        cache = FP8_DS_MLA.pack(latents[:, :512], latents[:, 512:]).view(BLOCKS, BLOCK, 656)
    return {
        "q": torch.randn(B, S, heads, 576, generator=generator).bfloat16(),
        "kv_cache": cache,
        "indices": torch.randint(-5, SLOTS + 5, (B, S, topk), generator=generator, dtype=torch.int32),
        "softmax_scale": 0.05,
    }


@pytest.fixture
def tape():
    plugin = Recorder()
    with serving(registry_of(plugin)):
        yield plugin


# what is asked


@pytest.mark.parametrize("name", [str(primitive) for primitive in Primitive.all()])
def test_signature_is_the_protocol_plus_backend(name: str):
    protocol = getattr(primitives, "".join(word.capitalize() for word in name.split("_")))
    expected = list(inspect.signature(protocol.__call__).parameters.values())[1:]
    offered = list(inspect.signature(getattr(mla_portable, name)).parameters.values())
    # of a second cache, and scales: only who declares `Support.extra_cache`, a layout with `tensor_scale` or `Support.q_scale`
    # is given these, so the Protocol does not ask for them
    optional = "extra_kv_cache", "extra_indices", "extra_lengths", "kv_scale", "q_scale"
    offered = [parameter for parameter in offered if parameter.name not in optional]
    if name in ("indexer_logits", "indexer_select"):  # likewise: only who has a schedule_kind is given a schedule
        offered = [parameter for parameter in offered if parameter.name != "schedule"]
    # an implementation is bound for an order and a layout, so calls name neither
    offered = [parameter for parameter in offered if parameter.name != "ordered"]
    layouts = [
        each for each in ("kv_layout", "index_layout") if Primitive.named(name).cache and each in Primitive.named(name).facts
    ]
    last = [*layouts, "backend"]
    own, added = offered[: -len(last)], offered[-len(last) :]
    assert [(p.name, p.kind, p.default) for p in own] == [(p.name, p.kind, p.default) for p in expected]
    assert [(p.name, p.kind, p.default) for p in added] == [(each, inspect.Parameter.KEYWORD_ONLY, None) for each in last]


@pytest.mark.parametrize("primitive", Primitive.all(), ids=str)
def test_the_check_and_the_reference_take_what_the_function_takes(primitive: Primitive):
    """In the same order: a function whose check is one of its own hands its arguments to it by position."""
    offered = list(inspect.signature(getattr(mla_portable, primitive)).parameters.values())[:-1]  # the last is `backend`
    reference = list(inspect.signature(primitive.reference).parameters.values())
    taken = [p for p in offered if p.name != "ordered"]  # of the reference the positions always ascend
    assert [(p.name, p.kind, p.default) for p in reference[: len(taken)]] == [(p.name, p.kind, p.default) for p in taken]
    assert [p.name for p in reference[len(taken) :]] in ([], ["dtype"]), "that of its arithmetic, by default float64"
    check = getattr(import_module(primitive.module), "check", None)
    assert (check is None) == (primitive in (MERGE_STATES, QUANTIZE_PER_TENSOR)), "these check in the public function"
    assert check is None or list(inspect.signature(check).parameters) == [p.name for p in offered]


def test_request_says_what_the_call_needs(tape):
    arguments = decode_arguments()
    lengths, sink = torch.zeros(B, S, dtype=torch.int32), torch.zeros(H)
    mla_portable.sparse_decode(**arguments, lengths=lengths)
    q, indices = arguments["q"][:, 0], arguments["indices"][:, 0]
    mla_portable.sparse_prefill(q, arguments["kv_cache"], indices, softmax_scale=1.0, attn_sink=sink)
    mla_portable.sparse_prefill(
        q, torch.zeros(9, 576).bfloat16(), indices, softmax_scale=1.0, lengths=lengths[:, 0].contiguous()
    )
    ids = torch.zeros(B, dtype=torch.int32)
    mla_portable.convert_indices(
        arguments["indices"][:, 0].contiguous(),
        ids,
        torch.zeros(2, 3, dtype=torch.int32),
        block_size=BLOCK,
        prefill_request_ids=ids,
        prefill_workspace_starts=ids,
        compact=True,
    )
    tokens = torch.zeros(2, 512).bfloat16(), torch.zeros(2, 64).bfloat16(), arguments["kv_cache"]
    mla_portable.cache_write(*tokens, torch.zeros(2, dtype=torch.int64), scale_format="amax")
    mla_portable.cache_write(*tokens[:2], torch.zeros(2, 4, 576).bfloat16(), torch.zeros(2, dtype=torch.int64))
    workspace = torch.zeros(9, 576).bfloat16()
    mla_portable.gather_upconvert(arguments["kv_cache"], torch.zeros(3, 2, dtype=torch.int32), ids, ids, out=workspace)
    table = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
    q, weights, keys = torch.zeros(B, 64, 128), torch.zeros(B, 64), torch.zeros(BLOCKS, BLOCK, 132, dtype=torch.uint8)
    mla_portable.indexer_logits(q.bfloat16(), weights, keys[..., :128].bfloat16(), *table, out=torch.zeros(B, 48))
    q, e4m3 = q.to(torch.float8_e4m3fn), torch.zeros(9, 128).to(torch.float8_e4m3fn)
    mla_portable.indexer_select(q, weights, keys, *table, topk=32)
    mla_portable.indexer_logits_ragged(q, weights, e4m3, torch.zeros(9), ids, ids, out=torch.zeros(B, 9))
    mla_portable.indexer_cache_write(torch.zeros(2, 128).bfloat16(), keys, torch.zeros(2, dtype=torch.int64))
    asked = [str(request) for request in tape.bound]
    assert asked == [
        "kv_layout=fp8_ds_mla num_heads=4 topk=24 block_size=16 query_len=2 lse=yes lengths=yes on CPU",
        "kv_layout=fp8_ds_mla num_heads=4 topk=24 block_size=16 lse=yes attn_sink=yes on CPU",
        "kv_layout=bf16 num_heads=4 topk=24 lse=yes lengths=yes on CPU",
        "topk=24 block_size=16 compact=yes prefill_workspace=yes on CPU",
        "kv_layout=fp8_ds_mla block_size=16 scale_format=amax on CPU",
        "kv_layout=bf16 block_size=4 on CPU",
        "kv_layout=fp8_ds_mla block_size=16 on CPU",
        "kv_layout=index_bf16 num_heads=64 block_size=16 on CPU",
        "kv_layout=index_fp8 num_heads=64 topk=32 block_size=16 uneven_blocks=yes ordered=yes on CPU",
        "kv_layout=index_fp8 num_heads=64 on CPU",
        "kv_layout=index_fp8 block_size=16 scale_format=pow2 uneven_blocks=yes on CPU",
    ]


def call_with_one_optional_argument_each():
    decode, lengths = decode_arguments(), torch.zeros(B, S, dtype=torch.int32)
    extra = {"extra_kv_cache": torch.zeros(3, 8, 656, dtype=torch.uint8), "extra_indices": torch.zeros(B, S, 6).int()}
    without_rope = decode["q"][..., :512].contiguous()
    mla_portable.sparse_decode(**decode, **extra)
    mla_portable.sparse_decode(**decode, **extra, extra_lengths=lengths)
    mla_portable.sparse_decode(**{**decode, "q": without_rope})
    q, indices = decode["q"][:, 0].contiguous(), decode["indices"][:, 0].contiguous()
    extra["extra_indices"] = extra["extra_indices"][:, 0].contiguous()
    mla_portable.sparse_prefill(q, decode["kv_cache"], indices, softmax_scale=1.0, **extra)
    extra["extra_lengths"] = lengths[:, 0].contiguous()
    mla_portable.sparse_prefill(q, decode["kv_cache"], indices, softmax_scale=1.0, **extra)
    mla_portable.sparse_prefill(without_rope[:, 0].contiguous(), decode["kv_cache"], indices, softmax_scale=1.0)
    convert = indices, torch.zeros(B, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
    for given in ({"dcp_size": 2}, {"seq_lens": torch.zeros(2, dtype=torch.int32)}, {"compact": True}):
        mla_portable.convert_indices(*convert, block_size=BLOCK, **given)
    dims = {"softmax_scale": 1.0, "max_query_len": 1, "max_key_len": 1}
    starts = torch.zeros(2, dtype=torch.int32)
    keys = torch.zeros(1, H, 192).bfloat16(), torch.zeros(1, H, 192).bfloat16(), torch.zeros(1, H, 128).bfloat16()
    mla_portable.masked_prefill(*keys, starts, starts, **dims)


def test_request_says_each_optional_argument_by_its_own_name():
    tape = Recorder(support=dict.fromkeys(("extra_cache", *(each.name for each in fields(Features))), True))
    with serving(registry_of(tape)):
        call_with_one_optional_argument_each()
    sizes, second = "num_heads=4 topk=24 block_size=16", "extra_topk=6 extra_block_size=8"
    assert [str(request) for request in tape.bound] == [
        f"kv_layout=fp8_ds_mla {sizes} {second} query_len=2 lse=yes on CPU",
        f"kv_layout=fp8_ds_mla {sizes} {second} query_len=2 extra_lengths=yes lse=yes on CPU",
        f"kv_layout=fp8_ds_mla {sizes} query_len=2 lse=yes nope=yes on CPU",
        f"kv_layout=fp8_ds_mla {sizes} {second} lse=yes on CPU",
        f"kv_layout=fp8_ds_mla {sizes} {second} extra_lengths=yes lse=yes on CPU",
        f"kv_layout=fp8_ds_mla {sizes} lse=yes nope=yes on CPU",
        "topk=24 block_size=16 context_parallel=yes on CPU",
        "topk=24 block_size=16 seq_lens=yes on CPU",
        "topk=24 block_size=16 compact=yes on CPU",
        "num_heads=4 qk_head_dim=192 v_head_dim=128 lse=yes on CPU",
    ]


@pytest.mark.parametrize(
    ("gap", "shift", "layout", "served"),
    [
        (0, 0, "fp8_ds_mla", "cheap"), (656, 0, "fp8_ds_mla", "cheap"), (16, 0, "fp8_ds_mla", "dear"),
        (4, 0, "fp8_ds_mla", "dear"), (0, 4, "fp8_ds_mla", "dear"), (576, 0, "bf16", "cheap"), (8, 0, "bf16", "dear"),
        (576, 2, "bf16", "dear"),
    ],
)  # fmt: skip
def test_a_cache_is_served_by_who_can_read_its_alignment(gap: int, shift: int, layout: str, served: str):
    cheap = Recorder("cheap.one", support={"cache_alignment": 16, "needs_whole_rows": True})
    dear = Recorder("dear.one", preference=90.0)
    arguments = decode_arguments(layout=layout)
    width, dtype = arguments["kv_cache"].shape[2], arguments["kv_cache"].dtype
    stride = BLOCK * width + gap
    memory = torch.zeros(BLOCKS * stride + 128, dtype=dtype)
    start = -memory.data_ptr() // memory.element_size() % 64 + shift
    cache = memory.as_strided((BLOCKS, BLOCK, width), (stride, width, 1), start)
    with serving(registry_of(cheap, dear)):
        mla_portable.sparse_decode(**{**arguments, "kv_cache": cache})
        mla_portable.cache_write(
            torch.zeros(2, 512).bfloat16(), torch.zeros(2, 64).bfloat16(), cache, torch.zeros(2, dtype=torch.int64)
        )
        table, ids = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        mla_portable.gather_upconvert(cache, table, ids, ids, out=torch.zeros(9, 576).bfloat16())
    tape, other = (cheap, dear) if served == "cheap" else (dear, cheap)
    assert [call[0] for call in tape.calls] == ["sparse_decode", "cache_write", "gather_upconvert"]
    assert other.calls == []


def test_the_cache_of_choices_is_bounded(tape, monkeypatch):
    monkeypatch.setattr(dispatch, "_CACHE_LIMIT", 4)
    for heads in range(1, 12):
        mla_portable.sparse_decode(**decode_arguments(heads=heads))
        assert len(dispatch.current_registry().dispatched) <= 4


def test_a_reset_lets_go_of_the_registry_and_of_what_it_served(monkeypatch):
    monkeypatch.delenv("MLA_PORTABLE_BACKEND", raising=False)
    reset_registry()
    outs, lses = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    mla_portable.merge_states(outs, lses, backend="reference")
    before = weakref.ref(get_registry())
    assert before() is not None and before().dispatched
    reset_registry()
    gc.collect()
    assert before() is None
    mla_portable.merge_states(outs, lses, backend="reference")
    reset_registry()


def test_a_serving_block_keeps_nothing():
    registry = registry_of(Recorder())
    with serving(registry):
        mla_portable.merge_states(torch.zeros(2, 3, 4), torch.zeros(2, 3))
    before = weakref.ref(registry)
    del registry
    gc.collect()
    assert before() is None


def test_a_call_under_graph_capture_is_another_kind(tape, monkeypatch):
    """On a pretended GPU: what serves eagerly may be unable to serve in a graph."""
    capturing = False
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    gpu = Accelerator(torch.device("cuda", 0))
    gpu.current_index, gpu.is_capturing = lambda: 0, lambda: capturing
    monkeypatch.setattr(dispatch, "accelerator", lambda device: gpu)
    monkeypatch.setattr(Registry, "facts", lambda self, device: H200)
    outs, lses = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    for capturing in (False, True, False, True):  # noqa: B007 (read by the lambda above)
        mla_portable.merge_states(outs, lses)
    assert [request.graph for request in tape.bound] == [False, True]


def test_calls_on_another_device_are_another_kind(tape, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    gpus = [Accelerator(torch.device("cuda", index)) for index in range(2)]
    outs, lses = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    for index in (0, 1, 0):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda self, index=index: index)
        gpus[index].current_index = lambda index=index: index
        monkeypatch.setattr(dispatch, "accelerator", lambda device, index=index: gpus[index])
        mla_portable.merge_states(outs, lses)
    assert len(dispatch.current_registry().dispatched) == 2


# steering


@pytest.fixture
def two():
    cheap, dear = Recorder("cheap.one"), Recorder("dear.one", preference=90.0)
    with serving(registry_of(cheap, dear)):
        yield cheap, dear


def test_backend_and_use_steer_calls_already_served(two):
    cheap, dear = two
    arguments = decode_arguments()

    def server(**options: str) -> str:
        return mla_portable.sparse_decode(**arguments, **options)[1].name

    assert server() == "cheap.one"
    assert server(backend="dear") == "dear.one"
    with mla_portable.use("dear"):
        assert server() == "dear.one"
        assert server(backend="cheap.one") == "cheap.one"
    with mla_portable.use(sparse_prefill="dear"):
        assert server() == "cheap.one"
    assert server() == "cheap.one"
    assert (len(cheap.calls), len(dear.calls)) == (4, 2)


# schedules


def split_schedule() -> SplitSchedule:
    return SplitSchedule(num_rows=B * S, num_heads=H, topk=K, num_splits=1)


def tile_schedule() -> TileSchedule:
    return TileSchedule(
        num_rows=B,
        query_len=S,
        num_heads=64,
        topk=K,
        num_sm_parts=1,
        tile_scheduler_metadata=torch.zeros(1, 8, dtype=torch.int32),
        num_splits=torch.zeros(B + 1, dtype=torch.int32),
    )


@pytest.mark.parametrize(
    ("kind", "schedule", "served"),
    [
        (SPLIT_KV, split_schedule, True),
        (SPLIT_KV, tile_schedule, False),
        (FLASHMLA_TILES, tile_schedule, True),
        (FLASHMLA_TILES, split_schedule, False),
        (None, split_schedule, True),
        (None, tile_schedule, True),
    ],
)
def test_schedule_must_be_of_the_kind_that_the_kernel_takes(kind, schedule, served):
    plugin, given = Recorder(schedule_kind=kind), schedule()
    with serving(registry_of(plugin)):
        if served:
            mla_portable.sparse_decode(**decode_arguments(), schedule=given)
            assert plugin.calls[0][2]["schedule"] is given
        else:
            with pytest.raises(PlanMismatch, match=type(given).__name__):
                mla_portable.sparse_decode(**decode_arguments(), schedule=given)
            assert plugin.calls == []


# explain


def test_explain_names_everyone(two):
    decision = mla_portable.explain("sparse_decode", device=H200, num_heads=16, topk=2048, kv_layout="fp8_ds_mla")
    assert decision.chosen == "cheap.one"
    assert [verdict.implementation for verdict in decision.verdicts] == ["cheap.one", "dear.one"]
    assert "NVIDIA H200" in decision.text()
    assert mla_portable.explain(MERGE_STATES, device="cpu", backend="dear").chosen == "dear.one"


@pytest.mark.parametrize(
    ("primitive", "fields", "argument", "expected"),
    [
        ("sparse_decod", {}, "primitive", "sparse_decode"),
        ("sparse_decode", {"heads": 16}, "heads", "num_heads"),
        ("sparse_decode", {"kv_layout": "fp4"}, "kv_layout", "bf16, bf16_128_32, bf16_nope, fp8_ds_mla"),
    ],
)
def test_explain_refuses_what_it_does_not_know(two, primitive, fields, argument, expected):
    with pytest.raises(InvalidArgument) as caught:
        mla_portable.explain(primitive, device="cpu", **fields)
    assert caught.value.argument == argument
    assert expected in caught.value.expected
