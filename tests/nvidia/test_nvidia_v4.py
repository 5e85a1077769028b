# SPDX-License-Identifier: Apache-2.0
"""FlashMLA on `fp8_v4`: two caches, sinks, lengths of each token, schedules of both lists; who is chosen in front of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flashmla_standins import GENERATIONS, installed
from machines import H200
from simulated_gpu import FACTS, conforms, registry

from mla_portable.choose import Registry
from mla_portable.contracts import InvalidArgument, PlanMismatch, Request, ScheduleLimits
from mla_portable.judge.problems.sparse_decode import sparse_decode as oracle
from mla_portable.layouts import FP8_V4
from mla_portable.primitives import SPARSE_DECODE
from mla_portable_common.flash_mla.tile_schedules import FLASHMLA_TILES, TileSchedule, num_sm_parts
from mla_portable_nvidia.flashmla import discovery
from mla_portable_nvidia.flashmla.attention import attention_implementations
from mla_portable_nvidia.native.attention_sm90 import native_implementations

NAME = "nvidia.flashmla_v4"
SCALE = 512**-0.5


def implementations():
    return [each for each in attention_implementations(device_types=("cpu",), environ={}) if each.name == NAME]


def v4_cache(g: torch.Generator, blocks: int, page: int, *, gap: int = 0) -> torch.Tensor:
    """[blocks, page, 584], blocks a multiple of 16 bytes apart and `gap` more."""
    stride = -(-page * 584 // 16) * 16 + gap
    memory = torch.zeros(blocks, stride, dtype=torch.uint8)
    cache = memory.as_strided((blocks, page, 584), (stride, 584, 1))
    rows = FP8_V4.pack(torch.randn(blocks * page, 512, generator=g))
    inside, behind = FP8_V4.parts(cache)
    inside.copy_(rows[:, :576].view(blocks, page, 576))
    behind.copy_(rows[:, 576:].view(blocks, page, 8))
    return cache


def problem(batch: int, query_len: int, heads: int, *, topk: int = 128, extra_topk: int | None = 64, page: int = 16):
    """Arguments and keywords of a call; indices of both lists are off the caches now and then."""
    g = torch.Generator().manual_seed(batch * 1000 + heads)
    q = torch.randn(batch, query_len, heads, 512, generator=g).bfloat16()
    cache = v4_cache(g, 4, page)
    indices = torch.randint(-20, 4 * page + 20, (batch, query_len, topk), generator=g, dtype=torch.int32)
    more: dict[str, torch.Tensor] = {}
    if extra_topk is not None:
        more["extra_kv_cache"] = v4_cache(g, 40, 2, gap=576)
        more["extra_indices"] = torch.randint(-9, 89, (batch, query_len, extra_topk), generator=g, dtype=torch.int32)
    return (q, cache, indices), more


def bound(heads: int, *, topk: int = 128, extra_topk: int | None = 64, page: int = 16, query_len: int = 1, **features):
    second = {} if extra_topk is None else {"extra_topk": extra_topk, "extra_block_size": 2}
    request = Request(
        SPARSE_DECODE, FACTS["sm90"], kv_layout="fp8_v4", num_heads=heads, topk=topk, block_size=page, query_len=query_len,
        **second, **({"lse": True} | features),
    )  # fmt: skip
    return registry(probe=False, offered=implementations()).bind(request, backend="nvidia")


def assert_right(results, args, **options):
    want_out, want_lse = oracle(*args, softmax_scale=SCALE, **options)
    torch.testing.assert_close(results[0].double(), want_out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(results[1].double(), want_lse, atol=1e-3, rtol=1e-3)


# -------------------------------------------------------------------------------------------------------- conformance


@pytest.mark.parametrize("generation", [each for each in GENERATIONS if each != "flash_mla 2025"])
def test_every_generation_with_a_second_cache_conforms(generation):
    with installed(generation) as library:
        conforms(registry(offered=implementations()), NAME, "smoke", SPARSE_DECODE)
        assert library.extra_calls
        found = discovery.find_kernel(SPARSE_DECODE, FACTS["sm90"], layout=FP8_V4)
        assert found.provider == GENERATIONS[generation][0] and found.traits.takes_plan


def test_the_quick_level_passes():
    with installed("vllm 0.33") as library:
        words = conforms(registry(offered=implementations()), NAME, "quick", SPARSE_DECODE)
        assert library.extra_calls
    assert {"scheduled", "lengths", "corpus", "strided", "b53", "extra_b53", "extra_b2", "h127", "extra_lengths"} <= words


def test_a_provider_without_a_second_cache_is_passed_over_with_the_reason():
    with installed("flash_mla 2025"):
        machine = registry(offered=implementations())
        decision = machine.decide(Request(SPARSE_DECODE, FACTS["sm90"], kv_layout="fp8_v4", num_heads=64), thorough=True)
        (verdict,) = [each for each in decision.verdicts if each.implementation == NAME]
        assert "provider flash_mla" in str(verdict.reasons[0]) and "no argument for the second cache" in str(verdict.reasons[0])
        assert discovery.find_kernel(SPARSE_DECODE, FACTS["sm90"]).provider == "flash_mla"  # of V3.2's rows


# ------------------------------------------------------------------------------------------------------- both lists


@pytest.mark.parametrize("heads", [8, 64, 100, 128])
@pytest.mark.parametrize("query_len", [1, 2])
def test_lengths_of_each_token_and_list_and_sinks_count(heads, query_len):
    with installed("vllm 0.26") as library:
        args, more = problem(3, query_len, heads)
        limits = torch.arange(3 * query_len, dtype=torch.int32).view(3, query_len)
        options = more | {
            "lengths": limits * 40 - 7, "extra_lengths": 70 - limits * 20, "attn_sink": torch.linspace(-1, 1, heads)
        }  # fmt: skip
        call = bound(heads, query_len=query_len, lengths=True, extra_lengths=True, attn_sink=True)
        assert_right(call(*args, softmax_scale=SCALE, **options), args, **options)
        assert library.calls[-1] == (3, query_len, 64 if heads <= 64 else 128, 128) and library.extra_calls


def test_widths_that_are_no_multiple_of_64_are_padded_each_by_itself():
    with installed("vllm 0.33"):
        args, more = problem(3, 1, 16, topk=100, extra_topk=70)
        assert_right(bound(16, topk=100, extra_topk=70)(*args, softmax_scale=SCALE, **more), args, **more)


@pytest.mark.parametrize("empty", ["kv_cache", "extra_kv_cache", "both"])
def test_a_cache_without_blocks_holds_nothing(empty):
    with installed("vllm 0.33"):
        (q, cache, indices), more = problem(3, 1, 64)
        if empty != "extra_kv_cache":
            cache = cache[:0]
        if empty != "kv_cache":
            more["extra_kv_cache"] = more["extra_kv_cache"][:0]
        call = bound(64)
        schedule = planned(3, 64)
        for options in ({}, {"schedule": schedule}):
            assert_right(call(q, cache, indices, softmax_scale=SCALE, **more, **options), (q, cache, indices), **more)


def planned(batch: int, heads: int, *, topk: int = 128, extra_topk: int = 64, rows: int | None = None) -> TileSchedule:
    parts = num_sm_parts("sm90", num_sms=132, query_len=1, num_heads=64 if heads <= 64 else 128)
    scratch = {} if rows is None else {"max_scratch_bytes": (rows + parts) * 64 * 4 * 513}
    limits = ScheduleLimits(
        torch.device("cpu"), heads, topk, 64, num_sms=132, arch="sm90", extra_topk=extra_topk, **scratch
    )  # fmt: skip
    return FLASHMLA_TILES.planner(limits).get(batch, 1)


@pytest.mark.parametrize("generation", ["vllm 0.24", "vllm 0.33", "flash_mla with out"])
@pytest.mark.parametrize(("topk", "extra_topk"), [(128, 512), (100, 70)])
def test_a_schedule_of_both_lists_is_the_library_s_own(generation, topk, extra_topk):
    with installed(generation) as library:
        args, more = problem(5, 1, 64, topk=topk, extra_topk=extra_topk)
        call, schedule = bound(64, topk=topk, extra_topk=extra_topk), planned(5, 64, topk=topk, extra_topk=extra_topk)
        library.plans = 0
        assert_right(call(*args, softmax_scale=SCALE, schedule=schedule, **more), args, **more)
        assert library.plans == 0


def test_rows_in_several_calls_share_a_schedule():
    with installed("vllm 0.33") as library:
        args, more = problem(21, 1, 16)
        schedule = planned(21, 16, rows=8)
        assert schedule.rows_per_call == 8
        call = bound(16)
        library.plans, library.calls = 0, []
        assert_right(call(*args, softmax_scale=SCALE, schedule=schedule, **more), args, **more)
        assert library.calls == [(8, 1, 64, 128), (8, 1, 64, 128), (5, 1, 64, 128)] and library.plans == 0


def test_a_schedule_of_one_list_is_refused_for_two():
    with installed("vllm 0.33") as library:
        args, more = problem(5, 1, 64)
        call = bound(64)
        library.calls = []
        with pytest.raises(PlanMismatch, match="extra_topk 64, its schedule was made for 0"):
            call(*args, softmax_scale=SCALE, schedule=planned(5, 64, extra_topk=0), **more)
        assert library.calls == []


@pytest.mark.parametrize("generation", ["vllm 0.24", "vllm 0.33"])
def test_with_promises_nothing_but_the_library_runs(generation):
    with installed(generation) as library:
        (q, cache, indices), more = problem(4, 1, 64)
        indices = indices.masked_fill(indices >= 64, -1).clamp(min=-1)
        more["extra_indices"] = more["extra_indices"].masked_fill(more["extra_indices"] >= 80, -1).clamp(min=-1)
        indices[1], more["extra_indices"][1] = -1, -1
        call, schedule, out = bound(64, clean_indices=True, lse=False), planned(4, 64), torch.empty(4, 1, 64, 512).bfloat16()
        want, _ = oracle(q, cache, indices, softmax_scale=SCALE, **more)
        library.plans = 0
        for _ in range(2):  # prepared by the first
            out.fill_(torch.nan)
            got, lse = call(q, cache, indices, softmax_scale=SCALE, schedule=schedule, out=out, **more)
            assert got is out and lse.numel() == 0 and library.plans == 0
            torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-2)
        other = more | {"extra_indices": more["extra_indices"].flip(0)}
        call(q, cache, indices, softmax_scale=SCALE, schedule=schedule, out=out, **other)
        want, _ = oracle(q, cache, indices, softmax_scale=SCALE, **other)
        torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-2)


def test_what_the_library_leaves_in_empty_rows_of_either_list_is_found_and_corrected():
    with installed("vllm 0.33", empty_out={128: torch.nan}):
        assert discovery.find_kernel(SPARSE_DECODE, FACTS["sm90"], layout=FP8_V4).traits.zeroes_empty == (64,)
        (q, cache, indices), more = problem(3, 1, 128)
        indices, more["extra_indices"] = torch.full_like(indices, -1), torch.full_like(more["extra_indices"], -1)
        got, _ = bound(128, clean_indices=True, lse=False)(q, cache, indices, softmax_scale=SCALE, **more)
        assert torch.equal(got, torch.zeros_like(got))


# --------------------------------------------------------------------------------------------------- what is chosen


def test_blocks_at_odd_multiples_of_8_bytes_are_refused_before_anything_runs():
    with installed("vllm 0.33") as library:
        call, ((q, _, indices), more) = bound(64), problem(3, 1, 64)
        library.calls = []
        packed = torch.zeros(4, 69, 584, dtype=torch.uint8)
        with pytest.raises(InvalidArgument, match="block stride 40296 bytes"):
            call(q, packed, indices, softmax_scale=SCALE, **more)
        with pytest.raises(InvalidArgument, match="block stride 40296 bytes"):
            call(q, v4_cache(torch.Generator(), 4, 16), indices, softmax_scale=SCALE, **more | {"extra_kv_cache": packed})
        assert library.calls == []


@pytest.mark.parametrize("heads", [8, 16, 32, 33, 64, 128])
def test_the_native_kernels_come_first_with_any_number_of_heads(heads):
    """Declared costs, on a device without times on record."""
    offered = [*(each for each in attention_implementations(environ={})), *native_implementations()]

    class Plugin:
        from mla_portable.contracts import hookimpl

        @hookimpl
        def mla_portable_register(self, registrar):
            for each in offered:
                registrar.add(replace(each, check=lambda facts: ()))

    facts = replace(H200, name="another H200")
    machine = Registry(plugins=[("nvidia", Plugin())], facts={"cuda": facts}, environ={})
    request = Request(SPARSE_DECODE, facts, kv_layout="fp8_v4", num_heads=heads, topk=128, extra_topk=512, extra_block_size=64)
    able = [each for each in machine.decide(request).verdicts if not each.reasons]
    few = ["nvidia.native"] if heads <= 32 else []
    assert [each.implementation for each in able] == [*few, "nvidia.native_wide", NAME]
