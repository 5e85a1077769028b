# SPDX-License-Identifier: Apache-2.0
"""SlotAttention: right for slots of a cache and of a workspace, and what it calls, with which schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from attention_steps import BLOCK, BLOCKS, HEADS, REFERENCE, SPEC, TOPK
from machines import H200
from recorder import Recorder, registry_of
from torch import Tensor

from mla_portable import cache_write, sparse_prefill
from mla_portable.attention import SlotAttention, SparseMLAAttention, UnsupportedRoute
from mla_portable.choose import Registry
from mla_portable.contracts import InvalidArgument, ScheduleLimits, SchedulePlanner
from mla_portable.contracts.share import ContextShare
from mla_portable.kit.split_kv import SPLIT_KV
from mla_portable.layouts import LAYOUTS
from mla_portable.primitives import CONVERT_INDICES, SPARSE_DECODE, SPARSE_PREFILL

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


def test_schedules_are_kept_for_a_few_widths_alone():
    """Each width has scratch of its own, which a captured graph may read: nothing is given back."""
    made: list[tuple[int, int]] = []

    def planner(limits: ScheduleLimits) -> SchedulePlanner:
        made.append((limits.topk, limits.extra_topk))
        return SPLIT_KV.planner(limits)

    plugin = Recorder(
        support={"extra_cache": True, "kv_layouts": ("fp8_v4",)}, schedule_kind=replace(SPLIT_KV, planner=planner)
    )
    attention = recorded(plugin, kv_layout="fp8_v4", extra_topk=16, extra_block_size=2)
    q, caches, lists, _ = two_caches(3)
    for width in (*range(1, 13), 1):
        second = {"extra_kv_cache": caches[1], "extra_slots": lists[1]}
        attention.forward(q, caches[0], lists[0][:, :width], softmax_scale=0.06, decodes=True, **second)
        attention.prepare(3, width)
    assert made == [(TOPK, 16), (1, 16), (2, 16), (3, 16)]
    schedules = [kwargs["schedule"] for _, _, kwargs in plugin.calls]
    assert [each and each.topk for each in schedules] == [1, 2, 3, *[None] * 8, TOPK, 1] and schedules[0] is schedules[-1]


@pytest.mark.parametrize("form", ["paged", "rows"])
@pytest.mark.parametrize("decodes", [True, False], ids=["decode", "prefill"])
@pytest.mark.parametrize("layout", ["bf16", "bf16_nope"])
def test_caches_without_scales_are_taken_paged_and_as_rows_by_every_call(layout: str, decodes: bool, form: str):
    row = LAYOUTS[layout]
    spec = replace(SLOTS, kv_layout=layout, scale_format=None, extra_topk=TOPK, extra_block_size=4)
    attention = SlotAttention(spec, device="cpu", registry=REFERENCE, backend="reference")
    q, kv, slots, _ = make_call(layout)
    _, more, more_slots, _ = make_call(layout, seed=5)
    shapes = [(-1, block, row.row_width) if form == "paged" else (-1, row.row_width) for block in (BLOCK, 4)]
    second = {"extra_kv_cache": more.view(shapes[1]), "extra_slots": more_slots}
    out = attention.forward(q, kv.view(shapes[0]), slots, softmax_scale=0.06, decodes=decodes, **second)
    both, shifted = torch.cat([kv, more]), torch.where(more_slots < 0, -1, more_slots + len(kv))
    wanted, _ = oracle.sparse_prefill(q, both, torch.cat([slots, shifted], dim=1).long(), softmax_scale=0.06)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=8e-3)


def test_rows_that_are_no_whole_number_of_blocks_need_a_prefill():
    changes = {"kv_layout": "bf16", "scale_format": None, "extra_topk": TOPK, "extra_block_size": 4}
    plugin = Recorder(support={"extra_cache": True})
    attention = recorded(plugin, **changes)
    fused = recorded(Recorder(support={"extra_cache": True}, primitives=(SPARSE_DECODE, CONVERT_INDICES)), **changes)
    q, kv, slots, _ = make_call("bf16")
    for given, name in (((kv[:-1], kv), "kv"), ((kv, kv[:-1]), "extra_kv_cache")):
        arguments = {"softmax_scale": 1.0, "decodes": True, "extra_kv_cache": given[1], "extra_slots": slots}
        attention.forward(q, given[0], slots, **arguments)
        with pytest.raises(InvalidArgument, match=f"forward: {name}: got .*, expected a multiple of"):
            fused.forward(q, given[0], slots, **arguments)
    assert [name for name, _, _ in plugin.calls] == ["sparse_prefill"] * 2


def test_more_rows_than_the_spec_has_are_served():
    rows = SLOTS.max_num_tokens + 1
    attention = SlotAttention(SLOTS, device="cpu", registry=REFERENCE, backend="reference")
    q, kv, slots, _ = make_call("fp8_ds_mla", rows)
    cache = paged("fp8_ds_mla", kv)
    for decodes in (True, False):
        out = attention.forward(q, cache, slots, softmax_scale=0.06, decodes=decodes)
        wanted, _ = oracle.sparse_prefill(q, cache, slots.long(), softmax_scale=0.06)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-2, atol=8e-3)


@pytest.mark.parametrize("num_rows", [None, "3", [3], 3.0, True, -1], ids=repr)
def test_numbers_of_rows_that_are_none_are_refused(num_rows: Any):
    for attention in (recorded(Recorder()), recorded(Recorder(schedule_kind=SPLIT_KV))):
        with pytest.raises(InvalidArgument, match=r"^SlotAttention.prepare: num_rows: got .* of at least 0"):
            attention.prepare(num_rows)
        for more, name in (((0,), "topk"), ((TOPK + 1,), "topk"), (("3",), "topk"), ((None, 1), "extra_topk")):
            with pytest.raises(InvalidArgument, match=f"^SlotAttention.prepare: {name}: got "):
                attention.prepare(3, *more)


def _other(call: dict[str, Any], argument: str, value: Any) -> dict[str, Any]:
    return call | {argument: value(call[argument]) if callable(value) else value}


_HEAD = torch.zeros(5, HEADS + 1, 512).bfloat16()
REFUSED: list[tuple[str, Any, str]] = [
    ("q", None, "got None, expected a tensor"),
    ("q", [[1.0]], "got list"),
    ("q", _HEAD[0], "shape"),
    ("q", _HEAD, rf"got shape \[5, {HEADS + 1}, 512\], expected \[T, H, 512\] = \[5, {HEADS}, 512\]"),
    ("q", lambda q: torch.cat([q, q[..., :64]], dim=-1), "512"),
    ("q", lambda q: q.to("meta"), "device"),
    ("kv", None, "got None, expected"),
    ("kv", [1], "got list"),
    (
        "kv",
        lambda kv: torch.zeros((*kv.shape[:2], 656), dtype=torch.uint8),
        r"uint8 rows of 656 \(fp8_ds_mla\), expected .* rows of 584 \(fp8_v4\)",
    ),
    ("kv", lambda kv: torch.zeros(16, 512).bfloat16(), "shape"),
    ("kv", lambda kv: torch.zeros(8, BLOCK * 2, 584, dtype=torch.uint8), f"block_size {BLOCK * 2}, expected .* {BLOCK}, as in"),
    ("kv", lambda kv: torch.zeros(kv.numel() + 8, dtype=torch.uint8)[8:].view(kv.shape), "expected multiples of 16 bytes"),
    ("slots", None, "got None"),
    ("slots", [[1]], "got list"),
    ("slots", lambda slots: slots.long(), "got torch.int64"),
    ("slots", lambda slots: torch.cat([slots, slots[:, :1]], dim=1), f"got lists of {TOPK + 1}, expected at most {TOPK}"),
    ("slots", lambda slots: slots[:4], r"got shape \[4, 12\]"),
    ("lengths", [5] * 5, "got list"),
    ("lengths", lambda lengths: lengths.float(), "got torch.float32"),
    ("lengths", None, "extra_lengths: got torch.int32"),
    ("attn_sink", None, r"got None, expected \[H\] float32, because spec.attn_sink"),
    ("attn_sink", [0.0] * HEADS, "got list"),
    ("attn_sink", torch.zeros(HEADS + 1), "shape"),
    ("extra_kv_cache", None, r"got None, expected what spec\.extra_topk = 16 says"),
    ("extra_kv_cache", [1], "got list"),
    ("extra_kv_cache", torch.zeros(4, 2, 656, dtype=torch.uint8), r"got .*\(fp8_ds_mla\)"),
    ("extra_kv_cache", torch.zeros(4, 3, 584, dtype=torch.uint8), "block_size 3, expected fp8_v4, block_size 2"),
    ("extra_slots", None, "got None"),
    ("extra_slots", [[1]], "got list"),
    ("extra_slots", torch.zeros(5, 17, dtype=torch.int32), "got lists of 17, expected at most 16, as in the spec"),
    ("extra_lengths", [1] * 5, "got list"),
    ("extra_lengths", None, "given where `lengths` are"),
    ("out", [1], "got list"),
    ("out", lambda out: out.float(), "got torch.float32"),
    ("out", lambda out: out[:4], "shape"),
    ("softmax_scale", None, "got None, expected a Python float"),
    ("softmax_scale", -1.0, "a finite number above 0"),
]


@pytest.mark.parametrize("decodes", [True, False], ids=["decode", "prefill"])
@pytest.mark.parametrize(("argument", "value", "text"), REFUSED, ids=[f"{name}-{text[:30]}" for name, _, text in REFUSED])
def test_a_call_is_held_against_the_spec_before_anything_runs(argument: str, value: Any, text: str, decodes: bool):
    plugin = Recorder(support={"extra_cache": True, "kv_layouts": ("fp8_v4",)}, schedule_kind=SPLIT_KV)
    attention = recorded(plugin, kv_layout="fp8_v4", extra_topk=16, extra_block_size=2, attn_sink=True)
    q, caches, lists, lengths = two_caches(5)
    given = {"q": q, "kv": caches[0], "slots": lists[0], "lengths": lengths[0], "attn_sink": torch.zeros(HEADS)}
    given |= {"extra_kv_cache": caches[1], "extra_slots": lists[1], "extra_lengths": lengths[1]}
    given |= {"out": torch.empty_like(q), "softmax_scale": 0.06, "decodes": decodes}
    attention.forward(**given)
    plugin.calls.clear()
    with pytest.raises(InvalidArgument, match=f"^SlotAttention.forward: .*{text}") as refused:
        attention.forward(**_other(given, argument, value))
    named = "extra_lengths" if (argument, value) == ("lengths", None) else argument
    assert refused.value.argument == named and not plugin.calls


@pytest.mark.parametrize("decodes", [True, False], ids=["decode", "prefill"])
def test_out_overlaps_no_input(decodes: bool):
    plugin = Recorder()
    attention = recorded(plugin)
    q, kv, slots, _ = make_call("fp8_ds_mla")
    cache = paged("fp8_ds_mla", kv)
    memory = torch.zeros(q.numel(), dtype=torch.bfloat16)
    over = {"q": memory.view(q.shape).copy_(q), "kv": cache, "slots": slots}
    for out in (memory[: q[..., :512].numel()], kv.view(-1)[: 2 * q[..., :512].numel()].view(torch.bfloat16)):
        with pytest.raises(InvalidArgument, match="forward: out: got memory that overlaps"):
            attention.forward(**over, softmax_scale=1.0, decodes=decodes, out=out.view(5, HEADS, 512))
    assert not plugin.calls


def test_paged_rows_without_scales_are_read_as_rows_where_no_gap_is_between_blocks():
    attention = recorded(Recorder(), kv_layout="bf16", scale_format=None)
    q, _, slots, _ = make_call("bf16")
    apart = torch.zeros(8, 2 * BLOCK, 576).bfloat16()[:, :BLOCK]
    with pytest.raises(InvalidArgument, match="kv: got block stride 9216, expected 4608: the spec promises contiguous blocks"):
        attention.forward(q, apart, slots, softmax_scale=1.0, decodes=False)


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
