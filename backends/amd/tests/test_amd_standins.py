# SPDX-License-Identifier: Apache-2.0
"""Every provider against the strict stand-in of AITER: the conformance suite, and what its operations do not do."""

from __future__ import annotations

import math

import aiter_ops
import oracle
import pytest
import torch
from aiter_machine import MACHINES, installed, registry
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_portable.contracts import Primitive, Request
from mla_portable.judge.conformance import run_suite
from mla_portable.layouts import LAYOUTS as LAYOUTS_OF
from mla_portable_amd import attention, cache, indexer
from mla_portable_amd.lists import lists_of

BOTH = {"mqa_logits", "topk_per_row", "concat_mla"}
PAGES = {
    "gfx942": {f"{each}_{kind}" for each in ("paged_mqa_logits", "indexer_k_quant") for kind in ("fnuz", "fnuz_tiles")},
    "gfx950": {f"{each}{kind}" for each in ("paged_mqa_logits", "indexer_k_quant") for kind in ("", "_tiles")},
}
SERVED = {arch: {*BOTH, *PAGES[arch], f"mla_{arch}", f"mla_{arch}_fp8", f"concat_mla_{arch}_fp8"} for arch in MACHINES}
LAYOUTS = {"sparse_decode": "bf16", "sparse_prefill": "bf16", "indexer_cache_write": "index_fp8", "indexer_logits": "index_fp8"}
THOROUGH = [(arch, each) for arch, served in SERVED.items() for each in sorted(served - (BOTH if arch == "gfx942" else set()))]
THOROUGH.append(("gfx942", "mqa_logits"))  # it converts there


def request_for(arch: str, primitive: str, **fields) -> Request:
    return Request(Primitive.named(primitive), MACHINES[arch], **{"kv_layout": LAYOUTS.get(primitive), **fields})


def bound(arch: str, primitive: str, **fields):
    return registry(arch).bind(request_for(arch, primitive, **fields), backend="amd")


@pytest.mark.parametrize("arch", MACHINES)
def test_all_that_is_claimed_holds_on_the_stand_in(arch):
    with installed(arch):
        report = run_suite(registry(arch), "amd", device="cpu", level="smoke")
    assert report.ok and report.skipped == 0, [r.message for r in report.results if r.status != "passed"]
    assert {name.removeprefix("amd.") for name, _ in report.counts()} == SERVED[arch]


@pytest.mark.parametrize(("arch", "variant"), THOROUGH, ids=[" ".join(each) for each in THOROUGH])
def test_each_adapter_passes_the_quick_suite(arch, variant):
    with installed(arch):
        report = run_suite(registry(arch), f"amd.{variant}", device="cpu", level="quick")
    assert report.ok and report.skipped == 0, [r.message for r in report.results if r.status != "passed"]


