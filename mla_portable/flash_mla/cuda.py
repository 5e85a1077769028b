# SPDX-License-Identifier: Apache-2.0
"""`flash_mla.cuda`: the functions of FlashMLA's extension module, by position, for callers that skip its Python interface.

Source: FlashMLA `csrc/api/api.cpp`, `sparse_decode.h`, `sparse_fwd.h`.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from torch import Tensor

from mla_portable.flash_mla.absent import NotServed
from mla_portable.flash_mla.decode import flash_mla_with_kvcache
from mla_portable.flash_mla.prefill import flash_mla_sparse_fwd
from mla_portable.flash_mla.schedule import FlashMLASchedMeta

__all__ = ["dense_decode_fwd", "dense_prefill_bwd", "dense_prefill_fwd", "sparse_decode_fwd", "sparse_prefill_fwd"]

_DENSE_PREFILL: Final = "Call flash_mla.flash_attn_varlen_func, which is served without a gradient."


def sparse_decode_fwd(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    attn_sink: Tensor | None,
    tile_scheduler_metadata: Tensor | None,
    num_splits: Tensor | None,
    extra_k_cache: Tensor | None,
    extra_indices: Tensor | None,
    extra_topk_length: Tensor | None,
    head_dim_v: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """`flash_mla_with_kvcache`; returns its out and lse, and the two tensors of the plan as they were given."""
    out, lse = flash_mla_with_kvcache(
        q,
        k_cache,
        None,
        None,
        head_dim_v,
        FlashMLASchedMeta(),
        softmax_scale=softmax_scale,
        indices=indices,
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
    )
    return out, lse, tile_scheduler_metadata, num_splits


def sparse_prefill_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`flash_mla_sparse_fwd`."""
    return flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)


def dense_decode_fwd(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises: NotServed."""
    raise NotServed("cuda.dense_decode_fwd", "dense decode", "It needs FlashMLA itself, on SM90.")


def dense_prefill_fwd(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises: NotServed."""
    raise NotServed("cuda.dense_prefill_fwd", "dense prefill into a workspace", _DENSE_PREFILL)


def dense_prefill_bwd(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises: NotServed."""
    raise NotServed("cuda.dense_prefill_bwd", "the gradient of dense prefill", "It needs FlashMLA itself, on SM100.")
