# SPDX-License-Identifier: Apache-2.0
"""FlashMLA called again with clean indices promised and no lse asked for: what a call keeps of the one before it."""

from __future__ import annotations

import math

import pytest
import torch
import torch_reference as reference
from flashmla_standins import installed
from test_nvidia_decode import SCALE, schedule_for
from test_nvidia_promised import PROMISE, assert_out, bound, clean_problem, passes, watch
from torch.multiprocessing.reductions import StorageWeakRef

from mla_portable.contracts import InvalidArgument, PlanMismatch
from mla_portable.kit.split_kv import SplitSchedule

__all__ = ["passes"]  # a fixture


@pytest.fixture(params=["vllm 0.33", "flash_mla with out"])
def plain(request):
    """(library, bound call, its arguments with `out` and a schedule); one call was made and kept."""
    with installed(request.param) as library:
        call, args = bound(64, **PROMISE), clean_problem(5, 1, 64, 64)
        out = torch.full((5, 1, 64, 512), math.nan, dtype=torch.bfloat16)
        options = {"softmax_scale": SCALE, "schedule": schedule_for(5, 1, 64, 64), "out": out}
        call(*args, **options)
        library.calls = []
        yield library, call, args, options


def test_a_repeated_call_makes_no_view_and_reads_what_is_there_now(plain, monkeypatch):
    library, call, (q, cache, indices), options = plain
    seen, made = watch(library), []
    other = clean_problem(5, 1, 64, 64)[2].roll(3, dims=1)
    for slots in (indices, other):
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "as_strided", lambda *args: made.append(args))
            got, lse = call(q, cache, slots, **options)
        assert got is options["out"] and lse.numel() == 0 and seen[-1]["indices"] is slots
        want, _ = reference.sparse_decode(q, cache, slots, softmax_scale=SCALE)
        torch.testing.assert_close(got.float(), want.float(), atol=2e-2, rtol=2e-2)
    assert len(seen) == 2 and made == []
    cache.copy_(cache.flip(0))
    assert_out(call(q, cache, indices, **options)[0], q, cache, indices)


def test_a_view_is_made_again_for_another_cache_and_for_other_strides(plain):
    library, call, (q, cache, indices), options = plain
    second = cache.flip(0).contiguous()
    for tensor in (second, cache, second):
        assert_out(call(q, tensor, indices, **options)[0], q, tensor, indices)
    second.set_(cache.untyped_storage(), 0, cache.shape, cache.stride())  # the same tensor with another memory
    assert_out(call(q, second, indices, **options)[0], q, cache, indices)
    seen = watch(library)
    second.resize_(2, 64, 656)
    call(q, second, indices.masked_fill(indices >= 2 * 64, -1), **options)
    assert seen[-1]["kv"].shape == (2, 64, 1, 656)
    wide = torch.zeros(6, 64, 656, dtype=torch.uint8)
    wide[::2] = cache
    for tensor in (wide[:3], wide[::2], wide[:3]):  # of one address and one shape
        assert_out(call(q, tensor, indices, **options)[0], q, tensor, indices)
    second.set_(wide.untyped_storage(), 0, (3, 64, 656), wide.stride())
    assert_out(call(q, second, indices, **options)[0], q, wide[:3], indices)
    second.as_strided_((3, 64, 656), (2 * 64 * 656, 656, 1))  # only the strides change
    assert_out(call(q, second, indices, **options)[0], q, cache, indices)
    library.calls = []
    shifted = torch.zeros(cache.numel() + 16, dtype=torch.uint8)[4 : 4 + cache.numel()].view_as(cache)
    with pytest.raises(InvalidArgument, match=r"a multiple of 16.*FlashMLA's kernel"):
        call(q, shifted, indices, **options)
    second.set_(shifted.untyped_storage(), 4, cache.shape, cache.stride())
    with pytest.raises(InvalidArgument, match=r"a multiple of 16.*FlashMLA's kernel"):
        call(q, second, indices, **options)
    second.resize_(0, 64, 656)
    assert not call(q, second, indices, **options)[0].any()
    assert library.calls == []


def test_a_bound_call_does_not_keep_a_cache(plain):
    _, call, (q, cache, indices), options = plain
    passing = cache.clone()
    memory = StorageWeakRef(passing.untyped_storage())
    call(q, passing, indices, **options)
    assert not memory.expired()
    del passing
    assert memory.expired()
    assert_out(call(q, cache, indices, **options)[0], q, cache, indices)


