# SPDX-License-Identifier: Apache-2.0
"""SlotAttention: right for slots of a cache and of a workspace, and what it calls, with which schedules."""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
import torch
from attention_steps import BLOCK, BLOCKS, HEADS, REFERENCE, SPEC, TOPK
from machines import H200
from recorder import Recorder, registry_of
from torch import Tensor

from mla_portable import cache_write, sparse_prefill
from mla_portable.attention import SlotAttention, SparseMLAAttention, UnsupportedRoute
from mla_portable.contracts import SPLIT_KV, InvalidArgument
from mla_portable.contracts.share import ContextShare
from mla_portable.layouts import LAYOUTS
from mla_portable.primitives import CONVERT_INDICES, SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.registry import Registry

PORTABLE = Registry(environ={}, probe=False)
SLOTS = replace(SPEC, need_lse=False, concat_query=False, max_num_reqs=8)


def make_call(layout: str, num_tokens: int = 5, rows: int = BLOCK * BLOCKS, seed: int = 3):
    """q, rows of the cache, slots with absent entries at the end of each row, lengths; other bytes are 0xFF."""
    g, row = torch.Generator().manual_seed(seed), LAYOUTS[layout]
    kv = torch.full((rows, row.row_bytes), 0xFF, dtype=torch.uint8).view(row.dtype)
    written = torch.randperm(rows, generator=g)[: rows // 2]
    latent, rope = torch.randn(len(written), row.key_width, generator=g).split([row.value_width, row.rope_width], dim=1)
    kv[written] = row.pack(latent, rope)
    lengths = torch.randint(0, TOPK + 1, (num_tokens,), generator=g, dtype=torch.int32)
    slots = torch.full((num_tokens, TOPK), -1, dtype=torch.int32)
    for token, length in enumerate(lengths.tolist()):
        slots[token, :length] = written[torch.randperm(len(written), generator=g)[:length]].to(torch.int32)
    q = torch.randn(num_tokens, HEADS, row.key_width, generator=g).bfloat16()
    return q, kv, slots, lengths


def paged(layout: str, kv: torch.Tensor) -> torch.Tensor:
    return kv.view(-1, BLOCK, LAYOUTS[layout].row_width) if LAYOUTS[layout].is_quantized else kv


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("with_lengths", [False, True], ids=["", "lengths"])
@pytest.mark.parametrize("decodes", [True, False], ids=["decode", "prefill"])
@pytest.mark.parametrize("layout", ["fp8_ds_mla", "bf16"])
def test_rows_are_right(layout: str, decodes: bool, with_lengths: bool, with_sink: bool, backend: str):
    spec = replace(SLOTS, kv_layout=layout, scale_format=None, attn_sink=with_sink)
    registry = REFERENCE if backend == "reference" else PORTABLE
    attention = SlotAttention(spec, device="cpu", registry=registry, backend=backend)
    q, kv, slots, lengths = make_call(layout)
    sink = torch.linspace(-2, 2, HEADS) if with_sink else None
    out = attention.forward(
        q,
        paged(layout, kv),
        slots,
        softmax_scale=0.06,
        decodes=decodes,
        lengths=lengths if with_lengths else None,
        attn_sink=sink,
    )
    wanted, _ = oracle.sparse_prefill(q, paged(layout, kv), slots.long(), softmax_scale=0.06, attn_sink=sink)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=8e-3)


def test_a_workspace_of_any_number_of_rows_is_read_as_rows():
    attention = SlotAttention(
        replace(SLOTS, kv_layout="bf16", scale_format=None), device="cpu", registry=REFERENCE, backend="reference"
    )
    q, kv, slots, _ = make_call("bf16", rows=BLOCK * 3 + 5)
    out = attention.forward(q, kv, slots, softmax_scale=0.06, decodes=True)
    wanted, _ = oracle.sparse_prefill(q, kv, slots.long(), softmax_scale=0.06)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=8e-3)


def recorded(*plugins: Recorder, **changes) -> SlotAttention:
    """Built for what claims to be an H200."""
    return SlotAttention(replace(SLOTS, **changes), device="cpu", registry=registry_of(*plugins, facts={"cpu": H200}))


def call(attention: SlotAttention, num_tokens: int, *, decodes: bool, with_lengths: bool = False) -> None:
    q, kv, slots, lengths = make_call("fp8_ds_mla", num_tokens)
    given = lengths if with_lengths else None
    attention.forward(q, paged("fp8_ds_mla", kv), slots, softmax_scale=0.06, decodes=decodes, lengths=given)


