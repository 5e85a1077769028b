# SPDX-License-Identifier: Apache-2.0
"""Tables without holes: what cannot leave out a hole serves only where the caller promises that there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_indexer import Plugin

from mla_portable import deep_gemm, primitives
from mla_portable.choose import Registry
from mla_portable.contracts import Primitive, Request, UnsupportedRequest
from mla_portable.dispatch import serving
from mla_portable.engines.common.asked import indexer_requests
from mla_portable.judge.conformance import run_suite
from mla_portable.judge.problems.base import cases_for
from mla_portable.primitives import INDEXER_LOGITS, INDEXER_SELECT

SIZES = {"kv_layout": "index_fp8", "num_heads": 8, "block_size": 16}


def registry_of(plugin: Plugin) -> Registry:
    return Registry(plugins=[("reference", "mla_portable.reference"), ("fused", plugin)], environ={})


def asked(registry: Registry, primitive: Primitive = INDEXER_SELECT, **changes: Any) -> Request:
    topk = {"topk": 32} if primitive is INDEXER_SELECT else {}
    return Request(primitive, registry.facts("cpu"), **SIZES, **topk, **changes)


@pytest.mark.parametrize("primitive", [INDEXER_SELECT, INDEXER_LOGITS])
def test_without_the_promise_it_is_refused_in_words(primitive: Primitive):
    registry = registry_of(Plugin())
    decision = registry.decide(asked(registry, primitive))
    assert decision.chosen == "reference.torch"
    assert "whole_tables not promised (cannot leave out positions without a block)" in decision.text()
    with pytest.raises(UnsupportedRequest, match=r"Request\(whole_tables=True\)"):
        registry.bind(asked(registry, primitive), backend="fused")


@pytest.mark.parametrize("primitive", [INDEXER_SELECT, INDEXER_LOGITS])
def test_with_the_promise_it_is_probed_with_whole_tables_and_serves(primitive: Primitive):
    registry = registry_of(Plugin())
    assert registry.decide(asked(registry, primitive, whole_tables=True)).chosen == "fused.indexer"


@pytest.mark.parametrize("primitive", [INDEXER_SELECT, INDEXER_LOGITS])
def test_what_claims_to_need_nothing_fails_its_probe(primitive: Primitive):
    """Red where a probe has whole tables though none are promised."""
    registry = registry_of(Plugin(needs_whole_tables=False))
    decision = registry.decide(asked(registry, primitive))
    assert decision.chosen == "reference.torch" and "wrong values" in decision.text()


def test_the_suite_asks_no_tables_with_holes_of_it_and_it_conforms():
    registry = registry_of(Plugin())
    report = run_suite(registry, "fused", device="cpu", level="quick")
    assert report.ok, [(each.case.id, each.message) for each in report.results if each.status != "passed"][:5]
    assert report.passed > 100
    for result in report.results:
        assert result.case.request.whole_tables and result.case.params.table == "plain"
    assert {each.case.primitive for each in report.results} == {INDEXER_SELECT, INDEXER_LOGITS}


def test_others_are_asked_for_both():
    registry = registry_of(Plugin())
    for primitive in (INDEXER_SELECT, INDEXER_LOGITS):
        (reference,) = (each for each in registry.implementations(primitive) if each.backend == "reference")
        cases = cases_for(reference, registry.facts("cpu"), "quick")
        told = {(case.params.table, case.request.whole_tables) for case in cases}
        assert told == {("plain", False), ("plain", True), ("holes", False), ("near", False)}


def test_doctors_probe_has_whole_tables_for_it():
    registry = registry_of(Plugin())
    for implementation in registry.implementations():
        if implementation.backend == "fused":
            assert registry.probe(implementation, torch.device("cpu")).ok


def test_engines_promise_it():
    registry = registry_of(Plugin())
    select, _ = indexer_requests(registry.facts("cpu"))
    assert registry.decide(select).chosen == "fused.indexer"


def batch(blocks: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    index_cache = torch.zeros((blocks, 16, 132), dtype=torch.uint8)
    keys = torch.randn((blocks * 16, 128), generator=generator)
    primitives.indexer_cache_write(keys.bfloat16(), index_cache, torch.arange(blocks * 16), backend="reference")
    return {
        "q": torch.randn((2, 8, 128), generator=generator).to(torch.float8_e4m3fn),
        "weights": torch.randn((2, 8), generator=generator),
        "index_cache": index_cache,
        "query_start_loc": torch.tensor([0, 1, 2], dtype=torch.int32),
        "seq_lens": torch.tensor([40, 33], dtype=torch.int32),
        "block_table": torch.tensor([[5, 0, 3], [1, -1, 4]], dtype=torch.int32),
    }


def test_public_functions_promise_nothing():
    plugin = Plugin()
    given = batch()
    with serving(registry_of(plugin)):
        chosen = primitives.indexer_select(**given, topk=64)
    assert plugin.fused.calls == 0
    assert not ((chosen[1] >= 16) & (chosen[1] < 32)).any()  # the block that is missing


def test_the_functions_of_deep_gemm_promise_it_as_deepgemm_requires_it():
    given = batch()
    given["block_table"][1, 1] = 2
    q, pages = given["q"].unsqueeze(1), given["index_cache"].unsqueeze(2)
    registry = registry_of(Plugin())
    with serving(registry):
        got = deep_gemm.fp8_paged_mqa_logits(
            q, pages, given["weights"], given["seq_lens"], given["block_table"], None, 48, clean_logits=True
        )
    served = {each.name for each in registry.dispatched.values()}
    want = primitives.indexer_logits(**given, out=torch.empty(2, 48), backend="reference")
    assert served == {"fused.indexer"}
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
