# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 behind sparse_decode and sparse_prefill: the suite on a strict stand-in, its promises, its splits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fa3_standins import SCHEMAS, installed
from machines import H200
from simulated_gpu import FACTS, conforms, registry
from torch import Tensor
from torch_passes import TorchPageLists

from mla_portable.contracts import MLAPortableError, Primitive, Request
from mla_portable.judge.problems.attention import attend
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_common.flash_mla.torch_passes import TorchBoundary
from mla_portable_common.flat_rows import FlatPrefill
from mla_portable_nvidia.fa3.operators import find_fa3
from mla_portable_nvidia.fa3.sparse_attention import (
    FlashAttention3,
    accumulator_bytes,
    bind_fa3_decode,
    bind_fa3_prefill,
    fa3_implementations,
    most_splits,
)
from mla_portable_nvidia.machine import PROVIDER_VARIABLE


def suite(level: str) -> None:
    machine = registry(offered=fa3_implementations(device_types=("cpu",)))
    conforms(machine, "nvidia.flash_attention3", level, SPARSE_DECODE, SPARSE_PREFILL)


@pytest.mark.parametrize("package", SCHEMAS)
def test_every_package_conforms(package: str):
    with installed(package) as library:
        suite("smoke")
        assert library.calls


def test_the_quick_level_passes_whatever_the_lse_of_an_empty_row_is():
    with installed(empty=float("inf")):
        suite("quick")


def request(primitive: Primitive = SPARSE_PREFILL, **changes: Any) -> Request:
    return Request(primitive, changes.pop("device", FACTS["sm90"]), kv_layout="bf16", num_heads=16, topk=128, **changes)


def problem(rows: int, topk: int = 128, heads: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    q = torch.randn(rows, heads, 576, generator=g).bfloat16()
    kv = torch.randn(2 * topk, 576, generator=g).bfloat16()
    return q, kv, torch.stack([torch.randperm(2 * topk, generator=g)[:topk] for _ in range(rows)]).to(torch.int32)


@pytest.mark.parametrize("primitive", [SPARSE_PREFILL, SPARSE_DECODE])
def test_compacted_indices_that_are_promised_go_to_the_kernel_as_they_are(primitive: Primitive, monkeypatch):
    monkeypatch.setattr(TorchPageLists, "__call__", lambda *_: pytest.fail("listed"))
    monkeypatch.setattr(TorchBoundary, "finish", lambda *_, **__: pytest.fail("finished"))
    q, kv, indices = problem(3)
    lengths = torch.tensor([0, 50, 128], dtype=torch.int32)
    indices[0], indices[1, 50:] = -1, -1
    out = torch.empty(3, 16, 512, dtype=torch.bfloat16)
    with installed() as library:
        promised = request(primitive, lengths=True, clean_indices=True, clean_lengths=True)
        if primitive is SPARSE_DECODE:
            bind_fa3_decode(promised)(
                q.unsqueeze(1), kv.view(-1, 8, 576), indices.unsqueeze(1), softmax_scale=0.1, lengths=lengths.unsqueeze(1),
                out=out.unsqueeze(1),
            )  # fmt: skip
        else:
            bind_fa3_prefill(promised)(q, kv, indices, softmax_scale=0.1, lengths=lengths, out=out)
        assert len(library.calls) == 1
    want, _ = attend(q, kv, indices, softmax_scale=0.1, lengths=lengths)
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kept", ["lengths", "clean_indices", "clean_lengths"])
def test_indices_are_listed_where_a_promise_is_missing(kept: str, monkeypatch):
    listed: list[int] = []
    whole = TorchPageLists.__call__
    monkeypatch.setattr(TorchPageLists, "__call__", lambda *a: (listed.append(len(a[3])), whole(*a))[1])
    q, kv, indices = problem(3)
    promises = {"lengths": True, "clean_indices": True, "clean_lengths": True} | {kept: False}
    with installed():
        call = bind_fa3_prefill(request(**promises))
        lengths = torch.full((3,), 128, dtype=torch.int32) if promises["lengths"] else None
        out, _ = call(q, kv, indices, softmax_scale=0.1, lengths=lengths)
    assert listed == [3]
    torch.testing.assert_close(out.double(), attend(q, kv, indices, softmax_scale=0.1)[0], atol=1e-2, rtol=1e-2)


def test_lists_of_many_tokens_are_made_some_at_a_time():
    q, kv, indices = problem(7)
    with installed() as library:
        operator, _ = find_fa3()
        assert operator is not None
        rows = FlashAttention3(operator, TorchBoundary(), TorchPageLists(), num_sms=132, max_scratch_bytes=3 * 128 * 4)
        out, lse = FlatPrefill(rows)(q, kv, indices, softmax_scale=0.1)
        assert [rows for rows, *_ in library.calls] == [3, 3, 1]
    want, want_lse = attend(q, kv, indices, softmax_scale=0.1)
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("rows", "heads", "topk", "splits"),
    [
        (1, 64, 2048, 32),  # a tile of keys each
        (16, 64, 2048, 7),
        (48, 64, 2048, 2),  # the kernel would take 3: two waves
        (64, 64, 2048, 2),
        (80, 64, 2048, 1),  # the kernel would take 2: two waves
        (24, 128, 2048, 2),
        (128, 64, 2048, 1),
        (993, 16, 2048, 1),
        (1, 16, 64, 1),
    ],
)
def test_splits_fill_the_device_and_no_more(rows: int, heads: int, topk: int, splits: int):
    assert most_splits(rows, heads, topk, 132) == splits


def test_splits_stay_within_scratch():
    for rows in range(1, 300):
        splits = most_splits(rows, 64, 65_536, 132, 8 << 20)
        assert splits == 1 or splits * accumulator_bytes(rows, 64) <= 8 << 20


def test_without_a_package_it_says_why():
    operator, reasons = find_fa3({})
    assert operator is None and [reason.subject for reason in reasons] == ["provider vllm", "provider sgl_kernel"]
    assert reasons[1].limit == "package sgl_kernel is not installed" and "package vllm" in reasons[0].limit
    (reason,) = find_fa3({PROVIDER_VARIABLE: "flash_mla"})[1]
    assert "FlashAttention 3 comes with vllm, sgl_kernel" in reason.limit
    with pytest.raises(MLAPortableError, match="nothing brings FlashAttention 3 here"):
        bind_fa3_prefill(request())


def test_an_operator_of_another_meaning_is_not_used():
    library = torch.library.Library("_vllm_fa3_C", "FRAGMENT")
    try:
        library.define("fwd(Tensor q, Tensor k, Tensor v, float softmax_scale) -> Tensor")
        operator, reasons = find_fa3({})
        assert operator is None and "has no argument q_v, out" in reasons[0].limit
    finally:
        library._destroy()


def test_what_it_declares():
    decode, prefill = fa3_implementations()
    asked = request(SPARSE_DECODE, block_size=64, query_len=2, graph=True, lse=True, attn_sink=True, lengths=True)
    for heads in (1, 16, 40, 128):
        assert decode.support.reasons(asked.but(num_heads=heads, device=H200)) == ()
    assert prefill.support.reasons(request(device=H200)) == ()
    for change in ({"kv_layout": "fp8_ds_mla"}, {"kv_layout": "fp8_v4"}, {"num_heads": 129}, {"uneven_blocks": True}):
        assert decode.support.reasons(asked.but(device=H200, **change)), change
    assert decode.prefills_as == prefill.name
