# SPDX-License-Identifier: Apache-2.0
"""sparse_decode: attention of B x S query tokens over chosen slots of the paged cache."""

from __future__ import annotations

from typing import Final, Protocol

from torch import Tensor

from mla_portable.contracts.primitive import Primitive
from mla_portable.contracts.schedule import DecodeSchedule

__all__ = ["SPARSE_DECODE", "SparseDecode"]


class SparseDecode(Protocol):
    """Attention of B x S query tokens over chosen slots of the paged cache.

    q [B, S, H, 576] bf16; kv_cache [blocks, block_size, 576] bf16 or [.., 656] uint8; indices [B, S, K] int32 global slots;
    lengths [B, S] int32; attn_sink [H] float32; schedule made for B * S rows, H heads and this K. Returns out
    [B, S, H, 512] bf16 and lse [B, S, H] float32, which are `out` and `lse_out` where given.
    """

    def __call__(
        self,
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        schedule: DecodeSchedule | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


SPARSE_DECODE: Final = Primitive[SparseDecode](
    "sparse_decode",
    module=__name__,
    facts=(
        "kv_layout",
        "num_heads",
        "topk",
        "block_size",
        "query_len",
        "cache_alignment",
        "uneven_blocks",
        "lengths",
        "attn_sink",
        "lse",
    ),
    results=("out", "lse"),
    has_layout=True,
)