def test_decode_rows_share_a_schedule_of_their_number_and_prefill_rows_take_none():
    plugin = Recorder(schedule_kind=SPLIT_KV)
    attention = recorded(plugin)
    attention.prepare(3)
    for num_tokens, decodes in ((3, True), (3, True), (3, False), (9, True)):
        call(attention, num_tokens, decodes=decodes)
    names = [name for name, _, _ in plugin.calls]
    assert names == ["sparse_decode", "sparse_decode", "sparse_prefill", "sparse_prefill"]  # 9 are more than the spec allows
    first, second = (kwargs["schedule"] for _, _, kwargs in plugin.calls[:2])
    assert first is second and (first.num_rows, first.num_heads, first.topk) == (3, HEADS, TOPK)


def test_an_unknown_number_of_rows_is_not_planned_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch):
    plugin = Recorder(schedule_kind=SPLIT_KV)
    attention = recorded(plugin)
    attention.prepare(2)
    monkeypatch.setattr(attention._accelerator, "is_capturing", lambda: True)
    call(attention, 2, decodes=True)
    call(attention, 4, decodes=True)
    prepared, unknown = (kwargs["schedule"] for _, _, kwargs in plugin.calls)
    assert prepared.num_rows == 2 and unknown is None


@pytest.mark.parametrize("kind", [None, SPLIT_KV], ids=["plain", "scheduled"])
@pytest.mark.parametrize("decodes", [True, False], ids=["decode", "prefill"])
def test_lists_without_slots_are_refused(decodes: bool, kind: object):
    attention = recorded(Recorder(schedule_kind=kind))
    q, kv, slots, _ = make_call("fp8_ds_mla")
    with pytest.raises(InvalidArgument, match="K of at least 1"):
        attention.forward(q, paged("fp8_ds_mla", kv), slots[:, :0], softmax_scale=1.0, decodes=decodes)


def test_lengths_reach_only_what_is_faster_for_them():
    reads_all, skips = Recorder(support={"lengths": False}), Recorder(support={"lengths": True})
    for plugin, given in ((reads_all, False), (skips, True)):
        attention = recorded(plugin)
        for decodes in (True, False):
            call(attention, 3, decodes=decodes, with_lengths=True)
            call(attention, 3, decodes=decodes)
        assert [kwargs["lengths"] is not None for _, _, kwargs in plugin.calls] == [given, False, given, False]


def test_slots_are_not_promised_to_be_clean():
    plugin = Recorder()
    recorded(plugin)
    assert plugin.bound and not any(request.clean_indices or request.clean_lengths for request in plugin.bound)


def test_without_a_prefill_that_reads_the_cache_decode_serves_all_rows():
    plugin = Recorder(primitives=(SPARSE_DECODE,))
    movers = Recorder("movers.kernels", primitives=(CONVERT_INDICES,))
    attention = recorded(plugin, movers)
    call(attention, 20, decodes=False)
    assert attention.route_decision.chosen == "fused"
    assert [name for name, _, _ in plugin.calls] == ["sparse_decode"]


def test_without_a_decode_prefill_serves_all_rows():
    plugin = Recorder(primitives=(SPARSE_PREFILL, CONVERT_INDICES))
    attention = recorded(plugin)
    call(attention, 3, decodes=True)
    assert [name for name, _, _ in plugin.calls] == ["sparse_prefill"]


def test_an_empty_batch_launches_nothing():
    plugin = Recorder()
    attention = recorded(plugin)
    for decodes in (True, False):
        call(attention, 0, decodes=decodes)
    assert plugin.calls == []


def test_refusals_say_what_is_wrong():
    with pytest.raises(InvalidArgument, match=r"spec\.need_lse: got True, expected False"):
        recorded(Recorder(), need_lse=True)
    with pytest.raises(InvalidArgument, match=r"spec\.decode_query_len: got 2, expected 1"):
        recorded(Recorder(), decode_query_len=2)
    with pytest.raises(InvalidArgument, match=r"spec\.need_lse|whole of each sequence"):
        recorded(Recorder(), need_lse=True, share=ContextShare(2, 0, 1))
    with pytest.raises(UnsupportedRoute, match="no such"):
        recorded(Recorder(support={"device_types": ("no such",)}))
    attention = recorded(Recorder())
    q, kv, slots, lengths = make_call("fp8_ds_mla")
    cache = paged("fp8_ds_mla", kv)
    with pytest.raises(InvalidArgument, match="attn_sink: got a tensor, expected None"):
        attention.forward(q, cache, slots, softmax_scale=1.0, decodes=True, attn_sink=torch.zeros(HEADS))
    for decodes in (True, False):
        with pytest.raises(InvalidArgument, match=r"torch\.float16"):
            attention.forward(q.half(), cache, slots, softmax_scale=1.0, decodes=decodes)
        with pytest.raises(InvalidArgument, match="lengths"):
            attention.forward(q, cache, slots, softmax_scale=1.0, decodes=decodes, lengths=lengths[:2])


