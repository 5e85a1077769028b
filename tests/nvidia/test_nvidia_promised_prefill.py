# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's prefill with no lse asked for, on a workspace and as decode of a BF16 cache: what a call leaves out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch_reference as reference
from flashmla_standins import installed
from simulated_gpu import FACTS, registry
from test_nvidia_decode import SCALE
from test_nvidia_promised import STEP, passes, step_of_a_layer

from mla_portable.attention import AttentionSpec, SlotAttention
from mla_portable.contracts import Request
from mla_portable.judge.problems.step import make_inputs
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_common.flash_mla.prefill_conventions import OperatorPrefill
from mla_portable_nvidia.flashmla.attention import attention_implementations
from mla_portable_nvidia.flashmla.discovery import find_kernel
from mla_portable_nvidia.flashmla.flat_decode import bind_flat_decode, flat_implementations

__all__ = ["passes"]  # a fixture

PREFILL = {"primitive": SPARSE_PREFILL, "kv_layout": "bf16", "topk": 128, "clean_indices": True, "lse": False}
DECODE = PREFILL | {"primitive": SPARSE_DECODE, "block_size": 20, "query_len": 2}


def problem(heads: int):
    """Six tokens on 200 rows; tokens 0 and 3 have no key, by their indices and by their length."""
    g = torch.Generator().manual_seed(heads)
    q, kv = torch.randn(6, heads, 576, generator=g).bfloat16(), torch.randn(200, 576, generator=g).bfloat16()
    lengths = torch.tensor([128, 5, 128, 0, 64, 127], dtype=torch.int32)
    indices = torch.randint(0, 200, (6, 128), generator=g, dtype=torch.int32)
    indices = indices.masked_fill(torch.arange(128) >= lengths[:, None], -1)
    indices[0] = -1
    return q, kv, indices, lengths


def prefill(request: Request, q, kv, indices, **options):
    return registry(probe=False).bind(request, backend="nvidia")(q, kv, indices, softmax_scale=SCALE, **options)


def decode(request: Request, q, kv, indices, lengths=None, out=None, **options):
    """The same tokens as three rows of two."""
    options |= {name: value.unflatten(0, (3, 2)) for name, value in (("lengths", lengths), ("out", out)) if value is not None}
    call = bind_flat_decode(request)
    got, lse = call(q.unflatten(0, (3, 2)), kv.view(10, 20, 576), indices.unflatten(0, (3, 2)), softmax_scale=SCALE, **options)
    return got.flatten(0, 1), lse


BOTH = pytest.mark.parametrize(("call", "features"), [(prefill, PREFILL), (decode, DECODE)], ids=["prefill", "decode"])


def check(call, features, heads, *, given=True, sink=None, apart=1, **more):
    request = Request(device=FACTS["sm90"], num_heads=heads, lengths=True, attn_sink=sink is not None, **(features | more))
    q, kv, indices, lengths = problem(heads)
    lengths = lengths.repeat_interleave(apart)[::apart]
    out = torch.full((6, heads, 512), math.nan, dtype=torch.bfloat16)
    options = {"lengths": lengths, "attn_sink": sink} | ({"out": out} if given else {})
    got, lse = call(request, q, kv, indices, **options)
    want, _ = reference.sparse_prefill(q, kv, indices, softmax_scale=SCALE, lengths=lengths, attn_sink=sink)
    torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)
    assert not got[[0, 3]].any()
    if given:
        torch.testing.assert_close(out, got)
    return lse


@BOTH
def test_promised_lengths_that_lie_apart_are_gathered(call, features):
    with installed("vllm 0.26") as library:
        check(call, features, 64, apart=2, clean_lengths=True)
        assert library.lengths


@BOTH
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("generation", ["vllm 0.33", "vllm 0.24", "flash_mla 2025"])
def test_without_lse_a_call_is_the_kernel_alone(generation, heads, given, call, features, passes):
    with installed(generation) as library:
        lse = check(call, features, heads, given=given)
        calls = [shape for shape in library.prefill_calls if shape[0] > 1]  # not calibration's
        assert lse.numel() == 0 and passes == [] and calls == [(6, max(heads, 64), 128)]


