# SPDX-License-Identifier: Apache-2.0
"""The passes around a kernel that gets each query row several times, each time with a part of its keys; a Triton kernel each.

Before: the row's query for every part, in as many heads as the kernel wants. After: the parts become one result.
Both are bound by latency: what they move is in the last-level cache.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.kit.triton_launcher import at_any_address
from mla_portable_nvidia.passes.early_start import can_wait, wait_for_kernel_in_front
from mla_portable_nvidia.passes.prepared_passes import Arguments, PreparedPass

_BLOCK: Final = 4096
_MERGED_HEADS: Final = 4


@triton.jit(do_not_specialize=["num_heads", "part", "length_stride"], **at_any_address("limits_ptr", "lengths_ptr"))
def _spread_kernel(
    queries_ptr, limits_ptr, q_ptr, lengths_ptr, num_heads, part, row_stride, head_stride, length_stride,
    PARTS: tl.constexpr, KERNEL_HEADS: tl.constexpr, WIDTH: tl.constexpr, HAS_LENGTHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK] of a row's heads times width
    head, column = at // WIDTH, at % WIDTH
    inside = at < KERNEL_HEADS * WIDTH
    source = q_ptr + row * row_stride + head * head_stride + column
    value = tl.load(source, mask=inside & (head < num_heads), other=0.0)  # [BLOCK]
    for p in tl.static_range(PARTS):
        tl.store(queries_ptr + (row * PARTS + p) * (KERNEL_HEADS * WIDTH) + at, value, mask=inside)
    if HAS_LENGTHS and tl.program_id(1) == 0:
        length = tl.maximum(tl.load(lengths_ptr + row * length_stride), 0)  # what follows does not wrap then
        for p in tl.static_range(PARTS):
            tl.store(limits_ptr + row * PARTS + p, tl.minimum(tl.maximum(length - p * part, 0), part))


@triton.jit(do_not_specialize=["num_heads"], **at_any_address("lse_out_ptr", "lses_ptr", "sink_ptr"))
def _merge_kernel(
    out_ptr, lse_out_ptr, parts_ptr, lses_ptr, sink_ptr, num_heads, out_row, out_head, lse_out_row, lse_out_head,
    PARTS: tl.constexpr, KERNEL_HEADS: tl.constexpr, WIDTH: tl.constexpr, LSE: tl.constexpr, SINK: tl.constexpr,
    BASE_2: tl.constexpr, BLOCK_H: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        wait_for_kernel_in_front()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    is_head = head < num_heads  # [BLOCK_H]
    all_parts = row * PARTS + tl.arange(0, PARTS)  # [PARTS]
    places = all_parts[:, None] * KERNEL_HEADS + head[None, :]  # [PARTS, BLOCK_H]
    lses = tl.load(lses_ptr + places, mask=is_head[None, :], other=0.0)  # [PARTS, BLOCK_H]
    empty = (lses == float("inf")) | (lses == float("-inf"))  # [PARTS, BLOCK_H]
    if BASE_2:
        lses = lses * 0.6931471805599453
    lses = tl.where(empty, float("-inf"), lses)
    top = tl.max(lses, 0)  # [BLOCK_H]
    level = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(lses - level[None, :]), 0)  # [BLOCK_H]; 0 where nothing is valid
    scale = tl.where(total == 0.0, 0.0, 1.0 / total)
    if LSE:
        lse = tl.where(total == 0.0, float("-inf"), level + tl.log(total))  # [BLOCK_H], without the sink
        tl.store(lse_out_ptr + row * lse_out_row + head * lse_out_head, lse, mask=is_head)
    if SINK:
        sink = tl.load(sink_ptr + head, mask=is_head, other=0.0)  # [BLOCK_H]
        scale = scale / (1.0 + tl.exp(sink - level - tl.log(total)))  # an infinite sink gives 0 or 1
        scale = tl.where(total == 0.0, 0.0, scale)
    d = tl.arange(0, WIDTH)  # [WIDTH]
    merged = tl.zeros([BLOCK_H, WIDTH], dtype=tl.float32)
    for i in tl.static_range(PARTS):
        here = (row * PARTS + i) * KERNEL_HEADS + head  # [BLOCK_H]
        own = tl.load(lses_ptr + here, mask=is_head, other=float("inf"))  # [BLOCK_H]
        valid = (own != float("inf")) & (own != float("-inf"))
        if BASE_2:
            own = own * 0.6931471805599453
        weight = tl.where(valid, tl.exp(own - level) * scale, 0.0)  # [BLOCK_H]
        value = tl.load(parts_ptr + here[:, None] * WIDTH + d[None, :], mask=valid[:, None], other=0.0)  # [BLOCK_H, WIDTH]
        merged += weight[:, None] * value.to(tl.float32)
    place = out_ptr + row * out_row + head[:, None] * out_head + d[None, :]
    tl.store(place, merged.to(out_ptr.dtype.element_ty), mask=is_head[:, None])


_spread, _merge = PreparedPass(_spread_kernel), PreparedPass(_merge_kernel)


class RowParts:
    """Both passes, one launch each; nothing for zero rows. They write what they are given, and neither synchronises."""

    def spread(self, queries: Tensor, limits: Tensor | None, q: Tensor, lengths: Tensor | None, part: int) -> None:
        """Queries and lengths of the parts.

        Args:
            queries: [T * P, H' >= H, 576] bf16 contiguous, written, the parts of a token one after the other; heads from H on
                become zero. q: [T, 1, H, 576] bf16.
            limits: [T * P] int32 contiguous, written: what of a row's length falls to each part, 0 to `part`; where
                lengths [T, 1] int32 are given. part: keys of a part.
        """
        (num_rows, kernel_heads, width), (num_tokens, _, num_heads, _) = shapes = queries.shape, q.shape
        if num_tokens == 0:
            return
        if limits is None or lengths is None:
            lengths, length_stride = None, 0
            tensors = (queries, queries, q, q)
        else:
            length_stride = lengths.stride(0)
            tensors = (queries, limits, q, lengths)
        _spread(
            (shapes, q.stride(), length_stride, lengths is None, part),
            tensors,
            lambda: Arguments(
                (num_tokens, -(-kernel_heads * width // _BLOCK)),
                (num_heads, part, q.stride(0), q.stride(2), length_stride),
                {
                    "PARTS": num_rows // num_tokens,
                    "KERNEL_HEADS": kernel_heads,
                    "WIDTH": width,
                    "HAS_LENGTHS": lengths is not None,
                    "BLOCK": _BLOCK,
                    "num_warps": 4,
                },
            ),
        )

    def merge(
        self, out: Tensor, lse_out: Tensor | None, parts: Tensor, lses: Tensor, attn_sink: Tensor | None, base_2: bool
    ) -> None:
        """The parts, weighted by their shares of the sum of exponentials.

        Args:
            out: [T, 1, H, 512] bf16, written; zeros where no part has a valid entry.
            lse_out: [T, 1, H] float32, written: natural, without the sink, -inf where no part has a valid entry.
            parts: [T * P, H' >= H, 512] bf16 contiguous. lses: [T * P, H'] float32 contiguous, infinite (of either sign) where
                a part has no valid entry, whatever `parts` hold there; to base 2 if base_2.
            attn_sink: [H] float32, to be applied.
        """
        num_tokens, _, num_heads, width = out.shape
        if num_tokens == 0:
            return
        lse_strides = None if lse_out is None else lse_out.stride()
        _merge(
            (out.shape, out.stride(), lse_strides, parts.shape, attn_sink is None, base_2),
            (out, lses if lse_out is None else lse_out, parts, lses, lses if attn_sink is None else attn_sink),
            lambda: Arguments(
                (num_tokens, -(-num_heads // _MERGED_HEADS)),
                (num_heads, out.stride(0), out.stride(2), *((0, 0) if lse_strides is None else lse_strides[::2])),
                {
                    "PARTS": parts.shape[0] // num_tokens,
                    "KERNEL_HEADS": parts.shape[1],
                    "WIDTH": width,
                    "LSE": lse_out is not None,
                    "SINK": attn_sink is not None,
                    "BASE_2": base_2,
                    "BLOCK_H": _MERGED_HEADS,
                    "EARLY": can_wait(out),
                    "num_warps": 4,
                },
                starts_early=can_wait(out),  # behind FlashMLA's prefill kernel, which is launched normally
            ),
        )
