# SPDX-License-Identifier: Apache-2.0
"""Every provider against the strict stand-in of its generation: the conformance suite, and who is chosen where."""

from __future__ import annotations

import math

import pytest
import torch
from corex_machine import BI_V150, GENERATIONS, NEWEST, installed, registry

from mla_portable.contracts import Primitive, Request
from mla_portable.judge.conformance import run_suite
from mla_portable.primitives import SPARSE_PREFILL

SERVED = {
    "corex 4.2": {"concat_mla", "dsa_convert", "dsa_indexer_logits", "dsa_update_topk", "fork_sparse_prefill"},
    "corex 4.5": {
        "block_sparse_logits", "concat_and_cache_mla", "concat_mla", "dsa_indexer_logits", "dsa_update_topk",
        "flash_mla_sparse_v2", "flash_mla_sparse_v2_h64", "flash_mla_sparse_v2_lse", "map_prefill",
    },
}  # fmt: skip
CHOSEN = {
    "corex 4.2": {
        "cache_write": "concat_mla", "convert_indices": "dsa_convert", "indexer_logits": "dsa_indexer_logits",
        "sparse_decode": "fork_sparse_prefill", "sparse_prefill": "fork_sparse_prefill", "topk_select": "dsa_update_topk",
    },
    "corex 4.5": {
        "cache_write": "concat_mla", "convert_indices": "map_prefill", "indexer_logits": "block_sparse_logits",
        "sparse_decode": "flash_mla_sparse_v2", "sparse_prefill": "flash_mla_sparse_v2", "topk_select": "dsa_update_topk",
    },
}  # fmt: skip
THOROUGH = [("corex 4.2", variant) for variant in ("dsa_convert", "dsa_indexer_logits")] + [
    ("corex 4.5", variant) for variant in sorted(SERVED["corex 4.5"] - {"flash_mla_sparse_v2", "dsa_indexer_logits"})
]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_all_that_is_claimed_holds_on_the_stand_in(generation):
    with installed(GENERATIONS[generation]):
        report = run_suite(registry(), "iluvatar", device="cpu", level="smoke")
    assert report.ok and report.skipped == 0, [r.message for r in report.results if r.status != "passed"]
    assert {name.removeprefix("iluvatar.") for name, _ in report.counts()} == SERVED[generation]


@pytest.mark.parametrize(("generation", "variant"), THOROUGH, ids=[variant for _, variant in THOROUGH])
def test_each_adapter_passes_the_quick_suite(generation, variant):
    with installed(GENERATIONS[generation]):
        report = run_suite(registry(), f"iluvatar.{variant}", device="cpu", level="quick")
    assert report.ok and report.skipped == 0, [r.message for r in report.results if r.status != "passed"]


def request_for(primitive: str, **fields) -> Request:
    layout = {"convert_indices": None, "indexer_logits": None, "topk_select": None}.get(primitive, "bf16")
    return Request(Primitive.named(primitive), BI_V150, kv_layout=layout, **fields)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_best_of_a_generation_is_chosen(generation):
    with installed(GENERATIONS[generation]):
        machine = registry()
        for primitive, variant in CHOSEN[generation].items():
            assert machine.select(request_for(primitive))[0].name == f"iluvatar.{variant}", primitive


def test_an_op_without_lse_is_passed_over_only_where_one_is_asked_for():
    with installed(NEWEST):
        machine = registry()
        assert machine.select(request_for("sparse_prefill"))[0].name == "iluvatar.flash_mla_sparse_v2"
        chosen, decision = machine.select(request_for("sparse_prefill", lse=True))
    assert chosen.name == "iluvatar.flash_mla_sparse_v2_lse"
    plain = next(v for v in decision.verdicts if v.implementation == "iluvatar.flash_mla_sparse_v2")
    assert [reason.subject for reason in plain.reasons] == ["lse"]


@pytest.mark.parametrize(("generation", "variant"), [("corex 4.2", "dsa_indexer_logits"), ("corex 4.5", "block_sparse_logits")])
def test_a_score_of_nan_is_minus_infinity(generation, variant):
    q, weights, cache = torch.randn(3, 64, 128).bfloat16(), torch.randn(3, 64), torch.randn(2, 16, 128).bfloat16()
    cache[1, 5, 100], weights[2, 7] = math.nan, math.nan
    table, (starts, lengths) = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([[0, 3], [20, 0]], dtype=torch.int32)
    with installed(GENERATIONS[generation]):
        bound = registry().bind(request_for("indexer_logits"), backend=f"iluvatar.{variant}")
        out = bound(q, weights, cache, starts, lengths[:1], table, out=torch.empty(3, 20))
    expected = torch.arange(20) < torch.tensor([[18], [19], [0]])
    expected[:, 5] = False
    assert torch.equal(out > -math.inf, expected) and not out.isnan().any()


def test_a_package_without_the_older_name_writes_the_cache_by_the_newer_one():
    packages = {place: op for place, op in NEWEST.items() if "vllm_concat" not in place}
    with installed(packages):
        assert registry().select(request_for("cache_write"))[0].name == "iluvatar.concat_and_cache_mla"


def test_graphs_are_not_claimed():
    with installed(NEWEST):
        decision = registry().decide(request_for("sparse_decode", graph=True), backend="iluvatar")
    assert decision.chosen is None
    assert all(any(r.subject == "graph" for r in v.reasons) for v in decision.verdicts if v.implementation != "reference.torch")


def test_nothing_is_imported_on_another_vendors_machine(monkeypatch):
    from machines import A100

    asked: list[str] = []
    monkeypatch.setattr("mla_portable_iluvatar.resolve.import_module", lambda name: asked.append(name))
    machine = registry(facts={"cuda": A100})
    decision = machine.decide(Request(SPARSE_PREFILL, A100, kv_layout="bf16"), thorough=True)
    ours = [v for v in decision.verdicts if v.implementation.startswith("iluvatar.")]
    assert ours and all("vendor" in [r.subject for r in v.reasons] for v in ours) and not asked


def test_a_cache_whose_blocks_lie_apart_by_part_of_a_row_is_served():
    """The op cannot read it in place: the named rows are copied, chunk by chunk."""
    import oracle

    from mla_portable_iluvatar import attention

    storage = torch.full((5, 16 * 576 + 8), float("nan"), dtype=torch.bfloat16)
    cache = storage[:, : 16 * 576].unflatten(1, (16, 576))
    cache.copy_(torch.randn(cache.shape))
    q, indices = torch.randn(9, 1, 3, 576).bfloat16(), torch.randint(-5, 80, (9, 1, 70), dtype=torch.int32)
    want, _ = oracle.sparse_decode(q, cache, indices, softmax_scale=0.05)
    with installed(NEWEST), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "GATHERED_ROWS", 300)
        got, _ = registry().bind(request_for("sparse_decode"))(q, cache, indices, softmax_scale=0.05)
    assert (got.double() - want).abs().max() < 0.02 * want.abs().max()
