# SPDX-License-Identifier: Apache-2.0
"""sparse_prefill: attention of T query tokens over chosen rows of a workspace, or of the paged cache itself."""

from __future__ import annotations

from typing import Final, Protocol

from torch import Tensor

from mla_portable.contracts.primitive import Primitive

__all__ = ["SPARSE_PREFILL", "SparsePrefill"]


class SparsePrefill(Protocol):
    """Attention of T query tokens over chosen rows of a workspace, or of the paged cache itself.

    q [T, H, 576] bf16; kv [W, 576] bf16 (a workspace or a flattened BF16 cache) or the paged FP8 cache itself
    [blocks, block_size, 656] uint8; indices [T, K] int32 rows of kv (slots of a paged cache), those past W are absent;
    lengths [T] int32; attn_sink [H] float32. Returns out [T, H, 512] bf16 and lse [T, H] float32, which are `out` and
    `lse_out` where given.
    """

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


SPARSE_PREFILL: Final = Primitive[SparsePrefill](
    "sparse_prefill",
    module=__name__,
    facts=("kv_layout", "num_heads", "topk", "block_size", "cache_alignment", "uneven_blocks", "lengths", "attn_sink", "lse"),
    results=("out", "lse"),
    has_layout=True,
)
