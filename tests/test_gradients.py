# SPDX-License-Identifier: Apache-2.0
"""While torch records gradients, a tensor that requires one is refused before any kernel runs: there is no backward here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from arguments import BLOCK, BLOCKS, H, K, S, T, W, bf16, e4m3, f32, good, i32, u8, zeros
from arguments import B as BATCH
from attention_steps import HEADS, REFERENCE, SPEC, make_layer, make_step, plan_for
from recorder import registry_of
from test_prompts import DIMS, make_prompts
from test_slot_attention import SLOTS, make_call
from test_slot_attention import paged as paged_slots
from test_unchecked_calls import Tape
from torch import Tensor

from mla_portable import deep_gemm, flash_mla, primitives
from mla_portable.attention import PromptAttention, SlotAttention
from mla_portable.contracts import InvalidArgument, Primitive
from mla_portable.dispatch import serving
from mla_portable.flash_mla import cuda

Call = tuple[Callable[..., Any], dict[str, Any]]

INDEX_TENSORS = {"q": (e4m3(T, H, 128), None), "weights": f32(T, H)}
CANDIDATES = {"metadata": u8(8 * T * 2), "num_max_sparse_blocks": 2, "sparse_block_kv": 8}
STARTS = {"cu_seqlens_qo": i32(3), "cu_seqlens_kv": i32(3), "max_seqlen_qo": 0, "max_seqlen_kv": 0}
DOORS: dict[str, dict[str, Any]] = {
    "flash_mla_with_kvcache": {
        "q": bf16(BATCH, S, H, 576),
        "k_cache": bf16(BLOCKS, BLOCK, 1, 576),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": None,
        "indices": i32(BATCH, S, K),
        "attn_sink": f32(H),
        "extra_k_cache": bf16(BLOCKS, BLOCK, 1, 576),
        "extra_indices_in_kvcache": i32(BATCH, S, K),
        "out": bf16(BATCH, S, H, 512),
    },
    "flash_mla_sparse_fwd": {
        "q": bf16(T, H, 576),
        "kv": bf16(W, 1, 576),
        "indices": i32(T, 1, K),
        "sm_scale": 0.1,
        "attn_sink": f32(H),
        "out": bf16(T, H, 512),
    },
    "flash_attn_varlen_func": {"q": bf16(0, H, 192), "k": bf16(0, H, 192), "v": bf16(0, H, 128), **STARTS},
    "flash_attn_varlen_kvpacked_func": {"q": bf16(0, H, 192), "kv": bf16(0, H, 320), **STARTS, "head_dim_qk": 192},
    "flash_attn_varlen_qkvpacked_func": {
        "qkv": bf16(0, H, 512), "cu_seqlens": i32(3), "max_seqlen": 0, "head_dim_qk": 192
    },
    "cuda.sparse_decode_fwd": {
        "q": bf16(BATCH, S, H, 576),
        "k_cache": e4m3(BLOCKS, BLOCK, 1, 656),
        "indices": i32(BATCH, S, K),
        "topk_length": None,
        "attn_sink": f32(H),
        "tile_scheduler_metadata": None,
        "num_splits": None,
        "extra_k_cache": e4m3(BLOCKS, BLOCK, 1, 656),
        "extra_indices": i32(BATCH, S, K),
        "extra_topk_length": None,
        "head_dim_v": 512,
        "softmax_scale": 0.1,
    },
    "cuda.sparse_prefill_fwd": {
        "q": bf16(T, H, 576), "kv": bf16(W, 1, 576), "indices": i32(T, 1, K), "sm_scale": 0.1, "d_v": 512,
        "attn_sink": f32(H), "topk_length": None,
    },
    "fp8_fp4_mqa_logits": {
        **INDEX_TENSORS, "kv": (e4m3(W, 128), f32(W)), "cu_seq_len_k_start": i32(T), "cu_seq_len_k_end": i32(T)
    },
    "fp8_fp4_paged_mqa_logits": {
        "q": (e4m3(BATCH, S, H, 128), None),
        "kv_cache": u8(BLOCKS, 64, 1, 132),
        "weights": f32(BATCH * S, H),
        "context_lens": i32(BATCH),
        "block_table": i32(BATCH, 2),
        "schedule_meta": None,
        "max_context_len": 99,
    },
    "fp8_fp4_sparse_mqa_logits": {
        "q": (e4m3(T, H, 128), i32(T, H)), "kv": (e4m3(W, 128), i32(W)), "weights": bf16(T, H), **CANDIDATES
    },
    "fp8_fp4_paged_sparse_mqa_logits": {
        "q": (e4m3(T, 1, H, 128), i32(T, 1, H)), "kv_cache": u8(BLOCKS, 64, 1, 132), "weights": bf16(T, H), **CANDIDATES
    },
}  # fmt: skip
OLDER_NAMES = {"fp8_mqa_logits": "fp8_fp4_mqa_logits", "fp8_paged_mqa_logits": "fp8_fp4_paged_mqa_logits"}
for _older, _name in OLDER_NAMES.items():
    DOORS[_older] = {**DOORS[_name], "q": DOORS[_name]["q"][0]}
NO_GRADIENT = {
    "get_mla_metadata",
    "get_mla_decoding_metadata",
    "get_paged_mqa_logits_metadata",
    "get_sparse_mqa_logits_metadata",
    "get_paged_sparse_mqa_logits_metadata",
}
"""They read lengths and lists of blocks alone, which are integers."""


def door(name: str) -> Call:
    where = cuda if name.startswith("cuda.") else deep_gemm if hasattr(deep_gemm, name) else flash_mla
    return getattr(where, name.removeprefix("cuda.")), DOORS[name]


def second(primitive: str, cache: str) -> Call:
    """Attention over two BF16 caches, whose numbers may require gradients."""
    given = good(primitive)
    given.pop("schedule", None)
    rows = given["q"].shape[:-2]
    return getattr(primitives, primitive), given | {
        cache: bf16(BLOCKS, BLOCK, 576) if cache == "kv_cache" else given[cache],
        "extra_kv_cache": bf16(BLOCKS, BLOCK, 576) if cache == "kv_cache" else bf16(W, 576),
        "extra_indices": i32(*rows, K),
    }


def calls() -> Iterator[tuple[str, Call]]:
    """Every public function, and primitives again with what `good` leaves out."""
    for primitive in Primitive.all():
        if primitive.module.startswith("mla_portable."):
            yield str(primitive), (getattr(primitives, primitive), good(primitive))
    yield "sparse_decode of two caches", second("sparse_decode", "kv_cache")
    yield "sparse_prefill of two caches", second("sparse_prefill", "kv")
    yield "cache_write of bf16", (primitives.cache_write, good("cache_write") | {"kv_cache": bf16(BLOCKS, BLOCK, 576)})
    gather = good("gather_upconvert") | {"kv_cache": bf16(BLOCKS, BLOCK, 576)}
    yield "gather_upconvert of bf16", (primitives.gather_upconvert, gather)
    write = good("indexer_cache_write") | {"index_cache": bf16(BLOCKS, BLOCK, 128)}
    yield "indexer_cache_write of bf16", (primitives.indexer_cache_write, write)
    for name in DOORS:
        yield name, door(name)


def tensors(given: dict[str, Any]) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Each tensor of a call that may require a gradient: its name, the tensor that does, and the call with it."""
    for name, value in given.items():
        parts = value if isinstance(value, tuple) else (value,)
        for at, part in enumerate(parts):
            if isinstance(part, Tensor) and part.is_floating_point():
                leaf = part.detach().clone().requires_grad_()
                changed = (*parts[:at], leaf, *parts[at + 1 :])
                yield f"{name}[{at}]" if len(parts) > 1 else name, leaf, {
                    **given, name: changed if isinstance(value, tuple) else leaf
                }  # fmt: skip


