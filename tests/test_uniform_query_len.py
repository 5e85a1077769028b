# SPDX-License-Identifier: Apache-2.0
"""Requests with the same number of query tokens, and other limits of vendors' indexers: no more than is declared is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_indexer import Plugin
from torch import Tensor

from mla_portable import deep_gemm, primitives
from mla_portable.choose import Registry
from mla_portable.contracts import Implementation, Registrar, Request, Support, UnsupportedRequest, hookimpl
from mla_portable.dispatch import serving
from mla_portable.judge.conformance import run_suite
from mla_portable.judge.problems.base import cases_for
from mla_portable.primitives import INDEXER_LOGITS, INDEXER_SELECT, SPARSE_DECODE, TOPK_SELECT

SIZES: dict[str, Any] = {"kv_layout": "index_bf16", "num_heads": 4, "block_size": 16}


class Paged:
    """`paged.logits`: an operation of [B, next_n, H, 128] queries, which sees nothing of where requests start."""

    def __init__(self, **support: object) -> None:
        self.shapes: list[tuple[int, ...]] = []
        declared = {"device_types": ("cpu",), "kv_layouts": ("index_bf16", "index_fp8"), "needs_uniform_query_len": True}
        self.support = Support(**{"source": "a stand-in", **declared, **support})

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        registrar.add(Implementation("paged.logits", INDEXER_LOGITS, self.support, lambda request: self.call, preference=5))

    def call(self, q: Tensor, weights: Tensor, pages: Tensor, starts: Tensor, lengths: Tensor, table: Tensor, *, out: Tensor):
        batch = max(1, len(lengths))
        next_n = len(q) // batch
        self.shapes.append((batch, next_n))
        own = torch.arange(batch + 1, dtype=torch.int32) * next_n
        return INDEXER_LOGITS.reference(q, weights, pages, own, lengths, table, out=out)


def registry_of(plugin: object, name: str) -> Registry:
    return Registry(plugins=[("reference", "mla_portable.reference"), (name, plugin)], environ={})


def test_it_is_refused_without_the_promise_and_serves_with_it():
    registry = registry_of(Paged(), "paged")
    asked = Request(INDEXER_LOGITS, registry.facts("cpu"), **SIZES)
    decision = registry.decide(asked)
    assert decision.chosen == "reference.torch" and "uniform_query_len not promised" in decision.text()
    with pytest.raises(UnsupportedRequest, match=r"Request\(uniform_query_len=True\)"):
        registry.bind(asked, backend="paged")
    assert registry.decide(asked.but(uniform_query_len=True)).chosen == "paged.logits"


def test_what_claims_to_need_nothing_fails_its_probe():
    registry = registry_of(Paged(needs_uniform_query_len=False), "paged")
    decision = registry.decide(Request(INDEXER_LOGITS, registry.facts("cpu"), **SIZES))
    assert decision.chosen == "reference.torch" and "wrong values" in decision.text()


@pytest.mark.parametrize("whole", [False, True])
def test_the_suite_asks_uniform_batches_alone_and_it_conforms(whole: bool):
    plugin = Paged(needs_whole_tables=whole)
    registry = registry_of(plugin, "paged")
    report = run_suite(registry, "paged", device="cpu", level="quick")
    assert report.ok, [(each.case.id, each.message) for each in report.results if each.status != "passed"][:5]
    assert report.passed > 40 and {next_n for _, next_n in plugin.shapes} >= {0, 1, 3}
    assert all(each.case.request.uniform_query_len for each in report.results)
    tables = {each.case.params.table for each in report.results}
    assert tables == ({"plain"} if whole else {"plain", "holes", "near"})
    (implementation,) = (each for each in registry.implementations() if each.backend == "paged")
    assert registry.probe(implementation, torch.device("cpu")).ok


def test_the_functions_of_deep_gemm_promise_it():
    plugin = Paged()
    pages = torch.zeros((4, 16, 132), dtype=torch.uint8)
    keys = torch.randn(64, 128).bfloat16()
    primitives.indexer_cache_write(keys, pages, torch.arange(64), backend="reference")
    q, weights = torch.randn(2, 3, 4, 128).to(torch.float8_e4m3fn), torch.randn(6, 4)
    lengths, table = torch.tensor([30, 20], dtype=torch.int32), torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    with serving(registry_of(plugin, "paged")):
        plugin.shapes.clear()
        one = deep_gemm.fp8_paged_mqa_logits(q, pages.unsqueeze(2), weights, lengths, table, None, 32)
        assert plugin.shapes[-1] == (2, 3)
        each = torch.stack([lengths - 2, lengths - 1, lengths], dim=1)
        two = deep_gemm.fp8_paged_mqa_logits(q, pages.unsqueeze(2), weights, each, table, None, 32)
        assert plugin.shapes[-1] == (6, 1)
    torch.testing.assert_close(one, two)
    assert one[0].isfinite().sum() == 28


def test_limits_of_k_and_of_blocks_are_asked_for_and_nothing_beside_them():
    limits = {"max_topk": 48, "topks": (128, 200), "block_size_multiple": 16, "max_block_size": 48}
    plugin = Plugin(**limits)
    registry = registry_of(plugin, "fused")
    (select,) = (each for each in registry.implementations(INDEXER_SELECT) if each.backend == "fused")
    asked = [case.request for case in cases_for(select, registry.facts("cpu"), "quick")]
    assert {each.topk for each in asked} == {1, 48, 128} and {each.block_size for each in asked} == {16, 48}
    report = run_suite(registry, "fused", device="cpu", level="smoke", primitives=[INDEXER_SELECT])
    assert report.ok and report.passed
    assert registry.probe(select, torch.device("cpu")).ok
    sizes = {**SIZES, "whole_tables": True}
    here = registry.facts("cpu")
    for topk, block_size, served in ((48, 48, True), (128, 16, True), (49, 16, False), (200, 64, False)):
        decision = registry.decide(Request(INDEXER_SELECT, here, **{**sizes, "topk": topk, "block_size": block_size}))
        assert (decision.chosen == "fused.indexer") == served, decision.text()


@pytest.mark.parametrize("primitive", [TOPK_SELECT, INDEXER_SELECT, SPARSE_DECODE])
def test_a_single_k_gets_cases_and_probes_of_that_k(primitive):
    """As of a vendor's kernels that take 2048 alone."""
    layouts = {"kv": ("bf16",), "index": ("index_bf16",)}.get(primitive.cache, ())
    support = Support("a stand-in", device_types=("cpu",), kv_layouts=layouts, topks=(200,))
    implementation = Implementation("one.k", primitive, support, lambda request: primitive.reference)

    class One:
        @hookimpl
        def mla_portable_register(self, registrar: Registrar) -> None:
            registrar.add(implementation)

    registry = registry_of(One(), "one")
    cases = cases_for(implementation, registry.facts("cpu"), "quick")
    assert cases and {case.request.topk for case in cases} == {200}
    assert registry.probe(implementation, torch.device("cpu")).ok
    report = run_suite(registry, "one", device="cpu", level="smoke")
    assert report.ok and report.passed
