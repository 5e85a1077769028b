# SPDX-License-Identifier: Apache-2.0
"""sparse_decode and sparse_prefill through the vendor's sparse attention.

The operations attend from lists of positions of a request, valid ones first, and stop at the first -1. Slots are handed over as
positions of one pretended request that owns all rows, with sparse_mode 0, so that no causal limit holds.

`npu_sparse_flash_attention` reads latent and rotary part of a row from two tensors. A `bf16` cache has both in one row, so rows
are copied apart: all of them where that is less, else the named ones, a bounded number at a time. So are rows of other caches
whose blocks lie apart by anything but whole blocks. The adapters allocate; whether a graph can hold them is up to the
operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mla_portable.contracts import DecodeSchedule, Request
from mla_portable.kit.results import head_results
from mla_portable.layouts import KV_LORA_RANK, Cache
from mla_portable_ascend.layouts import CODES
from mla_portable_ascend.resolve import Op
from mla_portable_ascend.rows import (
    COPIED_ROWS,
    Keys,
    flat_keys,
    flattened,
    latent_and_rope,
    named_rows,
    paged_keys,
    valid_first,
)

Found = tuple[Tensor, Tensor | None]
"""out [T, H, 512] bf16; lse [T, H] float32, None where it was not asked for."""
Call = Callable[[Op, Tensor, Keys, Tensor, float, bool], Found]
"""(op, q [T, H, 576], keys, positions [T, K] int32, scale, lse): one call of an operation, on contiguous tensors."""

KEYWORDS: Final = (
    *("query", "key", "value", "sparse_indices", "scale_value", "block_table", "actual_seq_lengths_query"),
    *("actual_seq_lengths_kv", "sparse_block_size", "layout_query", "layout_kv", "sparse_mode", "attention_mode"),
)
"""What every operation is called with."""
SPLIT_KEYWORDS: Final = (*KEYWORDS, "query_rope", "key_rope", "return_softmax_lse")
_TILES: Final = {"key_quant_mode": 2, "value_quant_mode": 2, "quant_scale_repo_mode": 1, "tile_size": 128, "rope_head_dim": 64}
"""Scales of tiles of 128 codes, in the rows: the only way that is supported."""
PACKED_KEYWORDS: Final = (*KEYWORDS, *_TILES)


def sparse_flash_attention(op: Op, q: Tensor, keys: Keys, positions: Tensor, scale: float, lse: bool) -> Found:
    """`npu_sparse_flash_attention`: keys have a part for the latent and one for the rotary part."""
    latent, rope = keys.parts
    q_latent, q_rope = latent_and_rope(q)
    given = _common(q_latent, latent, keys, positions, scale)
    out, peak, total = op(**given, query_rope=q_rope, key_rope=rope, return_softmax_lse=lse)
    return out, _lse(peak, total) if lse else None


def kv_quant_sparse_flash_attention(op: Op, q: Tensor, keys: Keys, positions: Tensor, scale: float, lse: bool) -> Found:
    """`npu_kv_quant_sparse_flash_attention`, of keys of one part. That of torch_npu has no lse, and is never asked for one."""
    (packed,) = keys.parts
    given = _common(q.contiguous(), packed, keys, positions, scale)
    if not lse:
        found = op(**given, **_TILES)
        return found[0] if isinstance(found, tuple) else found, None
    out, peak, total = op(**given, **_TILES, return_softmax_lse=True)
    return out, _lse(peak, total)


def _common(query: Tensor, key: Tensor, keys: Keys, positions: Tensor, scale: float) -> dict[str, object]:
    count = positions.new_full
    return {
        "query": query,
        "key": key,
        "value": key,
        "sparse_indices": positions.unsqueeze(1),
        "scale_value": scale,
        "block_table": keys.table,
        "actual_seq_lengths_query": count((1,), query.shape[0]),
        "actual_seq_lengths_kv": count((1,), keys.length),
        "sparse_block_size": 1,
        "layout_query": "TND",
        "layout_kv": keys.layout,
        "sparse_mode": 0,
        "attention_mode": 2,
    }


def _lse(peak: Tensor, total: Tensor) -> Tensor:
    """From the maximum of the scores and the sum of their exponentials, [1, T, H] each."""
    return peak[0] + total[0].log()


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """An operation for one kind of request.

    Attributes:
        op, call: see `Call`. lse: it is asked for. clean: indices are slots or -1, the slots first.
        apart: rows hold latent and rotary part, and are copied apart. codes: the dtype that bytes are handed over as, or None.
    """

    op: Op
    call: Call
    lse: bool
    clean: bool
    apart: bool
    codes: torch.dtype | None

    def attend(
        self, q: Tensor, kv: Cache, indices: Tensor, lengths: Tensor | None, scale: float, out: Tensor, lse_out: Tensor
    ) -> None:
        """Write `out` [T, H, 512] and `lse_out` [T, H], which holds NaN where it is not asked for.

        q [T, H, 576]; kv: parts [W, width] or [blocks, block_size, width]; indices [T, K]; lengths [T].
        """
        parts = kv if isinstance(kv, tuple) else (kv if self.codes is None else kv.view(self.codes),)
        num_rows, topk = math.prod(parts[0].shape[:-1]), indices.shape[1]
        if num_rows == 0:
            out.zero_()
            lse_out.fill_(-math.inf)
            return
        slots = indices.contiguous() if self.clean else valid_first(indices, num_rows, lengths)
        whole = None if self.apart else paged_keys(parts, topk)
        if whole is None and num_rows <= min(slots.numel(), COPIED_ROWS):
            whole = self._copied(tuple(map(flattened, parts)), topk)
        if whole is not None:
            self._write(q, whole, slots, scale, out, lse_out)
            return
        step = max(1, COPIED_ROWS // topk)
        for first in range(0, q.shape[0], step):
            some = slice(first, first + step)
            named = slots[some]
            keys = self._copied(tuple(named_rows(part, named) for part in parts), topk)
            places = torch.arange(named.numel(), dtype=torch.int32, device=named.device).view_as(named)
            self._write(q[some], keys, torch.where(named >= 0, places, -1), scale, out[some], lse_out[some])

    def _copied(self, rows: tuple[Tensor, ...], topk: int) -> Keys:
        """Copied rows [N, width] as keys."""
        return flat_keys(latent_and_rope(rows[0]) if self.apart else rows, topk)

    def _write(self, q: Tensor, keys: Keys, positions: Tensor, scale: float, out: Tensor, lse_out: Tensor) -> None:
        """One call; positions [T, K] of `keys`, valid first."""
        found, lse = self.call(self.op, q, keys, positions, scale, self.lse)
        empty = positions[:, :1] < 0  # [T, 1]
        out.copy_(found.masked_fill(empty.unsqueeze(-1), 0))
        if lse is None:
            lse_out.fill_(math.nan)
        else:
            lse_out.copy_(lse.masked_fill(empty, -math.inf))


def _attention(op: Op, request: Request, call: Call, *, apart: bool) -> Attention:
    """For a request. Clean lengths count leading slots, behind which clean indices are -1."""
    clean = request.lengths and request.clean_lengths and request.clean_indices
    return Attention(op, call, request.lse, clean, apart, CODES.get(request.kv_layout or ""))


def bind_sparse_prefill(op: Op, request: Request, *, call: Call, apart: bool = False) -> Callable[..., tuple[Tensor, Tensor]]:
    """sparse_prefill. Support declares no attn_sink."""
    attention = _attention(op, request, call, apart=apart)

    def sparse_prefill(
        q: Tensor,
        kv: Cache,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        out, lse_out = head_results(q, KV_LORA_RANK, out, lse_out)
        if q.shape[0]:
            attention.attend(q, kv, indices, lengths, softmax_scale, out, lse_out)
        return out, lse_out

    return sparse_prefill


def bind_sparse_decode(op: Op, request: Request, *, call: Call, apart: bool = False) -> Callable[..., tuple[Tensor, Tensor]]:
    """sparse_decode: B * S rows of one query each. Takes no schedule and no attn_sink."""
    attention = _attention(op, request, call, apart=apart)

    def sparse_decode(
        q: Tensor,
        kv_cache: Cache,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        schedule: DecodeSchedule | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        out, lse_out = head_results(q, KV_LORA_RANK, out, lse_out)
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