CALLS = dict(calls())


def assert_refused(function: Callable[..., Any], given: dict[str, Any], name: str) -> None:
    text = r"requires a gradient.*no backward here\. Call it under torch\.no_grad"
    with pytest.raises(InvalidArgument, match=text) as caught:
        function(**given)
    assert caught.value.argument.partition("[")[0] == name.partition("[")[0]


@pytest.mark.parametrize("what", CALLS)
def test_a_gradient_is_refused_before_anything_runs_unless_torch_records_none(what: str):
    function, given = CALLS[what]
    tape, seen = Tape(), 0
    with serving(registry_of(tape)):
        for name, _, changed in tensors(given):
            seen += 1
            if "packed" in what and name in ("kv", "qkv"):
                with pytest.raises(InvalidArgument, match="requires a gradient"):  # of its parts
                    function(**changed)
            else:
                assert_refused(function, changed, name)
            assert not tape.calls
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    function(**changed)
            assert tape.calls
            tape.calls.clear()
    assert seen or not any(isinstance(each, Tensor) and each.is_floating_point() for each in given.values())


def test_every_public_function_is_in_the_table():
    doors = {
        name
        for where in (flash_mla, deep_gemm)
        for name in where.__all__
        if inspect.isfunction(getattr(where, name)) and "Tensor" in str(inspect.signature(getattr(where, name)).parameters)
    }
    assert doors - NO_GRADIENT == {name for name in DOORS if not name.startswith("cuda.")}
    for primitive, (_, given) in CALLS.items():
        if primitive in Primitive.all():
            named = inspect.signature(getattr(primitives, primitive)).parameters
            assert set(given) <= set(named), primitive


