# SPDX-License-Identifier: Apache-2.0
"""sparse_decode and sparse_prefill through AITER's `mla_decode_fwd`, the kernels that are not persistent: on bf16 rows, and on
e4m3 rows with one scale for all (`mla_portable_amd.layouts`).

`mla_decode_fwd(q [T, H, 576], kv_buffer [pages, page_size, 1, 576], o [T, H, 512], qo_indptr, kv_indptr, kv_indices,
kv_last_page_lens, max_seqlen_q, ...)`: a query token is a request of one token, a row of the cache a page. What its source
at e4048607 says, and what follows:

- Kernels exist for the head counts of `KERNEL_HEADS` alone: q is padded. Its dispatch asks for a kernel of 64 heads that gfx942
  does not have; that of 32 heads on gfx950 gives wrong results for ragged rows that are split (vLLM 0.33, `_aiter_ops.py`).
- The lse is natural. It is written by the pass that merges splits, which is left out where there is one split of 32 or more
  heads: where the lse is asked for, at least two splits are.
- A token without indices has NaN, in o and in the lse.
- bf16 rows further than 4 GiB from the first are not reached, but for one kernel (ROCm/aiter issue 5765), and of e4m3 rows
  nothing is known: where a cache has more than 2**31 numbers, the rows that are named are copied.
- Its scratch is [T, splits, H, 512] float32: `TOKENS` bounds it.
- Over e4m3 rows queries are e4m3 too, with a scale for all, and so are the weights in front of the product with values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import DecodeSchedule, Request
from mla_portable.kit.results import attention_results
from mla_portable.layouts import HEAD_SIZE, KV_LORA_RANK
from mla_portable_amd.layouts import codes_of
from mla_portable_amd.library import Op
from mla_portable_amd.lists import lists_of

KERNEL_HEADS: Final = {"gfx942": (16, 32, 128), "gfx950": (16, 64, 128)}
"""hsa/<arch>/mla/mla_asm.csv at e4048607: bf16, not persistent, one query token."""
FP8_HEADS: Final = (16, 128)
"""The same for e4m3, on both."""
TOKENS: Final = 1024
"""Tokens of one call of the operation: with 128 heads its scratch takes 268 MB for each split."""
COPIED_ROWS: Final = 1 << 17
"""Rows that are copied at a time where the operation does not reach the cache: 151 MB."""
REACH: Final = 1 << 31
"""Numbers from the first row on that the kernels address: 4 GiB of bf16 rows. Whether numbers wrap around or bytes is not
published, so of e4m3 rows this is the lesser reach."""
_MOST_SPLITS: Final = 16


class Rows:
    """A paged cache as rows that follow one another, whose blocks lie whole rows apart.

    rows: [N, 1, 1, 576], pages of one row; None where the operation would not reach all of them.
    """

    __slots__ = ("_block_rows", "_block_size", "_cache", "num_slots", "rows")

    def __init__(self, cache: Tensor) -> None:
        """cache: [blocks, block_size, 576], of at least one row."""
        num_blocks, self._block_size, width = cache.shape
        self._cache, self.num_slots = cache, num_blocks * self._block_size
        self._block_rows = cache.stride(0) // width if num_blocks > 1 else self._block_size
        count = (num_blocks - 1) * self._block_rows + self._block_size
        near = count * width <= REACH
        self.rows = cache.as_strided((count, 1, 1, width), (width, width, width, 1)) if near else None

    def of(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Rows as pages, and the page of each of `slots` [n] int32: the cache in place, or copies."""
        block, within = slots // self._block_size, slots % self._block_size
        if self.rows is None:
            copies = self._cache.view(torch.uint8)[block, within].view(self._cache.dtype).view(-1, 1, 1, HEAD_SIZE)
            return copies, torch.arange(slots.shape[0], dtype=torch.int32, device=slots.device)
        return self.rows, slots if self._block_rows == self._block_size else block * self._block_rows + within


