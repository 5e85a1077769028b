# SPDX-License-Identifier: Apache-2.0
"""A second cache with a list of its own: what the reference makes of it, what schedules cut, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import mla_portable
from mla_portable.contracts import (
    ContextShare,
    InvalidArgument,
    PlanMismatch,
    Request,
    ScheduleLimits,
    Support,
)
from mla_portable.judge.problems.draw import cached_rows, paged_cache
from mla_portable.kit.split_kv import SplitSchedule, SplitSchedules, split_kv
from mla_portable.layouts import FP8_DS_MLA, FP8_NOPE, FP8_V4, CacheLayout
from mla_portable.planner import PlannerConfig
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.primitives.sparse_decode import reference
from mla_portable.primitives.sparse_prefill import reference as prefill_reference

B, S, H = 3, 2, 5
SCALE = 0.07
CPU = torch.device("cpu")


def cache_of(layout: CacheLayout, blocks: int, block_size: int, g: torch.Generator, *, strided: bool = False) -> Tensor:
    """NaN in slot 0 and in the last one."""
    cache = paged_cache(layout, blocks, block_size, strided=strided)
    slots = torch.arange(1, blocks * block_size - 1)
    cache.put(slots, cached_rows(len(slots), layout, "pow2", g))
    return cache.view


def drawn(layout: CacheLayout, width: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(5)
    first, second = cache_of(layout, 3, 16, g, strided=True), cache_of(layout, 9, 2, g)
    return {
        "q": torch.randn(B, S, H, width, generator=g).bfloat16(),
        "kv_cache": first,
        "indices": torch.randint(1, 47, (B, S, 12), generator=g, dtype=torch.int32),
        "lengths": torch.tensor([[12, 0], [5, 0], [-1, 7]], dtype=torch.int32),
        "attn_sink": torch.randn(H, generator=g),
        "extra_kv_cache": second,
        "extra_indices": torch.randint(1, 17, (B, S, 7), generator=g, dtype=torch.int32),
        "extra_lengths": torch.tensor([[7, 3], [0, 0], [9, 0]], dtype=torch.int32),
    }


def merged(arguments: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The union as two calls, merged; the sink is applied at last."""
    own, sink = dict(arguments), arguments["attn_sink"].double()
    own.pop("attn_sink")
    extra = {name.removeprefix("extra_"): own.pop(name) for name in list(own) if name.startswith("extra_")}
    parts = [reference(**own, softmax_scale=SCALE), reference(own["q"], **extra, softmax_scale=SCALE)]
    lses = torch.stack([lse for _, lse in parts]).double()
    lse = torch.logsumexp(lses, dim=0)
    weights = (lses - lse).exp().nan_to_num(0.0)
    out = (weights.unsqueeze(-1) * torch.stack([out for out, _ in parts]).double()).sum(dim=0)
    return out * torch.sigmoid(lse - sink).unsqueeze(-1), lse


@pytest.mark.parametrize(("layout", "width"), [(FP8_V4, 512), (FP8_NOPE, 512), (FP8_DS_MLA, 576), (FP8_DS_MLA, 512)])
def test_the_reference_attends_to_the_union(layout: CacheLayout, width: int):
    arguments = drawn(layout, width)
    out, lse = mla_portable.sparse_decode(**arguments, softmax_scale=SCALE, backend="reference")
    want, want_lse = merged(arguments)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    assert lse[1, 1, 0] == -math.inf and not out[1, 1].any()
    flat = {
        name: each.flatten(0, 1) for name, each in arguments.items() if name not in ("kv_cache", "extra_kv_cache", "attn_sink")
    }
    caches = {"kv": arguments["kv_cache"], "extra_kv_cache": arguments["extra_kv_cache"], "attn_sink": arguments["attn_sink"]}
    same, same_lse = mla_portable.sparse_prefill(**flat, **caches, softmax_scale=SCALE, backend="reference")
    assert torch.equal(same, out.flatten(0, 1)) and torch.equal(same_lse, lse.flatten(0, 1))
    assert torch.equal(prefill_reference(**flat, **caches, softmax_scale=SCALE)[0], same)


