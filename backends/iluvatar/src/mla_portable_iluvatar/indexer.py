# SPDX-License-Identifier: Apache-2.0
"""indexer_logits through the vendor's block-wise MQA logits, which know bf16 keys, bf16 weights and lengths as running sums.

The ops score positions of a request into columns of its tokens' rows. What they leave where a token sees nothing is nowhere
stated, so that is -inf afterwards whatever it was, and so is a score of NaN; a block that is not there is read as block 0 and
its scores replaced. Whether the ops' ReLU keeps NaN is not known.
Tokens that belong to no request are passed as one more request before the first and one after the last: the ops get running
sums from 0 to T whatever `query_start_loc` says. No request has less context than tokens. Which longest query and
context an op takes is known only on the device, so it gets bounds that the host knows: all tokens, and all
that the table holds. It allocates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mla_portable.layouts import INDEX_HEAD_SIZE
from mla_portable_iluvatar.resolve import Op

HEADS: Final = 64
"""The only number publicly tested (InfiniCore, test/infinicore/ops/dsa.py), and that of DeepSeek-V3.2."""
BLOCK_SIZES: Final = (16, 32, 64)
"""Those with a kernel; for others the older op falls to its twin (a comment in vllm-iluvatar 0.1.0)."""


@dataclass(frozen=True, slots=True, eq=False)
class LogitsArguments:
    """What the ops take, contiguous.

    logits [T, width] float32, to be written; q [T, H, 128] bf16; ends_q, ends_kv [R' + 1] int32, running sums of tokens
    and lengths from 0; cache [blocks, block_size, 128] bf16; table [R', columns] int32; weights [T, H] bf16.
    """

    logits: Tensor
    q: Tensor
    ends_q: Tensor
    ends_kv: Tensor
    cache: Tensor
    table: Tensor
    weights: Tensor


LogitsCall = Callable[[Op, LogitsArguments], Tensor]
"""Calls the op; returns the logits [T, width], which need not be the tensor that was given."""


def dsa_indexer(op: Op, a: LogitsArguments) -> Tensor:
    """(q, cu_seqlens_q, cu_seqlens_kv, kv_cache, block_table, weights, logits=, max_q_len=, ..): returns the logits."""
    width = a.logits.shape[1]
    returned = op(
        a.q, a.ends_q, a.ends_kv, a.cache, a.table, a.weights,
        logits=a.logits, max_q_len=a.q.shape[0], max_kv_len=width, max_context_len=width,
    )  # fmt: skip
    return returned if isinstance(returned, Tensor) else a.logits


def block_sparse(op: Op, a: LogitsArguments) -> Tensor:
    """The same by position, with the logits before the three lengths: writes them."""
    width = a.logits.shape[1]
    op(a.q, a.ends_q, a.ends_kv, a.cache, a.table, a.weights, a.logits, a.q.shape[0], width, width)
    return a.logits


def bind_indexer_logits(op: Op, *, call: LogitsCall) -> Callable[..., Tensor]:
    """indexer_logits through `op`; weights are rounded to bf16."""

    def indexer_logits(
        q: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        out: Tensor,
    ) -> Tensor:
        num_blocks, block_size, _ = index_cache.shape
        num_reqs, columns = block_table.shape
        num_tokens, capacity = q.shape[0], columns * block_size
        out.fill_(-math.inf)
        if 0 in (num_tokens, num_reqs, num_blocks, capacity, out.shape[1]):
            return out
        lengths = seq_lens.clamp(0, capacity)
        present = (block_table >= 0) & (block_table < num_blocks)  # [R, columns]
        pad = torch.nn.functional.pad
        inside = query_start_loc.clamp(0, num_tokens).cummax(0).values.to(torch.int32)
        ends_q = pad(pad(inside, (1, 0), value=0), (0, 1), value=num_tokens)  # [R + 3]: requests 0 and R + 1 are nobody's
        given = pad(lengths, (1, 1)).maximum(ends_q.diff()).clamp(1, capacity)
        logits = call(
            op,
            LogitsArguments(
                q.new_empty((num_tokens, capacity), dtype=torch.float32),
                q.contiguous(),
                ends_q,
                pad(given.cumsum(0, dtype=torch.int32), (1, 0)),
                index_cache.contiguous(),
                pad(torch.where(present, block_table, 0), (0, 0, 1, 1)),
                weights.to(torch.bfloat16).contiguous(),
            ),
        )
        token = torch.arange(num_tokens, dtype=torch.int64, device=q.device)
        begins, ends = query_start_loc[:-1].contiguous(), query_start_loc[1:].contiguous()
        owner = torch.searchsorted(ends, token, right=True).clamp(max=num_reqs - 1)  # [T]
        owned = (begins[owner] <= token) & (token < ends[owner])
        own = torch.where(owned, lengths[owner] - (ends[owner] - token), -1)  # [T] position of each token
        width = min(capacity, out.shape[1])
        position = torch.arange(width, dtype=torch.int64, device=q.device)
        seen = (position <= own.unsqueeze(1)) & present[owner][:, position // block_size]
        scores = logits[:, :width]
        out[:, :width] = torch.where(seen & ~scores.isnan(), scores, -math.inf)
        return out

    return indexer_logits


def indexer_trial(op: Op, device: torch.device, *, call: LogitsCall) -> None:
    """One call on a small problem: four tokens of one request."""
    q = torch.zeros((4, HEADS, INDEX_HEAD_SIZE), dtype=torch.bfloat16, device=device)
    starts = torch.tensor([0, 4], dtype=torch.int32, device=device)
    lengths, table = torch.full_like(starts[:1], 64), torch.zeros_like(starts[:1]).view(1, 1)
    out = torch.empty((4, 64), dtype=torch.float32, device=device)
    bind_indexer_logits(op, call=call)(
        q, q.new_zeros((4, HEADS)), q.new_zeros((1, 64, INDEX_HEAD_SIZE)), starts, lengths, table, out=out
    )