@pytest.mark.parametrize("layout", ["bf16", "fp8_ds_mla"])
def test_a_layer_refuses_gradients(layout: str):
    sink = torch.zeros(HEADS)
    route = "direct" if layout == "bf16" else "fused"
    layer, step = make_layer(route, layout, attn_sink=sink, need_lse=True), make_step("decodes", layout)
    plan, shape = plan_for(layer, step.batch), step.q.shape[:2]
    given = {
        "q": step.q,
        "kv_cache": step.kv_cache,
        "topk_indices": step.topk_indices,
        "plan": plan,
        "attn_sink": sink,
        "out": zeros(*shape, 512),
        "lse_out": f32(*shape),
    }
    halves = {**given, "q": (step.q[..., :512].contiguous(), step.q[..., 512:].contiguous())}
    write = {"kv_c": zeros(3, 512), "k_pe": zeros(3, 64), "kv_cache": step.kv_cache, "slot_mapping": torch.arange(3)}
    for function, arguments in ((layer.forward, given), (layer.forward, halves), (layer.cache_write, write)):
        for name, _, changed in tensors(arguments):
            assert_refused(function, changed, name)
            with torch.no_grad():
                function(**changed)


def test_a_layer_may_be_built_with_a_parameter_as_its_sink():
    """Engines build a model with gradients on, and run it without."""
    sink = torch.nn.Parameter(torch.zeros(HEADS))
    layer, step = make_layer("fused", attn_sink=sink), make_step("decodes", "fp8_ds_mla")
    given = {"q": step.q, "kv_cache": step.kv_cache, "topk_indices": step.topk_indices, "plan": plan_for(layer, step.batch)}
    assert_refused(layer.forward, given, "attn_sink")
    with torch.inference_mode():
        layer.forward(**given)


@pytest.mark.parametrize("layout", ["bf16", "fp8_ds_mla"])
def test_attention_over_slots_refuses_gradients(layout: str):
    spec = replace(SLOTS, kv_layout=layout, scale_format=None, attn_sink=True)
    attention = SlotAttention(spec, device="cpu", registry=REFERENCE, backend="reference")
    q, kv, slots, _ = make_call(layout)
    fixed = {"softmax_scale": 0.06, "decodes": False, "attn_sink": torch.zeros(HEADS), "out": zeros(*q.shape[:2], 512)}
    for name, _, changed in tensors({"q": q, "kv": paged_slots(layout, kv), "slots": slots, **fixed}):
        assert_refused(attention.forward, changed, name)
        with torch.no_grad():
            attention.forward(**changed)


def test_prompts_over_keys_of_each_head_refuse_gradients():
    given = make_prompts("short with context", "bf16")
    spec = replace(SPEC, kv_layout="bf16", scale_format=None, softmax_scale=DIMS.query**-0.5, need_lse=False)
    layer = PromptAttention(spec, DIMS, device="cpu", registry=REFERENCE, backend="reference")
    arguments = {
        "q": given.q,
        "kv_c": given.latent,
        "k_pe": given.rope,
        "project": given.project,
        "kv_cache": given.kv_cache,
        "topk_indices": given.topk,
        "plan": given.plan,
    }
    for name, _, changed in tensors(arguments):
        assert_refused(layer.forward, changed, name)
        with torch.no_grad():
            layer.forward(**changed)
    weight = torch.nn.Parameter(given.weight)
    assert_refused(layer.forward, arguments | {"project": partial(torch.nn.functional.linear, weight=weight)}, "project(rows)")