def attended(arch: str, tokens: int, heads: int, topk: int, cache: torch.Tensor, **fields):
    """sparse_decode of random indices, some of them absent, and what the oracle says."""
    q = torch.randn(tokens, 1, heads, 576).bfloat16()
    slots = cache.shape[0] * cache.shape[1]
    indices = torch.randint(-slots // 4, slots + 5, (tokens, 1, topk), dtype=torch.int32)
    indices[0] = -1
    want = oracle.sparse_decode(q, cache, indices, softmax_scale=0.05)
    with installed(arch):
        decode = bound(arch, "sparse_decode", num_heads=heads, topk=topk, block_size=cache.shape[1], **fields)
        got = decode(q, cache, indices, softmax_scale=0.05)
    return got, want


def close(got: torch.Tensor, want: torch.Tensor, share: float = 0.02) -> bool:
    finite = want.isfinite()
    return bool((got.isfinite() == finite).all()) and float((got.double() - want)[finite].abs().max()) < share * float(
        want[finite].abs().max()
    )


@pytest.mark.parametrize(("arch", "heads"), [("gfx942", 20), ("gfx942", 100), ("gfx950", 64)])
def test_the_lse_of_more_tokens_than_compute_units_is_written(arch, heads):
    """AITER's own rule gives each of them one split, whose lse nothing writes."""
    tokens = aiter_ops.COMPUTE_UNITS[arch] + 3
    (out, lse), (want, want_lse) = attended(arch, tokens, heads, 16, torch.randn(4, 16, 576).bfloat16(), lse=True)
    assert close(out, want) and close(lse, want_lse)
    assert (lse[0] == -math.inf).all() and not out[0].any()


def test_tokens_are_attended_to_in_parts(monkeypatch):
    monkeypatch.setattr(attention, "TOKENS", 4)
    (out, _), (want, _) = attended("gfx950", 11, 8, 32, torch.randn(4, 16, 576).bfloat16())
    assert close(out, want)


@pytest.mark.parametrize("apart", [0, 3 * 576])
def test_rows_that_the_kernel_does_not_reach_are_copied(monkeypatch, apart):
    """The stand-in refuses a cache beyond its reach, as the kernel wraps around without a word."""
    storage = torch.full((6, 16 * 576 + apart), math.nan, dtype=torch.bfloat16)
    cache = storage[:, : 16 * 576].unflatten(1, (16, 576)).copy_(torch.randn(6, 16, 576))
    for module in (attention, aiter_ops):
        monkeypatch.setattr(module, "REACH", 40 * 576)
    monkeypatch.setattr(attention, "COPIED_ROWS", 40)
    (out, lse), (want, want_lse) = attended("gfx950", 7, 16, 16, cache, lse=True)
    assert close(out, want) and close(lse, want_lse)


@pytest.mark.parametrize("compacted", [False, True])
def test_a_list_holds_the_indices_that_count_and_nothing_of_rows_that_nobody_wrote(compacted):
    indices = torch.tensor([[5, 7, -1, -1], [-1, -1, -1, -1], [3, 3, 9, 2]], dtype=torch.int32)
    lengths = torch.tensor([2, 0, 3], dtype=torch.int32)
    begins, slots, empty = lists_of(indices, lengths, 8 if not compacted else 10, compacted=compacted)
    want = [5, 7, 3, 3, 9] if compacted else [5, 7, 3, 3]  # 9 is past a cache of 8
    assert begins.tolist() == [0, 2, 2, len(want)] and slots[: len(want)].tolist() == want
    assert set(slots[len(want) :].tolist()) == {5} and empty.tolist() == [False, True, False]
    assert begins.dtype == slots.dtype == torch.int32


def test_what_the_layer_has_compacted_is_not_looked_at_again(monkeypatch):
    """Under both promises no index is compared with the size of the cache."""
    seen = []

    def noted(*arguments, compacted):
        seen.append(compacted)
        return lists_of(*arguments, compacted=compacted)

    monkeypatch.setattr(attention, "lists_of", noted)
    cache, q = torch.randn(2, 16, 576).bfloat16(), torch.randn(2, 1, 8, 576).bfloat16()
    indices = torch.arange(8, dtype=torch.int32).expand(2, 1, 8).contiguous()
    lengths = torch.tensor([[8], [3]], dtype=torch.int32)
    promised = {"lengths": True, "clean_indices": True, "clean_lengths": True}
    with installed():
        for fields in ({"lengths": True}, {"lengths": True, "clean_indices": True}, promised):
            decode = bound("gfx950", "sparse_decode", num_heads=8, topk=8, block_size=16, **fields)
            decode(q, cache, indices, softmax_scale=0.05, lengths=lengths)
    assert seen[-1] is True and not any(seen[:2])  # the probe, too, goes through the adapter: its calls are between


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("compacted", [False, True])
def test_attention_reads_nothing_back(compacted, lse):
    """On tensors without values, what waited for the device would raise."""

    def op(q, kv, o, *lists, return_lse, **more):
        return o, q.new_empty(q.shape[:2], dtype=torch.float32)

    with FakeTensorMode():
        q, kv = torch.empty(5, 8, 576, dtype=torch.bfloat16), torch.empty(3, 16, 576, dtype=torch.bfloat16)
        indices, lengths = torch.empty(5, 32, dtype=torch.int32), torch.empty(5, dtype=torch.int32)
        out, lse_out = torch.empty(5, 8, 512, dtype=torch.bfloat16), torch.empty(5, 8)
        attention.MlaDecode(op, 16, lse, 256, compacted).attend(q, kv, indices, lengths, 0.05, out, lse_out)


@pytest.mark.parametrize(("arch", "layout"), [("gfx942", "amd.fp8_fnuz"), ("gfx950", "amd.fp8")])
@pytest.mark.parametrize("given", ["bf16", "e4m3"])
def test_queries_are_taken_with_their_scale_and_without(arch, layout, given):
    """Those of OCP's e4m3 are converted for fnuz; of bf16 ones, one that is NaN spoils no other token."""
    code, kv_scale = LAYOUTS_OF[layout].dtype, torch.tensor([0.037])
    rows = (torch.randn(4, 16, 576) / kv_scale).clamp(-200, 200).to(code)
    q = torch.randn(5, 1, 16, 576)
    indices = torch.randint(0, 64, (5, 1, 32), dtype=torch.int32)
    fields = {"num_heads": 16, "topk": 32, "block_size": 16, "kv_layout": layout, "lse": True}
    scales = {"kv_scale": kv_scale}
    if given == "e4m3":
        scales["q_scale"] = torch.tensor([0.01])
        q, fields = (q / 0.01).to(torch.float8_e4m3fn), {**fields, "q_scale": True}
    else:
        q = q.bfloat16()
        q[2, 0, 3, 7] = math.nan
    reference = registry(arch).bind(request_for(arch, "sparse_decode", **fields), backend="reference")
    want, want_lse = reference(q, rows, indices, softmax_scale=0.05, **scales)
    with installed(arch):
        decode = registry(arch).bind(request_for(arch, "sparse_decode", **fields), backend=f"amd.mla_{arch}_fp8")
        out, lse = decode(q, rows, indices, softmax_scale=0.05, **scales)
    kept = [0, 1, 3, 4] if given == "bf16" else slice(None)
    assert torch.cosine_similarity(out[kept].flatten().double(), want[kept].flatten().double(), dim=0) > 0.998
    assert close(lse[kept], want_lse[kept].double(), 0.05)


def test_requests_of_as_many_tokens_are_passed_as_they_are():
    """With their own rows of the block table, where the caller promises it; without, with one for each token."""
    batches = []

    def noted(q_fp8, kv_cache, weights, out_logits, context_lens, kv_indices, max_model_len, Preshuffle=False, KVBlockSize=1):
        batches.append(tuple(q_fp8.shape[:2]))
        more = {"Preshuffle": Preshuffle, "KVBlockSize": KVBlockSize}
        aiter_ops.deepgemm_fp8_paged_mqa_logits(
            q_fp8, kv_cache, weights, out_logits, context_lens, kv_indices, max_model_len, **more
        )

    lengths = torch.tensor([7, 0, 1, 40, 3], dtype=torch.int32)  # some are shorter than their three tokens
    starts = torch.arange(0, 16, 3, dtype=torch.int32)
    q, weights = torch.randn(15, 64, 128).to(torch.float8_e4m3fn), torch.randn(15, 64)
    pages = torch.zeros(50, 1, 132, dtype=torch.uint8)
    fields = {"num_heads": 64, "block_size": 1}
    writer = registry().bind(request_for("gfx950", "indexer_cache_write"), backend="reference")
    writer(torch.randn(50, 128).bfloat16(), pages, torch.arange(50))
    table = torch.stack([torch.randperm(50) for _ in range(5)]).to(torch.int32)
    table[3, 11] = -1
    arguments = q, weights, pages, starts, lengths, table
    want = registry().bind(request_for("gfx950", "indexer_logits", **fields), backend="reference")(
        *arguments, out=torch.empty(15, 45)
    )
    with installed(deepgemm_fp8_paged_mqa_logits=noted):
        for uniform, shape in ((False, (15, 1)), (True, (5, 3))):
            score = bound("gfx950", "indexer_logits", uniform_query_len=uniform, **fields)
            got = score(*arguments, out=torch.empty(15, 45))
            assert batches[-1] == shape and torch.equal(got > -math.inf, want > -math.inf)
            assert (got - want).nan_to_num(0).abs().max() < 1e-3 * want[want > -math.inf].abs().max()


def test_pages_that_the_kernel_does_not_reach_are_copied(monkeypatch):
    monkeypatch.setattr(indexer, "_REACH", 100)
    with installed():
        report = run_suite(registry(), "amd.paged_mqa_logits", device="cpu", level="smoke")
    assert report.ok, [r.message for r in report.results if r.status != "passed"]


@pytest.mark.parametrize("slots", [[5, -1, 40, 3, 31, -7], [-1, -2, 99, 64, -1, -1]])
def test_keys_are_placed_where_blocks_lie_apart_by_part_of_a_block(slots):
    """The operation takes blocks that follow one another."""
    storage = torch.randint(0, 255, (4, 16 * 132 + 64), dtype=torch.uint8)
    k, mapping = torch.randn(6, 128).bfloat16(), torch.tensor(slots)
    pages = [each[:, : 16 * 132].unflatten(1, (16, 132)) for each in (storage.clone(), storage)]
    reference = registry().bind(request_for("gfx950", "indexer_cache_write"), backend="reference")
    reference(k, pages[0], mapping)
    with installed():
        cache.bind_indexer_cache_write(aiter_ops.indexer_k_quant_and_cache, request_for("gfx950", "indexer_cache_write"))(
            k, pages[1], mapping
        )
    assert torch.equal(*pages)
