# SPDX-License-Identifier: Apache-2.0
"""The functions by which SGLang finds DeepGEMM's (0.5.23): they return ours; values beside SGLang's own torch functions."""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from machines import A100, H200
from sglang_kit import pretend_for_indexer

from mla_portable import deep_gemm
from mla_portable.engines.sglang import indexer, seams


def stock_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """What a selector of SGLang's returns with DeepGEMM installed."""
    module = SimpleNamespace(
        get_num_sms=lambda: 132,
        get_paged_mqa_logits_metadata="metadata",
        fp8_paged_mqa_logits="paged",
        fp8_mqa_logits="ragged",
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    selector = getattr(import_module(seams.SELECTORS), name)
    selector.__wrapped__.cache_clear()
    try:
        return selector()
    finally:
        selector.__wrapped__.cache_clear()


def test_selectors(monkeypatch: pytest.MonkeyPatch):
    pretend_for_indexer(monkeypatch, A100)
    module = import_module(seams.SELECTORS)
    user = import_module("sglang.srt.layers.attention.dsa.dsa_indexer")
    for name, function in indexer.OURS.items():
        assert getattr(module, name)() is function and getattr(user, name)() is function
    assert module.resolve_num_sms() == deep_gemm.get_num_sms() >= 1
    pretend_for_indexer(monkeypatch, H200)
    indexer.choice.cache_clear()
    answers = [stock_answer(seam.name, monkeypatch) for seam in seams.INDEXER]
    assert answers == [132, "metadata", "paged", "ragged"]


def test_the_indexer_of_pools_takes_deep_gemm_s_module_from_here(monkeypatch: pytest.MonkeyPatch):
    """It calls DeepGEMM by its module's name, and makes schedules by a function of its own."""
    pretend_for_indexer(monkeypatch, A100)
    user, plans = import_module(seams.POOLED_INDEXER), import_module(seams.POOLED_SCHEDULE.target.rpartition(".")[0])
    assert isinstance(user.deep_gemm, indexer.LateDeepGemm)
    for name in ("get_num_sms", "get_paged_mqa_logits_metadata", "fp8_mqa_logits", "fp8_paged_mqa_logits"):
        assert getattr(user.deep_gemm, name) is getattr(deep_gemm, name)
    assert plans._get_deep_gemm() is deep_gemm
    monkeypatch.setattr(plans, "is_cuda", lambda: True)
    lengths = torch.tensor([3, 0], dtype=torch.int32)  # pools
    assert plans._compute_pool_schedule_metadata(lengths, index_page_size=64).shape == (deep_gemm.get_num_sms() + 1, 2)
    indexer.choice.cache_clear()
    pretend_for_indexer(monkeypatch, H200)
    monkeypatch.setattr(user.deep_gemm, "_theirs", SimpleNamespace(fp8_mqa_logits="stock"))
    monkeypatch.setattr(plans, "_DEEP_GEMM_MODULE", "stock")
    assert user.deep_gemm.fp8_mqa_logits == plans._get_deep_gemm() == "stock"


def e4m3(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.float8_e4m3fn)


def test_ragged_scores_are_those_of_sglang_s_torch_function():
    theirs = import_module(seams.SELECTORS)._fp8_mqa_logits_torch
    q, k, scales = e4m3(5, 32, 128, seed=1), e4m3(19, 128, seed=2), torch.linspace(0.5, 2, 19)
    weights = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
    starts, ends = torch.tensor([0, 0, 3, 7, 19], dtype=torch.int32), torch.tensor([1, 19, 9, 7, 19], dtype=torch.int32)
    ours = deep_gemm.fp8_mqa_logits(q, (k, scales), weights, starts, ends, clean_logits=False)
    wanted = theirs(q, (k, scales), weights, starts, ends, clean_logits=False)
    assert ours.shape == (5, 19) and ours.stride(0) % 4 == 0
    seen = torch.isfinite(ours)
    column = torch.arange(19)
    assert torch.equal(seen, (column >= starts[:, None]) & (column < ends[:, None]))
    torch.testing.assert_close(ours[seen], wanted[seen], rtol=2e-2, atol=0.5)
    ours[:, :2] = torch.inf  # SGLang marks tokens that are always selected
    assert ours[:, :2].isinf().all()


def test_paged_scores_are_those_of_sglang_s_torch_function():
    theirs = import_module("sglang.srt.layers.attention.dsv4.indexer").fp8_paged_mqa_logits_torch
    pages, q = 3, e4m3(2, 1, 32, 128, seed=4)
    cache = torch.cat([e4m3(pages, 64 * 128, seed=5).view(torch.uint8), torch.rand(pages, 64).view(torch.uint8)], dim=1)
    cache = cache.view(pages, 64, 1, 132)
    weights = torch.randn(2, 32, generator=torch.Generator().manual_seed(6))
    lengths, table = torch.tensor([[70], [5]], dtype=torch.int32), torch.tensor([[2, 0], [1, 1]], dtype=torch.int32)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, 132)
    ours = deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lengths, table, schedule, 128, clean_logits=False)
    wanted = theirs(q, cache, weights, lengths[:, 0], table, schedule, 128, clean_logits=False)
    assert ours.shape == wanted.shape == (2, 128)
    for row, length in enumerate((70, 5)):
        torch.testing.assert_close(ours[row, :length], wanted[row, :length].float(), rtol=2e-2, atol=0.5)
        assert ours[row, length:].eq(-torch.inf).all()
