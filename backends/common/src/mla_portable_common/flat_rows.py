# SPDX-License-Identifier: Apache-2.0
"""sparse_decode and sparse_prefill as attention of flat BF16 rows: each query token is a row of its own."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from mla_portable.contracts import InvalidArgument
from mla_portable.layouts import KV_LORA_RANK
from mla_portable_common.kept_views import KeptViews

View = TypeVar("View")


class FlatAttention(Protocol[View]):
    """Attention of rows of one query token, in the axes of decode, over flat BF16 rows in place of a cache."""

    def view_of(self, kv: Tensor) -> View:
        """kv [W, 576] or [W, 512] bf16 as a call takes it."""
        ...

    def __call__(
        self,
        q: Tensor,
        kv: View,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As sparse_decode, but kv: what `view_of` made of the rows that the indices count."""
        ...


class FlatDecode(Generic[View]):
    """The callable; see `mla_portable.contracts.SparseDecode`. Graph-safe where `out` and `lse_out` are given."""

    def __init__(self, attend: FlatAttention[View]) -> None:
        """attend: serves all calls."""
        self._attend = attend
        self._views: KeptViews[tuple[View, int]] = KeptViews(self._view)

    def _view(self, kv_cache: Tensor) -> tuple[View, int]:
        """The cache as `attend` takes it, and how many rows lie between its blocks. Raises: InvalidArgument."""
        kv, skipped = _flat(kv_cache)
        return self._attend.view_of(kv), skipped

    def __call__(
        self,
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        schedule: Any = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """All rows in one call, each query token a row of its own; `schedule` is not needed.

        Returns: out and lse; a tensor without elements where `attend` was bound for none.
        Raises: InvalidArgument for blocks that are not whole rows apart.
        """
        kv, skipped = self._views.of(kv_cache)
        if skipped:
            indices = _rows_of_slots(indices, kv_cache, skipped)
        batch, query_len, num_heads, _ = q.shape
        if query_len == 1:
            return self._attend(
                q,
                kv,
                indices,
                softmax_scale=softmax_scale,
                lengths=lengths,
                attn_sink=attn_sink,
                out=out,
                lse_out=lse_out,
            )
        if out is None:
            out = torch.empty((batch, query_len, num_heads, KV_LORA_RANK), dtype=q.dtype, device=q.device)
        result = _rows(out)  # a copy where the strides leave no other way
        lse_result = None if lse_out is None else _rows(lse_out)
        limits = None if lengths is None else _rows(lengths)
        _, lse = self._attend(
            _rows(q),
            kv,
            _rows(indices),
            softmax_scale=softmax_scale,
            lengths=limits,
            attn_sink=attn_sink,
            out=result,
            lse_out=lse_result,
        )
        if result.data_ptr() != out.data_ptr():
            out.copy_(result.view(out.shape))
        if lse is lse_result and lse_out is not None:
            if lse.data_ptr() != lse_out.data_ptr():
                lse_out.copy_(lse.view(lse_out.shape))
            return out, lse_out
        return out, lse.view(batch, query_len, num_heads) if lse.dim() == 3 else lse


class FlatPrefill(Generic[View]):
    """sparse_prefill by what serves `FlatDecode`: a token is a row. Graph-safe where `out` and `lse_out` are given."""

    def __init__(self, attend: FlatAttention[View]) -> None:
        """attend: as of `FlatDecode`."""
        self._attend = attend

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
    ) -> tuple[Tensor, Tensor]:
        """See `mla_portable.contracts.SparsePrefill`. Returns: as `FlatDecode`."""
        limits, result, lse = (None if each is None else each.unsqueeze(1) for each in (lengths, out, lse_out))
        result, lse = self._attend(
            q.unsqueeze(1),
            self._attend.view_of(kv),
            indices.unsqueeze(1),
            softmax_scale=softmax_scale,
            lengths=limits,
            attn_sink=attn_sink,
            out=result,
            lse_out=lse,
        )
        return result.squeeze(1), lse.squeeze(1) if lse.dim() == 3 else lse


def _rows(tensor: Tensor) -> Tensor:
    """[B, S, ..] as [B * S, 1, ..]."""
    return tensor.flatten(0, 1).unsqueeze(1)


def _flat(kv_cache: Tensor) -> tuple[Tensor, int]:
    """The cache's memory as rows [n, width], and how many rows lie between its blocks. Raises: InvalidArgument."""
    blocks, block, width = kv_cache.shape
    apart = kv_cache.stride(0) if blocks > 1 else block * width
    if kv_cache.stride()[1:] != (width, 1) or apart % width:
        raise InvalidArgument(
            "sparse_decode",
            "kv_cache",
            got=f"strides {kv_cache.stride()}",
            expected=f"blocks of rows that lie {width} elements apart, a whole number of rows from block to block",
            remedy="Pad the cache's blocks by whole rows, or take another backend.",
        )
    pitch = apart // width
    return kv_cache.as_strided((max((blocks - 1) * pitch + block, 0), width), (width, 1)), pitch - block


def _rows_of_slots(indices: Tensor, kv_cache: Tensor, skipped: int) -> Tensor:
    """Which of the flat rows the slots `indices` are, where `skipped` rows lie between blocks."""
    blocks, block, _ = kv_cache.shape
    inside = (indices >= 0) & (indices < blocks * block)
    return torch.where(inside, indices + indices // block * skipped, -1)
