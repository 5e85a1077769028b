# SPDX-License-Identifier: Apache-2.0
"""indexer_select through the fused indexer, on a strict stand-in of it."""

from __future__ import annotations

import pytest
import torch
from ascend_machine import A2, A5, registry
from ascend_ops import Operations, torch_npu, vllm_ascend

from mla_portable.contracts import Request
from mla_portable.primitives import INDEXER_SELECT
from mla_portable_ascend import indexer


@pytest.fixture
def operations():
    found = Operations()
    with vllm_ascend(found):
        yield found


def request_for(facts=A2, **fields) -> Request:
    sizes = {"kv_layout": "index_bf16", "num_heads": 8, "topk": 20, "block_size": 16, "whole_tables": True, **fields}
    return Request(INDEXER_SELECT, facts, **sizes)


def case(gap: int = 0):
    """Three requests, whose blocks lie `gap` rows apart; one of them sees fewer keys than are asked for."""
    storage = torch.randn(9, 16 + gap, 128).bfloat16()
    table = torch.tensor([[8, 2, 0], [1, 3, 5], [4, 6, 7]], dtype=torch.int32)
    starts, lengths = torch.tensor([0, 2, 3, 7], dtype=torch.int32), torch.tensor([45, 12, 40], dtype=torch.int32)
    return torch.randn(7, 8, 128).bfloat16(), torch.randn(7, 8), storage[:, :16], starts, lengths, table


def test_it_serves_where_tables_are_promised_to_be_whole(operations):
    machine = registry()
    assert machine.decide(request_for(topk=32)).chosen == "ascend.lightning_indexer"
    decision = machine.decide(request_for(topk=32, whole_tables=False), thorough=True)
    reasons = {v.implementation: [r.subject for r in v.reasons] for v in decision.verdicts}
    assert decision.chosen == "reference.torch" and reasons["ascend.lightning_indexer"] == ["whole_tables"]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("gap", [0, 16, 4])
def test_blocks_are_read_where_they_lie_or_copied_for_a_few_requests_at_a_time(operations, monkeypatch, gap, ordered):
    bound = registry().bind(request_for(ordered=ordered))
    monkeypatch.setattr(indexer, "COPIED_BYTES", 2 * 3 * 16 * 128 * 2)  # of two requests
    operations.calls.clear()
    pages = case(gap)
    found = bound(*pages, topk=20)
    assert len(operations.calls) == (2 if gap == 4 else 1)
    want = INDEXER_SELECT.reference(*pages, topk=20)
    assert torch.equal(found.sort(1).values, want.sort(1).values)
    assert torch.equal(found, want) == ordered
    assert torch.equal(found == -1, want == -1), "what is absent stands behind"


@pytest.mark.parametrize(("facts", "dtype"), [(A2, torch.float32), (A5, torch.bfloat16)], ids=["A2", "A5"])
def test_weights_are_what_the_family_takes(facts, dtype):
    asked = []

    class Noted(Operations):
        def npu_lightning_indexer(self, query, key, weights, **keywords):
            asked.append(weights.dtype)
            return super().npu_lightning_indexer(query, key, weights, **keywords)

    found = Noted(strided=facts is A5)
    with vllm_ascend(found), torch_npu(found):
        registry(facts).bind(request_for(facts))(*case(), topk=20)
    assert set(asked) == {dtype}


@pytest.mark.parametrize("starts", [[0, 2, 3, 7], [2, 3, 3, 5], [-1, 2, 3, 9]], ids=["all", "tokens of nobody", "cut off"])
def test_tokens_are_those_of_their_requests(operations, starts):
    q, weights, cache, _, lengths, table = case()
    pages = q, weights, cache, torch.tensor(starts, dtype=torch.int32), lengths, table
    found = registry().bind(request_for(ordered=True))(*pages, topk=20)
    assert torch.equal(found, INDEXER_SELECT.reference(*pages, topk=20))
