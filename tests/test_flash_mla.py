# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's functions by its names, against a float64 oracle of FlashMLA's conventions, in the shapes that engines pass."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from arguments import on_a_gpu, zeros
from flash_mla_oracle import (
    INVALID,
    assert_out,
    assert_statistic,
    attend,
    cut_from_larger,
    draw,
    v4_cache,
    v4_without_unused,
    v32_cache,
    without_unused,
)
from invented_layouts import known
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import mla_portable
from mla_portable import flash_mla
from mla_portable.contracts import InvalidArgument
from mla_portable.errors import PlanMismatch
from mla_portable.flash_mla import statistics
from mla_portable.flash_mla.absent import NotServed
from mla_portable.layouts import CacheLayout, layout_of

BF16, INT32, UINT8, E4M3 = torch.bfloat16, torch.int32, torch.uint8, torch.float8_e4m3fn
INF = math.inf
SCALE = 576**-0.55


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Arguments, shapes and conventions are what is tested here; kernels have tests of their own."""
    with mla_portable.use("reference"):
        yield


@pytest.fixture(autouse=True)
def with_max_logits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(statistics.MAX_LOGITS.name, "on")
    statistics.wants_max_logits.cache_clear()
    yield
    statistics.wants_max_logits.cache_clear()


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=INT32)


def picked(*shape: int, below: int, seed: int, holes: float = 0.2) -> Tensor:
    """Indices in [0, below), some of them absent."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(below, shape, generator=generator, dtype=INT32)
    absent = torch.rand(shape, generator=generator) < holes
    fillers = int32((*INVALID, below))[torch.randint(len(INVALID) + 1, shape, generator=generator)]
    return torch.where(absent, fillers, found)


def sinks(heads: int, seed: int) -> Tensor:
    """Of every kind: finite ones, one without effect, one that takes everything."""
    sink = draw(heads, seed=seed)
    sink[0] = INF
    if heads > 1:
        sink[1] = -INF
    return sink


# ----------------------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize("stored", [UINT8, torch.int8, E4M3])
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize(("heads", "page", "topk"), [(1, 2, 7), (5, 64, 64), (64, 61, 9)])
@pytest.mark.parametrize("features", ["plain", "lengths", "sinks", "both"])
def test_decode_of_quantised_pages(stored: torch.dtype, query_len: int, heads: int, page: int, topk: int, features: str):
    batch, seed = 4, heads
    cache, rows = v32_cache(draw(4 * page, 576, seed=seed, spread=0.3), page)
    indices = picked(batch, query_len, topk, below=len(rows), seed=seed)
    indices[1] = -1
    lengths = int32([topk, 3, 0, topk // 2]) if features in ("lengths", "both") else None
    sink = sinks(heads, seed=seed) if features in ("sinks", "both") else None
    without_unused(cache[:, :, 0], indices, page)
    q = draw(batch, query_len, heads, 576, seed=seed + 1).clamp(-1, 1).to(BF16)
    plan, nothing = flash_mla.get_mla_metadata()
    assert nothing is None
    out, lse = flash_mla.flash_mla_with_kvcache(
        cut_from_larger(q), cache.view(stored), None, None, 512, plan, None, SCALE, False, True, cut_from_larger(indices),
        sink, None, None, lengths, None,
    )  # fmt: skip
    per_token = None if lengths is None else lengths.repeat_interleave(query_len)
    wanted = attend(q.flatten(0, 1), [(rows, indices.flatten(0, 1), per_token)], SCALE, sink)
    assert out.shape == (batch, query_len, heads, 512) and lse.shape == (batch, heads, query_len)
    assert_out(out.flatten(0, 1), wanted.out)
    assert_statistic(lse.transpose(1, 2).flatten(0, 1), wanted.lse)
    assert (lse[1] == INF).all() and not out[1].any()
    if query_len > 1 and heads > 1:
        assert lse.stride() == (query_len * heads, 1, heads)  # a transposed view, as FlashMLA's is


@pytest.mark.parametrize("stored", [UINT8, E4M3])
@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize(("page", "extra_page"), [(2, 64), (61, 2), (16, None)])
@pytest.mark.parametrize("lengths_of", ["none", "first", "second", "both"])
def test_decode_of_v4_pages(stored: torch.dtype, query_len: int, page: int, extra_page: int | None, lengths_of: str):
    """One cache, or two with pages of their own sizes; positionally, as FlashMLA's tests call it."""
    batch, heads, topk, extra_topk = 4, 3, 9, 12
    cache, rows = v4_cache(draw(4 * page, 512, seed=1, spread=0.3), page, gap=1)
    indices = picked(batch, query_len, topk, below=len(rows), seed=2)
    indices[1] = -1
    v4_without_unused(cache, indices, page)
    lengths = int32([topk, 3, 0, 4]) if lengths_of in ("first", "both") else None
    lists = [(rows, indices.flatten(0, 1), None if lengths is None else lengths.repeat_interleave(query_len))]
    extra: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
    extra_lengths = None
    if extra_page is not None:
        extra_cache, extra_rows = v4_cache(draw(3 * extra_page, 512, seed=3, spread=0.3), extra_page)
        extra_indices = picked(batch, query_len, extra_topk, below=len(extra_rows), seed=4)
        extra_indices[1] = -1
        v4_without_unused(extra_cache, extra_indices, extra_page)
        extra_lengths = int32([0, 3, 5, extra_topk]) if lengths_of in ("second", "both") else None
        per_token = None if extra_lengths is None else extra_lengths.repeat_interleave(query_len)
        lists.append((extra_rows, extra_indices.flatten(0, 1), per_token))
        extra = extra_cache.view(stored), cut_from_larger(extra_indices)
    q, sink, scale = draw(batch, query_len, heads, 512, seed=5).to(BF16), sinks(heads, seed=6), 512**-0.55
    plan = flash_mla.get_mla_metadata()[0]
    out, lse = flash_mla.flash_mla_with_kvcache(
        cut_from_larger(q), cache.view(stored), None, None, 512, plan, None, scale, False, True, cut_from_larger(indices), sink,
        *extra, lengths, extra_lengths,
    )  # fmt: skip
    wanted = attend(q.flatten(0, 1), lists, scale, sink)
    assert_out(out.flatten(0, 1), wanted.out)
    assert_statistic(lse.transpose(1, 2).flatten(0, 1), wanted.lse)
    assert (lse[1] == INF).all() and not out[1].any()
    assert plan.config is not None
    found = plan.config.extra_page_block_size, plan.config.extra_topk
    assert found == ((None, None) if extra_page is None else (extra_page, extra_topk))


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_sglang_and_lmdeploy_decode_v4_over_a_window_and_a_compressed_cache(backend: str):
    """All keywords, no table, one object for every layer, kv_format by its name."""
    window, window_rows = v4_cache(draw(32, 512, seed=1, spread=0.3), 16)
    compressed, compressed_rows = v4_cache(draw(8, 512, seed=2, spread=0.3), 4)
    q, sink = draw(2, 1, 8, 512, seed=3).to(BF16), sinks(8, seed=4)
    near, far = picked(2, 1, 16, below=32, seed=5), picked(2, 1, 64, below=8, seed=6)
    lengths, extra_lengths, plan = int32([9, 16]), int32([0, 30]), flash_mla.get_mla_metadata()[0]
    wanted = attend(q[:, 0], [(window_rows, near[:, 0], lengths), (compressed_rows, far[:, 0], extra_lengths)], 0.05, sink)
    for _ in range(2):
        with mla_portable.use(backend):
            out, _ = flash_mla.flash_mla_with_kvcache(
                q=q, k_cache=window, head_dim_v=512, block_table=None, cache_seqlens=None, tile_scheduler_metadata=plan,
                softmax_scale=0.05, is_fp8_kvcache=True, indices=near, topk_length=lengths, attn_sink=sink,
                extra_k_cache=compressed, extra_indices_in_kvcache=far, extra_topk_length=extra_lengths,
                use_legacy=True, kv_format="V4",
            )  # fmt: skip
        assert_out(out[:, 0], wanted.out)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_sglang_decodes_rows_without_a_rotary_part(backend: str):
    """GLM-5.3-Flash: the head of V32 rows, told by their name from V41's, in one cache and in two."""
    cache, rows = v32_cache(draw(32, 576, seed=1, spread=0.3), 16)
    extra_cache, extra_rows = v32_cache(draw(8, 576, seed=4, spread=0.3), 4)
    q, indices, extra = draw(2, 1, 3, 512, seed=2).to(BF16), picked(2, 1, 9, below=32, seed=3), picked(2, 1, 5, below=8, seed=5)
    lists = [(rows[:, :512], indices[:, 0], None), (extra_rows[:, :512], extra[:, 0], None)]
    second = {"extra_k_cache": extra_cache[..., :528].contiguous(), "extra_indices_in_kvcache": extra}
    for more, wanted in (({}, lists[:1]), (second, lists)):
        with mla_portable.use(backend):
            out, _ = flash_mla.flash_mla_with_kvcache(
                q, cache[..., :528].contiguous().view(E4M3), None, None, 512, flash_mla.get_mla_metadata()[0],
                is_fp8_kvcache=True, indices=indices, use_legacy=True, kv_format="V32_NO_ROPE", **more,
            )  # fmt: skip
        assert_out(out[:, 0], attend(q[:, 0], wanted, 512**-0.5).out)


def test_queries_without_a_rotary_part_over_v32_rows():
    """FlashMLA takes no such call; rows of 656 bytes hold a latent of 512 with its scales."""
    cache, rows = v32_cache(draw(32, 576, seed=1, spread=0.3), 16)
    q, indices = draw(2, 1, 3, 512, seed=2).to(BF16), picked(2, 1, 9, below=32, seed=3)
    out, _ = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, None, indices=indices)
    assert_out(out[:, 0], attend(q[:, 0], [(rows[:, :512], indices[:, 0], None)], 512**-0.5).out)


@pytest.mark.parametrize("width", [576, 512])
@pytest.mark.parametrize("asked", [None, False])
def test_decode_of_bf16_pages(width: int, asked: bool | None):
    """FlashMLA has no such kernel."""
    rows = draw(48, width, seed=1, spread=0.3).to(BF16)
    cache = torch.full((3, 17, width), float("nan"), dtype=BF16)[:, :16].copy_(rows.view(3, 16, width)).unsqueeze(2)
    indices, q = picked(2, 2, 10, below=48, seed=2), draw(2, 2, 3, width, seed=3).to(BF16)
    plan = flash_mla.get_mla_metadata()[0]
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, 512, plan, is_fp8_kvcache=asked, indices=indices, softmax_scale=None
    )
    wanted = attend(q.flatten(0, 1), [(rows, indices.flatten(0, 1), None)], width**-0.5)
    assert_out(out.flatten(0, 1), wanted.out)
    assert_statistic(lse.transpose(1, 2).flatten(0, 1), wanted.lse)


