# SPDX-License-Identifier: Apache-2.0
"""Adapter of acme's paged decode kernel, which reads the first `lengths` slots of a row and needs one at least.

So absent slots are moved behind the others, and those that the kernel reads but does not count name a row that counts: memory
that nobody wrote may hold NaN, and 0 times NaN is NaN.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from mla_portable.contracts import DecodeSchedule

KERNEL_HEADS = 64


class AcmeSparseDecode:
    """sparse_decode on a paged bf16 cache; see `mla_portable.primitives.SparseDecode` for the shapes."""

    def __init__(self, library: ModuleType) -> None:
        self._kernel = library.paged_mla_decode

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
    ) -> tuple[Tensor, Tensor]:
        """Pad heads, compact slots, call, clear rows without a slot."""
        batch, query_len, num_heads, _ = q.shape
        if out is None:
            out = q.new_empty((batch, query_len, num_heads, 512))
        if lse_out is None:
            lse_out = q.new_empty((batch, query_len, num_heads), dtype=torch.float32)
        num_rows, topk = batch * query_len, indices.shape[-1]
        if num_rows == 0:
            return out, lse_out
        padded = q.new_zeros((num_rows, KERNEL_HEADS, q.shape[-1]))
        padded[:, :num_heads] = q.reshape(num_rows, num_heads, -1)
        slots = indices.reshape(num_rows, topk)
        absent = (slots < 0) | (slots >= kv_cache.shape[0] * kv_cache.shape[1])  # [T, K]
        if lengths is not None:
            absent |= torch.arange(topk, device=q.device) >= lengths.reshape(num_rows, 1)
        order = absent.to(torch.uint8).argsort(dim=1, stable=True)
        counts = (~absent).sum(dim=1)  # [T]
        compact = slots.gather(1, order)
        uncounted = torch.arange(topk, device=q.device) >= counts.unsqueeze(1)
        compact = torch.where(uncounted, compact[:, :1], compact)
        empty = counts == 0  # [T]
        compact = compact.masked_fill(empty.unsqueeze(1), 0)
        result, lse = self._kernel(padded, kv_cache, compact, counts.clamp(min=1).to(torch.int32), softmax_scale)
        cleared = result[:, :num_heads].masked_fill(empty.view(-1, 1, 1), 0)
        out.copy_(cleared.view(batch, query_len, num_heads, 512))
        lse_out.copy_(lse[:, :num_heads].masked_fill(empty.unsqueeze(1), -math.inf).view(batch, query_len, num_heads))
        return out, lse_out
