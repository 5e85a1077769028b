# SPDX-License-Identifier: Apache-2.0
"""The attention kernels of the Triton plugin in what conformance does not see: splits, strides, launches, configurations.

In Triton's interpreter, or on a GPU where there is one.

Rows of the cache that no index names, gaps between blocks, outputs and scratch are NaN before every call.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton_machine import device, facts, memory_is_poisoned

from mla_portable.contracts import DeviceFacts, Request
from mla_portable.kit.split_kv import SplitSchedule, split_kv
from mla_portable.layouts import FP8_DS_MLA
from mla_portable.primitives import MERGE_STATES, SPARSE_DECODE, SPARSE_PREFILL, SparseDecode, SparsePrefill
from mla_portable_triton.attention_configs import CONFIGS, attention_config, program_shape
from mla_portable_triton.bind_attention import bind_merge_states, bind_sparse_decode, bind_sparse_prefill
from mla_portable_triton.kernels.bfloat16 import dot_operand, to_bfloat16
from mla_portable_triton.kernels.coded_products import fp8_constants
from mla_portable_triton.kernels.sparse_attention import launch
from mla_portable_triton.kernels.strides import stride_unit

__all__ = ["device", "facts", "memory_is_poisoned"]  # fixtures

LAYOUTS = ("bf16", "fp8_ds_mla")
SCALE = 0.06
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
NAN, INF = float("nan"), float("inf")

Pair = tuple[Tensor, Tensor]


class Problem:
    """A cache, queries and indices with every kind of absence in them; [B, S] query rows, or [T] where `rows` is (T,)."""

    def __init__(
        self,
        device: torch.device,
        layout: str,
        *,
        heads: int,
        topk: int,
        rows: tuple[int, ...] = (1, 1),
        blocks: int = 5,
        block_size: int = 16,
        gap: int = 0,
        seed: int = 0,
    ) -> None:
        self.layout, self.heads, self.topk, self.rows = layout, heads, topk, rows
        generator = torch.Generator().manual_seed(seed)
        num_slots = blocks * block_size
        self.q = torch.randn(*rows, heads, 576, generator=generator).bfloat16().to(device)
        # every other slot stays unused
        indices = torch.randint(0, (num_slots + 1) // 2, (*rows, topk), generator=generator, dtype=torch.int32) * 2
        indices[torch.rand(indices.shape, generator=generator) < 0.1] = -1
        corpus = torch.tensor([INT32_MIN, -123456, -1, num_slots, num_slots + 114514, INT32_MAX], dtype=torch.int32)
        for start in (0, topk // 2 - 3, topk - 6):
            indices[..., start : start + 6] = corpus
        self.indices = indices.to(device)
        self.cache = make_cache(layout, blocks, block_size, gap, generator, device)

    def decode(self, facts: DeviceFacts) -> SparseDecode:
        request = Request(SPARSE_DECODE, facts, kv_layout=self.layout, num_heads=self.heads, topk=self.topk)
        return bind_sparse_decode(request)

    def prefill(self, facts: DeviceFacts) -> SparsePrefill:
        request = Request(SPARSE_PREFILL, facts, kv_layout=self.layout, num_heads=self.heads, topk=self.topk)
        return bind_sparse_prefill(request)

    def schedule(self, num_splits: int) -> SplitSchedule:
        return make_schedule(self.q.shape[0] * self.q.shape[1], self.heads, self.topk, num_splits, self.q.device)


def make_cache(layout: str, blocks: int, block_size: int, gap: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Values in the even slots, NaN in the odd ones and in the `gap` elements that follow each block."""
    rows = torch.randn(blocks * block_size, 576, generator=generator)
    rows[:, :512] *= torch.rand(blocks * block_size, 4, generator=generator).repeat_interleave(128, dim=1) + 0.05
    if layout == "bf16":
        packed, bad = rows.bfloat16(), NAN
    else:
        packed, bad = FP8_DS_MLA.pack(rows[:, :512], rows[:, 512:], scale_format="amax"), 0xFF
    packed[1::2] = bad
    width = packed.shape[1]
    storage = torch.full((blocks, block_size * width + gap), bad, dtype=packed.dtype, device=device)
    cache = storage[:, : block_size * width].unflatten(1, (block_size, width))
    return cache.copy_(packed.view(blocks, block_size, width))


def make_schedule(rows: int, heads: int, topk: int, num_splits: int, device: torch.device) -> SplitSchedule:
    partial_out = torch.full((num_splits, rows, heads, 512), NAN, device=device)
    partial_lse = torch.full((num_splits, rows, heads), NAN, device=device)
    return SplitSchedule(rows, heads, topk, num_splits, partial_out, partial_lse)