def test_a_known_schedule_is_checked_against_other_rows(plain):
    """Fewer rows than it was made for, other heads, an unknown one of another kind: each as in a first call."""
    library, call, (q, cache, indices), options = plain
    few = {**options, "out": options["out"][:0]}
    assert call(q[:0], cache, indices[:0], **few)[0].shape == (0, 1, 64, 512) and library.calls == []
    with pytest.raises(PlanMismatch, match="runs with 128 heads, the plan was made for 64"):
        call(q.repeat(1, 1, 2, 1), cache, indices, **options)
    with pytest.raises(PlanMismatch, match="takes a TileSchedule"):
        call(q, cache, indices, **{**options, "schedule": SplitSchedule(5, 64, 64, 1)})
    assert library.calls == []
    library.plans = 0
    assert_out(call(q, cache, indices, softmax_scale=SCALE, out=options["out"])[0], q, cache, indices)
    assert library.plans == 1  # without a schedule the provider makes its own
    assert_out(call(q, cache, indices, **options)[0], q, cache, indices)
    assert library.plans == 1


def test_tensors_that_lie_otherwise_than_the_last_ones_are_copied_as_ever(plain):
    library, call, (q, cache, indices), options = plain
    memory = torch.zeros(q.numel() + 8, dtype=torch.bfloat16)
    apart = torch.zeros(5, 1, 64, 580, dtype=torch.bfloat16)
    slots = torch.full((5, 1, 72), 1 << 30, dtype=torch.int32)
    wide = torch.full((5, 1, 64, 520), math.nan, dtype=torch.bfloat16)
    odd = memory[1 : 1 + q.numel()].view_as(q).copy_(q)
    apart[..., :576], slots[..., :64] = q, indices
    for query in (odd, odd, apart[..., :576], apart[..., :576]):
        assert_out(call(query, cache, indices, **options)[0], q, cache, indices)
    assert_out(call(q, cache, slots[..., :64], **options)[0], q, cache, indices)
    assert_out(call(q, cache, indices, **{**options, "out": wide[..., :512]})[0], q, cache, indices)
    assert wide[..., 512:].isnan().all()
    assert call(q, cache, indices, **{**options, "out": None})[0].shape == (5, 1, 64, 512)
    assert len(library.calls) == 7


@pytest.mark.parametrize(
    ("heads", "features", "expected"),
    [
        (16, {}, []),
        (64, {"clean_indices": False}, ["sanitise"]),
        (64, {"lse": True}, ["finish"]),
        (64, {"attn_sink": True}, ["finish"]),
    ],
)
@pytest.mark.parametrize("generation", ["vllm 0.33", "flash_mla 2025"])
def test_what_a_call_needs_beside_the_kernel_it_needs_every_time(generation, heads, features, expected, passes):
    sink = torch.linspace(2, 6, heads) if "attn_sink" in features else None
    with installed(generation, sunk_out=math.nan):
        call, args = bound(heads, **(PROMISE | features)), clean_problem(5, 1, heads, 64)
        memory = torch.empty(5, 1, heads, 512, dtype=torch.bfloat16), torch.empty(5, 1, heads)
        options = {"softmax_scale": SCALE, "schedule": schedule_for(5, 1, 64, 64), "attn_sink": sink}
        for _ in range(3):
            passes.clear()
            memory[0].fill_(math.nan)
            assert_out(call(*args, **options, out=memory[0], lse_out=memory[1])[0], *args, attn_sink=sink)
            assert passes == expected


def test_a_sink_goes_to_the_kernel_in_a_repeated_call():
    sink = torch.randn(64, generator=torch.Generator().manual_seed(1)) + 4
    with installed("vllm 0.33") as library:
        call, args = bound(64, attn_sink=True, **PROMISE), clean_problem(5, 1, 64, 64)
        out = torch.empty(5, 1, 64, 512, dtype=torch.bfloat16)
        for other in (sink, sink.flip(0)):
            library.sinks = 0
            assert_out(call(*args, softmax_scale=SCALE, attn_sink=other, out=out)[0], *args, attn_sink=other)
            assert library.sinks == 1