TWO = replace(SLOTS, kv_layout="fp8_v4", extra_topk=TOPK + 4, extra_block_size=2, attn_sink=True)


def two_caches(num_tokens: int, seed: int = 4) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """q, two caches of fp8_v4 with blocks of another size, a list of each, and how many entries of each list there are."""
    g, row = torch.Generator().manual_seed(seed), LAYOUTS["fp8_v4"]
    caches, lists, lengths = [], [], []
    for block, width in ((BLOCK, TOPK), (2, TOPK + 4)):
        cache = torch.full((BLOCKS, block, row.row_width), 0xFF, dtype=torch.uint8)
        latent = torch.randn(BLOCKS * block, row.value_width, generator=g).bfloat16()
        every = torch.arange(BLOCKS * block)
        cache_write(latent, latent[:, :0], cache, every, scale_format="pow2", backend="reference")
        count = torch.randint(0, width + 1, (num_tokens,), generator=g, dtype=torch.int32)
        slots = torch.stack([torch.randperm(len(every), generator=g)[:width] for _ in range(num_tokens)]).to(torch.int32)
        slots[torch.arange(width) >= count.unsqueeze(1)] = -1
        caches.append(cache)
        lists.append(slots)
        lengths.append(count)
    return torch.randn(num_tokens, HEADS, row.key_width, generator=g).bfloat16(), caches, lists, lengths


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("with_lengths", [False, True], ids=["", "lengths"])
@pytest.mark.parametrize("decodes", [True, False], ids=["decode", "prefill"])
def test_rows_attend_to_both_caches(decodes: bool, with_lengths: bool, backend: str):
    attention = SlotAttention(TWO, device="cpu", registry=REFERENCE if backend == "reference" else PORTABLE, backend=backend)
    q, caches, lists, lengths = two_caches(5)
    sink, out = torch.linspace(-2, 2, HEADS), torch.full_like(q, torch.nan)
    given = lengths if with_lengths else [None, None]
    got = attention.forward(
        q,
        caches[0],
        lists[0],
        softmax_scale=0.06,
        decodes=decodes,
        lengths=given[0],
        attn_sink=sink,
        extra_kv_cache=caches[1],
        extra_slots=lists[1],
        extra_lengths=given[1],
        out=out,
    )
    second = {"extra_kv_cache": caches[1], "extra_indices": lists[1], "backend": "reference"}
    wanted, _ = sparse_prefill(q, caches[0], lists[0], softmax_scale=0.06, attn_sink=sink, **second)
    assert got is out
    torch.testing.assert_close(out, wanted, rtol=1e-2, atol=8e-3)


def test_lists_of_another_width_have_a_schedule_of_their_own():
    plugin = Recorder(support={"extra_cache": True, "kv_layouts": ("fp8_v4",)}, schedule_kind=SPLIT_KV)
    attention = recorded(plugin, kv_layout="fp8_v4", extra_topk=16, extra_block_size=2)
    q, caches, lists, _ = two_caches(3)
    for width in (16, 8, 16):
        second = {"extra_kv_cache": caches[1], "extra_slots": lists[1][:, :width]}
        attention.forward(q, caches[0], lists[0], softmax_scale=0.06, decodes=True, **second)
    schedules = [kwargs["schedule"] for _, _, kwargs in plugin.calls]
    assert [schedule.extra_topk for schedule in schedules] == [16, 8, 16] and schedules[0] is schedules[2]


def test_a_second_cache_is_there_where_the_spec_says_so():
    q, caches, lists, lengths = two_caches(2)
    two = SlotAttention(TWO, device="cpu", registry=REFERENCE, backend="reference")
    one = SlotAttention(
        replace(TWO, extra_topk=0, extra_block_size=None), device="cpu", registry=REFERENCE, backend="reference"
    )
    second = {"extra_kv_cache": caches[1], "extra_slots": lists[1]}
    for attention, given in ((two, {}), (one, second)):
        with pytest.raises(InvalidArgument, match="extra_kv_cache"):
            attention.forward(q, caches[0], lists[0], softmax_scale=0.06, decodes=True, **given)
    with pytest.raises(InvalidArgument, match="extra_lengths"):
        two.forward(q, caches[0], lists[0], softmax_scale=0.06, decodes=True, lengths=lengths[0], **second)
    with pytest.raises(InvalidArgument, match="extra_topk"):
        replace(TWO, extra_block_size=None)
    with pytest.raises(InvalidArgument, match="extra_topk"):
        replace(TWO, attn_sink=False, need_lse=True, share=ContextShare(2, 0))
    with pytest.raises(InvalidArgument, match="extra_topk"):
        SparseMLAAttention(TWO, device="cpu", registry=REFERENCE)
