# SPDX-License-Identifier: Apache-2.0
"""indexer_select: scores of some tokens at a time into bounded scratch, then the top-k of each row: two kernels of others.

Scratch holds the scores of as many tokens as SCRATCH_BYTES allow, and what `topk_select` needs for them.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

from mla_portable_triton.kernels import indexer_logits, topk_select
from mla_portable_triton.kernels.index_keys import Numbers

__all__ = ["SCRATCH_BYTES", "launch", "rows_at_a_time"]

SCRATCH_BYTES: Final = 64 << 20


def rows_at_a_time(num_tokens: int, num_logits: int, topk: int) -> int:
    """Tokens whose scores are held at a time, at least 1; alike in all parts but the last."""
    each = 4 * (num_logits + 1) + topk_select.scratch_bytes(1, num_logits, topk)
    most = max(1, (SCRATCH_BYTES - (1 << 10)) // each)
    return triton.cdiv(num_tokens, triton.cdiv(num_tokens, most))


def launch(
    out: Tensor,
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    numbers: Numbers,
) -> None:
    """Write `out` [T, K]. Allocates up to SCRATCH_BYTES on the current stream; may be captured in a CUDA graph."""
    num_tokens, num_logits = q.shape[0], block_table.shape[1] * index_cache.shape[1]
    if num_tokens == 0:
        return
    if num_logits == 0 or index_cache.shape[0] == 0:
        out.fill_(-1)
        return
    rows = rows_at_a_time(num_tokens, num_logits, out.shape[1])
    logits = torch.empty((rows, num_logits), dtype=torch.float32, device=q.device)
    ends = torch.empty(rows, dtype=torch.int32, device=q.device)
    for first in range(0, num_tokens, rows):
        some = slice(0, min(rows, num_tokens - first))
        indexer_logits.launch(
            logits[some], q, weights, index_cache, query_start_loc, seq_lens, block_table,
            numbers=numbers, ends=ends[some], first_token=first,
        )  # fmt: skip
        topk_select.launch(out[first : first + rows], logits[some], None, ends[some])
