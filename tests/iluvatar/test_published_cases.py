# SPDX-License-Identifier: Apache-2.0
"""The published cases: in the suite of everybody who claims them, right on the reference, and able to fail."""

from __future__ import annotations

from functools import partial

import oracle
import pytest
import torch
from corex_machine import registry

from mla_portable.judge.conformance import cases_for, run_case
from mla_portable.layouts import CORE_LAYOUTS
from mla_portable.primitives import CONVERT_INDICES, INDEXER_LOGITS, SPARSE_DECODE, SPARSE_PREFILL

CPU = torch.device("cpu")
PRIMITIVES = (CONVERT_INDICES, SPARSE_DECODE, SPARSE_PREFILL, INDEXER_LOGITS)


def published(implementation, facts):
    return [case for case in cases_for(implementation, facts, "quick") if "published" in case.id]


def test_the_published_slots_are_what_the_formula_gives():
    rows = torch.tensor([[0, 63, 64, -1], [1, 65, -1, -1], [0, 64, -1, -1], [3, 66, -1, -1]], dtype=torch.int32)
    owner, table = torch.tensor([0, 0, 1, 1], dtype=torch.int32), torch.tensor([[2, 3], [5, 6]], dtype=torch.int32)
    indices, counts = oracle.convert_indices(rows, owner, table, block_size=64)
    assert indices.tolist() == [[128, 191, 192, -1], [129, 193, -1, -1], [320, 384, -1, -1], [323, 386, -1, -1]]
    assert counts.tolist() == [3, 2, 2, 2]


def wrong_slots(topk, owner, table, *, block_size):
    return torch.where(topk < 0, 0, topk), (topk >= 0).sum(1, dtype=torch.int32)


def reads_holes(solve, layout):
    def attend(q, kv, indices, **keywords):
        out, lse = solve(q, kv, indices.clamp(0, 79), kv_layout=layout, **keywords)
        return out.bfloat16(), lse.float()

    return attend


def test_the_published_lengths_are_what_compacting_counts():
    from mla_portable_iluvatar.rows import pick

    picked = pick(torch.tensor([[1, 2, -1, -1], [3, 4, 5, -1]], dtype=torch.int32), num_slots=6, lengths=None)
    assert picked.lens.tolist() == [2, 3] and picked.slots[:, :4].tolist() == [[1, 2, -1, -1], [3, 4, 5, -1]]


def scores_without_relu(q, weights, index_cache, *rest, out):
    want = oracle.indexer_logits(q, weights, index_cache, *rest, out=out)
    opposite = (-q.float()).to(q.dtype)
    negative = oracle.indexer_logits(opposite, weights, index_cache, *rest, out=out)
    return out.copy_(want - negative.nan_to_num(neginf=0.0))


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_they_catch_what_they_are_for(primitive):
    machine = registry()
    (implementation,) = (i for i in machine.implementations(primitive) if i.name == "reference.torch")
    wrong = {
        CONVERT_INDICES: lambda layout: wrong_slots,
        SPARSE_DECODE: partial(reads_holes, oracle.sparse_decode),
        SPARSE_PREFILL: partial(reads_holes, oracle.sparse_prefill),
        INDEXER_LOGITS: lambda layout: scores_without_relu,
    }[primitive]
    cases = published(implementation, machine.facts("cpu"))
    cases = [
        case for case in cases if case.request.kv_layout is None or case.request.kv_layout in CORE_LAYOUTS
    ]  # a plugin's that another test loaded
    assert cases
    for case in cases:
        assert run_case(case, wrong(case.request.kv_layout), CPU).status == "failed", case.id
