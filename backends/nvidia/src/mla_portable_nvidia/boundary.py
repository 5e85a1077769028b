# SPDX-License-Identifier: Apache-2.0
"""The two passes around a FlashMLA call that give it this project's one meaning, one Triton kernel each.

Before: indices that FlashMLA's decode may be shown. It knows one absent index, -1, and follows any other wherever it leads.
After: lse natural and -inf where nothing is valid, out zero there, the sink where the kernel could not apply it itself.

Both are bound by latency: at 128 rows of 2048 indices the first moves 2 MB; the second reads one float a head and writes one,
and touches `out` only where a row is empty, unless heads were padded or a sink is due.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.contracts.triton_launcher import TritonLauncher

_INT32_MAX: Final = 2**31 - 1
_BLOCK_K: Final = 1024
_BLOCK_H: Final = 8


@triton.jit(do_not_specialize=["last_slot", "query_len"])
def _sanitise_kernel(
    out_ptr, indices_ptr, lengths_ptr, last_slot, query_len, batch_stride, query_stride, length_batch_stride,
    length_query_stride, TOPK: tl.constexpr, WIDTH: tl.constexpr, HAS_LENGTHS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # rows x WIDTH passes 2**31 at 1 048 576 rows of 2048
    batch, query = row // query_len, row % query_len
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)  # [BLOCK_K]
    limit = TOPK
    if HAS_LENGTHS:
        limit = tl.minimum(limit, tl.load(lengths_ptr + batch * length_batch_stride + query * length_query_stride))
    index = tl.load(indices_ptr + batch * batch_stride + query * query_stride + k, mask=k < limit, other=-1)  # [BLOCK_K]
    index = tl.where((index < 0) | (index > last_slot), -1, index)
    tl.store(out_ptr + row * WIDTH + k, index, mask=k < WIDTH)


@triton.jit(do_not_specialize=["query_len", "num_heads"])
def _finish_kernel(
    out_ptr, lse_out_ptr, result_ptr, lse_ptr, sink_ptr, query_len, num_heads,
    out_batch, out_query, out_head, lse_out_batch, lse_out_query, lse_out_head,
    result_batch, result_query, result_head, lse_batch, lse_query, lse_head,
    COPY: tl.constexpr, SINK: tl.constexpr, BASE_2: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, query = row // query_len, row % query_len
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    is_head = head < num_heads  # [BLOCK_H]
    lse = tl.load(lse_ptr + batch * lse_batch + query * lse_query + head * lse_head, mask=is_head, other=0.0)  # [BLOCK_H]
    empty = (lse == float("inf")) | (lse == float("-inf"))  # [BLOCK_H]
    if BASE_2:
        lse = lse * 0.6931471805599453
    lse = tl.where(empty, float("-inf"), lse)
    tl.store(lse_out_ptr + batch * lse_out_batch + query * lse_out_query + head * lse_out_head, lse, mask=is_head)
    d = tl.arange(0, WIDTH)  # [WIDTH]
    place = out_ptr + batch * out_batch + query * out_query + head[:, None] * out_head + d[None, :]  # [BLOCK_H, WIDTH]
    if COPY or SINK:
        source = result_ptr + batch * result_batch + query * result_query + head[:, None] * result_head + d[None, :]
        value = tl.load(source, mask=is_head[:, None], other=0.0)  # [BLOCK_H, WIDTH]
        if SINK:
            sink = tl.load(sink_ptr + head, mask=is_head, other=0.0)  # [BLOCK_H]
            weight = 1.0 / (1.0 + tl.exp(sink - lse))  # [BLOCK_H]; an infinite sink gives 0 or 1
            value = (value.to(tl.float32) * weight[:, None]).to(out_ptr.dtype.element_ty)
        zero = tl.zeros([BLOCK_H, WIDTH], dtype=out_ptr.dtype.element_ty)
        tl.store(place, tl.where(empty[:, None], zero, value), mask=is_head[:, None])
    else:
        zero = tl.zeros([BLOCK_H, WIDTH], dtype=out_ptr.dtype.element_ty)
        tl.store(place, zero, mask=(is_head & empty)[:, None])


_launch_sanitise, _launch_finish = TritonLauncher(_sanitise_kernel), TritonLauncher(_finish_kernel)


class Boundary:
    """Both passes, one launch each; nothing for zero rows. They write what they are given, and neither synchronises."""

    def sanitise(self, out: Tensor, indices: Tensor, lengths: Tensor | None, num_slots: int) -> None:
        """Copy indices; what is negative, past the cache or past the row's length becomes -1, and so does the padding.

        Args:
            out: [B, S, K'] int32 contiguous, written, K' >= K. indices: [B, S, K] int32. lengths: [B, S] int32.
            num_slots: slots of the cache, at least 1.
        """
        batch, query_len, topk = indices.shape
        width = out.shape[2]
        if batch * query_len == 0:
            return
        length_strides = (0, 0) if lengths is None else lengths.stride()
        _launch_sanitise(
            (batch * query_len, triton.cdiv(width, _BLOCK_K)),
            out,
            indices,
            lengths,
            min(num_slots - 1, _INT32_MAX),
            query_len,
            indices.stride(0),
            indices.stride(1),
            *length_strides,
            TOPK=topk,
            WIDTH=width,
            HAS_LENGTHS=lengths is not None,
            BLOCK_K=_BLOCK_K,
            num_warps=4,
        )

    def finish(
        self, out: Tensor, lse_out: Tensor, result: Tensor | None, lse: Tensor, attn_sink: Tensor | None, base_2: bool
    ) -> None:
        """Bring a kernel's results into `out` and `lse_out`.

        Args:
            out: [B, S, H, 512] bf16, written. lse_out: [B, S, H] float32, written.
            result: [B, S, H' >= H, 512] bf16, or None where the kernel wrote `out` itself.
            lse: [B, S, H' >= H] float32, infinite (of either sign) where a row has no valid entry. base_2: lse is to base 2.
            attn_sink: [H] float32 that the kernel has not applied.
        """
        batch, query_len, num_heads, width = out.shape
        if batch * query_len == 0:
            return
        source = out if result is None else result
        _launch_finish(
            (batch * query_len, triton.cdiv(num_heads, _BLOCK_H)),
            out,
            lse_out,
            source,
            lse,
            attn_sink,
            query_len,
            num_heads,
            *out.stride()[:3],
            *lse_out.stride(),
            *source.stride()[:3],
            *lse.stride(),
            COPY=result is not None,
            SINK=attn_sink is not None,
            BASE_2=base_2,
            WIDTH=width,
            BLOCK_H=_BLOCK_H,
            num_warps=4,
        )