def decode_arguments(**changes: Any) -> dict[str, Any]:
    """b 2, s_q 3, h_q 4, topk 8."""
    return {
        "q": zeros(2, 3, 4, 576),
        "k_cache": zeros(6, 16, 1, 656, dtype=UINT8),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": flash_mla.FlashMLASchedMeta(),
        "softmax_scale": 0.1,
        "indices": zeros(2, 3, 8, dtype=INT32),
        "attn_sink": zeros(4, dtype=torch.float32),
        "topk_length": zeros(2, dtype=INT32),
    } | changes


def test_decode_into_the_callers_memory():
    """vLLM's copy of FlashMLA has `out`."""
    memory = torch.full((2, 3, 5, 512), 7.0, dtype=BF16)
    given = memory[:, :, :4]
    out, _ = flash_mla.flash_mla_with_kvcache(**decode_arguments(out=given))
    assert out.data_ptr() == given.data_ptr()
    assert not given.any() and (memory[:, :, 4] == 7.0).all()


def test_no_requests():
    out, lse = flash_mla.flash_mla_with_kvcache(
        **decode_arguments(q=zeros(0, 3, 4, 576), indices=zeros(0, 3, 8, dtype=INT32), topk_length=zeros(0, dtype=INT32))
    )
    assert out.shape == (0, 3, 4, 512) and lse.shape == (0, 4, 3)


def test_a_scheduler_object_serves_calls_of_equal_shapes():
    plan, _ = flash_mla.get_mla_metadata(zeros(2, dtype=INT32), 12, num_heads_k=1, topk=8)  # arguments of older versions
    assert isinstance(plan, flash_mla.FlashMLASchedMeta) and not plan.have_initialized and plan.config is None
    for _ in range(2):
        flash_mla.flash_mla_with_kvcache(**decode_arguments(tile_scheduler_metadata=plan))
    assert plan.have_initialized and plan.config is not None
    kept = plan.config
    assert (kept.b, kept.s_q, kept.h_q, kept.topk, kept.page_block_size, kept.h_k) == (2, 3, 4, 8, 16, 1)
    assert kept.is_fp8_kvcache and not kept.causal and kept.extra_topk is None and kept.extra_page_block_size is None
    with pytest.raises(PlanMismatch, match=r"h_q 5 \(at first 4\).* get_mla_metadata"):
        flash_mla.flash_mla_with_kvcache(
            **decode_arguments(tile_scheduler_metadata=plan, q=zeros(2, 3, 5, 576), attn_sink=None)
        )
    assert copy.deepcopy(plan) == plan


