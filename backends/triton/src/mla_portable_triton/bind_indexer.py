# SPDX-License-Identifier: Apache-2.0
"""indexer_logits and topk_select bound to their kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_portable.contracts import Request
from mla_portable.primitives import IndexerLogits, TopkSelect
from mla_portable_triton.support import interpreter_is_on

__all__ = ["bind_indexer_logits", "bind_topk_select"]


def bind_indexer_logits(request: Request) -> IndexerLogits:
    """indexer_logits for any number of heads; graph-safe."""
    from mla_portable_triton.kernels import indexer_logits as kernel

    config = kernel.config_for(kernel.CONFIGS, request.device.arch)
    bf16_native = not interpreter_is_on()

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
        kernel.launch(
            out, q, weights, index_cache, query_start_loc, seq_lens, block_table, bf16_native=bf16_native, config=config
        )
        return out

    return indexer_logits


def bind_topk_select(request: Request) -> TopkSelect:
    """topk_select for any K; graph-safe with `out`."""
    from mla_portable_triton.kernels import topk_select as kernel

    def topk_select(logits: Tensor, row_starts: Tensor, row_ends: Tensor, *, topk: int, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty((logits.shape[0], topk), dtype=torch.int32, device=logits.device)
        kernel.launch(out, logits, row_starts, row_ends)
        return out

    return topk_select
