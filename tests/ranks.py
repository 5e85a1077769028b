# SPDX-License-Identifier: Apache-2.0
"""Ranks that share sequences, as processes on gloo: run by test_context_parallel.py.

    python tests/ranks.py SIZE INTERLEAVE STORE

What an engine does on each rank: scores its own keys and merges the selections; gathers the query's heads, attends to its own
keys with all of them, merges the partial results. Each rank holds what came out against the oracle on everything.
"""

from __future__ import annotations

import multiprocessing
import sys
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from attention_steps import BATCHES, BLOCK, HEADS, MODEL_LEN, assert_matches, make_layer, make_step, plan_for
from shares import shared

import mla_portable
from mla_portable.attention import SelectionMerge
from mla_portable.contracts import ContextShare
from mla_portable.judge.problems.indexer_select import indexer_select as scores_of
from mla_portable.layouts import INDEX_FP8
from mla_portable.primitives import TOPK_SELECT

WIDTH, INDEX_HEADS, TOPK = 128, 4, 12


def gathered(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim=dim)


def attend(name: str, layout: str, route: str, share: ContextShare) -> None:
    """A step of a layer whose heads are split over the ranks."""
    step = make_step(name, layout)
    batch, cache = shared(step, share)
    layer = make_layer(route, layout, BATCHES[name][1], share=share)
    own = [head for head in range(HEADS) if head % share.size == share.rank]  # heads of this rank; some have fewer
    padded = torch.zeros((len(step.q), -(-HEADS // share.size), step.q.shape[2]), dtype=step.q.dtype)
    padded[:, : len(own)] = step.q[:, own]
    order = [r + share.size * i for r in range(share.size) for i in range(padded.shape[1])]  # of the gathered heads
    q = torch.empty_like(step.q)
    everyone = gathered(padded, 1)
    for place, head in enumerate(order):
        if head < HEADS:
            q[:, head] = everyone[:, place]
    out, lse = layer.forward(q, cache, step.topk_indices, plan_for(layer, batch))
    assert lse is not None
    outs, lses = gathered(out.unsqueeze(0), 0), gathered(lse.unsqueeze(0), 0)
    assert_matches(step, *mla_portable.merge_states(outs, lses, backend="reference"))


def select(share: ContextShare) -> None:
    """The positions that ranks keep together are those of the best scores."""
    random = torch.Generator().manual_seed(7)
    query_lens, seq_lens = [1, 3, 20], [40, 3, MODEL_LEN]
    starts = torch.tensor(np.concatenate([[0], np.cumsum(query_lens)]), dtype=torch.int32)
    lengths, tokens = torch.tensor(seq_lens, dtype=torch.int32), sum(query_lens)
    keys = torch.randint(-2, 3, (len(seq_lens), MODEL_LEN, WIDTH), generator=random).float()  # so small that scores tie
    keys[:, 5::7] = keys[:, 4:5]
    q = torch.randint(-1, 2, (tokens, INDEX_HEADS, WIDTH), generator=random).float().to(torch.float8_e4m3fn)
    weights = torch.ones(tokens, INDEX_HEADS)

    def pages(of: ContextShare) -> tuple[torch.Tensor, torch.Tensor]:
        columns = -(-MODEL_LEN // of.size // BLOCK) + 1
        table = torch.arange(len(seq_lens) * columns, dtype=torch.int32).view(-1, columns)
        cache = torch.full((table.numel(), BLOCK, INDEX_FP8.row_width), 0xFF, dtype=torch.uint8)
        slots, rows = [], []
        for request, length in enumerate(seq_lens):
            for position in range(length):
                own = int(of.own(torch.tensor([position])))
                if own >= 0:
                    slots.append(int(table[request, own // BLOCK]) * BLOCK + own % BLOCK)
                    rows.append(keys[request, position])
        if rows:
            mla_portable.indexer_cache_write(torch.stack(rows).bfloat16(), cache, torch.tensor(slots), backend="reference")
        return cache, table

    cache, table = pages(share)
    scores = torch.empty(tokens, TOPK)
    chosen = mla_portable.indexer_select(
        q, weights, cache, starts, lengths, table, topk=TOPK, scores_out=scores, backend="reference", **share.arguments
    )
    merge = SelectionMerge(share, TOPK, TOPK_SELECT.reference, lambda each: gathered(each, 1), chosen.device)
    merge(scores, chosen)
    assert ((chosen < 0) | (share.own(chosen) >= 0)).all()
    kept = gathered(chosen, 1)
    whole, whole_table = pages(ContextShare())
    every = scores_of(q, weights, whole, starts, lengths, whole_table, topk=TOPK)
    for row, found in zip(every, kept.tolist(), strict=True):
        seen = [position for position, score in enumerate(row.tolist()) if score > -float("inf")]
        positions = [position for position in found if position >= 0]
        assert len(set(positions)) == len(positions) == min(TOPK, len(seen))
        best = sorted((float(row[position]) for position in seen), reverse=True)[:TOPK]
        assert sorted((float(row[position]) for position in positions), reverse=True) == best


def rank(share: ContextShare, store: str) -> None:
    """What a process of the group does."""
    group = {"rank": share.rank, "world_size": share.size, "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", init_method=f"file://{store}", **group)
    attend("decodes and prefills in chunks", "fp8_ds_mla", "split", share)
    attend("two-token decodes and prefills", "bf16", "direct", share)
    attend("mixed, padded", "fp8_ds_mla", "fused", share)
    select(share)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    size, interleave = map(int, sys.argv[1:3])
    fork = multiprocessing.get_context("fork")  # torch is imported once
    shares = [ContextShare(size, number, interleave) for number in range(size)]
    processes = [fork.Process(target=rank, args=(share, sys.argv[3])) for share in shares]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(int(any(process.exitcode for process in processes)))


if __name__ == "__main__":
    main()