def test_queries_without_a_rotary_part_leave_that_of_the_rows_out():
    arguments = drawn(FP8_DS_MLA, 512)
    plain = {name: arguments[name] for name in ("kv_cache", "indices", "lengths")}
    out, lse = mla_portable.sparse_decode(arguments["q"], **plain, softmax_scale=SCALE, backend="reference")
    padded = torch.nn.functional.pad(arguments["q"], (0, 64))
    want, want_lse = mla_portable.sparse_decode(padded, **plain, softmax_scale=SCALE, backend="reference")
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_what_declares_no_second_cache_is_refused_with_words():
    device = mla_portable.get_registry().facts("cpu")
    support = Support(source="a test", device_types=None, kv_layouts=(FP8_V4.name,), topk_multiple=64, block_sizes=(64,))
    request = Request(SPARSE_DECODE, device, kv_layout=FP8_V4.name, topk=64, block_size=64, scale_format="pow2")
    assert not support.reasons(request)
    second = request.but(extra_topk=100, extra_block_size=2)
    found = {reason.subject: reason for reason in support.reasons(second)}
    assert found.keys() == {"extra_topk", "extra_block_size", "extra_cache"}
    assert "merge_states" in found["extra_cache"].remedy
    assert [reason.subject for reason in support.reasons(request.but(nope=True))] == ["nope"]
    for name in ("extra_topk", "extra_block_size", "extra_lengths", "nope"):
        assert name in SPARSE_DECODE.facts and name in SPARSE_PREFILL.facts


def test_ranks_share_no_second_cache():
    device = mla_portable.get_registry().facts("cpu")
    with pytest.raises(InvalidArgument, match=r"extra_topk: got 64.*context_parallel.*whole on one rank"):
        Request(SPARSE_DECODE, device, extra_topk=64, context_parallel=True)
    limits = {"num_heads": 8, "topk": 128, "max_num_reqs": 2, "max_num_tokens": 4, "max_model_len": 64}
    with pytest.raises(InvalidArgument, match=r"extra_topk: got 512.*whole on one rank"):
        PlannerConfig("cpu", "direct", **limits, extra_topk=512, share=ContextShare(2, 0))
    assert PlannerConfig("cpu", "direct", **limits, extra_topk=512).extra_topk == 512


def test_splits_cut_the_tiles_of_both_lists():
    sizes = {"num_rows": 1, "num_heads": 16, "num_sms": 132}
    assert split_kv(**sizes, topk=128, extra_topk=512) == 10  # of 64 indices each, 264 programs have room
    assert split_kv(**sizes, topk=65, extra_topk=65) == 4  # no tile has indices of both lists
    assert split_kv(**sizes, topk=128) == 2
    limits = ScheduleLimits(CPU, 16, 128, 4, num_sms=132, extra_topk=512)
    schedule = SplitSchedules(limits).get(1)
    assert (schedule.num_splits, schedule.extra_topk) == (10, 512)
    invariant = SplitSchedules(ScheduleLimits(CPU, 16, 128, 4, num_sms=132, extra_topk=512, batch_invariant=True))
    assert {invariant.get(rows).num_splits for rows in (1, 2, 4)} == {3}  # of 256


def test_a_schedule_for_one_list_is_refused():
    arguments = drawn(FP8_V4, 512)
    for made_for, words in ((0, "the call has extra_topk 7, its schedule was made for 0"), (8, "made for 8")):
        with pytest.raises(PlanMismatch, match=words):
            mla_portable.sparse_decode(
                **arguments, softmax_scale=SCALE, schedule=SplitSchedule(B * S, H, 12, 1, extra_topk=made_for)
            )
    with pytest.raises(PlanMismatch, match="the call has extra_topk 0, its schedule was made for 7"):
        mla_portable.sparse_decode(
            *(arguments[name] for name in ("q", "kv_cache", "indices")),
            softmax_scale=SCALE,
            schedule=SplitSchedule(B * S, H, 12, 1, extra_topk=7),
        )
