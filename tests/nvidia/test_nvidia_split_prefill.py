# SPDX-License-Identifier: Apache-2.0
"""A few rows of many keys on FlashMLA's prefill kernel: cut into parts, as many as are predicted to be fastest."""

from __future__ import annotations

import pytest
import torch
from flashmla_standins import installed
from simulated_gpu import FACTS
from torch import Tensor

from mla_portable.contracts import Request
from mla_portable.judge.problems.attention import attend
from mla_portable.primitives import SPARSE_DECODE
from mla_portable_common.flash_mla.sparse_prefill import FlashMLAPrefill
from mla_portable_nvidia.flashmla.flat_decode import bind_flat_decode
from mla_portable_nvidia.flashmla.split_prefill import num_parts

ROWS, TOPK = 3, 1024


def problem(heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, a cache, indices and lengths: nothing, a part and a little, all."""
    g = torch.Generator().manual_seed(heads)
    q, kv = torch.randn(ROWS, 1, heads, 576, generator=g).bfloat16(), torch.randn(32, 64, 576, generator=g).bfloat16()
    indices = torch.stack([torch.randperm(2048, generator=g)[:TOPK] for _ in range(ROWS)]).to(torch.int32)
    lengths = torch.tensor([0, 150, TOPK], dtype=torch.int32)
    indices[torch.arange(TOPK) >= lengths.unsqueeze(1)] = -1
    return q, kv, indices.unsqueeze(1), lengths.unsqueeze(1)


def bound(heads: int, **changes: bool):
    request = Request(
        SPARSE_DECODE, FACTS["sm90"], kv_layout="bf16", num_heads=heads, topk=TOPK, block_size=64, query_len=1, **changes
    )
    return bind_flat_decode(request)


@pytest.mark.parametrize("generation", ["vllm 0.26", "flash_mla 2025"])
@pytest.mark.parametrize("heads", [40, 64, 128])
@pytest.mark.parametrize(("with_sink", "with_lse"), [(False, False), (True, False), (False, True), (True, True)])
def test_parts_of_a_few_rows_are_rows_of_one_call(generation: str, heads: int, with_sink: bool, with_lse: bool):
    q, kv, indices, lengths = problem(heads)
    sink = torch.randn(heads, generator=torch.Generator().manual_seed(1)) if with_sink else None
    with installed(generation) as library:
        call = bound(heads, clean_indices=True, clean_lengths=True, lengths=True, attn_sink=with_sink, lse=with_lse)
        del library.prefill_calls[:]
        out, lse = call(q, kv, indices, softmax_scale=0.05, lengths=lengths, attn_sink=sink)
        assert library.prefill_calls == [(8 * ROWS, 64 if heads <= 64 else 128, 128)]
        given = torch.full((ROWS, 1, heads), 7.0)
        _, returned = call(q, kv, indices, softmax_scale=0.05, lengths=lengths, attn_sink=sink, lse_out=given)
    want, want_lse = attend(q[:, 0], kv, indices[:, 0], softmax_scale=0.05, lengths=lengths[:, 0], attn_sink=sink)
    torch.testing.assert_close(out[:, 0].double(), want, atol=1e-2, rtol=1e-2)
    assert not out[0].any()
    if with_lse:
        torch.testing.assert_close(lse[:, 0].double(), want_lse, atol=1e-4, rtol=1e-4)
        assert returned is given and torch.equal(given, lse)
    else:
        assert not lse.numel() and not returned.numel() and torch.equal(given, torch.full_like(given, 7.0))


def test_an_lse_of_rows_that_are_not_cut_comes_from_the_whole_call():
    q, kv, indices, lengths = problem(64)
    with installed("vllm 0.26") as library:
        call = bound(64, lengths=True, lse=True)  # indices past a length are not promised to be absent
        del library.prefill_calls[:]
        out, lse = call(q, kv, indices, softmax_scale=0.05, lengths=lengths)
        assert library.prefill_calls == [(ROWS, 64, TOPK)]
    want, want_lse = attend(q[:, 0], kv, indices[:, 0], softmax_scale=0.05, lengths=lengths[:, 0])
    torch.testing.assert_close(out[:, 0].double(), want, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse[:, 0].double(), want_lse, atol=1e-4, rtol=1e-4)


def test_heads_that_are_padded_take_the_same_passes_in_one_part(monkeypatch):
    monkeypatch.setattr("mla_portable_nvidia.flashmla.split_prefill.num_parts", lambda *_: 1)
    monkeypatch.setattr(FlashMLAPrefill, "__call__", lambda *_, **__: pytest.fail("padded by itself"))
    q, kv, indices, lengths = problem(40)
    with installed("vllm 0.26") as library:
        call = bound(40, clean_indices=True, lengths=True)
        del library.prefill_calls[:]
        out, _ = call(q, kv, indices, softmax_scale=0.05, lengths=lengths)
        assert library.prefill_calls == [(ROWS, 64, TOPK)]
    want, _ = attend(q[:, 0], kv, indices[:, 0], softmax_scale=0.05, lengths=lengths[:, 0])
    torch.testing.assert_close(out[:, 0].double(), want, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("tokens", "heads", "topk", "parts"),
    [
        (1, 64, 2048, 16),
        (1, 64, 2304, 2),  # 9 x 256: a part is a multiple of 128
        (1, 64, 100, 1),
        (64, 64, 2048, 2),  # 128 blocks
        (32, 64, 2048, 4),
        (32, 128, 2048, 2),
        (128, 64, 2048, 1),  # a block for each multiprocessor
        (150, 64, 2048, 2),  # three waves of halves are shorter than two
        (4096, 64, 2048, 1),
    ],
)
def test_parts_fill_the_device_and_no_more(tokens: int, heads: int, topk: int, parts: int):
    assert num_parts(tokens, heads, topk, 132) == parts
