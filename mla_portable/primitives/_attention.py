# SPDX-License-Identifier: Apache-2.0
"""The reference of sparse_decode and sparse_prefill: for a few query rows at a time, fetch their keys and attend.

scores = softmax_scale * q @ keys^T, out = softmax(scores) @ latents, lse = logsumexp(scores), all in `dtype`: float64,
or float32 on a device whose float64 cannot be trusted (`_reference.products`).
Absent entries score -inf. Their keys must not be read from just anywhere, for 0 * NaN is NaN: an absent entry reads a
slot that another entry of the same row names, so what no index names is never fetched where it could matter. Of two caches the
scores and values stand side by side.
Cost per query row: K rows of the cache fetched and widened to 8 bytes a number, and 2 * K * H * (key + value width) operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mla_portable.primitives._reference import CacheRows, products

_CHUNK_BYTES: Final = {"cpu": 16 << 20}
"""Scratch of one chunk on a CPU: about what a last-level cache holds, beyond which each pass goes to memory."""
_CHUNK_BYTES_ELSEWHERE: Final = 256 << 20


def chunk_bytes(device_type: str) -> int:
    """The scratch that a call aims at on this type of device, in bytes; a single query row may take more."""
    return _CHUNK_BYTES.get(device_type, _CHUNK_BYTES_ELSEWHERE)


@dataclass(frozen=True, slots=True)
class Keys:
    """What query rows attend to in one cache: its rows, indices [T, K] and lengths [T] (or [B, S, K] and [B, S])."""

    rows: CacheRows
    indices: Tensor
    lengths: Tensor | None
    scale: Tensor | None = None
    """By which the numbers of the rows count: float32, one element."""

    def of(self, s: int) -> Keys:
        """[:, s] of indices [B, S, K] and lengths [B, S]."""
        return Keys(self.rows, self.indices[:, s], None if self.lengths is None else self.lengths[:, s], self.scale)

    def named(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Indices [C, K] int64, and which of them are valid."""
        index = self.indices[chunk].long()
        valid = (index >= 0) & (index < self.rows.num_slots)
        if self.lengths is not None:
            valid &= torch.arange(index.shape[1], dtype=torch.int64, device=index.device) < self.lengths[chunk].unsqueeze(1)
        return index, valid

    def values(self, index: Tensor, valid: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """latent [C, K, V] and rope [C, K, R]; an absent entry has those of another entry of its row.

        Where all entries of a row are absent, they have those of slot 0, NaN perhaps; zeros where there is no slot.
        """
        layout = self.rows.layout
        if self.rows.num_slots == 0:
            empty = torch.zeros((*valid.shape, layout.key_width), dtype=dtype, device=index.device)
            return empty[..., : layout.value_width], empty[..., layout.value_width :]
        named_slot = index.masked_fill(~valid, -1).amax(dim=1, keepdim=True).clamp_(min=0)  # [C, 1]
        latent, rope = self.rows.values(torch.where(valid, index, named_slot).flatten(), dtype)
        if self.scale is not None:
            latent, rope = latent * self.scale.to(dtype), rope * self.scale.to(dtype)
        return latent.view(*valid.shape, latent.shape[-1]), rope.view(*valid.shape, rope.shape[-1])


def attend(
    q: Tensor,
    lists: Sequence[Keys],
    softmax_scale: float,
    attn_sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dtype: torch.dtype,
    q_scale: Tensor | None = None,
) -> None:
    """Fill out [T, H, V] and lse [T, H] from q [T, H, V + R] and the union of `lists`; all may be strided views.

    V and R are the widths of the layout's latent and rotary part. Queries [T, H, V] leave the rotary part of keys out. q_scale:
    float32 of one element, by which queries count.
    """
    num_tokens, num_heads, key_width = q.shape
    layout = lists[0].rows.layout
    value_width = layout.value_width
    topk = sum(each.indices.shape[1] for each in lists)
    if topk == 0 or out.numel() == 0:  # torch reduces no empty dimension
        out.zero_()
        lse.fill_(-math.inf)
        return
    # keys in `dtype` and float32, their stored bytes, the same bytes as table indices; scores and their temporaries per head
    row_bytes = topk * ((dtype.itemsize + 4) * layout.key_width + 3 * layout.row_bytes + 2 * dtype.itemsize * num_heads)
    step = max(1, chunk_bytes(q.device.type) // row_bytes)
    for begin in range(0, num_tokens, step):
        chunk = slice(begin, begin + step)
        query = q[chunk].to(dtype) * softmax_scale  # [C, H, V + R]
        if q_scale is not None:
            query *= q_scale.to(dtype)
        named, latents, parts = [each.named(chunk) for each in lists], list[Tensor](), list[Tensor]()
        for each, (index, valid) in zip(lists, named, strict=True):
            latent, rope = each.values(index, valid, dtype)  # [C, K, V], [C, K, R]
            part = products(query[..., :value_width], latent)  # [C, H, K]
            if value_width < key_width:
                part += products(query[..., value_width:], rope)
            if len(lists) > 1:  # a weight of 0 does not hide NaN, and a row may have entries in one of the lists alone
                latent.masked_fill_(~valid.any(dim=1)[:, None, None], 0.0)
            latents.append(latent)
            parts.append(part.masked_fill_(~valid.unsqueeze(1), -math.inf))
        scores, latent = (each[0] if len(lists) == 1 else torch.cat(each, dim) for each, dim in ((parts, 2), (latents, 1)))
        empty = ~torch.cat([valid for _, valid in named], dim=1).any(dim=1)[:, None, None]  # [C, 1, 1]
        top = scores.amax(dim=-1, keepdim=True).masked_fill_(empty, 0.0)  # [C, H, 1]
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True)  # [C, H, 1]
        row_lse = (top + total.log()).squeeze(-1)  # [C, H]; log(0) is -inf where the row is empty
        values = products(weights, latent.mT).div_(total)  # [C, H, V]
        if attn_sink is not None:
            values *= torch.sigmoid(row_lse - attn_sink.to(dtype)).unsqueeze(-1)
        values.masked_fill_(empty, 0.0)  # 0 / 0 until here
        out[chunk] = values.to(out.dtype)
        lse[chunk] = row_lse