def check(got: Pair, want: Pair) -> None:
    """out within 4e-3 of the norm of each head, lse within 2e-5 or two parts in a million; rows without entries exact."""
    (out, lse), (want_out, want_lse) = ([x.cpu().double() for x in pair] for pair in (got, want))
    assert not out.isnan().any() and not lse.isnan().any()
    empty = want_lse == -INF
    assert torch.equal(lse == -INF, empty)
    assert (out[empty] == 0).all()
    torch.testing.assert_close(lse[~empty], want_lse[~empty], rtol=2e-6, atol=2e-5)
    error, size = (out - want_out).norm(dim=-1), want_out.norm(dim=-1)
    assert (error <= 4e-3 * size + 1e-30).all(), f"relative error {(error / size).max():.1e}"


def test_a_schedule_of_its_own_fills_the_device(device: torch.device, facts: DeviceFacts, monkeypatch: pytest.MonkeyPatch):
    problem = Problem(device, "fp8_ds_mla", heads=16, topk=512)
    wide = replace(facts, num_sms=2)
    made: list[SplitSchedule] = []

    def recorded(*args: Any) -> SplitSchedule:
        made.append(SplitSchedule(*args))
        return made[-1]

    monkeypatch.setattr("mla_portable_triton.bind_attention.SplitSchedule", recorded)
    got = problem.decode(wide)(problem.q, problem.cache, problem.indices, softmax_scale=SCALE)
    check(got, oracle.sparse_decode(problem.q, problem.cache, problem.indices, softmax_scale=SCALE))
    config = attention_config(facts.arch, "fp8_ds_mla", 16)
    expected = split_kv(num_rows=1, num_heads=16, topk=512, num_sms=2, program=program_shape(config, "fp8_ds_mla", wide))
    assert [each.num_splits for each in made] == [expected] and expected > 1


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "bf16"])
def test_all_splits_work_on_a_row_that_is_shorter_than_k(device: torch.device, facts: DeviceFacts, layout: str):
    problem = Problem(device, layout, heads=2, topk=2048, rows=(5, 1))
    lengths = torch.tensor([[2048], [512], [200], [0], [5000]], dtype=torch.int32, device=device)
    schedule = problem.schedule(4)
    got = problem.decode(facts)(
        problem.q, problem.cache, problem.indices, softmax_scale=SCALE, lengths=lengths, schedule=schedule
    )
    check(got, oracle.sparse_decode(problem.q, problem.cache, problem.indices, softmax_scale=SCALE, lengths=lengths))
    parts = (schedule.partial_lse > -INF).all(2).sum(0)
    tile = max(64, attention_config(facts.arch, layout, 2).block_n)
    assert parts.tolist() == [4, 4, -(-200 // tile), 0, 4]


@pytest.mark.parametrize("strides", [(0,), (8, 16), (576, 4608)])
def test_aligned_strides_are_counted_in_units(strides: tuple[int, ...]):
    assert stride_unit(*strides) == 8
    assert stride_unit(*strides, 4) == 1


def test_nan_in_a_named_row_is_seen(device: torch.device, facts: DeviceFacts):
    problem = Problem(device, "fp8_ds_mla", heads=2, topk=64, rows=(2, 1))
    problem.indices[1, 0, 30] = 1  # a row of NaN
    for schedule in (None, problem.schedule(2)):
        out, lse = problem.decode(facts)(problem.q, problem.cache, problem.indices, softmax_scale=SCALE, schedule=schedule)
        assert out[1].isnan().all() and lse[1].isnan().all()
        assert not out[0].isnan().any() and not lse[0].isnan().any()


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("row_bytes", [528, 656])
def test_fp8_rows_without_a_rotary_part(device: torch.device, facts: DeviceFacts, row_bytes: int, num_splits: int):
    """Queries of 512 columns over rows of 528 bytes, and over rows of 656 whose rotary part is NaN."""
    problem = Problem(device, "fp8_ds_mla", heads=20, topk=192, rows=(3, 1))
    q, cache = problem.q[..., :512], problem.cache[..., :row_bytes].contiguous()
    cache[..., 528:] = 0xFF
    rows, heads = q.shape[0], q.shape[2]
    if num_splits > 1:
        schedule = problem.schedule(num_splits)
        out, lse = schedule.partial_out, schedule.partial_lse
    else:
        out, lse = torch.empty_like(q), torch.empty(rows, 1, heads, device=device)
    launch(
        out, lse, q, cache, problem.indices, softmax_scale=SCALE, lengths=None, attn_sink=None, num_splits=num_splits,
        config=attention_config(facts.arch, "fp8_ds_mla", heads), bf16_native=facts.has_bf16,
        fp8=fp8_constants(facts.arch, e4m3_native=facts.has_fp8_conversion, hardware=device.type != "cpu"),
    )  # fmt: skip
    if num_splits > 1:  # parts: lse in base 2
        natural = lse * math.log(2.0)
        weights = torch.exp(natural - natural.logsumexp(0)).nan_to_num().unsqueeze(-1)
        out = (weights * out.masked_fill(weights == 0, 0.0)).sum(0).unsqueeze(1)
        lse = natural.logsumexp(0).unsqueeze(1)
    without = problem.cache.clone()
    without[..., 528:] = 0
    wide = torch.cat([q, torch.zeros(rows, 1, heads, 64, dtype=q.dtype, device=device)], -1)
    check((out, lse), oracle.sparse_decode(wide, without, problem.indices, softmax_scale=SCALE))


@pytest.mark.parametrize(("rise", "growth"), [(300, 0), (18, 0), (0, 30), (28, -40)])
@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_and_scales_far_apart(
    device: torch.device, facts: DeviceFacts, layout: str, order: str, rise: float, growth: float
):
    """Over 640 tokens scores rise by `rise`, of every other head they fall, and values grow by 2**growth, in each order."""
    generator = torch.Generator().manual_seed(0)
    topk, heads = 640, 4
    steps = torch.arange(topk) / topk  # 0 to 1
    if order != "rising":
        steps = steps.flip(0) if order == "falling" else steps[torch.randperm(topk, generator=generator)]
    rows = torch.randn(topk, 576, generator=generator)
    rows[:, :512] *= torch.exp2(growth * steps).unsqueeze(1)
    rows[:, 512:] = 0
    rows[:, 575] = rise * steps
    q = torch.randn(1, 1, heads, 576, generator=generator)
    q[..., :512] *= 2.0 ** (-4 - max(growth, 0))
    q[..., 512:] = 0
    if rise:
        q[..., ::2, 575], q[..., 1::2, 575] = 1 / SCALE, -1 / SCALE
    packed = rows.bfloat16() if layout == "bf16" else FP8_DS_MLA.pack(rows[:, :512], rows[:, 512:], scale_format="amax")
    indices = torch.arange(topk, dtype=torch.int32, device=device).view(1, 1, topk)
    arguments = (q.bfloat16().to(device), packed.unsqueeze(1).to(device), indices)
    request = Request(SPARSE_DECODE, facts, kv_layout=layout, num_heads=heads, topk=topk)
    got = bind_sparse_decode(request)(*arguments, softmax_scale=SCALE)
    check(got, oracle.sparse_decode(*arguments, softmax_scale=SCALE))


@pytest.mark.parametrize("exponent", [-118, -40, 20, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_queries_of_any_magnitude(device: torch.device, facts: DeviceFacts, layout: str, exponent: int):
    """Heads are 2**8 apart, and the softmax scale undoes what all have in common."""
    problem = Problem(device, layout, heads=5, topk=256)
    apart = torch.tensor([0, -8, 0, 0, 8], device=device).view(5, 1) + exponent
    q = torch.ldexp(problem.q.float(), apart).bfloat16()
    scale = SCALE * 2.0**-exponent
    got = problem.decode(facts)(q, problem.cache, problem.indices, softmax_scale=scale)
    check(got, oracle.sparse_decode(q, problem.cache, problem.indices, softmax_scale=scale))


def test_a_head_whose_queries_are_not_finite_is_nan_alone(device: torch.device, facts: DeviceFacts):
    problem = Problem(device, "fp8_ds_mla", heads=4, topk=64)
    problem.q[0, 0, 1, 7], problem.q[0, 0, 2, 570] = INF, NAN
    out, lse = problem.decode(facts)(problem.q, problem.cache, problem.indices, softmax_scale=SCALE)
    assert out[0, 0, 1:3].isnan().all() and lse[0, 0, 1:3].isnan().all()
    assert not out[0, 0, ::3].isnan().any() and not lse[0, 0, ::3].isnan().any()


def test_a_cache_without_slots(device: torch.device, facts: DeviceFacts):
    problem = Problem(device, "bf16", heads=2, topk=40)
    out, lse = problem.decode(facts)(problem.q, problem.cache[:0], problem.indices, softmax_scale=SCALE)
    assert (out == 0).all() and (lse == -INF).all()


def test_no_rows_no_launch(device: torch.device, facts: DeviceFacts, monkeypatch: pytest.MonkeyPatch):
    problem = Problem(device, "bf16", heads=2, topk=40, rows=(0, 1))
    for kernel in ("sparse_attention.sparse_attention_kernel", "merge_states.merge_states_kernel"):
        monkeypatch.setattr(f"mla_portable_triton.kernels.{kernel}", None)
    out, lse = problem.decode(facts)(problem.q, problem.cache, problem.indices, softmax_scale=SCALE)
    assert out.shape == (0, 1, 2, 512) and lse.shape == (0, 1, 2)
    prefill = problem.prefill(facts)(problem.q[:, 0], problem.cache.view(-1, 576), problem.indices[:, 0], softmax_scale=SCALE)
    assert prefill[0].shape == (0, 2, 512)
    merged = bind_merge_states(Request(MERGE_STATES, facts))(out[None], lse[None])
    assert merged[0].shape == out.shape and merged[1].shape == lse.shape


def test_nothing_is_allocated_where_all_is_given(device: torch.device, facts: DeviceFacts, monkeypatch: pytest.MonkeyPatch):
    problem = Problem(device, "fp8_ds_mla", heads=2, topk=40)
    out = torch.empty(1, 1, 2, 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(1, 1, 2, device=device)
    schedule, decode, prefill = problem.schedule(2), problem.decode(facts), problem.prefill(facts)

    def refuse(*args: object, **kwargs: object) -> Tensor:
        raise AssertionError("allocated")

    with monkeypatch.context() as patch:
        patch.setattr("mla_portable_triton.bind_attention.torch.empty", refuse)
        decode(problem.q, problem.cache, problem.indices, softmax_scale=SCALE, schedule=schedule, out=out, lse_out=lse)
        split = out.clone(), lse.clone()
        prefill(problem.q[0], problem.cache, problem.indices[0], softmax_scale=SCALE, out=out[0], lse_out=lse[0])
    want = oracle.sparse_decode(problem.q, problem.cache, problem.indices, softmax_scale=SCALE)
    check(split, want)
    check((out, lse), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(9, 3, 7), (140, 3, 1)])
def test_merge_states_in_several_tiles(device: torch.device, facts: DeviceFacts, dtype: torch.dtype, shape: tuple[int, ...]):
    generator = torch.Generator().manual_seed(1)
    outs = torch.randn(shape, generator=generator).to(dtype)
    lses = torch.randn(shape[:-1], generator=generator) * 20
    lses[0, 0] = -INF
    outs[0, 0] = NAN  # of a part without entries: not to be read
    if shape[0] > 1:
        lses[:, -1] = -INF  # a row that every part is empty for
        lses[1::2, -1] = lses[1, 0] = INF  # as FlashMLA says it
    outs[lses.isinf()] = NAN
    got = bind_merge_states(Request(MERGE_STATES, facts))(outs.to(device), lses.to(device))
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    want = oracle.merge_states(outs, lses)
    assert not got[0].isnan().any()
    torch.testing.assert_close(got[1].cpu().double(), want[1], rtol=1e-6, atol=1e-6)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(got[0].cpu().double(), want[0], rtol=step, atol=max(step * 1e-2, 1e-5))


@triton.jit
def _round_kernel(x_ptr, rounded_ptr, operand_ptr, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(rounded_ptr + i, to_bfloat16(x, NATIVE))
    tl.store(operand_ptr + i, dot_operand(x, NATIVE).to(tl.float32))


def test_rounding_to_bfloat16_by_integers(device: torch.device):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4096, generator=generator) * torch.exp2(torch.randint(-120, 120, (4096,), generator=generator).float())
    x[:512] = torch.randn(512, generator=generator).bfloat16().float() * (1 + 2**-8)  # ties and their neighbours
    x[512:520] = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 3.4e38, 1e-40, 1.9999999])
    x[520] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # a NaN whose payload rounding would carry over
    x = x.to(device)
    rounded, operand = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x)
    _round_kernel[(1,)](x, rounded, operand, NATIVE=False, BLOCK=4096)
    want = x.bfloat16()
    torch.testing.assert_close(rounded, want, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(operand, want.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("arch", CONFIGS)
def test_every_configuration_is_one_that_a_dot_accepts(arch: str):
    assert set(CONFIGS[arch]) == {*LAYOUTS, "bf16_nope", "fp8_nope", "fp8_v4", "bf16_128_32"}
    for rows in CONFIGS[arch].values():
        assert [max_heads for max_heads, _ in rows] == sorted({max_heads for max_heads, _ in rows})
        for max_heads, config in rows:
            for tile in (config.block_h, config.block_n):
                assert tile >= 16 and tile & (tile - 1) == 0
            assert config.block_h == max(16, max_heads)


@pytest.mark.parametrize(
    ("arch", "layout", "heads", "block_h"),
    [
        ("sm90", "fp8_ds_mla", 1, 16),
        ("sm90", "fp8_ds_mla", 16, 16),
        ("sm90", "fp8_ds_mla", 17, 32),
        ("sm90", "bf16", 128, 64),
        ("sm86", "fp8_ds_mla", 128, 32),
        ("ivcore11", "bf16", 64, 16),
        ("sm90", None, 64, 16),
        ("sm90", "bf16", None, 16),
    ],
)
def test_choosing_a_configuration(arch: str, layout: str | None, heads: int | None, block_h: int):
    assert attention_config(arch, layout, heads).block_h == block_h
