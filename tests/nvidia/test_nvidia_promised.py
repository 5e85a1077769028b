# SPDX-License-Identifier: Apache-2.0
"""FlashMLA with clean indices promised and no lse asked for: what a call leaves out, and where it does not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch_reference as reference
from flashmla_standins import Library, installed
from simulated_gpu import FACTS, registry
from test_nvidia_decode import SCALE, problem, schedule_for

from mla_portable.attention import AttentionSpec, SparseMLAAttention
from mla_portable.contracts import Request
from mla_portable.judge.problems.attention import SOFTMAX_SCALE
from mla_portable.judge.problems.step import StepInputs, StepShape, make_inputs
from mla_portable.planner import Planner
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_common.flash_mla.torch_passes import TorchBoundary
from mla_portable_nvidia.flashmla.discovery import find_kernel
from mla_portable_nvidia.passes import boundary

PROMISE = {"clean_indices": True, "lse": False}


class CountedBoundary(TorchBoundary):
    """Which passes ran, in order."""

    def __init__(self) -> None:
        self.passes: list[str] = []

    def sanitise(self, *args):
        self.passes.append("sanitise")
        super().sanitise(*args)

    def finish(self, *args, early):
        self.passes.append("finish")
        super().finish(*args, early=early)


@pytest.fixture
def passes(monkeypatch) -> list[str]:
    """The passes of everything that is bound from here on."""
    counted = CountedBoundary()
    monkeypatch.setattr(boundary, "Boundary", lambda: counted)
    return counted.passes


def bound(heads: int, topk: int = 64, *, query_len: int = 1, **features):
    request = Request(
        SPARSE_DECODE, FACTS["sm90"], kv_layout="fp8_ds_mla", num_heads=heads, topk=topk, block_size=64,
        query_len=query_len, scale_format="pow2", **features,
    )  # fmt: skip
    return registry(probe=False).bind(request, backend="nvidia")


def clean_problem(batch: int, query_len: int, heads: int, topk: int):
    """Every third row is empty."""
    q, cache, indices = problem(batch, query_len, heads, topk)
    indices = indices.masked_fill((indices < 0) | (indices >= 3 * 64), -1)
    indices[::3] = -1
    return q, cache, indices


def assert_out(got, q, cache, indices, **options):
    want, _ = reference.sparse_decode(q, cache, indices, softmax_scale=SCALE, **options)
    torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)
    assert not got[::3].any()


def watch(library: Library) -> list[dict[str, object]]:
    """What the kernel is called with from here on, and what it returns."""
    seen: list[dict[str, object]] = []
    decode = library.decode

    def watched(q, kv, indices, scale, sink=None, length=None, plan=None, out=None, extra=None):
        results = decode(q, kv, indices, scale, sink, length, plan, out, extra)
        seen.append({"kv": kv, "indices": indices, "out": out, "result": results[0]})
        return results

    library.decode = watched
    return seen


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("topk", [64, 512])
def test_a_promised_call_is_one_kernel_call_and_nothing_else(heads, topk, passes):
    with installed("vllm 0.33") as library:
        call, (q, cache, indices) = bound(heads, topk, **PROMISE), clean_problem(5, 1, heads, topk)
        out = torch.full((5, 1, heads, 512), math.nan, dtype=torch.bfloat16)
        scratch = torch.full((5, 1, heads), math.nan)
        seen, library.plans = watch(library), 0
        got, lse = call(
            q, cache, indices, softmax_scale=SCALE, schedule=schedule_for(5, 1, heads, topk), out=out, lse_out=scratch
        )
        assert len(seen) == 1 and passes == [] and library.plans == 0
        assert seen[0]["indices"] is indices and seen[0]["out"] is out and got is out
        assert lse.numel() == 0 and scratch.isnan().all()
        assert_out(got, q, cache, indices)
        assert_out(call(q, cache, indices, softmax_scale=SCALE)[0], q, cache, indices)
        assert passes == []


@pytest.mark.parametrize("generation", ["vllm 0.24", "flash_mla 2025", "flash_mla 2026", "sgl_kernel 0.4.5"])
def test_a_provider_that_allocates_its_result_gives_it_away(generation, passes):
    with installed(generation) as library:
        call, args = bound(64, **PROMISE), clean_problem(5, 1, 64, 64)
        seen = watch(library)
        got, _ = call(*args, softmax_scale=SCALE)
        assert got is seen[0]["result"]
        assert_out(got, *args)
        out = torch.full_like(got, math.nan)
        assert call(*args, softmax_scale=SCALE, out=out)[0] is out
        assert_out(out, *args)
        assert len(seen) == 2 and passes == []


@pytest.mark.parametrize("generation", ["vllm 0.33", "vllm 0.24"])
@pytest.mark.parametrize("left", [math.nan, 1.0])
def test_a_provider_that_leaves_something_in_empty_rows_is_corrected(generation, left, passes):
    with installed(generation, empty_out={128: left}):
        traits = find_kernel(SPARSE_DECODE, FACTS["sm90"]).traits
        assert traits.zeroes_empty == (64,)
        for heads, finishing in ((128, ["finish"]), (100, ["finish"]), (64, []), (16, [])):
            passes.clear()
            args = clean_problem(4, 2, heads, 64)
            got, lse = bound(heads, query_len=2, **PROMISE)(*args, softmax_scale=SCALE)
            assert_out(got, *args)
            assert passes == finishing and bool(lse.numel()) == bool(finishing)


def test_calibration_asks_for_every_way_to_an_empty_row():
    """Either head count, a row of one part and of several, without a sink and with one; the memory before is NaN."""
    with installed("vllm 0.33") as library:
        before, decode = [], library.decode

        def watched(q, kv, indices, scale, sink=None, length=None, plan=None, out=None, extra=None):
            if out is not None:
                before.append((q.shape[2], indices.shape[2], sink is not None, bool(out.isnan().all())))
            return decode(q, kv, indices, scale, sink, length, plan, out, extra)

        library.decode = watched
        assert find_kernel(SPARSE_DECODE, FACTS["sm90"]).traits.zeroes_empty == (64, 128)
    assert before == [(heads, keys, sink, True) for sink in (False, True) for heads in (64, 128) for keys in (64, 512)]


def test_a_head_count_that_is_refused_is_not_believed_to_be_finished():
    with installed("vllm 0.33") as library:
        decode = library.decode

        def few(q, *rest):
            library.need(q.shape[2] == 64, "this build has 64 heads")
            return decode(q, *rest)

        library.decode = few
        assert find_kernel(SPARSE_DECODE, FACTS["sm90"]).traits.zeroes_empty == (64,)


@pytest.mark.parametrize(
    ("generation", "heads", "sunk", "expected"),
    [
        ("vllm 0.33", 64, 0.0, []),
        ("vllm 0.33", 64, math.nan, ["finish"]),
        ("vllm 0.33", 16, 0.0, ["finish"]),
        ("flash_mla 2025", 64, 0.0, ["finish"]),
    ],
)
def test_a_sink_that_the_kernel_cannot_apply_is_applied_after_it(generation, heads, sunk, expected, passes):
    sink = torch.randn(heads, generator=torch.Generator().manual_seed(1)) + 4
    sink[0], sink[1] = math.inf, -math.inf
    with installed(generation, sunk_out=sunk):
        args = clean_problem(5, 1, heads, 64)
        got, _ = bound(heads, attn_sink=True, **PROMISE)(*args, softmax_scale=SCALE, attn_sink=sink)
        assert_out(got, *args, attn_sink=sink)
        assert passes == expected
        assert_out(bound(heads, **PROMISE)(*args, softmax_scale=SCALE)[0], *args)
        assert passes == expected


@pytest.mark.parametrize("generation", ["vllm 0.33", "vllm 0.24"])
@pytest.mark.parametrize("given", [False, True])
def test_chunks_are_kernel_calls_alone(generation, given, passes):
    with installed(generation) as library:
        call, args = bound(64, **PROMISE), clean_problem(7, 1, 64, 64)
        out = torch.full((7, 1, 64, 512), math.nan, dtype=torch.bfloat16) if given else None
        library.calls = []
        got, _ = call(*args, softmax_scale=SCALE, schedule=schedule_for(7, 1, 64, 64, rows=3), out=out)
        assert [shape[0] for shape in library.calls] == [3, 3, 1] and passes == []
        assert_out(got, *args)


@pytest.mark.parametrize(("promised", "expected"), [(True, ["finish"]), (False, ["sanitise", "finish"])])
@pytest.mark.parametrize("generation", ["vllm 0.33", "flash_mla 2025"])
def test_prefill_reads_clean_indices_in_place_whatever_their_lengths(generation, promised, expected, passes):
    g = torch.Generator().manual_seed(3)
    q, kv = torch.randn(5, 64, 576, generator=g).bfloat16(), torch.randn(200, 576, generator=g).bfloat16()
    lengths = torch.tensor([0, 5, 128, 64, 127], dtype=torch.int32)
    indices = torch.randint(0, 200, (5, 128), generator=g, dtype=torch.int32)
    indices = indices.masked_fill(torch.arange(128) >= lengths[:, None], -1)
    request = Request(
        SPARSE_PREFILL, FACTS["sm90"], kv_layout="bf16", num_heads=64, topk=128, lengths=True, lse=True,
        clean_indices=promised,
    )  # fmt: skip
    with installed(generation) as library:
        call, library.lengths = registry(probe=False).bind(request, backend="nvidia"), 0
        got, lse = call(q, kv, indices, softmax_scale=SCALE, lengths=lengths)
        assert passes == expected and bool(library.lengths) == (generation == "vllm 0.33")
    want, want_lse = reference.sparse_prefill(q, kv, indices, softmax_scale=SCALE, lengths=lengths)
    torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, want_lse, atol=1e-3, rtol=1e-3)


def step_of_a_layer(library: Library, inputs: StepInputs, backend: Any, **spec: Any):
    """(out, lse) of a layer of 64 heads on a cache that it wrote itself; the library counts from its step on."""
    limits = {"max_num_tokens": 32, "max_num_reqs": 8, "max_model_len": 512, "topk": 128, "decode_query_len": 2}
    spec = AttentionSpec(num_heads=64, softmax_scale=SOFTMAX_SCALE, **limits, **spec)
    layer = SparseMLAAttention(spec, device="cpu", registry=registry(probe=False), backend=backend)
    layer.cache_write(inputs.history_kv_c, inputs.history_k_pe, inputs.kv_cache, inputs.history_slots)
    layer.cache_write(inputs.kv_c, inputs.k_pe, inputs.kv_cache, inputs.slot_mapping)
    plan = Planner(layer.planner_config()).plan(inputs.batch)
    library.plans, library.calls = 0, []
    return layer.forward(inputs.q, inputs.kv_cache, inputs.topk_indices, plan)


STEP = StepShape(num_heads=64, topk=128, decodes=2, decode_query_len=2, prefills=2, prefill_tokens=5, context=150)


@pytest.mark.parametrize(("need_lse", "expected"), [(False, []), (True, ["finish"])])
@pytest.mark.parametrize(
    ("generation", "planned"), [("vllm 0.33", 0), ("flash_mla 2026", 0), ("sgl_kernel 0.4.5", 0), ("flash_mla 2025", 1)]
)
def test_a_layer_plans_on_the_host_and_promises_what_it_converted(generation, planned, need_lse, expected, passes):
    """Garbage among the positions; decodes and prefill tokens alike. The generation of 2025 has plans of another layout."""
    inputs = make_inputs(STEP, torch.device("cpu"))
    inputs.topk_indices[0, :4] = torch.tensor([-7, 1 << 30, 2**31 - 1, -(2**31)], dtype=torch.int32)
    options = {"scale_format": "pow2", "route": "fused", "need_lse": need_lse}
    with installed(generation) as library:
        got, lse = step_of_a_layer(library, inputs, {"sparse_decode": "nvidia"}, **options)
        assert passes == expected and (lse is not None) == need_lse
        assert library.calls == [(14, 1, 64, 128)] and library.plans == planned
        want, _ = step_of_a_layer(library, inputs, "reference", **options)
    torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)
