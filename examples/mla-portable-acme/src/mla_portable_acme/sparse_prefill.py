# SPDX-License-Identifier: Apache-2.0
"""Adapter of acme's kernel: converts the vendor's conventions to those of mla_portable.

The kernel computes exactly 64 heads, wants a head axis on `kv` and `indices`, accepts one absent index (-1), and returns lse in
base 2 with +inf for a row without keys.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

KERNEL_HEADS = 64


class AcmeSparsePrefill:
    """sparse_prefill on a bf16 workspace; see `mla_portable.primitives.SparsePrefill` for the shapes."""

    def __init__(self, library: ModuleType) -> None:
        self._kernel = library.sparse_mla_fwd

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
        """Pad heads, mark absent indices the vendor's way, call, convert lse back, slice."""
        num_tokens, num_heads, _ = q.shape
        if out is None:
            out = q.new_empty((num_tokens, num_heads, 512))
        if lse_out is None:
            lse_out = q.new_empty((num_tokens, num_heads), dtype=torch.float32)
        if num_tokens == 0:
            return out, lse_out
        padded = q.new_zeros((num_tokens, KERNEL_HEADS, q.shape[-1]))
        padded[:, :num_heads] = q
        absent = (indices < 0) | (indices >= kv.shape[0])
        result, lse2 = self._kernel(padded, kv.unsqueeze(1), indices.masked_fill(absent, -1).unsqueeze(1), softmax_scale)
        empty = absent.all(dim=1, keepdim=True)  # [T, 1]
        out.copy_(result[:, :num_heads].masked_fill(empty.unsqueeze(-1), 0))
        lse_out.copy_((lse2[:, :num_heads] * math.log(2)).masked_fill(empty, -math.inf))
        return out, lse_out
