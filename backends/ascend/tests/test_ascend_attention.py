# SPDX-License-Identifier: Apache-2.0
"""Attention through the vendor's operations, on strict stand-ins of them: the conformance suite, and what is handed over."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from ascend_machine import A2, A5, registry
from ascend_ops import Operations, torch_npu, vllm_ascend

from mla_portable.contracts import Primitive, Request
from mla_portable.judge.conformance import run_suite
from mla_portable.layouts import LAYOUTS
from mla_portable_ascend import attention

EVERY_COUNT = tuple(range(1, 129))
MACHINES = {
    "ascend910b": (A2, Operations),
    "ascend950": (A5, lambda: Operations(strided=True, heads=EVERY_COUNT)),
}
SERVED = {
    "ascend910b": {
        f"{operation}{place}"
        for operation in ("sfa", "sfa_copied", "quant_sfa", "lightning_indexer")
        for place in ("", "_torch_npu")
    },
    "ascend950": {"sfa_950", "sfa_copied_950", "quant_sfa_950", "lightning_indexer_950"},
}


@pytest.fixture
def operations():
    """Those of an Atlas A2, in both places."""
    with ExitStack() as stack:
        found = Operations()
        stack.enter_context(vllm_ascend(found))
        stack.enter_context(torch_npu(found))
        yield found


def request_for(primitive: str, facts=A2, **fields) -> Request:
    return Request(Primitive.named(primitive), facts, **{"kv_layout": "bf16", "num_heads": 4, "topk": 64, **fields})


def case(num_tokens: int = 9, num_rows: int = 80, topk: int = 70, heads: int = 4):
    """q, rows, indices with absent ones in any column, a row without any."""
    q, rows = torch.randn(num_tokens, heads, 576).bfloat16(), torch.randn(num_rows, 576).bfloat16()
    indices = torch.randint(-5, num_rows, (num_tokens, topk), dtype=torch.int32)
    indices[1] = -1
    return q, rows, indices


def check_against_reference(bound, q, rows, indices):
    got, lse = bound(q, rows, indices, softmax_scale=0.05)
    want, want_lse = Primitive.named("sparse_prefill").reference(q, rows, indices, softmax_scale=0.05)
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("machine", MACHINES)
def test_all_that_is_claimed_holds_on_the_stand_in(machine):
    facts, make = MACHINES[machine]
    with vllm_ascend(make()), torch_npu(make()):
        report = run_suite(registry(facts), "ascend", device="cpu", level="smoke")
    assert report.ok and report.skipped == 0, [r.message for r in report.results if r.status != "passed"]
    assert {name.removeprefix("ascend.") for name, _ in report.counts()} == SERVED[machine]


@pytest.mark.parametrize("primitive", ["sparse_decode", "sparse_prefill"])
def test_the_operators_of_vllm_ascend_are_preferred_and_torch_npus_follow(primitive):
    request = request_for(primitive, lse=True)
    with torch_npu(Operations()):
        with vllm_ascend(Operations()):
            assert registry().decide(request).chosen == "ascend.sfa_copied"
        assert registry().decide(request).chosen == "ascend.sfa_copied_torch_npu"
    assert registry().decide(request).chosen == "reference.torch"


@pytest.mark.parametrize(
    ("machine", "heads", "served"), [("ascend910b", 24, False), ("ascend910b", 32, True), ("ascend950", 24, True)]
)
def test_heads_are_those_of_the_family(machine, heads, served):
    facts, make = MACHINES[machine]
    with vllm_ascend(make()), torch_npu(make()):
        chosen = registry(facts).decide(request_for("sparse_decode", facts, num_heads=heads)).chosen
    assert chosen.startswith("ascend.") == served


def test_a_list_longer_than_the_rows_is_read_to_its_end(operations):
    """The operation reads no more entries than its request has positions."""
    q, rows, _ = case(num_rows=3)
    indices = torch.randint(0, 3, (9, 70), dtype=torch.int32)
    bound = registry().bind(request_for("sparse_prefill", topk=70, lse=True))
    check_against_reference(bound, q, rows, indices)
    layout = LAYOUTS["ascend.c8"]
    cache = layout.pack(torch.randn(16, 512), torch.randn(16, 64)).unsqueeze(0)
    request = request_for("sparse_prefill", topk=70, lse=True, kv_layout=layout.name, block_size=16, scale_format="amax")
    got, _ = registry().bind(request, backend="ascend.quant_sfa")(q, cache, indices, softmax_scale=0.05)
    reference = Primitive.named("sparse_prefill").reference
    want, _ = reference(q, cache, indices, softmax_scale=0.05, kv_layout=layout.name)
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("limit", [1, 300, 1 << 17])
def test_rows_are_copied_a_bounded_number_at_a_time(operations, monkeypatch, limit):
    bound = registry().bind(request_for("sparse_prefill", topk=70, lse=True))
    monkeypatch.setattr(attention, "COPIED_ROWS", limit)
    operations.calls.clear()
    check_against_reference(bound, *case())
    assert len(operations.calls) == {1: 9, 300: 1, 1 << 17: 1}[limit]


def test_what_a_layer_compacted_is_not_compacted_again(operations, monkeypatch):
    promises = {"lengths": True, "clean_indices": True, "clean_lengths": True}
    machine = registry()
    clean, plain = (machine.bind(request_for("sparse_prefill", topk=70, **more)) for more in (promises, {"lengths": True}))
    monkeypatch.setattr(attention, "valid_first", None)
    q, rows, indices = case()
    lengths = torch.arange(9, dtype=torch.int32)
    indices = torch.where(torch.arange(70) < lengths.unsqueeze(1), indices.abs(), -1)
    got, _ = clean(q, rows, indices, lengths=lengths, softmax_scale=0.05)
    want, _ = Primitive.named("sparse_prefill").reference(q, rows, indices, lengths=lengths, softmax_scale=0.05)
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)
    with pytest.raises(TypeError):
        plain(q, rows, indices, lengths=lengths, softmax_scale=0.05)


@pytest.mark.parametrize("lse", [True, False])
def test_the_lse_is_asked_for_where_a_request_has_it(operations, lse):
    bound = registry().bind(request_for("sparse_prefill", topk=70, lse=lse))
    operations.calls.clear()
    bound(*case(), softmax_scale=0.05)
    assert {asked for _, asked in operations.calls} == {lse}


@pytest.mark.parametrize("lse", [True, False])
def test_torch_npu_s_quantised_attention_has_no_lse(lse):
    request = request_for("sparse_decode", kv_layout="ascend.c8", block_size=16, scale_format="amax", lse=lse)
    with torch_npu(Operations()):
        chosen = registry().decide(request).chosen
    assert chosen == ("reference.torch" if lse else "ascend.quant_sfa_torch_npu")


@pytest.mark.parametrize(
    ("facts", "layout", "served"), [(A2, "ascend.c8_e4m3", False), (A5, "ascend.c8_e4m3", True), (A5, "ascend.c8", True)]
)
def test_e4m3_codes_are_read_by_the_newest_family_alone(facts, layout, served):
    found = Operations(strided=facts is A5)
    with vllm_ascend(found), torch_npu(found):
        request = request_for("sparse_decode", facts, kv_layout=layout, block_size=16, scale_format="amax")
        assert registry(facts).decide(request).chosen.startswith("ascend.quant_sfa") == served


@pytest.mark.parametrize(("gap", "calls"), [(0, 1), (16, 1), (4, 9)])
def test_a_packed_cache_is_read_in_place_where_blocks_lie_whole_blocks_apart(operations, monkeypatch, gap, calls):
    """Otherwise the rows that are named are copied, those of a token at a time here."""
    layout = LAYOUTS["ascend.c8"]
    q, rows, indices = case()
    storage = torch.full((5, 16 + gap, 656), 0x7F, dtype=torch.uint8)
    cache = storage[:, :16]
    cache.copy_(layout.pack(rows[:, :512], rows[:, 512:]).view(5, 16, 656))
    request = request_for("sparse_decode", topk=70, lse=True, kv_layout=layout.name, block_size=16, scale_format="amax")
    bound = registry().bind(request, backend="ascend.quant_sfa")
    monkeypatch.setattr(attention, "COPIED_ROWS", 79)  # fewer than there are
    operations.calls.clear()
    arguments = q[:, None], cache, indices[:, None]
    out, lse = bound(*arguments, softmax_scale=0.05)
    want, want_lse = Primitive.named("sparse_decode").reference(*arguments, softmax_scale=0.05, kv_layout=layout.name)
    torch.testing.assert_close(out.float(), want.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)
    assert len(operations.calls) == calls


def split_case(latent_gap: int, rope_gap: int):
    """q, the two tensors of a cache whose blocks lie so many rows apart, indices."""
    q, rows, indices = case()
    caches = []
    for values, gap in ((rows[:, :512], latent_gap), (rows[:, 512:], rope_gap)):
        storage = torch.full((5, 16 + gap, values.shape[1]), float("nan")).bfloat16()
        storage[:, :16] = values.view(5, 16, -1)
        caches.append(storage[:, :16])
    return q[:, None], tuple(caches), indices[:, None]


@pytest.mark.parametrize(("latent_gap", "rope_gap", "in_place"), [(0, 0, True), (16, 16, True), (16, 0, False), (3, 3, False)])
def test_a_split_cache_is_read_in_place_where_both_tensors_allow_it(monkeypatch, latent_gap, rope_gap, in_place):
    """Where block numbers of both are the same; otherwise the rows that are named are copied."""
    q, caches, indices = split_case(latent_gap, rope_gap)
    given = []

    class Noted(Operations):
        def npu_sparse_flash_attention(self, query, key, *args, key_rope, **keywords):
            given.append((key.data_ptr(), key_rope.data_ptr()))
            return super().npu_sparse_flash_attention(query, key, *args, key_rope=key_rope, **keywords)

    with vllm_ascend(Noted()):
        request = request_for("sparse_decode", topk=70, lse=True, kv_layout="ascend.split", block_size=16)
        bound = registry().bind(request, backend="ascend.sfa")
        given.clear()
        out, lse = bound(q, caches, indices, softmax_scale=0.05)
    want, want_lse = Primitive.named("sparse_decode").reference(q, caches, indices, softmax_scale=0.05)
    torch.testing.assert_close(out.float(), want.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)
    assert (given == [tuple(cache.data_ptr() for cache in caches)]) == in_place


@pytest.mark.parametrize(("lse", "chosen"), [(True, "reference.torch"), (False, "ascend.sfa")])
def test_an_operation_as_its_documents_have_it_serves_pages_without_an_lse(lse, chosen):
    """They allow the lse without pages alone; a call of vllm-ascend asks for it with pages. The probe of a device tells."""
    request = request_for("sparse_decode", kv_layout="ascend.split", block_size=16, lse=lse)
    with vllm_ascend(Operations(paged_lse=False)):
        assert registry().decide(request).chosen == chosen
