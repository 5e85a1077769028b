# SPDX-License-Identifier: Apache-2.0
"""sparse_decode and sparse_prefill through `npu_sparse_flash_attention`, which reads latent and rotary part from two tensors.

The operation attends from lists of positions of a request, valid ones first, and stops at the first -1. Slots are handed over
as positions of one pretended request that owns all rows, with sparse_mode 0, so that no causal limit holds. It looks at no more
entries of a list than the request has positions: there are at least K rows.

A `bf16` cache has both parts in one row, so rows are copied apart: all of them where that is less, else the named ones, a
bounded number at a time. The adapter allocates; whether a graph can hold it is up to the operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_portable.contracts import DecodeSchedule, Request
from mla_portable.kit.results import attention_results
from mla_portable.layouts import KV_LORA_RANK
from mla_portable_ascend.resolve import Op
from mla_portable_ascend.rows import COPIED_ROWS, named_rows, valid_first

KEYWORDS = (
    *("query", "key", "value", "sparse_indices", "scale_value", "block_table", "actual_seq_lengths_query"),
    *("actual_seq_lengths_kv", "query_rope", "key_rope", "sparse_block_size", "layout_query", "layout_kv", "sparse_mode"),
    *("attention_mode", "return_softmax_lse"),
)
"""What the operation is called with."""


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """The operation for one kind of request.

    Attributes:
        op: `npu_sparse_flash_attention`. lse: it is asked for. clean: indices are slots or -1, the slots first.
    """

    op: Op
    lse: bool
    clean: bool

    @classmethod
    def of(cls, op: Op, request: Request) -> Attention:
        """What a request asks for and promises: clean lengths count leading slots, behind which clean indices are -1."""
        return cls(op, request.lse, request.lengths and request.clean_lengths and request.clean_indices)

    def attend(
        self, q: Tensor, kv: Tensor, indices: Tensor, lengths: Tensor | None, scale: float, out: Tensor, lse_out: Tensor
    ) -> None:
        """Write `out` [T, H, 512] and `lse_out` [T, H], which holds NaN where it is not asked for.

        q [T, H, 576]; kv [W, 576] or [blocks, block_size, 576]; indices [T, K]; lengths [T].
        """
        num_rows, topk = math.prod(kv.shape[:-1]), indices.shape[1]
        if num_rows == 0:
            out.zero_()
            lse_out.fill_(-math.inf)
            return
        slots = indices.contiguous() if self.clean else valid_first(indices, num_rows, lengths)
        if num_rows <= min(slots.numel(), COPIED_ROWS):
            self._write(q, kv.reshape(num_rows, -1), slots, scale, out, lse_out)
            return
        step = max(1, COPIED_ROWS // topk)
        for first in range(0, q.shape[0], step):
            part = slice(first, first + step)
            rows, places = named_rows(kv, slots[part])
            self._write(q[part], rows, places, scale, out[part], lse_out[part])

    def _write(self, q: Tensor, rows: Tensor, positions: Tensor, scale: float, out: Tensor, lse_out: Tensor) -> None:
        """One call, over rows [N, 576] that are copied apart; positions [T, K] are of them, valid first."""
        short = positions.shape[1] - rows.shape[0]
        if short > 0:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, short))
        latent, rope = (part.contiguous().unsqueeze(1) for part in rows.tensor_split([KV_LORA_RANK], dim=1))
        q_latent, q_rope = (part.contiguous() for part in q.tensor_split([KV_LORA_RANK], dim=2))
        count = positions.new_full
        found, peak, total = self.op(
            query=q_latent,
            key=latent,
            value=latent,
            sparse_indices=positions.unsqueeze(1),
            scale_value=scale,
            block_table=None,
            actual_seq_lengths_query=count((1,), q.shape[0]),
            actual_seq_lengths_kv=count((1,), rows.shape[0]),
            query_rope=q_rope,
            key_rope=rope,
            sparse_block_size=1,
            layout_query="TND",
            layout_kv="TND",
            sparse_mode=0,
            attention_mode=2,
            return_softmax_lse=self.lse,
        )
        empty = positions[:, :1] < 0  # [T, 1]
        out.copy_(found.masked_fill(empty.unsqueeze(-1), 0))
        if self.lse:
            lse_out.copy_((peak[0] + total[0].log()).masked_fill(empty, -math.inf))
        else:
            lse_out.fill_(math.nan)


def bind_sparse_prefill(op: Op, request: Request) -> Callable[..., tuple[Tensor, Tensor]]:
    """sparse_prefill over bf16 rows. Support declares no attn_sink."""
    attention = Attention.of(op, request)

    def sparse_prefill(
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
        out, lse_out = attention_results(q, kv, out, lse_out)
        if q.shape[0]:
            attention.attend(q, kv, indices, lengths, softmax_scale, out, lse_out)
        return out, lse_out

    return sparse_prefill


def bind_sparse_decode(op: Op, request: Request) -> Callable[..., tuple[Tensor, Tensor]]:
    """sparse_decode over a paged bf16 cache: B * S rows of one query each. Takes no schedule and no attn_sink."""
    attention = Attention.of(op, request)

    def sparse_decode(
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
        out, lse_out = attention_results(q, kv_cache, out, lse_out)
        if q.shape[0] == 0:
            return out, lse_out
        rows = None if lengths is None else lengths.flatten()
        # a caller's views may not fold into rows: then memory of ours is written, and the views are filled from it
        flat_out, flat_lse = out.flatten(0, 1), lse_out.flatten(0, 1)
        attention.attend(q.flatten(0, 1), kv_cache, indices.flatten(0, 1), rows, softmax_scale, flat_out, flat_lse)
        for tensor, flat in ((out, flat_out), (lse_out, flat_lse)):
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))
        return out, lse_out

    return sparse_decode
