# SPDX-License-Identifier: Apache-2.0
"""sparse_decode on FlashMLA: schedules, chunks, padding, and what is refused before anything runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch_reference as reference
from flashmla_standins import Library, installed
from simulated_gpu import FACTS, registry

from mla_portable.contracts import Batch, InvalidArgument, PlanMismatch, Request
from mla_portable.kit.split_kv import SplitSchedule
from mla_portable.layouts import FP8_DS_MLA
from mla_portable.planner import Planner, PlannerConfig
from mla_portable.primitives import SPARSE_DECODE
from mla_portable_common.flash_mla import head_padding
from mla_portable_common.flash_mla.sparse_decode import FlashMLADecode, rows_per_call
from mla_portable_common.flash_mla.tile_schedules import FLASHMLA_TILES, TileSchedule, num_sm_parts, tile_schedule
from mla_portable_common.flash_mla.torch_passes import TorchBoundary

SCALE = 192**-0.5
MIB = 1 << 20


def problem(batch: int, query_len: int, heads: int, topk: int, *, block_size: int = 64):
    g = torch.Generator().manual_seed(batch * 1000 + heads)
    tokens = torch.randn(3 * block_size, 576, generator=g)
    cache = FP8_DS_MLA.pack(tokens[:, :512], tokens[:, 512:]).view(3, block_size, 656)
    q = torch.randn(batch, query_len, heads, 576, generator=g).bfloat16()
    indices = torch.randint(-20, 3 * block_size + 20, (batch, query_len, topk), generator=g, dtype=torch.int32)
    return q, cache, indices


def bound(heads: int, topk: int = 64, *, query_len: int = 1, **features):
    request = Request(
        SPARSE_DECODE,
        FACTS["sm90"],
        kv_layout="fp8_ds_mla",
        num_heads=heads,
        topk=topk,
        block_size=64,
        query_len=query_len,
        scale_format="pow2",
        **({"lse": True} | features),
    )
    return registry(probe=False).bind(request, backend="nvidia")


def assert_right(results, q, cache, indices, **options):
    want_out, want_lse = reference.sparse_decode(q, cache, indices, softmax_scale=SCALE, **options)
    torch.testing.assert_close(results[0].float(), want_out.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(results[1], want_lse, atol=1e-3, rtol=1e-3)


def schedule_for(batch: int, query_len: int, heads: int, topk: int, rows: int | None = None) -> TileSchedule:
    """A plan for `batch` rows in calls of `rows`, a shorter last one included."""
    parts = num_sm_parts("sm90", num_sms=132, query_len=query_len, num_heads=heads)

    def call(count: int) -> TileSchedule:
        tiles = tile_schedule([topk] * count, num_sm_parts=parts)
        words = torch.from_numpy(tiles.metadata), torch.from_numpy(tiles.num_splits)
        return TileSchedule(count, query_len, heads, topk, parts, *words)

    if rows is None or rows >= batch:
        return call(batch)
    tail = call(batch % rows) if batch % rows else None
    return replace(call(rows), num_rows=batch, rows_per_call=rows, tail=tail)


# --------------------------------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize("generation", ["vllm 0.24", "vllm 0.33", "flash_mla 2026", "sgl_kernel 0.4.5", "sgl_flash_mla"])
@pytest.mark.parametrize("heads", [16, 64])
def test_with_a_schedule_no_planner_runs(generation, heads):
    with installed(generation) as library:
        call, args = bound(heads), problem(5, 1, heads, 64)
        library.plans = 0
        assert_right(call(*args, softmax_scale=SCALE, schedule=schedule_for(5, 1, 64, 64)), *args)
        assert library.plans == 0
        assert_right(call(*args, softmax_scale=SCALE), *args)
        assert library.plans == 1


def test_a_generation_with_plans_of_another_layout_makes_its_own_once():
    with installed("flash_mla 2025") as library:
        call, args = bound(16), problem(5, 1, 16, 64)
        library.plans = 0
        for _ in range(3):
            assert_right(call(*args, softmax_scale=SCALE, schedule=schedule_for(5, 1, 64, 64)), *args)
        assert library.plans == 1


def test_a_plan_of_the_real_planner_serves_a_step():
    config = PlannerConfig(
        device="cpu", route="fused", num_heads=16, topk=64, max_num_reqs=4, max_num_tokens=64, max_model_len=256,
        schedule_kind=FLASHMLA_TILES, num_sms=132, arch="sm90", max_scratch_bytes=140 * 64 * 4 * 513,
    )  # fmt: skip
    batch = Batch(
        query_start_loc=np.array([0, 1, 2, 21], dtype=np.int32),
        seq_lens=np.array([30, 40, 60], dtype=np.int32),
        block_table=torch.zeros(3, 4, dtype=torch.int32),
    )
    plan = Planner(config).plan(batch)
    assert plan.decode_schedule.rows_per_call == 8
    with installed("vllm 0.33") as library:
        call, args = bound(16), problem(21, 1, 16, 64)
        library.plans, library.calls = 0, []
        assert_right(call(*args, softmax_scale=SCALE, schedule=plan.decode_schedule), *args)
        assert library.calls == [(8, 1, 64, 64), (8, 1, 64, 64), (5, 1, 64, 64)]
        assert library.plans == 0
        assert library.accumulators <= config.max_scratch_bytes


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (SplitSchedule(5, 16, 64, 1), "takes a TileSchedule"),
        (schedule_for(5, 1, 128, 64), "runs with 64 heads, the plan was made for 128"),
        (replace(schedule_for(5, 1, 64, 64, rows=2), tail=None), "last call has 1 rows"),
    ],
)
def test_a_foreign_schedule_is_refused_before_anything_runs(schedule, message):
    with installed("vllm 0.33") as library:
        call, args = bound(16), problem(5, 1, 16, 64)
        library.calls = []
        with pytest.raises(PlanMismatch, match=message):
            call(*args, softmax_scale=SCALE, schedule=schedule)
        assert library.calls == []


# ------------------------------------------------------------------------------------------------------------ scratch


PARTS = partial(num_sm_parts, "sm90", num_sms=132)


def adapter(library: Library, max_scratch_bytes: int) -> FlashMLADecode:
    from mla_portable_nvidia.flashmla.discovery import find_kernel

    found = find_kernel(SPARSE_DECODE, FACTS["sm90"])
    library.calls, library.accumulators = [], 0
    return FlashMLADecode(
        found.kernel,
        TorchBoundary(),
        lse_base_2=found.traits.lse_base_2,
        takes_plan=found.traits.takes_plan,
        parts=PARTS,
        max_scratch_bytes=max_scratch_bytes,
    )


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_many_rows_without_a_schedule_are_decoded_in_bounded_calls(heads):
    with installed("vllm 0.33") as library:
        limit = 20 * MIB
        args = problem(70, 1, heads, 64)
        lengths = torch.arange(70, dtype=torch.int32).view(70, 1) % 70
        sink = torch.linspace(-1, 1, heads)
        options = {"lengths": lengths, "attn_sink": sink}
        assert_right(adapter(library, limit)(*args, softmax_scale=SCALE, **options), *args, **options)
        assert len(library.calls) > 1 and sum(call[0] for call in library.calls) == 70
        assert library.accumulators <= limit


def test_many_tokens_of_one_row_become_rows_of_one_token():
    """B = 1, S = T would take accumulators of (1 + parts) * T rows and serialise on one part."""
    with installed("vllm 0.33") as library:
        limit = 140 * 64 * 4 * 513
        args = problem(2, 300, 8, 64)
        assert rows_per_call(PARTS, query_len=300, heads=64, max_bytes=limit) < 1
        lengths = torch.arange(600, dtype=torch.int32).view(2, 300) % 70
        results = adapter(library, limit)(*args, softmax_scale=SCALE, lengths=lengths)
        assert_right(results, *args, lengths=lengths)
        assert {call[1] for call in library.calls} == {1}
        assert library.accumulators <= limit


def test_a_mixed_batch_of_32768_tokens_needs_less_than_256_mib():
    rows = rows_per_call(PARTS, query_len=1, heads=64)
    one_call = 4 * (rows + 132) * 64 * 513 + rows * (64 * (576 + 512) * 2 + 4 * 2048)
    assert 0 < one_call < 256 * MIB
    as_one_row = 4 * (1 + 1) * 32_768 * 64 * 512
    assert as_one_row == 8 << 30


# ------------------------------------------------------------------------------------------------- padding and sinks


def test_padding_reuses_one_buffer_whose_other_heads_stay_zero():
    buffers = head_padding.PaddedQueries()
    cpu = torch.device("cpu")
    first = buffers.take(6, 16, 64, cpu)
    first[:, :16] = 3
    again = buffers.take(4, 16, 64, cpu)
    assert again.data_ptr() == first.data_ptr() and not again[:, 16:].any()
    wider = buffers.take(4, 32, 64, cpu)
    assert not wider[:, 32:].any() and wider.data_ptr() != first.data_ptr()
    assert buffers.take(9, 16, 64, cpu).shape == (9, 64, 576)
    assert [head_padding.kernel_heads(n) for n in (1, 63, 64, 65, 128)] == [64, 64, 64, 128, 128]


# ------------------------------------------------------------------------------------------------------ the cache


def test_a_cache_that_the_kernel_cannot_read_is_refused_before_anything_runs():
    with installed("vllm 0.33") as library:
        call, (q, cache, indices) = bound(16), problem(2, 1, 16, 64)
        library.calls = []
        apart = torch.zeros(3, 64 * 656 + 4, dtype=torch.uint8)
        apart[:, : 64 * 656] = cache.view(3, -1)
        shifted = torch.zeros(cache.numel() + 16, dtype=torch.uint8)[4 : 4 + cache.numel()].view_as(cache)
        for bad in (apart[:, : 64 * 656].unflatten(1, (64, 656)), shifted):
            with pytest.raises(InvalidArgument, match=r"a multiple of 16.*FlashMLA's kernel"):
                call(q, bad, indices, softmax_scale=SCALE)
        assert library.calls == []
