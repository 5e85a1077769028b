# SPDX-License-Identifier: Apache-2.0
"""indexer_logits bound to its kernel."""

from __future__ import annotations

from torch import Tensor

from mla_portable.contracts import Request
from mla_portable.primitives import IndexerLogits
from mla_portable_triton.support import interpreter_is_on

__all__ = ["bind_indexer_logits"]


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
