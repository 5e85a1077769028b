# SPDX-License-Identifier: Apache-2.0
"""indexer_select: scores of some tokens at a time into bounded scratch, then the top-k of each row.

Scratch holds the scores of as many tokens as SCRATCH_BYTES allow, beside what this plugin's own `topk_select` takes for them.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

from mla_portable.primitives import TopkSelect
from mla_portable_triton.kernels import indexer_logits, topk_select
from mla_portable_triton.kernels.index_keys import Numbers

__all__ = ["SCRATCH_BYTES", "launch", "rows_at_a_time"]

SCRATCH_BYTES: Final = 64 << 20


def rows_at_a_time(num_tokens: int, num_logits: int, topk: int) -> int:
    """Tokens whose scores are held at a time, at least 1; alike in all parts but the last."""
    each = 4 * (num_logits + 2) + topk_select.scratch_bytes(1, num_logits, topk)
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
    choose: TopkSelect,
) -> None:
    """Write `out` [T, K]. Allocates up to SCRATCH_BYTES on the current stream. Graph-safe where `choose` is."""
    num_tokens, num_logits, topk = q.shape[0], block_table.shape[1] * index_cache.shape[1], out.shape[1]
    if num_tokens == 0:
        return
    if num_logits == 0 or index_cache.shape[0] == 0:
        out.fill_(-1)
        return
    rows = rows_at_a_time(num_tokens, num_logits, topk)
    logits = torch.empty((rows, num_logits), dtype=torch.float32, device=q.device)
    bounds = torch.empty((2, rows), dtype=torch.int32, device=q.device)
    for first in range(0, num_tokens, rows):
        count = min(rows, num_tokens - first)
        scores, limits = logits[:count], bounds[:, :count]
        indexer_logits.launch(
            scores, q, weights, index_cache, query_start_loc, seq_lens, block_table,
            numbers=numbers, bounds=limits, first_token=first,
        )  # fmt: skip
        choose(scores, limits[0], limits[1], topk=topk, out=out[first : first + count])