def test_the_plan_as_tensors_can_be_copied_into_the_buffers_of_a_graph():
    """SGLang copies both into buffers of its graphs, the second for each number of rows."""
    for rows in (1, 7, 64):
        plan, splits = flash_mla.get_mla_decoding_metadata(
            torch.ones(rows, dtype=INT32), 64, 1, 64, is_fp8_kvcache=True, topk=2048, use_legacy=True
        )
        assert plan.shape == (1, 8) and plan.dtype == INT32
        assert splits.shape == (rows + 1,) and splits.dtype == INT32
    for name, arguments in {
        "seqlens_k": (zeros(2, dtype=torch.int64), 64, 1),
        "num_q_tokens_per_head_k": (zeros(2, dtype=INT32), 0, 1),
    }.items():
        with pytest.raises(InvalidArgument) as caught:
            flash_mla.get_mla_decoding_metadata(*arguments)
        assert (caught.value.where, caught.value.argument) == ("get_mla_decoding_metadata", name)


# ---------------------------------------------------------------------------------------------------------- prefill


@pytest.mark.parametrize("width", [576, 512])
@pytest.mark.parametrize("heads", [1, 6])
@pytest.mark.parametrize("features", ["plain", "lengths", "sinks", "both"])
@pytest.mark.parametrize("strides", ["contiguous", "cut from larger"])
def test_prefill(width: int, heads: int, features: str, strides: str):
    tokens, topk, seed = 5, 11, heads
    rows = draw(30, width, seed=seed, spread=0.3).to(BF16)
    indices = picked(tokens, topk, below=30, seed=seed)
    indices[2] = INVALID[0]
    indices[indices == 0] = -1
    rows[0] = float("nan")  # nobody names it
    lengths = int32([topk, 0, topk, 3, 1]) if features in ("lengths", "both") else None
    sink = sinks(heads, seed=seed) if features in ("sinks", "both") else None
    q = draw(tokens, heads, width, seed=seed + 1).to(BF16)
    given = (q, rows.unsqueeze(1), indices.unsqueeze(1))
    if strides != "contiguous":
        given = tuple(cut_from_larger(each) for each in given)
    out, greatest, lse = flash_mla.flash_mla_sparse_fwd(*given, sm_scale=0.5, attn_sink=sink, topk_length=lengths)
    wanted = attend(q, [(rows, indices, lengths)], 0.5, sink)
    assert_out(out, wanted.out)
    assert greatest is not None and lse is not None
    assert_statistic(greatest, wanted.max_logits)
    assert_statistic(lse, wanted.lse)
    assert (lse[2] == INF).all() and (greatest[2] == -INF).all() and not out[2].any()


def prefill_arguments(**changes: Any) -> dict[str, Any]:
    """s_q 4, s_kv 10, h_q 3, topk 6."""
    return {
        "q": draw(4, 3, 576, seed=1).to(BF16),
        "kv": draw(10, 1, 576, seed=2).to(BF16),
        "indices": picked(4, 1, 6, below=10, seed=3),
        "sm_scale": 0.1,
        "attn_sink": zeros(3, dtype=torch.float32),
        "topk_length": int32([6, 0, 3, 5]),
    } | changes


def test_statistics_to_base_2_and_none():
    """As sgl-flash-mla takes `return_log2_lse`."""
    natural = flash_mla.flash_mla_sparse_fwd(**prefill_arguments())
    binary = flash_mla.flash_mla_sparse_fwd(**prefill_arguments(), use_legacy=True, return_log2_lse=True)
    none = flash_mla.flash_mla_sparse_fwd(**prefill_arguments(), return_log2_lse=False)
    assert none[1] is None and none[2] is None
    assert torch.equal(natural[0], binary[0]) and torch.equal(natural[0], none[0])
    for one, other in zip(natural[1:], binary[1:], strict=True):
        assert one is not None and other is not None
        torch.testing.assert_close(other, one / math.log(2))


