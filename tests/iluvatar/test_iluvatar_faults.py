# SPDX-License-Identifier: Apache-2.0
"""Each misbehaving op is found before its first real call, with a reason that names the symptom, and another is taken."""

from __future__ import annotations

import corex_faults as faults
import corex_ops as ops
import oracle
import pytest
import torch
from corex_machine import BI_V150, COREX_32, COREX_42, COREX_45, installed, registry

from mla_portable.contracts import Primitive, Request, UnsupportedRequest
from mla_portable.primitives import (
    CACHE_WRITE,
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    INDEXER_LOGITS,
    SPARSE_DECODE,
    SPARSE_PREFILL,
)

V2 = "ixtriturbo._C:ops.flash_mla_sparse_v2"
LOGITS = next(place for place in COREX_45 if "mqa_logits_perf" in place)
MAP_PREFILL = next(place for place in COREX_45 if "map_prefill" in place)
CONCAT = "ixformer.inference.functions:vllm_concat_and_cache_mla"
GATHER = "vllm._custom_ops:cp_gather_and_upconvert_fp8_kv_cache"
PAGED_32 = "ixformer.functions:vllm_paged_attention_mla"
PAGED = "ixformer.inference.functions:vllm_paged_attention_mla"
PREFILL = Request(SPARSE_PREFILL, BI_V150, kv_layout="bf16", num_heads=16, topk=128)
V2_VARIANTS = ["flash_mla_sparse_v2", "flash_mla_sparse_v2_h64", "flash_mla_sparse_v2_sink"]

SYMPTOMS = {
    faults.ignores_lens: ("probe", "wrong values: out is off by"),
    faults.reads_past_the_row: ("probe", "wrong values: out "),
    faults.writes_half: ("probe", "wrong values: out holds NaN"),
    faults.raises: ("probe", "raised RuntimeError: ixErrorNotSupported: no kernel for this shape"),
    faults.forgets_the_scale: ("probe", "wrong values: out is off by"),
    faults.falls_to_a_twin: ("speed", "runs ref_flash_mla_sparse_v2"),
    faults.loops: ("speed", "where batched torch took"),
}


def reasons_against(machine, name: str, primitive: Primitive, layout: str | None = None) -> list[tuple[str, str]]:
    implementation = next(i for i in machine.implementations(primitive) if i.name == f"iluvatar.{name}")
    report = machine.probe(implementation, torch.device("cpu"), layout=layout)
    return [(reason.subject, reason.given) for reason in report.reasons]


@pytest.mark.parametrize("fault", SYMPTOMS, ids=lambda fault: fault.__name__)
def test_a_faulty_sparse_op_is_rejected_by_its_symptom_and_the_next_serves(fault):
    subject, symptom = SYMPTOMS[fault]
    with installed({**COREX_45, V2: fault}):
        machine = registry()
        chosen, decision = machine.select(PREFILL)
        assert chosen.name == "iluvatar.ds4_sparse_fwd"
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
    assert "no kernel for this shape" in text and "ixformer.inference.functions" in text and "vllm_iluvatar" in text
    assert decision.chosen == "reference.torch"


def test_an_op_that_changes_its_input_is_rejected():
    with installed({**COREX_45, V2: faults.changes_q}):
        found = reasons_against(registry(), "flash_mla_sparse_v2", SPARSE_PREFILL)
    assert found == [("probe", "it changed its input q")]


def test_a_missing_symbol_is_named():
    with installed({place: op for place, op in COREX_45.items() if place != V2} | {"ixtriturbo._C:ops.other": ops.attend}):
        machine = registry()
        assert reasons_against(machine, "flash_mla_sparse_v2", SPARSE_PREFILL) == [
            ("symbol", "ixtriturbo._C.ops.flash_mla_sparse_v2")
        ]
        assert machine.select(PREFILL)[0].name == "iluvatar.ds4_sparse_fwd"


def test_an_op_that_wants_64_heads_is_served_by_the_variant_that_pads():
    with installed({**COREX_45, V2: faults.wants_64_heads}):
        chosen, _ = registry().select(PREFILL)
    assert chosen.name == "iluvatar.flash_mla_sparse_v2_h64"


def test_a_sink_that_is_ignored_takes_down_its_own_variant_alone():
    with installed({**COREX_45, V2: faults.forgets_the_sink}):
        machine = registry()
        assert machine.select(PREFILL)[0].name == "iluvatar.flash_mla_sparse_v2"
        assert machine.select(PREFILL.but(attn_sink=True))[0].name == "iluvatar.ds4_sparse_fwd_sink"


