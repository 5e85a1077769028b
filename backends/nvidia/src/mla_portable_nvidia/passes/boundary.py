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

from mla_portable.kit.triton_launcher import at_any_address
from mla_portable_nvidia.passes.early_start import can_wait, wait_for_kernel_in_front
from mla_portable_nvidia.passes.prepared_passes import Arguments, PreparedPass

_INT32_MAX: Final = 2**31 - 1
_BLOCK_K: Final = 1024
_BLOCK_H: Final = 8
_BLOCK_LSE: Final = 256
_COLUMNS: Final = 32


@triton.jit(
    do_not_specialize=["last_slot", "query_len", "length_batch_stride", "length_query_stride"], **at_any_address("lengths_ptr")
)
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


@triton.jit(
    do_not_specialize=[
        "query_len",
        "num_heads",
        "lse_out_batch",
        "lse_out_query",
        "lse_out_head",
        "lse_batch",
        "lse_head",
        "lse_query",
    ],
    **at_any_address("lse_out_ptr", "lse_ptr", "sink_ptr"),
)
def _finish_kernel(
    out_ptr, lse_out_ptr, result_ptr, lse_ptr, sink_ptr, query_len, num_heads,
    out_batch, out_query, out_head, lse_out_batch, lse_out_query, lse_out_head,
    result_batch, result_query, result_head, lse_batch, lse_head, lse_query,
    SINK: tl.constexpr, BASE_2: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr,
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
    source = result_ptr + batch * result_batch + query * result_query + head[:, None] * result_head + d[None, :]
    value = tl.load(source, mask=is_head[:, None], other=0.0)  # [BLOCK_H, WIDTH]
    if SINK:
        sink = tl.load(sink_ptr + head, mask=is_head, other=0.0)  # [BLOCK_H]
        weight = 1.0 / (1.0 + tl.exp(sink - lse))  # [BLOCK_H]; an infinite sink gives 0 or 1
        value = (value.to(tl.float32) * weight[:, None]).to(out_ptr.dtype.element_ty)
    zero = tl.zeros([BLOCK_H, WIDTH], dtype=out_ptr.dtype.element_ty)
    place = out_ptr + batch * out_batch + query * out_query + head[:, None] * out_head + d[None, :]  # [BLOCK_H, WIDTH]
    tl.store(place, tl.where(empty[:, None], zero, value), mask=is_head[:, None])


@triton.jit(
    do_not_specialize=[
        "total",
        "query_len",
        "num_heads",
        "lse_out_batch",
        "lse_out_query",
        "lse_out_head",
        "lse_batch",
        "lse_head",
        "lse_query",
    ],
    **at_any_address("lse_out_ptr", "lse_ptr"),
)
def _lse_kernel(
    out_ptr, lse_out_ptr, lse_ptr, total, query_len, num_heads,
    out_batch, out_query, out_head, lse_out_batch, lse_out_query, lse_out_head, lse_batch, lse_head, lse_query,
    BASE_2: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        wait_for_kernel_in_front()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK] of all heads of all rows
    inside = at < total
    row, head = at // num_heads, at % num_heads
    batch, query = (row // query_len).to(tl.int64), row % query_len
    lse = tl.load(lse_ptr + batch * lse_batch + query * lse_query + head * lse_head, mask=inside, other=0.0)  # [BLOCK]
    empty = (lse == float("inf")) | (lse == float("-inf"))  # [BLOCK]
    if BASE_2:
        lse = lse * 0.6931471805599453
    lse = tl.where(empty, float("-inf"), lse)
    tl.store(lse_out_ptr + batch * lse_out_batch + query * lse_out_query + head * lse_out_head, lse, mask=inside)
    if tl.max(empty.to(tl.int32), 0) > 0:
        place = out_ptr + batch * out_batch + query * out_query + head * out_head  # [BLOCK]
        d = tl.arange(0, COLUMNS)  # [COLUMNS]
        zero = tl.zeros([BLOCK, COLUMNS], dtype=out_ptr.dtype.element_ty)
        for first in range(0, WIDTH, COLUMNS):
            tl.store(place[:, None] + first + d[None, :], zero, mask=empty[:, None])


_sanitise, _finish, _lse = PreparedPass(_sanitise_kernel), PreparedPass(_finish_kernel), PreparedPass(_lse_kernel)


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
        last_slot = min(num_slots - 1, _INT32_MAX)
        strides, length_strides = indices.stride(), (0, 0) if lengths is None else lengths.stride()
        _sanitise(
            (indices.shape, width, strides, length_strides, lengths is None),
            (out, indices, indices if lengths is None else lengths),
            lambda: Arguments(
                (batch * query_len, -(-width // _BLOCK_K)),
                (query_len, *strides[:2], *length_strides),
                {
                    "TOPK": topk,
                    "WIDTH": width,
                    "HAS_LENGTHS": lengths is not None,
                    "BLOCK_K": _BLOCK_K,
                    "num_warps": 4,
                },
            ),
            (last_slot,),  # a workspace is as long as its step needs
        )

    def finish(
        self,
        out: Tensor,
        lse_out: Tensor,
        result: Tensor | None,
        lse: Tensor,
        attn_sink: Tensor | None,
        base_2: bool,
        *,
        early: bool,
    ) -> None:
        """Bring a kernel's results into `out` and `lse_out`.

        Args:
            out: [B, S, H, 512] bf16, written. lse_out: [B, S, H] float32, written.
            result: [B, S, H' >= H, 512] bf16, or None where the kernel wrote `out` itself.
            lse: [B, H' >= H, S] float32, infinite (of either sign) where a row has no valid entry. base_2: lse is to base 2.
            attn_sink: [H] float32 that the kernel has not applied.
            early: the pass may start before the end of the kernel in front of it, by the rule of `early_start.can_wait`.
        """
        batch, query_len, num_heads, width = out.shape
        if batch * query_len == 0:
            return
        strides, lse_strides = out.stride()[:3], (*lse_out.stride(), *lse.stride())  # batch, query, head; batch, head, query
        if result is None and attn_sink is None:
            total = batch * query_len * num_heads
            _lse(
                (out.shape, strides, lse_strides, base_2, early),
                (out, lse_out, lse),
                lambda: Arguments(
                    (-(-total // _BLOCK_LSE), 1),
                    (total, query_len, num_heads, *strides, *lse_strides),
                    {
                        "BASE_2": base_2,
                        "WIDTH": width,
                        "BLOCK": _BLOCK_LSE,
                        "COLUMNS": _COLUMNS,
                        "EARLY": early and can_wait(out),
                        "num_warps": 4,
                    },
                    starts_early=early and can_wait(out),
                ),
            )
            return
        source = out if result is None else result
        _finish(
            (out.shape, strides, lse_strides, source.stride(), attn_sink is None, base_2),
            (out, lse_out, source, lse, lse if attn_sink is None else attn_sink),
            lambda: Arguments(
                (batch * query_len, -(-num_heads // _BLOCK_H)),
                (query_len, num_heads, *strides, *lse_strides[:3], *source.stride()[:3], *lse_strides[3:]),
                {"SINK": attn_sink is not None, "BASE_2": base_2, "WIDTH": width, "BLOCK_H": _BLOCK_H, "num_warps": 4},
            ),
        )
