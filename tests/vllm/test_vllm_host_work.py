# SPDX-License-Identifier: Apache-2.0
"""What vLLM's host does in a layer of ours beside kernels, counted: views, allocations and other operations of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import vllm_indexer
from recorder import Recorder, registry_of
from test_host_work import Kernels, counted
from test_vllm_prompts import make_prompt_engine
from vllm_engine import HEADS, LATENT, NOPE, ROPE, V_DIM, make_engine, make_step

from mla_portable.choose import registry as choose
from mla_portable.engines.vllm import indexer


def null_kernels(monkeypatch: pytest.MonkeyPatch, plugin: Recorder) -> None:
    monkeypatch.setattr(choose, "_registry", registry_of(plugin))


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 1, 9]], ids=["decodes", "decodes and a prompt"])
def test_a_layer_allocates_its_result_alone(query_lens: list[int], monkeypatch: pytest.MonkeyPatch):
    """The prompt is computed by what also decodes, in one call."""
    null_kernels(monkeypatch, Recorder(prefills_as="recorder.tape"))
    engine = make_engine("fp8")
    step = make_step(engine, query_lens, [70, 100, 90])
    metadata = engine.builder.build(0, step.common)
    found = counted(lambda: engine.impl.forward_mqa(step.q, engine.kv_cache, metadata, engine.layer))
    assert found.pop("allocation") == 1 and found.pop("view") <= 6 and found == {}


@pytest.mark.parametrize(
    ("seq_lens", "most"),
    [
        # the rotary part and the result without their middle dimension, the projection by heads, keys and values
        ([33, 30], {"view": 4}),
        # the latent and rotary columns of the gathered rows, to which new tokens are copied
        ([50, 40], {"view": 5, "allocation": 1, "operation": 2}),
        # and the selection of the step's tokens
        ([100, 40], {"view": 6, "allocation": 1, "operation": 2}),
    ],
    ids=["short", "with context", "selected"],
)
def test_prompts_of_a_layer_cost_few_views(seq_lens: list[int], most: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    null_kernels(monkeypatch, Kernels(support={"head_dims": ((NOPE + ROPE, V_DIM),)}))
    engine = make_prompt_engine(monkeypatch, "fp8")
    step = make_step(engine, [33, 30], seq_lens)
    metadata = engine.builder.build(0, step.common)
    q, latent = torch.zeros(63, HEADS, NOPE + ROPE), torch.zeros(63, LATENT)
    rope, out = torch.zeros(63, 1, ROPE), torch.zeros(63, HEADS * V_DIM)
    projected = {rows: torch.zeros(rows, HEADS * (NOPE + V_DIM)) for rows in (63, sum(seq_lens))}
    monkeypatch.setattr(engine.impl, "_project", lambda rows: (projected[rows.shape[0]],))
    scale = torch.ones(())
    found = counted(lambda: engine.impl.forward_mha(q, latent, rope, engine.kv_cache, metadata, scale, out))
    assert found == most


def test_positions_that_all_layers_select_are_counted_once_a_step():
    """Short prompts: each layer then writes them with two kernels."""
    part = indexer.Requests(
        0,
        7,
        query_start_loc=torch.tensor([0, 4, 7], dtype=torch.int32),
        seq_lens=torch.tensor([6, 3], dtype=torch.int32),
        block_table=torch.zeros((2, 1), dtype=torch.int32),
        longest=6,
    )
    outs = [torch.zeros((7, vllm_indexer.TOPK + 4), dtype=torch.int32) for _ in range(2)]
    found = [counted(lambda out=out: part.select_all(out[:, : vllm_indexer.TOPK])) for out in outs]
    assert found == [{"view": 1, "operation": 2}] * 2
    for out in outs:
        lengths = [3, 4, 5, 6, 1, 2, 3]
        assert [[p for p in row if p >= 0] for row in out[:, : vllm_indexer.TOPK].tolist()] == [list(range(n)) for n in lengths]
        assert not out[:, vllm_indexer.TOPK :].any()


def test_another_layer_s_width_is_counted_again():
    part: Any = indexer.Requests(0, 2, torch.tensor([0, 2]).int(), torch.tensor([2]).int(), torch.zeros((1, 1)).int(), 2)
    for width in (4, 8, 4):
        out = torch.zeros((2, width), dtype=torch.int32)
        part.select_all(out)
        assert out.tolist() == [[0, *[-1] * (width - 1)], [0, 1, *[-1] * (width - 2)]]