@pytest.mark.parametrize(("prefills", "calls"), [(2, [(14, 64, 128)]), (0, [(4, 64, 128)])])
def test_a_layer_on_a_bf16_cache_is_one_call_of_the_kernel(prefills, calls, passes):
    """Decodes and prefills alike; with the positions that convert_indices counted."""
    inputs = make_inputs(replace(STEP, prefills=prefills, kv_layout="bf16"), torch.device("cpu"))
    options = {"kv_layout": "bf16", "need_lse": False}
    with installed("vllm 0.33") as library:
        got, _ = step_of_a_layer(library, inputs, {"sparse_decode": "nvidia", "sparse_prefill": "nvidia"}, **options)
        assert [shape for shape in library.prefill_calls if shape[0] > 1] == calls and passes == []
        want, _ = step_of_a_layer(library, inputs, "reference", **options)
    torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("decodes", [True, False], ids=["decode", "prefill"])
@pytest.mark.parametrize("heads", [64, 128])
def test_rows_of_clean_slots_are_one_call_of_the_kernel(heads, decodes, passes, monkeypatch):
    """Of a library that takes no `out`: what it made is the result, and slots and lengths go to it as they came."""
    seen, kernel = [], OperatorPrefill.__call__

    def watched(self, q, kv, indices, *args, lengths=None, **named):
        result = kernel(self, q, kv, indices, *args, lengths=lengths, **named)
        seen.append([each if each is None else each.data_ptr() for each in (q, kv, indices, lengths, result[0])])
        return result

    monkeypatch.setattr(OperatorPrefill, "__call__", watched)
    offered = (*attention_implementations(device_types=("cpu",)), *flat_implementations(device_types=("cpu",)))
    spec = AttentionSpec(
        num_heads=heads, softmax_scale=SCALE, max_num_tokens=8, max_num_reqs=8, max_model_len=256, kv_layout="bf16",
        block_size=20, topk=128, need_lse=False,
    )  # fmt: skip
    with installed("sgl_flash_mla"):
        machine = registry(probe=False, offered=offered)
        attention = SlotAttention(spec, device="cpu", registry=machine, backend="nvidia", clean_slots=True)
        q, kv, slots, lengths = problem(heads)
        seen.clear()
        got = attention.forward(q, kv, slots, softmax_scale=SCALE, decodes=decodes, lengths=lengths)
        assert seen == [[each.data_ptr() for each in (q, kv, slots, lengths, got)]] and passes == []
        out = torch.empty_like(got)
        assert attention.forward(q, kv, slots, softmax_scale=SCALE, decodes=decodes, lengths=lengths, out=out) is out
    want, _ = reference.sparse_prefill(q, kv, slots, softmax_scale=SCALE, lengths=lengths)
    for each in (got, out):
        torch.testing.assert_close(each.float(), want.float(), atol=2e-2, rtol=2e-2)


def finished(call, heads: int, passes: list[str]) -> list[str]:
    """Of a decode with padded heads another pass takes the results out, and does all of that."""
    return passes if call is prefill or heads in (64, 128) else []


@BOTH
@pytest.mark.parametrize("left", [math.nan, 1.0])
@pytest.mark.parametrize("generation", ["vllm 0.33", "vllm 0.24"])
def test_a_provider_that_leaves_something_in_empty_rows_is_corrected(generation, left, call, features, passes):
    with installed(generation, empty_out={128: left}):
        assert find_kernel(SPARSE_PREFILL, FACTS["sm90"]).traits.zeroes_empty == (64,)
        for heads, finishing in ((128, ["finish"]), (100, ["finish"]), (64, []), (16, [])):
            passes.clear()
            check(call, features, heads)
            assert passes == finished(call, heads, finishing)


@BOTH
@pytest.mark.parametrize(
    ("generation", "heads", "sunk", "expected"),
    [
        ("vllm 0.33", 64, 0.0, []),
        ("vllm 0.33", 64, math.nan, ["finish"]),
        ("vllm 0.33", 16, 0.0, ["finish"]),
        ("vllm 0.33", 100, 0.0, ["finish"]),
        ("flash_mla 2025", 64, 0.0, ["finish"]),
    ],
)
def test_a_sink_that_the_kernel_cannot_apply_is_applied_after_it(generation, heads, sunk, expected, call, features, passes):
    sink = torch.randn(heads, generator=torch.Generator().manual_seed(1)) + 4
    with installed(generation, sunk_out=sunk):
        check(call, features, heads, sink=sink)
    assert passes == finished(call, heads, expected)