def test_a_nan_in_a_key_stays_one():
    """FlashMLA does not hide it either; -inf alone becomes +inf."""
    found = statistics.as_flashmla(torch.tensor([-INF, INF, math.nan, 1.5, -2.5]))
    assert found[:2].tolist() == [INF, INF] and found[2].isnan() and found[3:].tolist() == [1.5, -2.5]


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_parts_merge_as_they_are_returned(backend: str):
    """A token without a valid key in a part has an lse of +inf there, and no weight in `merge_states`."""
    arguments = prefill_arguments()
    del arguments["attn_sink"], arguments["topk_length"]  # a sink would count in each part
    indices = arguments["indices"]
    first, second = (torch.full_like(indices, -1) for _ in range(2))
    half = indices.shape[-1] // 2
    first[1:, :, :half], second[:-1, :, half:] = indices[1:, :, :half], indices[:-1, :, half:]
    first[2:3], second[2:3] = -1, -1  # empty in both
    parts = [flash_mla.flash_mla_sparse_fwd(**arguments | {"indices": part}) for part in (first, second)]
    outs, lses = (torch.stack([part[at] for part in parts]) for at in (0, 2))
    assert (lses[0, 0] == INF).all() and (lses[1, -1] == INF).all() and (lses[:, 2] == INF).all()
    out, lse = mla_portable.merge_states(outs, lses, backend=backend)
    whole = flash_mla.flash_mla_sparse_fwd(**arguments | {"indices": torch.cat((first, second), dim=-1)})
    torch.testing.assert_close(out, whole[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, whole[2].masked_fill(whole[2] == INF, -INF))


@pytest.mark.parametrize("value", ["on", "ON", "On", " on "])
def test_max_logits_are_asked_for_in_upper_or_lower_case(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(statistics.MAX_LOGITS.name, value)
    statistics.wants_max_logits.cache_clear()
    assert flash_mla.flash_mla_sparse_fwd(**prefill_arguments())[1] is not None


@pytest.mark.parametrize("value", ["off", "OFF", ""])
def test_max_logits_are_left_out_unless_asked_for(value: str, monkeypatch: pytest.MonkeyPatch):
    whole = flash_mla.flash_mla_sparse_fwd(**prefill_arguments())
    monkeypatch.setenv(statistics.MAX_LOGITS.name, value)
    assert flash_mla.flash_mla_sparse_fwd(**prefill_arguments())[1] is not None  # read once a process
    statistics.wants_max_logits.cache_clear()
    out, greatest, lse = flash_mla.flash_mla_sparse_fwd(**prefill_arguments())
    assert greatest is None and torch.equal(out, whole[0]) and torch.equal(lse, whole[2])
    monkeypatch.setenv(statistics.MAX_LOGITS.name, "maybe")
    statistics.wants_max_logits.cache_clear()
    with pytest.raises(InvalidArgument, match="MAX_LOGITS"):
        flash_mla.flash_mla_sparse_fwd(**prefill_arguments())


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0])
def test_max_logits_of_equal_keys_and_of_scores_of_any_size(size: float, backend: str):
    """A sum over keys with one score is that score, but for the logarithm of their number over 2**20."""
    kv = draw(8, 1, 576, seed=1).to(BF16)
    q = draw(2, 3, 576, seed=2).to(BF16)
    indices = int32([[[5] * 64], [[0, 1, 2, 3, 4, 6, 7, -1] * 8]])
    scale = size / 24
    with mla_portable.use(backend):
        found = flash_mla.flash_mla_sparse_fwd(q, kv, indices, scale)[1]
    assert found is not None
    wanted = attend(q, [(kv[:, 0], indices[:, 0], None)], scale).max_logits
    error = found.double() - wanted
    rounding = 2.0**-20 * wanted.abs()
    assert (error >= -rounding).all() and (error <= math.log(64) / 2**20 + rounding).all()


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_max_logits_are_exact_whatever_torch_allows(precision: str):
    before, arguments = torch.get_float32_matmul_precision(), prefill_arguments(topk_length=None)
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(BF16)
    try:
        with torch.autocast("cpu", dtype=BF16):
            found = flash_mla.flash_mla_sparse_fwd(**arguments)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision(before)
    wanted = attend(arguments["q"], [(arguments["kv"][:, 0], arguments["indices"][:, 0], None)], 0.1)
    assert_statistic(found[1], wanted.max_logits)
    assert_statistic(found[2], wanted.lse)


def test_no_tokens_and_no_rows():
    nothing = prefill_arguments(q=zeros(0, 3, 576), indices=zeros(0, 1, 6, dtype=INT32), topk_length=zeros(0, dtype=INT32))
    assert [tuple(each.shape) for each in flash_mla.flash_mla_sparse_fwd(**nothing)] == [(0, 3, 512), (0, 3), (0, 3)]
    out, greatest, lse = flash_mla.flash_mla_sparse_fwd(**prefill_arguments(kv=zeros(0, 1, 576)))
    assert not out.any() and (greatest == -INF).all() and (lse == INF).all()


@pytest.mark.parametrize("stride", [576, 1408])
def test_prefill_into_the_callers_memory(stride: int):
    """vLLM calls it so, also with slices of heads; rows of kv side by side, and apart."""
    memory, rows = torch.full((4, 5, 512), 7.0, dtype=BF16), torch.zeros(10 * stride, dtype=BF16)
    kv = rows.as_strided((10, 1, 576), (stride, 576, 1))
    kv.copy_(prefill_arguments()["kv"])
    given = memory[:, 1:4]
    out = flash_mla.flash_mla_sparse_fwd(**prefill_arguments(kv=kv, out=given))[0]
    assert out.data_ptr() == given.data_ptr()
    assert torch.equal(out, flash_mla.flash_mla_sparse_fwd(**prefill_arguments())[0])
    assert (memory[:, [0, 4]] == 7.0).all()


def test_numbers_of_numpy_are_scales():
    one = flash_mla.flash_mla_sparse_fwd(**prefill_arguments(sm_scale=np.float32(0.125)))
    assert torch.equal(one[0], flash_mla.flash_mla_sparse_fwd(**prefill_arguments(sm_scale=0.125))[0])


# ---------------------------------------------------------------------------------------------------------- engines


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize(("gap", "width"), [(0, 576), (128, 576), (64, 512)])
def test_lmdeploy_decodes_bf16_pages_as_overlapping_rows(backend: str, gap: int, width: int):
    """A row begins every 64 elements of the cache's memory: `index` of a token is its offset over 64. Nothing is copied."""
    blocks, page, heads, tokens, topk = 4, 16, 4, 3, 8
    memory = torch.full((blocks, page * width + gap), float("nan"), dtype=BF16)
    cache = memory[:, : page * width].view(blocks, page, 1, width)
    cache.copy_(draw(blocks, page, 1, width, seed=1, spread=0.3))
    slots = picked(tokens, topk, below=blocks * page, seed=2)
    block, offset = slots // page, slots % page
    units = (block * (page * width + gap) + offset * width) // 64
    units[(slots < 0) | (slots >= blocks * page)] = -1
    count = ((blocks - 1) * (page * width + gap) + (page - 1) * width) // 64 + 1
    kv = cache.as_strided((count, 1, width), (64, width, 1))
    q = draw(tokens, heads, width, seed=3).to(BF16)
    lengths = int32([8, 5, 0])
    with mla_portable.use(backend):
        found = flash_mla.flash_mla_sparse_fwd(q, kv, units.unsqueeze(1), sm_scale=0.06, topk_length=lengths)
    wanted = attend(q, [(cache.flatten(0, 2), slots, lengths)], 0.06)
    assert_out(found[0], wanted.out)
    assert found[1] is not None and found[2] is not None
    assert_statistic(found[1], wanted.max_logits)
    assert_statistic(found[2], wanted.lse)


def test_lmdeploy_decodes_quantised_pages():
    """Two tokens of each request, a cache of float8_e4m3fn, tables and lengths that sparse decode does not read."""
    cache, rows = v32_cache(draw(48, 576, seed=1, spread=0.3), 16)
    plan, splits = flash_mla.get_mla_metadata(int32([20, 9]), 4 * 2, num_heads_k=1, num_heads_q=4, is_fp8_kvcache=True, topk=10)
    q, indices = draw(2, 2, 4, 576, seed=2).to(BF16), picked(2, 2, 10, below=48, seed=3)
    out, lse = flash_mla.flash_mla_with_kvcache(
        q,
        k_cache=cache.view(E4M3),
        block_table=int32([[0, 1], [2, 0]]),
        cache_seqlens=int32([20, 9]),
        head_dim_v=512,
        softmax_scale=SCALE,
        tile_scheduler_metadata=plan,
        num_splits=splits,
        causal=False,
        is_fp8_kvcache=True,
        indices=indices,
    )
    wanted = attend(q.flatten(0, 1), [(rows, indices.flatten(0, 1), None)], SCALE)
    assert_out(out.flatten(0, 1), wanted.out)
    assert_statistic(lse.transpose(1, 2).flatten(0, 1), wanted.lse)


