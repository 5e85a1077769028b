# SPDX-License-Identifier: Apache-2.0
"""sparse_prefill and sparse_decode on a bf16 cache, through a sparse op of the vendor.

The adapter does what the contract asks and the ops do not: absent indices anywhere, rows without any, caches whose blocks
lie apart, inputs and outputs that are not contiguous. It allocates; whether a graph can hold it is up to the op.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mla_portable.contracts import DecodeSchedule
from mla_portable.kit.results import attention_results
from mla_portable.layouts import HEAD_SIZE, KV_LORA_RANK
from mla_portable_iluvatar.resolve import Op
from mla_portable_iluvatar.rows import flat_rows, gathered, pick

GATHERED_ROWS: Final = 1 << 17
"""Rows of a cache that are copied at a time where the op cannot read it in place: 151 MB."""

SparseCall = Callable[[Op, Tensor, Tensor, Tensor, Tensor, Tensor, float], None]
"""(op, out [T, H, 512] bf16, q [T, H, 576] bf16, rows [N, 576] bf16, indices [T, K'] int32, lens [T] int32, scale): calls
the op on contiguous tensors and fills out. No op returns an lse."""


def flash_mla_sparse_v2(op: Op, out: Tensor, q: Tensor, rows: Tensor, indices: Tensor, lens: Tensor, scale: float) -> None:
    """(out, q, kv [N, 1, 576], indices [T, 1, K], topk_lens, scale, attn_sink=None): writes out, returns nothing."""
    op(out, q, rows.unsqueeze(1), indices.unsqueeze(1), lens, scale)


def sparse_prefill_returning(op: Op, out: Tensor, q: Tensor, rows: Tensor, indices: Tensor, lens: Tensor, scale: float) -> None:
    """(q, kv [N, 1, 576], indices [T, 1, K], sm_scale): returns out alone; upstream's op of that name, a tuple led by it."""
    returned = op(q, rows.unsqueeze(1), indices.unsqueeze(1), scale)
    out.copy_(returned[0] if isinstance(returned, tuple) else returned)


@dataclass(frozen=True, slots=True, eq=False)
class SparseOp:
    """A vendor's op with its calling convention.

    Attributes:
        op, call: see `SparseCall`. kernel_heads: q is padded to so many heads, None to hand over any count.
        own_lse: compute the lse here, in torch, because the op does not return it.
    """

    op: Op
    call: SparseCall
    kernel_heads: int | None = None
    own_lse: bool = False

    def attend(
        self, q: Tensor, kv: Tensor, indices: Tensor, lengths: Tensor | None, scale: float, out: Tensor, lse_out: Tensor
    ) -> None:
        """Write `out` [T, H, 512] and `lse_out` [T, H], which holds NaN where it is not computed.

        q [T, H, 576]; kv [W, 576] or [blocks, block_size, 576]; indices [T, K]; lengths [T].
        """
        cache = flat_rows(kv)
        if cache.num_slots == 0:
            out.zero_()
            lse_out.fill_(-math.inf)
            return
        picked = pick(indices, cache.num_slots, lengths)
        if cache.rows is not None:
            slots = torch.where(picked.slots >= 0, cache.row_of(picked.slots), -1)
            self._write(q, cache.rows, slots, picked.lens, scale, out, lse_out)
        else:
            paged = kv.unsqueeze(0) if kv.dim() == 2 else kv
            step = max(1, GATHERED_ROWS // picked.slots.shape[1])
            for first in range(0, q.shape[0], step):
                part = slice(first, first + step)
                rows, places = gathered(paged, picked.slots[part])
                self._write(q[part], rows, places, picked.lens[part], scale, out[part], lse_out[part])
        out.masked_fill_(picked.empty.view(-1, 1, 1), 0)
        lse_out.masked_fill_(picked.empty.view(-1, 1), -math.inf)

    def _write(
        self, q: Tensor, rows: Tensor, indices: Tensor, lens: Tensor, scale: float, out: Tensor, lse_out: Tensor
    ) -> None:
        """One call of the op on contiguous tensors, copied back where the caller's are not."""
        num_heads = q.shape[1]
        heads = self.kernel_heads or num_heads
        in_place = heads == num_heads and out.is_contiguous()
        padded = q.contiguous() if heads == num_heads else torch.nn.functional.pad(q, (0, 0, 0, heads - num_heads))
        target = out if in_place else out.new_full((q.shape[0], heads, KV_LORA_RANK), math.nan)
        self.call(self.op, target, padded, rows, indices.contiguous(), lens, scale)
        if not in_place:
            out.copy_(target[:, :num_heads])
        if self.own_lse:
            _write_lse(q, rows, indices, lens, scale, lse_out)
        else:
            lse_out.fill_(math.nan)  # nobody asks for it: Support says so


def _write_lse(q: Tensor, rows: Tensor, indices: Tensor, lens: Tensor, scale: float, lse_out: Tensor) -> None:
    """The natural lse of each token and head, in float32, a bounded number of copied rows at a time."""
    step = max(1, GATHERED_ROWS // 4 // indices.shape[1])
    within = torch.arange(indices.shape[1], device=q.device) < lens.unsqueeze(1)  # [T, K']
    for first in range(0, q.shape[0], step):
        part = slice(first, first + step)
        keys = rows[indices[part].clamp(min=0).long()].float()  # [t, K', 576]
        keys.masked_fill_(~within[part].unsqueeze(-1), 0)
        scores = torch.bmm(q[part].float(), keys.transpose(1, 2)) * scale  # [t, H, K']
        lse_out[part] = scores.masked_fill_(~within[part].unsqueeze(1), -math.inf).logsumexp(-1)


def bind_sparse_prefill(sparse: SparseOp) -> Callable[..., tuple[Tensor, Tensor]]:
    """sparse_prefill over bf16 rows. Support declares no attn_sink."""

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
        out, lse_out = attention_results(q, kv, out, lse_out, kv_layout="bf16")
        if q.shape[0]:
            sparse.attend(q, kv, indices, lengths, softmax_scale, out, lse_out)
        return out, lse_out

    return sparse_prefill


def bind_sparse_decode(sparse: SparseOp) -> Callable[..., tuple[Tensor, Tensor]]:
    """sparse_decode over a paged bf16 cache: B * S rows of one query each. Takes no schedule and no attn_sink."""

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
        out, lse_out = attention_results(q, kv_cache, out, lse_out, kv_layout="bf16")
        if q.shape[0] == 0:
            return out, lse_out
        rows = None if lengths is None else lengths.flatten()
        # a caller's views may not fold into rows: then the op writes to memory of ours, and the views are filled from it
        flat_out, flat_lse = out.flatten(0, 1), lse_out.flatten(0, 1)
        sparse.attend(q.flatten(0, 1), kv_cache, indices.flatten(0, 1), rows, softmax_scale, flat_out, flat_lse)
        for tensor, flat in ((out, flat_out), (lse_out, flat_lse)):
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))
        return out, lse_out

    return sparse_decode


def attention_trial(sparse: SparseOp, device: torch.device) -> None:
    """One call on a small problem."""
    q = torch.zeros((4, 64, HEAD_SIZE), dtype=torch.bfloat16, device=device)
    indices = torch.arange(64, dtype=torch.int32, device=device).expand(4, -1)
    bind_sparse_prefill(sparse)(q, q.new_zeros((64, HEAD_SIZE)), indices, softmax_scale=HEAD_SIZE**-0.5)
