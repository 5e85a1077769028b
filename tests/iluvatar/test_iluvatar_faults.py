# SPDX-License-Identifier: Apache-2.0
"""Each misbehaving op is found before its first real call, with a reason that names the symptom, and another is taken."""

from __future__ import annotations

import corex_faults as faults
import corex_ops as ops
import pytest
import torch
from corex_machine import BI_V150, COREX_42, COREX_45, installed, registry

from mla_portable.contracts import Primitive, Request, UnsupportedRequest
from mla_portable.judge.conformance import run_suite
from mla_portable.primitives import (
    CACHE_WRITE,
    CONVERT_INDICES,
    INDEXER_LOGITS,
    SPARSE_PREFILL,
    TOPK_SELECT,
)

V2 = "ixtriturbo._C:ops.flash_mla_sparse_v2"
LOGITS = next(place for place in COREX_45 if "mqa_logits_perf" in place)
MAP_PREFILL = next(place for place in COREX_45 if "map_prefill" in place)
TOPK = "ixformer.inference.functions:dsa_update_topk_indices"
CONCAT = "ixformer.inference.functions:vllm_concat_and_cache_mla"
PREFILL = Request(SPARSE_PREFILL, BI_V150, kv_layout="bf16", num_heads=16, topk=128)
V2_VARIANTS = ["flash_mla_sparse_v2", "flash_mla_sparse_v2_h64", "flash_mla_sparse_v2_lse"]
FORK = {place: op for place, op in COREX_42.items() if "flash_mla_sparse_prefill" in place}

SYMPTOMS = {
    faults.ignores_lens: ("probe", "wrong values: out is off by"),
    faults.reads_past_the_row: ("probe", "wrong values: out "),
    faults.writes_half: ("probe", "wrong values: out holds NaN"),
    faults.raises: ("probe", "raised RuntimeError: ixErrorNotSupported: no kernel for this shape"),
    faults.forgets_the_scale: ("probe", "wrong values: out is off by"),
    faults.falls_to_a_twin: ("speed", "runs ref_flash_mla_sparse_v2"),
}


def reasons_against(machine, name: str, primitive: Primitive, layout: str | None = None) -> list[tuple[str, str]]:
    implementation = next(i for i in machine.implementations(primitive) if i.name == f"iluvatar.{name}")
    report = machine.probe(implementation, torch.device("cpu"), layout=layout)
    return [(reason.subject, reason.given) for reason in report.reasons]


@pytest.mark.parametrize("fault", SYMPTOMS, ids=lambda fault: fault.__name__)
def test_a_faulty_sparse_op_is_rejected_by_its_symptom_and_the_next_serves(fault):
    subject, symptom = SYMPTOMS[fault]
    with installed({**COREX_45, **FORK, V2: fault}):
        machine = registry()
        chosen, decision = machine.select(PREFILL)
        assert chosen.name == "iluvatar.fork_sparse_prefill"
        first = next(v for v in decision.verdicts if v.implementation == "iluvatar.flash_mla_sparse_v2")
        assert any(r.subject == subject and symptom in r.given for r in first.reasons), first.reasons
        for variant in V2_VARIANTS:
            with pytest.raises(UnsupportedRequest) as refused:
                machine.select(PREFILL, backend=f"iluvatar.{variant}")
            assert f"iluvatar.{variant}" in str(refused.value) and "never falls back" in str(refused.value)


def test_a_forced_vendor_whose_ops_all_fail_is_refused_with_every_reason():
    broken = {place: faults.raises for place in COREX_45 if place == V2}
    with installed(broken):
        with pytest.raises(UnsupportedRequest) as refused:
            registry().select(PREFILL, backend="iluvatar")
        decision = registry().decide(PREFILL)
    text = refused.value.decision.text()
    assert "no kernel for this shape" in text and "vllm.v1.attention.ops.flashmla" in text
    assert decision.chosen == "reference.torch"


def test_a_missing_symbol_is_named():
    with installed(
        {place: op for place, op in COREX_45.items() if place != V2} | FORK | {"ixtriturbo._C:ops.other": ops.attend}
    ):
        machine = registry()
        assert reasons_against(machine, "flash_mla_sparse_v2", SPARSE_PREFILL) == [
            ("symbol", "ixtriturbo._C.ops.flash_mla_sparse_v2")
        ]
        assert machine.select(PREFILL)[0].name == "iluvatar.fork_sparse_prefill"


