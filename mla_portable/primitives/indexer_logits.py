# SPDX-License-Identifier: Apache-2.0
"""indexer_logits: how much each query token wants each cached token of its request: what the top-k is taken of."""

from __future__ import annotations

from typing import Final, Protocol

from torch import Tensor

from mla_portable.contracts.primitive import Primitive

__all__ = ["INDEXER_LOGITS", "IndexerLogits"]


class IndexerLogits(Protocol):
    """How much each query token wants each cached token of its request: what the top-k is taken of.

    q [T, H, 128] bf16 and weights [T, H] float32, of the indexer's own heads; index_cache [blocks, block_size, 128] bf16;
    query_start_loc [R + 1] int32, ascending; seq_lens [R] int32; block_table [R, columns] int32. A length counts as one in
    [0, columns * block_size]. Token t belongs to the request r with query_start_loc[r] <= t < query_start_loc[r + 1], at
    position seq_lens[r] - query_start_loc[r + 1] + t. The first value may be below or above 0 and the last above or below T:
    such values are not clamped, so the last token of a request is at its last position, though only tokens 0 to T - 1 exist.
    Values that do not ascend give unspecified scores, and no access outside of the arguments.
    Returns out [T, N] float32: out[t, s] = sum_h weights[t, h] * max(q[t, h] . k[s], 0) for positions s up to the token's
    own. All else is -inf: later positions, those without a block in the cache, and tokens that belong to no request.
    """

    def __call__(
        self,
        q: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        out: Tensor,
    ) -> Tensor: ...


INDEXER_LOGITS: Final = Primitive[IndexerLogits](
    "indexer_logits", module=__name__, facts=("num_heads", "block_size"), results=("out",)
)
