# SPDX-License-Identifier: Apache-2.0
"""Rows of V4 and a second cache on the Triton kernels, against the oracle: splits that cut the tiles of both lists."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton_machine import device, facts

from mla_portable.contracts import DeviceFacts, Request
from mla_portable.judge.problems.attention_problem import EDGES, AttentionParams, DecodeParams, PrefillParams
from mla_portable.kit.split_kv import SplitSchedule
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_triton.bind_attention import bind_sparse_decode, bind_sparse_prefill

__all__ = ["device", "facts"]  # fixtures

TWO_LISTS: dict[str, Any] = {
    "heads": 3,
    "topk": 40,
    "rows": 4,
    "pattern": "holes",
    "sink": "finite",
    "lengths": True,
    "outputs": "views",
    "blocks": "strided",
    "extra_topk": 70,
    "extra_pattern": "absent",
    "extra_lengths": True,
}
EDGE_LENGTHS = TWO_LISTS | {"rows": len(EDGES), "limits": "edges"}
PAGED = {"block_size": 16, "extra_block_size": 2}
CASES = [
    DecodeParams(kv="fp8_v4", scale_format="pow2", query_len=2, **PAGED, **TWO_LISTS),
    DecodeParams(kv="fp8_ds_mla", scale_format="amax", query_len=1, **PAGED, **TWO_LISTS),
    DecodeParams(kv="fp8_nope", scale_format="amax", query_len=2, **PAGED, **TWO_LISTS),
    DecodeParams(kv="bf16", scale_format=None, query_len=2, **PAGED, **TWO_LISTS),
    PrefillParams(kv="fp8_v4", scale_format="pow2", query_len=None, block_size=53, extra_block_size=256, **TWO_LISTS),
    PrefillParams(
        kv="workspace_bf16_nope", scale_format=None, query_len=None, block_size=None, **(TWO_LISTS | {"blocks": "packed"})
    ),
    DecodeParams(kv="fp8_v4", scale_format="pow2", query_len=1, heads=2, topk=64, rows=3, block_size=1, pattern="corpus"),
    DecodeParams(kv="fp8_nope", scale_format="pow2", query_len=1, heads=2, topk=64, rows=3, block_size=3, pattern="corpus"),
    PrefillParams(kv="fp8_nope", scale_format="amax", query_len=None, block_size=53, extra_block_size=256, **TWO_LISTS),
    DecodeParams(kv="fp8_ds_mla", scale_format="amax", query_len=1, heads=2, topk=64, rows=3, block_size=16, nope=True),
    DecodeParams(kv="fp8_v4", scale_format="pow2", query_len=1, **PAGED, **EDGE_LENGTHS),
    PrefillParams(kv="workspace", scale_format=None, query_len=None, block_size=None, **(EDGE_LENGTHS | {"blocks": "packed"})),
]


def messages(params: AttentionParams, device: torch.device, facts: DeviceFacts, **keywords: Any) -> list[str]:
    """What the judge has against a call."""
    problem = params.build(7, device, facts)
    problem.kwargs.update(keywords)
    bind = bind_sparse_decode if params.primitive is SPARSE_DECODE else bind_sparse_prefill
    return [found.message for found in problem.findings(problem.call(bind(params.request(facts)))) if found.message]


@pytest.mark.parametrize("params", CASES, ids=lambda params: "-".join(params.words()))
def test_the_kernels_attend_to_the_union(device: torch.device, facts: DeviceFacts, params: AttentionParams):
    assert not messages(params, device, facts)


@pytest.mark.parametrize("num_splits", [2, 3, 5])
def test_splits_cut_the_tiles_of_both_lists(device: torch.device, facts: DeviceFacts, num_splits: int):
    """130 and 300 keys: a split has the end of the first list and the beginning of the second, another nothing at all."""
    params = replace(
        CASES[0], topk=130, extra_topk=300, rows=2, query_len=1, pattern="dense", extra_pattern="holes", lengths=False
    )
    shape = (num_splits, params.rows, params.heads)
    out, lse = (torch.full(each, math.nan, device=device) for each in ((*shape, 512), shape))
    schedule = SplitSchedule(params.rows, params.heads, params.topk, num_splits, out, lse, extra_topk=300)
    assert not messages(params, device, facts, schedule=schedule)


def test_a_kernel_that_leaves_the_second_list_out_is_found_out(device: torch.device, facts: DeviceFacts):
    params = replace(CASES[0], rows=2, pattern="dense", extra_pattern="dense", lengths=False, extra_lengths=False)
    problem = params.build(7, device, facts)
    for name in ("extra_kv_cache", "extra_indices"):
        problem.kwargs.pop(name)
    call = bind_sparse_decode(Request(SPARSE_DECODE, facts, kv_layout="fp8_v4", num_heads=3))
    assert any(found.message for found in problem.findings(problem.call(call)))


def test_both_primitives_declare_it(facts: DeviceFacts):
    from mla_portable_triton.support import SUPPORT

    for primitive in (SPARSE_DECODE, SPARSE_PREFILL):
        request = Request(primitive, facts, kv_layout="fp8_v4", num_heads=8, topk=128, scale_format="pow2")
        assert not SUPPORT[primitive].reasons(
            request.but(extra_topk=512, extra_block_size=2, extra_lengths=True, attn_sink=True)
        )
