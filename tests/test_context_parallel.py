# SPDX-License-Identifier: Apache-2.0
"""Layers of several ranks that share each sequence: their partial results, merged, are those of one rank with everything."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_steps import BATCHES, BLOCK, LAYOUTS, ROUTES, SPEC, assert_matches, make_layer, make_step, plan_for
from hypothesis import given, settings
from hypothesis import strategies as st
from shares import shared

import mla_portable
from mla_portable.attention import AttentionSpec, SelectionMerge, selections
from mla_portable.contracts import Batch, ContextShare, InvalidArgument
from mla_portable.planner import Planner
from mla_portable.primitives import TOPK_SELECT

GROUPS = [(2, 1), (3, 4), (8, 1)]


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("size", "interleave"), GROUPS)
def test_merged_ranks_agree_with_the_oracle(size: int, interleave: int, route: str, name: str) -> None:
    layout = LAYOUTS[len(name) % len(LAYOUTS)]
    step, parts = make_step(name, layout), []
    for rank in range(size):
        share = ContextShare(size, rank, interleave)
        batch, cache = shared(step, share)
        layer = make_layer(route, layout, BATCHES[name][1], share=share)
        if layer.buffers.workspace is not None:
            layer.buffers.workspace.fill_(math.nan)
        out, lse = layer.forward(step.q, cache, step.topk_indices, plan_for(layer, batch))
        assert lse is not None
        nothing = (share.own(step.topk_indices[: len(lse)]) < 0).all(dim=1)  # [T]
        assert not out[nothing].any()
        assert (lse[nothing] == -math.inf).all()
        assert out.isfinite().all()
        parts.append((out, lse))
    outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
    assert_matches(step, *mla_portable.merge_states(outs, lses, backend="reference"))


@pytest.mark.parametrize("size", [2, 8])
def test_the_workspace_holds_own_tokens(size: int) -> None:
    """Chunks are cut by own lengths: twice and eight times as many sequences fit."""
    query_lens, seq_lens = np.array([3, 5, 2, 1], dtype=np.int32), np.array([40, 48, 30, 1], dtype=np.int32)
    starts = np.concatenate([[0], query_lens.cumsum()]).astype(np.int32)
    for rank in range(size):
        share = ContextShare(size, rank)
        layer = make_layer("split", share=share)
        table = torch.zeros((4, -(-48 // size // BLOCK)), dtype=torch.int32)
        (chunk,) = Planner(layer.planner_config()).plan(Batch(starts, seq_lens, table)).prefill_chunks
        own = share.lengths(seq_lens)
        assert chunk.seq_lens.tolist() == own.tolist()
        assert chunk.workspace_starts.tolist() == (own.cumsum() - own).tolist()
        assert chunk.workspace_rows == own.sum()


def test_a_chunk_of_nothing_has_a_row() -> None:
    """Kernels are not called on a workspace without rows."""
    layer = make_layer("upconvert", share=ContextShare(2, 1))
    batch = Batch(np.array([0, 1], dtype=np.int32), np.array([1], dtype=np.int32), torch.zeros((1, 1), dtype=torch.int32))
    (chunk,) = plan_for(layer, batch).prefill_chunks
    assert (chunk.seq_lens.tolist(), chunk.workspace_rows) == ([0], 1)


def test_a_block_table_reaches_further_on_more_ranks() -> None:
    starts, lengths = np.array([0, 1], dtype=np.int32), np.array([2 * BLOCK + 1], dtype=np.int32)
    batch = Batch(starts, lengths, torch.zeros((1, 1), dtype=torch.int32))
    plan_for(make_layer("direct", share=ContextShare(3, 2)), batch)
    with pytest.raises(InvalidArgument, match=f"at most {2 * BLOCK}"):
        plan_for(make_layer("direct", share=ContextShare(2, 1)), batch)


@pytest.mark.parametrize(
    ("field", "changes"), [("need_lse", {"need_lse": False}), ("attn_sink", {"attn_sink": True}), ("share", {"share": 2})]
)
def test_a_spec_whose_partial_results_cannot_be_merged(field: str, changes: dict[str, object]) -> None:
    fields = {name: getattr(SPEC, name) for name in SPEC.__slots__} | {"share": ContextShare(2, 0)} | changes
    with pytest.raises(InvalidArgument) as refusal:
        AttentionSpec(**fields)
    assert refusal.value.argument == field


@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 4), topk=st.integers(1, 6), data=st.data())
def test_ranks_keep_the_best_of_all(size: int, topk: int, data: st.DataObject) -> None:
    values = st.sampled_from([-1e30, -1.5, -0.0, 0.0, 1e-40, 2.0, 3e38])
    everyone = data.draw(st.lists(st.tuples(st.integers(0, size - 1), values), max_size=14))  # position -> its rank, its score
    scores, positions = torch.full((size, 2, topk), -math.inf), torch.full((size, 2, topk), -1, dtype=torch.int32)
    order = sorted(range(len(everyone)), key=lambda position: (-everyone[position][1], *everyone[position][:1], position))
    for rank in range(size):
        for entry, position in enumerate(sorted([p for p in order if everyone[p][0] == rank][:topk])):
            scores[rank, :, entry], positions[rank, :, entry] = everyone[position][1], position
    gathered = torch.cat([*scores], dim=1)
    for rank in range(size):
        merge = SelectionMerge(ContextShare(size, rank), topk, TOPK_SELECT.reference, lambda _: gathered, scores.device)
        merge(scores[rank], positions[rank])
        kept = [position for position in order[:topk] if everyone[position][0] == rank]
        for row in positions[rank].tolist():
            assert sorted(row) == sorted([*kept, *[-1] * (topk - len(kept))])


def test_selections_are_gathered_some_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selections, "_GATHERED_BYTES", 4 * 2 * 3 * 4)  # 4 tokens of 3 entries of 2 ranks
    scores, positions = torch.rand(10, 3), torch.arange(3, dtype=torch.int32).expand(10, 3).contiguous()
    sent: list[int] = []

    def gather(scores: torch.Tensor) -> torch.Tensor:
        sent.append(len(scores))
        return torch.cat([torch.full_like(scores, -math.inf), scores], dim=1)

    merge = SelectionMerge(ContextShare(2, 1), 3, TOPK_SELECT.reference, gather, scores.device)
    merge(scores, positions)
    assert sent == [4, 4, 2]
    assert positions.tolist() == [[0, 1, 2]] * 10
    assert merge.nbytes(10) == merge.nbytes(4) > merge.nbytes(3)


@pytest.mark.parametrize(("size", "interleave"), [(2, 8), (4, 1)])
def test_processes_that_share_sequences_agree(size: int, interleave: int, tmp_path: Path) -> None:
    """tests/ranks.py on gloo: the indexer's selection and a layer's attention, as an engine composes them."""
    command = [sys.executable, str(Path(__file__).with_name("ranks.py")), str(size), str(interleave), str(tmp_path / "store")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
