# SPDX-License-Identifier: Apache-2.0
"""How each sparse attention op is called: argument names, order and axes of one op in each function, and nothing else.

Every function takes (op, Arguments) with contiguous tensors and fills `out`; where the op tells the lse, it returns
[T, H] float32. Axes: T tokens, H heads, N rows, K' indices. The signatures are those of vendor packages of CoreX 4.2 to
4.5 as public code defines or calls them; what no public code shows is listed in docs/iluvatar.md as open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Arguments",
    "Convention",
    "ds4_sparse_fwd",
    "ds4_with_kvcache",
    "flash_mla_sparse_v2",
    "paged_attention_mla",
    "sparse_flash_attn",
    "sparse_prefill_returning",
]


@dataclass(frozen=True, slots=True, eq=False)
class Arguments:
    """out [T, H, 512] bf16, q [T, H, 576] bf16, rows [N, 576] bf16, indices [T, K'] int32, lens [T] int32, sink [H] or None."""

    out: Tensor
    q: Tensor
    rows: Tensor
    indices: Tensor
    lens: Tensor
    scale: float
    sink: Tensor | None


Convention = Callable[[Callable[..., Any], Arguments], "Tensor | None"]


def flash_mla_sparse_v2(op: Callable[..., Any], a: Arguments) -> None:
    """(out, q, kv [N, 1, 576], indices [T, 1, K], topk_lens, scale, attn_sink): writes out, returns nothing."""
    op(a.out, a.q, a.rows.unsqueeze(1), a.indices.unsqueeze(1), a.lens, a.scale, a.sink)


def sparse_flash_attn(op: Callable[..., Any], a: Arguments) -> None:
    """(out, q, kv [N, 1, 576], indices [T, 1, K], scale): no lengths, so rows end in -1."""
    op(a.out, a.q, a.rows.unsqueeze(1), a.indices.unsqueeze(1), a.scale)


def sparse_prefill_returning(op: Callable[..., Any], a: Arguments) -> None:
    """(q, kv [N, 1, 576], indices [T, 1, K], sm_scale): returns out alone; upstream's op of that name, a tuple led by it."""
    returned = op(a.q, a.rows.unsqueeze(1), a.indices.unsqueeze(1), a.scale)
    a.out.copy_(returned[0] if isinstance(returned, tuple) else returned)


def ds4_sparse_fwd(op: Callable[..., Any], a: Arguments) -> None:
    """Keywords only: q, kv [N, 1, 576], indices [T, 1, K], sm_scale, attn_sink, topk_length, output."""
    op(
        q=a.q,
        kv=a.rows.unsqueeze(1),
        indices=a.indices.unsqueeze(1),
        sm_scale=a.scale,
        attn_sink=a.sink,
        topk_length=a.lens,
        output=a.out,
    )


def ds4_with_kvcache(op: Callable[..., Any], a: Arguments) -> None:
    """Keywords only, one query a batch row: q [T, 1, H, 576], k_cache as one block [1, N, 1, 576], no second cache."""
    op(
        q=a.q.unsqueeze(1),
        k_cache=a.rows.view(1, -1, 1, a.rows.shape[-1]),
        indices=a.indices.unsqueeze(1),
        topk_length=a.lens,
        sm_scale=a.scale,
        attn_sink=a.sink,
        extra_k_cache=None,
        extra_indices=None,
        extra_topk_length=None,
        output=a.out.unsqueeze(1),
    )


def paged_attention_mla(table_dtype: torch.dtype, *, with_lse: bool) -> Convention:
    """Dense MLA over a paged cache, made sparse: blocks of one token, whose table is the index row.

    Args:
        table_dtype: of block_tables; public sources disagree about it. with_lse: the op knows return_softmax_lse=True, and
            returns (out, lse [T, H]).
    """
    more: dict[str, Any] = {"return_softmax_lse": True} if with_lse else {}

    def call(op: Callable[..., Any], a: Arguments) -> Tensor | None:
        returned = op(
            output=a.out,
            query=a.q,
            kv_cache=a.rows.unsqueeze(1),
            scale=a.scale,
            block_tables=a.indices.clamp(min=0).to(table_dtype),
            context_lens=a.lens,
            max_context_len=a.indices.shape[1],
            **more,
        )
        if not with_lse:
            return None
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise TypeError(f"asked for the lse, the op returned {type(returned).__name__} instead of (out, lse)")
        return returned[1]

    return call