def test_an_lse_in_another_base_is_recognised():
    with installed({**COREX_42, PAGED: faults.lse_in_base_2(torch.int32)}):
        machine = registry()
        found = reasons_against(machine, "paged_mla_inference_i32_lse", SPARSE_PREFILL)
        assert any("looks like base 2" in given for _, given in found)
        assert reasons_against(machine, "paged_mla_inference_i32", SPARSE_PREFILL) == []


def test_an_lse_that_does_not_come_is_said():
    with installed({**COREX_42, PAGED: faults.lse_missing(torch.int32)}):
        found = reasons_against(registry(), "paged_mla_inference_i32_lse", SPARSE_PREFILL)
    assert any("instead of (out, lse)" in given for _, given in found)


def test_a_dense_op_that_takes_no_blocks_of_one_token_says_so_and_is_passed_over():
    with installed({**COREX_32, PAGED_32: faults.wants_larger_blocks(torch.int64)}):
        machine = registry()
        found = reasons_against(machine, "paged_mla_functions_i64", SPARSE_DECODE)
        chosen, _ = machine.select(Request(SPARSE_DECODE, BI_V150, kv_layout="bf16", num_heads=16, topk=128))
    assert any("block_size 1 is not supported" in given for _, given in found), found
    assert chosen.name == "reference.torch"


def test_a_topk_that_covers_the_context_is_the_dense_op_exactly():
    """Every slot of the context, in the order of a top-k: dense attention over blocks of one token."""
    cache, q = torch.randn(4, 16, 576).bfloat16(), torch.randn(2, 1, 16, 576).bfloat16()
    rows = [torch.randperm(64)[:count] for count in (50, 64)]
    indices = torch.stack([torch.nn.functional.pad(row, (0, 64 - len(row)), value=-1) for row in rows]).to(torch.int32)
    want, want_lse = oracle.sparse_decode(q, cache, indices[:, None], softmax_scale=0.05)
    request = Request(SPARSE_DECODE, BI_V150, kv_layout="bf16", num_heads=16, topk=64, lse=True)
    with installed(COREX_42):
        machine = registry()
        assert machine.select(request)[0].name == "iluvatar.paged_mla_inference_i32_lse"
        got, lse = machine.bind(request)(q, cache, indices[:, None], softmax_scale=0.05)
    assert (got.double() - want).abs().max() < 0.01 * want.abs().max() and torch.allclose(lse.double(), want_lse, atol=1e-4)


def test_the_wrong_dtype_of_a_block_table_leaves_the_other():
    with installed({**COREX_42, PAGED: ops.paged_mla(torch.int64, knows_lse=True)}):
        chosen, _ = registry().select(PREFILL.but(lse=True))
    assert chosen.name == "iluvatar.paged_mla_inference_i64_lse"


def test_a_convert_that_loses_offsets_is_rejected_and_the_next_serves():
    with installed({**COREX_45, MAP_PREFILL: faults.convert_loses_the_offset}):
        machine = registry()
        found = reasons_against(machine, "map_prefill", CONVERT_INDICES)
        assert any("became slot" in given for _, given in found)
        chosen, _ = machine.select(Request(CONVERT_INDICES, BI_V150, topk=64, block_size=64))
    assert chosen.name == "iluvatar.map_decode"


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
        (faults.logits_half_written, "probe", "is nan, expected"),
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
        found = reasons_against(registry(), "concat_mla_inference", CACHE_WRITE, "bf16")
    assert any("byte" in given for _, given in found)


def test_a_gather_without_scales_is_rejected():
    with installed({**COREX_45, GATHER: faults.gather_forgets_the_scales}):
        found = reasons_against(registry(), "gather_implied", GATHER_UPCONVERT, "fp8_ds_mla")
    assert any("out is" in given for _, given in found)


@pytest.mark.parametrize(
    ("op", "variant"),
    [
        (ops.cp_gather_with_seq_lens, "gather_seq_lens"),
        (ops.cp_gather_without_seq_lens, "gather_implied"),
    ],
)
def test_each_convention_of_the_gather_is_told_by_its_parameters(op, variant):
    with installed({GATHER: op}):
        machine = registry()
        chosen, decision = machine.select(Request(GATHER_UPCONVERT, BI_V150, kv_layout="fp8_ds_mla"))
        assert chosen.name == f"iluvatar.{variant}"
        decision = machine.decide(decision.request, thorough=True)
    others = [v for v in decision.verdicts if v.implementation.startswith("iluvatar.gather") and not v.can_run]
    assert len(others) == 1 and all(v.reasons[0].subject == "calling convention" for v in others)
