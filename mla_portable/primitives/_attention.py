# SPDX-License-Identifier: Apache-2.0
"""The reference of sparse_decode and sparse_prefill: for a few query rows at a time, fetch their keys and attend.

scores = softmax_scale * q @ keys^T, out = softmax(scores) @ latents, lse = logsumexp(scores), all in `dtype`: float64,
or float32 on a device whose float64 cannot be trusted (`_reference.products`).
Absent entries score -inf. Their keys must not be read from just anywhere, for 0 * NaN is NaN: an absent entry reads a
slot that another entry of the same row names, so what no index names is never fetched where it could matter.
Cost per query row: K rows of the cache fetched and widened to 8 bytes a number, and 2 * K * H * (key + value width) operations.
"""

from __future__ import annotations

import math
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


def attend(
    q: Tensor,
    rows: CacheRows,
    indices: Tensor,
    softmax_scale: float,
    lengths: Tensor | None,
    attn_sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dtype: torch.dtype,
) -> None:
    """Fill out [T, H, V] and lse [T, H] from q [T, H, V + R], indices [T, K], lengths [T]; all may be strided views.

    V and R are the widths of the layout's latent and rotary part.
    """
    num_tokens, num_heads, key_width = q.shape
    value_width = rows.layout.value_width
    topk = indices.shape[1]
    if topk == 0 or rows.num_slots == 0 or out.numel() == 0:  # nothing to read: torch reduces no empty dimension
        out.zero_()
        lse.fill_(-math.inf)
        return
    # keys in `dtype` and float32, their stored bytes, the same bytes as table indices; scores and their temporaries per head
    row_bytes = topk * ((dtype.itemsize + 4) * key_width + 3 * rows.layout.row_bytes + 2 * dtype.itemsize * num_heads)
    step = max(1, chunk_bytes(q.device.type) // row_bytes)
    column = torch.arange(topk, dtype=torch.int64, device=q.device)
    for begin in range(0, num_tokens, step):
        chunk = slice(begin, begin + step)
        index = indices[chunk].long()  # [C, K]
        valid = (index >= 0) & (index < rows.num_slots)
        if lengths is not None:
            valid &= column < lengths[chunk].unsqueeze(1)
        empty = ~valid.any(dim=1)  # [C]
        present = index.masked_fill(~valid, -1)
        named_slot = present.amax(dim=1, keepdim=True).clamp_(min=0)  # [C, 1] a named slot; 0 where no entry is valid
        latent, rope = rows.values(torch.where(valid, index, named_slot).flatten(), dtype)
        latent, rope = (part.view(len(valid), topk, part.shape[-1]) for part in (latent, rope))  # [C, K, V], [C, K, R]
        query = q[chunk].to(dtype) * softmax_scale  # [C, H, V + R]
        scores = products(query[..., :value_width], latent)  # [C, H, K]
        if value_width < key_width:
            scores += products(query[..., value_width:], rope)
        scores.masked_fill_(~valid.unsqueeze(1), -math.inf)
        top = scores.amax(dim=-1, keepdim=True).masked_fill_(empty[:, None, None], 0.0)  # [C, H, 1]
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True)  # [C, H, 1]
        row_lse = (top + total.log()).squeeze(-1)  # [C, H]; log(0) is -inf where the row is empty
        values = products(weights, latent.mT).div_(total)  # [C, H, V]
        if attn_sink is not None:
            values *= torch.sigmoid(row_lse - attn_sink.to(dtype)).unsqueeze(-1)
        values.masked_fill_(empty[:, None, None], 0.0)  # 0 / 0 until here
        out[chunk] = values.to(out.dtype)
        lse[chunk] = row_lse