@dataclass(frozen=True, slots=True, eq=False)
class MlaDecode:
    """The operation for one kind of request.

    Attributes:
        op: `mla_decode_fwd`. heads: of the kernel; q is padded to them. lse: the lse is asked for.
        num_sms: compute units. compacted: what `lists_of` is promised. code: the dtype of e4m3 rows, None for bf16 ones.
    """

    op: Op
    heads: int
    lse: bool
    num_sms: int
    compacted: bool
    code: torch.dtype | None = None

    @classmethod
    def bind(cls, op: Op, request: Request[Any]) -> MlaDecode:
        code = codes_of(request.kv_layout)
        kernels = KERNEL_HEADS[request.device.arch] if code is None else FP8_HEADS
        heads = next(each for each in kernels if each >= (request.num_heads or 1))
        compacted = request.lengths and request.clean_indices and request.clean_lengths
        return cls(op, heads, request.lse, request.device.num_sms, compacted, code)

    def attend(
        self,
        q: Tensor,
        cache: Tensor,
        indices: Tensor,
        lengths: Tensor | None,
        scale: float,
        out: Tensor,
        lse_out: Tensor,
        *,
        q_scale: Tensor | None = None,
        kv_scale: Tensor | None = None,
    ) -> None:
        """Write `out` [T, H, 512] and `lse_out` [T, H], which is NaN where it is not asked for.

        Args:
            q: [T, H, 576] bf16; over e4m3 rows also e4m3, with q_scale. cache: [blocks, block_size, 576] bf16, or e4m3 with
                kv_scale. indices: [T, K] int32. lengths: [T] int32 or None. q_scale, kv_scale: one float32.
        """
        if cache.shape[0] * cache.shape[1] == 0:
            out.zero_()
            lse_out.fill_(-math.inf)
            return
        scales: dict[str, Tensor | None] = {}
        if q.shape[0] == 0:
            return
        if self.code is not None:
            q, q_scale = queries(q, q_scale, self.code)
            scales = {"q_scale": q_scale, "kv_scale": kv_scale}
        rows = Rows(cache)
        step = TOKENS if rows.rows is not None else max(1, min(TOKENS, COPIED_ROWS // indices.shape[1]))
        for first in range(0, q.shape[0], step):
            part = slice(first, first + step)
            some = None if lengths is None else lengths[part]
            self._attend(q[part], rows, indices[part], some, out[part], lse_out[part], sm_scale=scale, **scales)

    def _attend(
        self,
        q: Tensor,
        rows: Rows,
        indices: Tensor,
        lengths: Tensor | None,
        out: Tensor,
        lse_out: Tensor,
        **scales: float | Tensor | None,
    ) -> None:
        tokens, num_heads = q.shape[:2]
        begins, slots, empty = lists_of(indices, lengths, rows.num_slots, compacted=self.compacted)
        pages, page_of = rows.of(slots)
        in_place = num_heads == self.heads and out.is_contiguous()
        padded = q.contiguous() if num_heads == self.heads else q.new_zeros((tokens, self.heads, HEAD_SIZE))
        if num_heads < self.heads:
            padded[:, :num_heads] = q
        target = out if in_place else out.new_empty((tokens, self.heads, KV_LORA_RANK))
        ends = torch.arange(tokens + 1, dtype=torch.int32, device=q.device)
        full = torch.ones(tokens, dtype=torch.int32, device=q.device)
        _, lse = self.op(
            padded, pages, target, ends, begins, page_of, full, 1,
            return_lse=self.lse, **scales, **self._splits(tokens, q.device),
        )  # fmt: skip
        if not in_place:
            out.copy_(target[:, :num_heads])
        out.masked_fill_(empty.view(-1, 1, 1), 0)
        if self.lse:
            lse_out.copy_(lse[:, :num_heads])
            lse_out.masked_fill_(empty.view(-1, 1), -math.inf)
        else:
            lse_out.fill_(math.nan)

    def _splits(self, tokens: int, device: torch.device) -> dict[str, Any]:
        """How many parts each token's rows are dealt out to. AITER's own rule serves but where an lse needs two."""
        if not self.lse:
            return {}
        splits = min(max(2, self.num_sms // tokens), _MOST_SPLITS)
        begins = torch.arange(0, (tokens + 1) * splits, splits, dtype=torch.int32, device=device)
        return {"num_kv_splits": splits, "num_kv_splits_indptr": begins}


def queries(q: Tensor, q_scale: Tensor | None, code: torch.dtype) -> tuple[Tensor, Tensor]:
    """q [T, H, 576] as codes of the device's e4m3, and the scale of all of them, one float32.

    Args:
        q: bf16, or e4m3 of OCP with q_scale. code: OCP's, or fnuz, which holds half of each number of OCP's exactly.
    """
    if q_scale is None:
        largest = torch.finfo(code).max
        q_scale = (q.abs().nan_to_num(0, posinf=0).amax().float() / largest).clamp(min=torch.finfo(torch.float32).tiny).view(1)
        return (q.float() / q_scale).clamp(-largest, largest).to(code), q_scale
    return (q, q_scale) if q.dtype == code else ((q.float() * 0.5).to(code), q_scale * 2)


def bind_sparse_prefill(op: Op, request: Request[Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """sparse_prefill over flat rows. Support declares no attn_sink."""
    decode, kv_layout = MlaDecode.bind(op, request), request.kv_layout

    def sparse_prefill(
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        q_scale: Tensor | None = None,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        out, lse_out = attention_results(q, kv, out, lse_out, kv_layout=kv_layout)
        scales = {"q_scale": q_scale, "kv_scale": kv_scale}
        decode.attend(q, kv.unsqueeze(1) if kv.dim() == 2 else kv, indices, lengths, softmax_scale, out, lse_out, **scales)
        return out, lse_out

    return sparse_prefill


def bind_sparse_decode(op: Op, request: Request[Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """sparse_decode over a paged cache, B * S tokens. Takes no schedule and no attn_sink."""
    decode, kv_layout = MlaDecode.bind(op, request), request.kv_layout

    def sparse_decode(
        q: Tensor,
        kv_cache: Tensor,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        schedule: DecodeSchedule | None = None,
        q_scale: Tensor | None = None,
        kv_scale: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        out, lse_out = attention_results(q, kv_cache, out, lse_out, kv_layout=kv_layout)
        if q.shape[0] == 0:
            return out, lse_out
        some = None if lengths is None else lengths.flatten()
        # a caller's views may not fold into rows: then these are copies, and the views are filled from them
        flat_out, flat_lse = out.flatten(0, 1), lse_out.flatten(0, 1)
        rows = q.flatten(0, 1), kv_cache, indices.flatten(0, 1), some
        decode.attend(*rows, softmax_scale, flat_out, flat_lse, q_scale=q_scale, kv_scale=kv_scale)
        for tensor, flat in ((out, flat_out), (lse_out, flat_lse)):
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))
        return out, lse_out

    return sparse_decode
