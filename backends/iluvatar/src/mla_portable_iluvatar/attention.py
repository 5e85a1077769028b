# SPDX-License-Identifier: Apache-2.0
"""sparse_prefill and sparse_decode on a bf16 cache, through whichever sparse op of the vendor a provider names.

The adapter does what the contract asks and the ops do not: absent indices anywhere, rows without any, caches whose blocks
lie apart, inputs and outputs that are not contiguous. It allocates, so it claims no graph safety.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DecodeSchedule, attention_results
from mla_portable.layouts import HEAD_SIZE, KV_LORA_RANK
from mla_portable_iluvatar.conventions import Arguments, Convention
from mla_portable_iluvatar.native import Trial
from mla_portable_iluvatar.rows import flat_rows, gathered, pick

__all__ = ["SparseOp", "attention_trial", "bind_sparse_decode", "bind_sparse_prefill"]

GATHERED_ROWS: Final = 1 << 17
"""Rows of a cache that are copied at a time where the op cannot read it in place: 151 MB."""
TRIAL_TOKENS: Final = 32
TRIAL_HEADS: Final = 4
TRIAL_KEYS: Final = 64


class SparseOp:
    """A vendor's op with its convention.

    Args:
        op, convention: see `conventions`. kernel_heads: pad q to this many heads, None to hand over any count.
        own_lse: compute the lse here, in torch, because the op does not tell it.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        convention: Convention,
        *,
        kernel_heads: int | None = None,
        own_lse: bool = False,
    ) -> None:
        self._op, self._convention = op, convention
        self.kernel_heads, self._own_lse = kernel_heads, own_lse

    def attend(
        self,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None,
        attn_sink: Tensor | None,
        out: Tensor,
        lse_out: Tensor,
    ) -> None:
        """Write `out` [T, H, 512] and `lse_out` [T, H], which holds NaN afterwards where neither op nor adapter tells it.

        q [T, H, 576]; kv [W, 576] or [blocks, block_size, 576]; indices [T, K]; lengths [T].
        """
        cache = flat_rows(kv)
        if cache.num_slots == 0:
            out.zero_()
            lse_out.fill_(-math.inf)
            return
        picked = pick(indices, cache.num_slots, lengths)
        if cache.rows is not None:
            slots = picked.slots
            if cache.block_rows != cache.block_size:
                slots = torch.where(slots >= 0, cache.row_of(slots), -1)
            self._write(q, cache.rows, slots, picked.lens, softmax_scale, attn_sink, out, lse_out)
        else:
            paged = kv.unsqueeze(0) if kv.dim() == 2 else kv
            step = max(1, GATHERED_ROWS // picked.slots.shape[1])
            for first in range(0, q.shape[0], step):
                part = slice(first, first + step)
                rows, places = gathered(paged, picked.slots[part])
                lens = picked.lens[part]
                self._write(q[part], rows, places, lens, softmax_scale, attn_sink, out[part], lse_out[part])
        out.masked_fill_(picked.empty.view(-1, 1, 1), 0)
        lse_out.masked_fill_(picked.empty.view(-1, 1), -math.inf)

    def _write(
        self,
        q: Tensor,
        rows: Tensor,
        indices: Tensor,
        lens: Tensor,
        scale: float,
        sink: Tensor | None,
        out: Tensor,
        lse_out: Tensor,
    ) -> None:
        """One call of the op on contiguous tensors, copied back where the caller's are not."""
        num_tokens, num_heads, _ = q.shape
        heads = self.kernel_heads or num_heads
        own_out = heads != num_heads or not out.is_contiguous()
        if heads != num_heads:
            padded = q.new_zeros((num_tokens, heads, HEAD_SIZE))
            padded[:, :num_heads] = q
            asked = padded
        else:
            asked = q.contiguous()
        target = out.new_full((num_tokens, heads, KV_LORA_RANK), math.nan) if own_out else out
        lse = self._convention(self._op, Arguments(target, asked, rows, indices.contiguous(), lens, scale, sink))
        if own_out:
            out.copy_(target[:, :num_heads])
        if lse is not None:
            lse_out.copy_(lse[:, :num_heads])
        elif self._own_lse:
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
    """sparse_prefill over bf16 rows."""

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
            sparse.attend(
                q, kv, indices, softmax_scale=softmax_scale, lengths=lengths, attn_sink=attn_sink, out=out, lse_out=lse_out
            )
        return out, lse_out

    return sparse_prefill


def bind_sparse_decode(sparse: SparseOp) -> Callable[..., tuple[Tensor, Tensor]]:
    """sparse_decode over a paged bf16 cache: B * S rows of one query each. Takes no schedule."""

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
        batch, query_len, num_heads, _ = q.shape
        out, lse_out = attention_results(q, kv_cache, out, lse_out)
        if batch == 0:
            return out, lse_out
        rows = batch * query_len
        # a caller's views may not fold into rows: then the op writes to memory of ours, and the views are filled from it
        flat_out, flat_lse = _folded(out, rows), _folded(lse_out, rows)
        sparse.attend(
            q.reshape(rows, num_heads, HEAD_SIZE),
            kv_cache,
            indices.reshape(rows, indices.shape[2]),
            softmax_scale=softmax_scale,
            lengths=None if lengths is None else lengths.reshape(rows),
            attn_sink=attn_sink,
            out=flat_out,
            lse_out=flat_lse,
        )
        for tensor, flat in ((out, flat_out), (lse_out, flat_lse)):
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))
        return out, lse_out

    return sparse_decode


def _folded(tensor: Tensor, rows: int) -> Tensor:
    """`tensor` [B, S, ...] as [B * S, ...]: a view where strides allow, else new memory of that shape."""
    try:
        return tensor.view(rows, *tensor.shape[2:])
    except RuntimeError:
        return torch.empty((rows, *tensor.shape[2:]), dtype=tensor.dtype, device=tensor.device)


def attention_trial(sparse: SparseOp, device: torch.device, *, sink: bool) -> Trial:
    """A problem on which a loop over tokens shows: many tokens, few keys, and few heads unless the op is given more."""
    generator = torch.Generator().manual_seed(0)
    heads = sparse.kernel_heads or TRIAL_HEADS
    shape = (TRIAL_TOKENS, heads, HEAD_SIZE)
    q = torch.randn(shape, generator=generator).bfloat16().to(device)
    kv = torch.randn((TRIAL_KEYS, HEAD_SIZE), generator=generator).bfloat16().to(device)
    picks = torch.rand((TRIAL_TOKENS, TRIAL_KEYS), generator=generator).argsort(1)
    indices = picks.to(torch.int32).to(device)
    attn_sink = torch.zeros(heads, device=device) if sink else None
    bound, scale = bind_sparse_prefill(sparse), HEAD_SIZE**-0.5

    def plain() -> Tensor:
        keys = kv[indices.long()].float()  # [T, K, 576]
        scores = torch.bmm(q.float(), keys.transpose(1, 2)) * scale
        return torch.bmm(scores.softmax(-1), keys[..., :KV_LORA_RANK]).bfloat16()

    return Trial(lambda: bound(q, kv, indices, softmax_scale=scale, attn_sink=attn_sink), plain, device)