def test_an_op_that_wants_64_heads_is_served_by_the_variant_that_pads():
    with installed({**COREX_45, V2: faults.wants_64_heads}):
        chosen, _ = registry().select(PREFILL)
    assert chosen.name == "iluvatar.flash_mla_sparse_v2_h64"


def test_a_convert_that_loses_offsets_is_rejected_and_the_next_serves():
    seed_op = {place: op for place, op in COREX_42.items() if "dsa_convert" in place}
    with installed({**COREX_45, **seed_op, MAP_PREFILL: faults.convert_loses_the_offset}):
        machine = registry()
        found = reasons_against(machine, "map_prefill", CONVERT_INDICES)
        assert any("became slot" in given for _, given in found)
        chosen, _ = machine.select(Request(CONVERT_INDICES, BI_V150, topk=64, block_size=64))
    assert chosen.name == "iluvatar.dsa_convert"


def test_a_convert_that_forgets_the_workspace_is_rejected():
    with installed({**COREX_45, MAP_PREFILL: faults.convert_forgets_the_workspace}):
        found = reasons_against(registry(), "map_prefill", CONVERT_INDICES)
    assert any("became slot" in given for _, given in found)


def test_an_absent_position_that_becomes_a_slot_is_absent_again():
    with installed({**COREX_45, MAP_PREFILL: faults.convert_gives_absent_a_slot}):
        assert reasons_against(registry(), "map_prefill", CONVERT_INDICES) == []


@pytest.mark.parametrize(
    ("fault", "subject", "symptom"),
    [
        (faults.logits_without_relu, "probe", "it looks as if the ReLU were missing"),
        (faults.logits_in_a_twin, "speed", "runs ref_dsa_indexer_mqa_logits_with_blocks"),
        (faults.logits_half_written, "probe", "is -inf, expected"),  # NaN, which the adapter writes so
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_faulty_scores_are_rejected_by_their_symptom_and_the_next_op_serves(fault, subject, symptom):
    request = Request(INDEXER_LOGITS, BI_V150, num_heads=64, block_size=64)
    with installed({**COREX_45, LOGITS: fault}):
        machine = registry()
        found = reasons_against(machine, "block_sparse_logits", INDEXER_LOGITS)
        assert machine.select(request)[0].name == "iluvatar.dsa_indexer_logits"
        with pytest.raises(UnsupportedRequest) as refused:
            machine.select(request, backend="iluvatar.block_sparse_logits")
    assert any(of == subject and symptom in given for of, given in found), found
    assert symptom in str(refused.value) and "never falls back" in str(refused.value)


def test_a_cache_write_that_skips_nothing_is_rejected():
    with installed({**COREX_45, CONCAT: faults.concat_writes_skipped}):
        found = reasons_against(registry(), "concat_mla", CACHE_WRITE, "bf16")
    assert any("byte" in given for _, given in found)


HARMLESS = [faults.topk_writes_columns, faults.topk_leaves_the_rest, faults.topk_ignores_the_end]


@pytest.mark.parametrize("harmless", HARMLESS, ids=lambda op: op.__name__)
def test_what_is_not_known_of_the_topk_op_does_not_matter(harmless):
    with installed({**COREX_45, TOPK: harmless}):
        report = run_suite(registry(), "iluvatar.dsa_update_topk", device="cpu", level="quick")
    assert report.ok and report.skipped == 0 and report.results, [r.message for r in report.results if r.status != "passed"]


@pytest.mark.parametrize("fault", [faults.topk_takes_the_later_of_equal_scores, faults.topk_is_one_short])
def test_a_topk_op_that_chooses_others_is_rejected(fault):
    with installed({**COREX_45, TOPK: fault}):
        found = reasons_against(registry(), "dsa_update_topk", TOPK_SELECT)
    assert found and all(of == "probe" and "wrong values" in given for of, given in found), found


def renamed(q, kv, indices, scale):
    return ops.flash_mla_sparse_prefill(q, kv, indices, scale)


def test_an_op_that_takes_other_arguments_is_not_called():
    with installed({**COREX_42, next(iter(FORK)): renamed}):
        machine = registry()
        found = reasons_against(machine, "fork_sparse_prefill", SPARSE_PREFILL)
        assert machine.select(PREFILL)[0].name == "reference.torch"
    assert found == [("calling convention", "flash_mla_sparse_prefill(q, kv, indices, scale)")]