def as_lmdeploy_pads(q: Tensor, sink: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Queries and sinks of `heads` heads; those that are not there have what memory may hold: NaN and infinity."""
    wide = torch.full((*q.shape[:-2], heads, q.shape[-1]), float("nan"), dtype=q.dtype)
    wide[..., q.shape[-2] + 1 :: 2, :] = INF
    wide[..., : q.shape[-2], :] = q
    return wide, torch.cat([sink, torch.full((heads - len(sink),), float("nan"))])


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_lmdeploy_decodes_v4_with_padded_heads(backend: str, compressed: bool):
    """The compressed cache first, the window, a block for each request, as the second one; or the window as both, and a first
    list of absent entries whose length is 0. A padded request of a graph attends to one key."""
    window, window_rows = v4_cache(draw(48, 512, seed=1, spread=0.3), 16)
    blocks, rows = v4_cache(draw(32, 512, seed=2, spread=0.3), 8) if compressed else (window, window_rows)
    q, sink = draw(3, 1, 6, 512, seed=3).to(BF16), sinks(6, seed=4)
    near = (torch.arange(16, dtype=INT32) + 16 * torch.arange(3, dtype=INT32)[:, None]).unsqueeze(1)
    far = picked(3, 1, 64, below=32, seed=5, holes=0.0) if compressed else torch.full((3, 1, 64), -1, dtype=INT32)
    lengths, extra_lengths = int32([64, 17, 1] if compressed else [0, 0, 0]), int32([16, 9, 1])
    wide, wide_sink = as_lmdeploy_pads(q, sink, 64)
    with mla_portable.use(backend):
        out, _ = flash_mla.flash_mla_with_kvcache(
            wide, k_cache=blocks, block_table=None, cache_seqlens=None, head_dim_v=512,
            tile_scheduler_metadata=flash_mla.get_mla_metadata()[0], softmax_scale=0.05, causal=False, is_fp8_kvcache=True,
            indices=far, attn_sink=wide_sink, extra_k_cache=window, extra_indices_in_kvcache=near,
            topk_length=lengths, extra_topk_length=extra_lengths,
        )  # fmt: skip
    wanted = attend(q[:, 0], [(rows, far[:, 0], lengths), (window_rows, near[:, 0], extra_lengths)], 0.05, sink)
    assert_out(out[:, 0, :6], wanted.out)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_lmdeploy_prefills_v4_over_flat_rows_with_padded_heads(backend: str):
    """Rows of 512 of the window and of what is compressed, one after the other; lengths of each token."""
    rows = draw(40, 512, seed=1, spread=0.3).to(BF16)
    q, sink = draw(5, 6, 512, seed=2).to(BF16), sinks(6, seed=3)
    indices, lengths = picked(5, 128, below=40, seed=4, holes=0.0), int32([128, 1, 60, 0, 3])
    wide, wide_sink = as_lmdeploy_pads(q, sink, 64)
    with mla_portable.use(backend):
        found = flash_mla.flash_mla_sparse_fwd(
            wide, rows.unsqueeze(1), indices.unsqueeze(1), sm_scale=0.05, attn_sink=wide_sink, topk_length=lengths
        )
    assert_out(found[0][:, :6], attend(q, [(rows, indices, lengths)], 0.05, sink).out)


def test_lmdeploy_s_dense_decode_is_refused_with_words():
    with pytest.raises(InvalidArgument, match=r"indices: got None \(dense decode\).* needs FlashMLA itself \(SM90"):
        flash_mla.flash_mla_with_kvcache(
            zeros(2, 1, 16, 576),
            k_cache=zeros(4, 64, 1, 576),
            block_table=zeros(2, 2, dtype=INT32),
            cache_seqlens=int32([5, 70]),
            head_dim_v=512,
            softmax_scale=0.1,
            tile_scheduler_metadata=flash_mla.get_mla_metadata()[0],
            num_splits=None,
            causal=True,
            is_fp8_kvcache=False,
            indices=None,
        )


def test_sglang_decodes_with_the_plan_as_tensors():
    """A fresh object for each call that carries them, pages of 64, an empty table, one token of each request."""
    cache, rows = v32_cache(draw(128, 576, seed=1, spread=0.3), 64)
    q, indices = draw(3, 1, 8, 576, seed=2).to(BF16), picked(3, 1, 64, below=128, seed=3)
    plan, splits = flash_mla.get_mla_decoding_metadata(int32([64, 9, 30]), 8, 1, 8, True, 64, use_legacy=True)
    object_of_the_call = flash_mla.flash_mla_interface.FlashMLASchedMeta(tile_scheduler_metadata=plan, num_splits=splits)
    out, _ = flash_mla.flash_mla_with_kvcache(
        q=q, k_cache=cache, block_table=torch.empty((3, 0), dtype=INT32), cache_seqlens=int32([64, 9, 30]), head_dim_v=512,
        tile_scheduler_metadata=object_of_the_call, softmax_scale=SCALE, causal=False, is_fp8_kvcache=True, indices=indices,
        attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None,
        use_legacy=True, kv_format="V32", descale_q=None, descale_k=None,
    )  # fmt: skip
    assert_out(out[:, 0], attend(q[:, 0], [(rows, indices[:, 0], None)], SCALE).out)


def test_sglang_prefills_over_its_flat_pool():
    pool = draw(100, 1, 576, seed=1, spread=0.3).to(BF16)
    q, table = draw(4, 8, 576, seed=2).to(BF16), picked(4, 16, below=100, seed=3)
    lengths, sink = int32([16, 4, 9, 1]), sinks(8, seed=4)
    out, _, lse = flash_mla.flash_mla_sparse_fwd(
        q, pool, table.unsqueeze(1), SCALE, 512, sink, lengths, use_legacy=True, return_log2_lse=True
    )
    wanted = attend(q, [(pool[:, 0], table, lengths)], SCALE, sink)
    assert_out(out, wanted.out)
    assert lse is not None
    assert_statistic(lse * math.log(2), wanted.lse)


def test_the_extension_module_takes_its_arguments_by_position():
    arguments = decode_arguments()
    plan, splits = zeros(1, 8, dtype=INT32), zeros(3, dtype=INT32)
    found = flash_mla.cuda.sparse_decode_fwd(
        arguments["q"], arguments["k_cache"], arguments["indices"], arguments["topk_length"], arguments["attn_sink"],
        plan, splits, None, None, None, 512, 0.1,
    )  # fmt: skip
    own = flash_mla.flash_mla_with_kvcache(**arguments)
    assert torch.equal(found[0], own[0]) and torch.equal(found[1], own[1]) and found[2] is plan and found[3] is splits
    given = prefill_arguments()
    some = given["q"], given["kv"], given["indices"], 0.1, 512, given["attn_sink"], given["topk_length"]
    for one, other in zip(flash_mla.cuda.sparse_prefill_fwd(*some), flash_mla.flash_mla_sparse_fwd(**given), strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (flash_mla.cuda.dense_decode_fwd, "flash_mla.cuda.dense_decode_fwd: dense decode is not served"),
        (flash_mla.cuda.dense_prefill_fwd, "flash_attn_varlen_func"),
        (flash_mla.cuda.dense_prefill_bwd, "gradient"),
        (flash_mla.fused_norm_rope_attn_rope_cast.prefill, "SM100 and sgl-flash-mla"),
        (flash_mla.fused_norm_rope_attn_rope_cast.decode, "SM100 and sgl-flash-mla"),
        (flash_mla.fused_norm_rope_attn_rope_cast.permute_q_b_proj, "SM100 and sgl-flash-mla"),
        (flash_mla.fused_norm_rope_attn_rope_cast.permute_wv_proj, "SM100 and sgl-flash-mla"),
    ],
)
def test_names_without_an_implementation_say_what_is_needed(function: Any, words: str):
    with pytest.raises(NotServed, match=words) as caught:
        function(1, key=2)
    assert isinstance(caught.value, NotImplementedError) and isinstance(caught.value, mla_portable.MLAPortableError)


class NoReadBack(TorchDispatchMode):
    """Refuses what waits for a device: numbers on the host, and results whose shape depends on values."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(self.WAITS), f"{name} waits for the device"
        if name.startswith("index") and len(args) > 1 and isinstance(args[1], (list, tuple)):
            assert all(each is None or each.dtype != torch.bool for each in args[1]), "a mask as an index waits"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stride", [576, 1408])
def test_nothing_is_read_back(stride: int, monkeypatch: pytest.MonkeyPatch):
    """A CUDA graph can capture the calls, apart from the kernels, which have tests of their own."""

    def attention(q: Tensor, kv: Tensor, indices: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return q[..., :512].clone(), torch.zeros(q.shape[:-1], dtype=torch.float32)

    for module in (flash_mla.decode, flash_mla.prefill):
        monkeypatch.setattr(module, "unchecked", lambda *args, **facts: attention)
    decode, prefill = decode_arguments(), prefill_arguments(kv=zeros(10 * stride).as_strided((10, 1, 576), (stride, 576, 1)))
    with NoReadBack():
        flash_mla.flash_mla_with_kvcache(**decode)
        flash_mla.flash_mla_sparse_fwd(**prefill)
    with pytest.raises(AssertionError, match="waits"), NoReadBack():
        decode["topk_length"].max().item()


# -------------------------------------------------------------------------------------------- dense, ragged batches


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_kv", [1, 4])
@pytest.mark.parametrize("form", ["apart", "kv packed", "qkv packed"])
def test_dense_attention_of_a_ragged_batch(causal: bool, heads_kv: int, form: str):
    if form == "qkv packed" and heads_kv == 1:
        heads_kv = 4  # one tensor has one number of heads
    lengths_q = [3, 0, 5]
    lengths_k = lengths_q if form == "qkv packed" else [4, 2, 5]
    starts_q, starts_k = (int32(np.cumsum([0, *each]).tolist()) for each in (lengths_q, lengths_k))
    q = draw(8, 4, 192, seed=1).to(BF16)
    k, v = draw(int(starts_k[-1]), heads_kv, 192, seed=2).to(BF16), draw(int(starts_k[-1]), heads_kv, 128, seed=3).to(BF16)
    options = {"softmax_scale": 0.07, "causal": causal, "is_varlen": True}
    if form == "apart":
        out, lse = flash_mla.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 5, np.int64(5), **options)
    elif form == "kv packed":
        kv = torch.cat([k, v], dim=-1)
        out, lse = flash_mla.flash_attn_varlen_kvpacked_func(q, kv, starts_q, starts_k, 5, 5, 192, **options)
    else:
        qkv = torch.cat([q, k, v], dim=-1)
        out, lse = flash_mla.flash_attn_varlen_qkvpacked_func(qkv, starts_q, 5, 192, **options)
    assert out.shape == (8, 4, 128) and lse.shape == (8, 4) and lse.stride(0) == 1
    for (begin, end), (first, last) in zip(
        zip(starts_q.tolist(), starts_q[1:].tolist(), strict=False),
        zip(starts_k.tolist(), starts_k[1:].tolist(), strict=False),
        strict=False,
    ):
        for head in range(4):
            of_keys = head % heads_kv
            scores = 0.07 * q[begin:end, head].double() @ k[first:last, of_keys].double().T
            if causal:
                seen = torch.ones(scores.shape, dtype=torch.bool).tril(diagonal=(last - first) - (end - begin))
                scores.masked_fill_(~seen, -INF)
            assert_out(out[begin:end, head], scores.softmax(-1) @ v[first:last, of_keys].double())
            assert_statistic(lse[begin:end, head], scores.logsumexp(-1))


def varlen_arguments(**changes: Any) -> dict[str, Any]:
    return {
        "q": zeros(6, 4, 192),
        "k": zeros(7, 4, 192),
        "v": zeros(7, 4, 128),
        "cu_seqlens_qo": int32([0, 2, 6]),
        "cu_seqlens_kv": int32([0, 3, 7]),
        "max_seqlen_qo": 4,
        "max_seqlen_kv": 4,
    } | changes


# ------------------------------------------------------------------------------------------------- what is refused

NO_TENSORS = (5, "x", [1.0])
NO_SCALES = (-1.0, 0, float("nan"), "x", True, torch.tensor(0.1))

DECODE_REFUSALS: dict[str, list[Any]] = {
    "q": [
        None, *NO_TENSORS, zeros(2, 3, 576), zeros(2, 3, 4, 448), zeros(2, 3, 4, 576, dtype=torch.float16), zeros(2, 0, 4, 576),
        zeros(2, 3, 0, 576), zeros(2, 3, 4, 1152)[..., ::2], zeros(), zeros(576),
    ],
    "k_cache": [
        None, *NO_TENSORS, zeros(6, 16, 656, dtype=UINT8), zeros(6, 16, 2, 656, dtype=UINT8), zeros(6, 16, 1, 288, dtype=UINT8),
        zeros(6, 16, 1, 656, dtype=torch.float16), zeros(6, 32, 1, 656, dtype=UINT8)[:, ::2], zeros(6, 0, 1, 656, dtype=UINT8),
        on_a_gpu(6, 16, 1, 656, dtype=UINT8),
    ],
    "indices": [
        None, *NO_TENSORS, zeros(2, 8, dtype=INT32), zeros(2, 3, 0, dtype=INT32), zeros(2, 3, 8, dtype=torch.int64),
        zeros(3, 3, 8, dtype=INT32), zeros(2, 2, 8, dtype=INT32), zeros(2, 3, 16, dtype=INT32)[..., ::2],
    ],
    "attn_sink": [*NO_TENSORS, zeros(4), zeros(5, dtype=torch.float32), zeros(1, 4, dtype=torch.float32)],
    "topk_length": [*NO_TENSORS, zeros(3, dtype=INT32), zeros(2, dtype=torch.int64), zeros(2, 3, dtype=INT32)],
    "out": [
        *NO_TENSORS, zeros(2, 3, 4, 576), zeros(2, 3, 4, 512, dtype=torch.float32), zeros(1, 3, 4, 512).expand(2, -1, -1, -1),
    ],
    "head_dim_v": [None, 576, "512", 128, torch.tensor([512, 512]), [512]],
    "tile_scheduler_metadata": ["x", 5, (None, None)],
    "softmax_scale": list(NO_SCALES),
    "causal": [True, None, torch.tensor([False, True]), np.zeros(2), "no"],
    "is_fp8_kvcache": [False, torch.tensor([True, True]), "yes"],
    "kv_format": ["V32_NO_ROPE", "V41", "V41_FP4", "V4", "x", 5, ["V32"], {}, torch.tensor([1, 2])],
    "extra_k_cache": [*NO_TENSORS, zeros(6, 16, 1, 576), zeros(6, 16, 656, dtype=UINT8), zeros(6, 0, 1, 656, dtype=UINT8)],
    "extra_indices_in_kvcache": [
        None, *NO_TENSORS, zeros(2, 3, 0, dtype=INT32), zeros(2, 3, 8, dtype=torch.int64), zeros(3, 3, 8, dtype=INT32),
    ],
    "extra_topk_length": [*NO_TENSORS, zeros(3, dtype=INT32), zeros(2, dtype=torch.int64)],
    "enable_batch_invariant": [True, torch.tensor([False, False])],
    "descale_q": [zeros(1, dtype=torch.float32)],
    "descale_k": [zeros(1, dtype=torch.float32)],
}  # fmt: skip
PREFILL_REFUSALS: dict[str, list[Any]] = {
    "q": [
        None, *NO_TENSORS, zeros(4, 576), zeros(4, 3, 512), zeros(4, 0, 576), zeros(4, 3, 576, dtype=torch.float16), zeros(),
    ],
    "kv": [
        None, *NO_TENSORS, zeros(10, 576), zeros(10, 2, 576), zeros(10, 1, 640), zeros(10, 1, 656, dtype=UINT8),
        zeros(10, 1, 576, dtype=torch.float16), zeros(1, 1, 576).expand(10, 1, 576), zeros(10, 1, 1152)[..., ::2],
        on_a_gpu(10, 1, 576),
    ],
    "indices": [
        None, *NO_TENSORS, zeros(4, 6, dtype=INT32), zeros(4, 2, 6, dtype=INT32), zeros(4, 1, 0, dtype=INT32),
        zeros(5, 1, 6, dtype=INT32), zeros(4, 1, 6, dtype=torch.int64),
    ],
    "sm_scale": [None, *NO_SCALES],
    "d_v": [None, 128, 576, torch.tensor([512, 512])],
    "return_log2_lse": [torch.tensor([True, True]), "yes", 2],
    "attn_sink": [*NO_TENSORS, zeros(3), zeros(4, dtype=torch.float32)],
    "topk_length": [*NO_TENSORS, zeros(5, dtype=INT32), zeros(4, 1, dtype=INT32)],
    "out": [*NO_TENSORS, zeros(4, 3, 576), zeros(4, 3, 512, dtype=torch.float32)],
}  # fmt: skip
VARLEN_REFUSALS: dict[str, list[Any]] = {
    "q": [None, *NO_TENSORS, zeros(6, 192), zeros(6, 4, 192, dtype=torch.float16), zeros(6, 4, 192).requires_grad_()],
    "k": [None, zeros(7, 4, 128), zeros(7, 2, 192), zeros(7, 3, 192), zeros(7, 4, 192).requires_grad_()],
    "v": [None, zeros(8, 4, 128), zeros(7, 1, 128), zeros(7, 4, 128).requires_grad_()],
    "cu_seqlens_qo": [
        None, zeros(3, dtype=torch.int64), zeros(0, dtype=INT32), zeros(3, 1, dtype=INT32), int32([-1, 2, 6]), int32([0, 3, 2]),
        int32([0, 3, 7]),
    ],
    "cu_seqlens_kv": [None, zeros(4, dtype=INT32), zeros(3, dtype=torch.int64), int32([0, 4, 8]), int32([2, 1, 4])],
    "max_seqlen_qo": [None, -1, 1.5, True, torch.tensor(4), 3],
    "max_seqlen_kv": [None, -1, "x", torch.tensor(4), 3],
    "dropout_p": [0.1, None, "0", torch.tensor([0.0, 0.0])],
    "softmax_scale": list(NO_SCALES),
    "causal": [None, 1, torch.tensor([True, False])],
    "deterministic": [True, None, torch.tensor([False, False])],
}  # fmt: skip


def refused(call: Any, arguments: dict[str, Any], argument: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        call(**arguments | {argument: value})
    told = {"k_cache": {"k_cache", "q"}, "kv": {"kv", "q"}, "k": {"k", "v"}, "q": {"q", "k"}}.get(argument, {argument})
    assert caught.value.argument in told and caught.value.where == call.__name__, str(caught.value)
    assert ": got " in str(caught.value) and ", expected " in str(caught.value)


@pytest.mark.parametrize("argument", DECODE_REFUSALS)
def test_decode_is_checked_before_anything_runs(argument: str):
    given = decode_arguments()
    if argument.startswith("extra"):
        given |= {"extra_k_cache": zeros(3, 64, 1, 656, dtype=UINT8), **SECOND}
    for value in DECODE_REFUSALS[argument]:
        refused(flash_mla.flash_mla_with_kvcache, given, argument, value)


@pytest.mark.parametrize("argument", PREFILL_REFUSALS)
def test_prefill_is_checked_before_anything_runs(argument: str):
    for value in PREFILL_REFUSALS[argument]:
        refused(flash_mla.flash_mla_sparse_fwd, prefill_arguments(), argument, value)


WIDE = {
    dtype: CacheLayout(
        name=f"wide_{dtype.itemsize}",
        dtype=dtype,
        row_width=640,
        value_width=512,
        rope_width=128,
        rope_offset=512 * dtype.itemsize,
        alignment=1,
    )
    for dtype in (BF16, UINT8)
}


@pytest.mark.parametrize("dtype", WIDE)
def test_rows_that_a_plugin_alone_knows_are_refused(dtype: torch.dtype):
    """Though calls that name no layout infer it: FlashMLA's functions have FlashMLA's formats."""
    with known(*WIDE.values()):
        pages, flat = zeros(6, 16, 1, 640, dtype=dtype), zeros(10, 1, 640, dtype=dtype)
        assert layout_of(flat) is WIDE[dtype]
        decode = decode_arguments(q=zeros(2, 3, 4, 640))
        refused(flash_mla.flash_mla_with_kvcache, decode, "k_cache", pages)
        refused(flash_mla.flash_mla_with_kvcache, decode_arguments(**SECOND), "extra_k_cache", pages)
        refused(flash_mla.flash_mla_sparse_fwd, prefill_arguments(q=zeros(4, 3, 640)), "kv", flat)


@pytest.mark.parametrize("argument", VARLEN_REFUSALS)
def test_dense_attention_is_checked_before_anything_runs(argument: str):
    flash_mla.flash_attn_varlen_func(**varlen_arguments())
    for value in VARLEN_REFUSALS[argument]:
        refused(flash_mla.flash_attn_varlen_func, varlen_arguments(), argument, value)


@pytest.mark.parametrize(
    ("argument", "value"),
    [(each, value) for each in ("qkv", "kv") for value in (None, [1.0], zeros(), zeros(7, 512), zeros(7, 4, 192))]
    + [("head_dim_qk", value) for value in (None, 0, -1, 1.5, "192", torch.tensor(192), 600)],
)
def test_packed_forms_are_checked_before_anything_runs(argument: str, value: Any):
    options = {"cu_seqlens": int32([0, 2, 6]), "max_seqlen": 4, "qkv": zeros(6, 4, 512), "head_dim_qk": 192}
    keys = varlen_arguments(kv=zeros(7, 4, 320), head_dim_qk=192)
    del keys["k"], keys["v"]
    for call, given in (
        (flash_mla.flash_attn_varlen_qkvpacked_func, options),
        (flash_mla.flash_attn_varlen_kvpacked_func, keys),
    ):
        call(**given)
        if argument in given:
            with pytest.raises(InvalidArgument) as caught:
                call(**given | {argument: value})
            told = {"qkv", "kv"} if isinstance(value, int) and value == 600 else {argument}
            assert caught.value.argument in told and ", expected " in str(caught.value)


def test_a_gradient_that_nobody_asks_for_is_no_error():
    with torch.no_grad():
        flash_mla.flash_attn_varlen_func(**varlen_arguments(q=zeros(6, 4, 192).requires_grad_()))


SECOND = {"extra_indices_in_kvcache": zeros(2, 3, 8, dtype=INT32)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"extra_k_cache": zeros(6, 16, 1, 656, dtype=UINT8)},
            "extra_indices_in_kvcache: got None, expected slots of extra_k_cache",
        ),
        ({"extra_indices_in_kvcache": zeros(2, 3, 8, dtype=INT32)}, "Pass the cache that it names slots of"),
        ({"extra_topk_length": zeros(2, dtype=INT32)}, "Pass the cache that it names slots of"),
        ({"extra_k_cache": zeros(6, 16, 1, 584, dtype=UINT8), **SECOND}, "the layout of k_cache, fp8_ds_mla"),
        ({"k_cache": zeros(6, 16, 1, 528, dtype=UINT8)}, "kv_format: got None for rows of 528 bytes, expected 'V32_NO_ROPE'"),
        ({"kv_format": "V32_NO_ROPE"}, "V32_NO_ROPE for rows of 528 bytes"),
        ({"k_cache": zeros(6, 16, 1, 528, dtype=UINT8), "kv_format": "V41"}, "V32, V32_NO_ROPE, V4, which have kernels here"),
        ({"kv_format": "V4"}, "V4 for rows of 584 bytes"),
        ({"enable_batch_invariant": True}, "batch_invariant"),
        ({"k_cache": zeros(6, 16, 1, 576), "is_fp8_kvcache": True}, "False for a cache of torch.bfloat16"),
    ],
)
def test_a_refusal_says_what_would_be_served(changes: dict[str, Any], words: str):
    with pytest.raises(InvalidArgument, match=words):
        flash_mla.flash_mla_with_kvcache(**decode_arguments(**changes))


def test_overlapping_rows_are_for_reading_rows_without_scales_alone():
    """sparse_decode takes them as blocks of one row; not whole blocks, quantised rows, caches that are written."""
    call = {"indices": zeros(1, 1, 4, dtype=INT32), "softmax_scale": 0.1}
    rows = zeros(6000).as_strided((20, 1, 576), (64, 576, 1))
    out, _ = mla_portable.sparse_decode(zeros(1, 1, 2, 576), rows, **call)
    assert out.shape == (1, 1, 2, 512)
    with pytest.raises(InvalidArgument, match="whole rows"):
        mla_portable.sparse_decode(zeros(1, 1, 2, 576), zeros(6000).as_strided((5, 2, 576), (576, 576, 1)), **call)
    with pytest.raises(InvalidArgument, match="whole rows"):
        quantised = zeros(9000, dtype=UINT8).as_strided((5, 1, 656), (64, 656, 1))
        mla_portable.sparse_decode(zeros(1, 1, 2, 576), quantised, **call)
    with pytest.raises(InvalidArgument, match="whole rows"):
        mla_portable.cache_write(zeros(1, 512), zeros(1, 64), rows, zeros(1, dtype=torch.int64))
