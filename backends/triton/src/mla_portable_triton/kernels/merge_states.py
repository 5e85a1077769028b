# SPDX-License-Identifier: Apache-2.0
"""Merging partial attention results over disjoint key sets: the primitive itself, and the last step of split-KV decoding.

    lse = log(sum_p exp(lse_p)),  out = sum_p exp(lse_p - lse) * out_p

A part with lse = -inf is not read, so its `out` may hold anything. Where every part is empty, out = 0 and lse = -inf.
A caller's part is empty with lse = +inf, too, as FlashMLA returns it; one of split-KV decoding, in base 2, never has it.
Parts are added in their order, BLOCK_P at a time: the result is the same every time and depends on no other row.

Cost: P * D values read and D written for each row, once; one program for a row.
"""

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.kit.triton_launcher import TritonLauncher, at_any_address
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.kernels.bfloat16 import to_bfloat16, to_float32
from mla_portable_triton.kernels.strides import stride_unit

LSE_TILE = 64
"""Parts whose lse one step of the first pass reads. Split-KV seldom makes more."""
PART_TILE = 8
"""Parts that one step of the second pass adds: loads in flight, against registers."""
NUM_WARPS = 4
SHORT_ROW = 256
"""Values of a row up to which one warp merges two parts, as where contexts are attended to in parts: rows are many then."""


@triton.jit(
    do_not_specialize=[
        *("num_parts", "outs_stride_p", "lses_stride_p", "out_stride_b", "out_stride_s", "out_stride_h"),
        *("lse_stride_b", "lse_stride_s", "lse_stride_h"),
    ],
    **at_any_address("lse_ptr", "lses_ptr", "sink_ptr"),
)
def merge_states_kernel(
    out_ptr,
    lse_ptr,
    outs_ptr,  # [P, rows, HEAD_DIM], rows of a part contiguous
    lses_ptr,  # [P, rows], likewise
    sink_ptr,  # [NUM_HEADS] or None: no sink
    num_parts,
    outs_stride_p,
    lses_stride_p,
    out_stride_b,
    out_stride_s,
    out_stride_h,
    lse_stride_b,
    lse_stride_s,
    lse_stride_h,
    STRIDE_UNIT: tl.constexpr,  # elements; strides of out and outs count it, those of lse and lses one
    NUM_HEADS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BASE_2: tl.constexpr,  # the parts' lse are in base 2; the merged one is always natural
    BF16_NATIVE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Grid (rows,): a row is a query token and a head, b * S * H + s * H + h."""
    row = tl.program_id(0).to(tl.int64)
    h = row % NUM_HEADS
    b = row // NUM_HEADS // QUERY_LEN
    s = row // NUM_HEADS % QUERY_LEN
    LOG2_E: tl.constexpr = 1.4426950408889634
    LN_2: tl.constexpr = 0.6931471805599453
    # of the parts' lse to base 2 and to base e; differences are taken first, where they are exact
    TO_2: tl.constexpr = 1.0 if BASE_2 else LOG2_E
    TO_E: tl.constexpr = LN_2 if BASE_2 else 1.0

    # as in the attention kernel: a finite start, so that no -inf is subtracted from another
    top = -1.0e30
    total = 0.0
    for start in range(0, num_parts, BLOCK_L):
        p = start + tl.arange(0, BLOCK_L)
        part_lse = tl.load(lses_ptr + p.to(tl.int64) * lses_stride_p + row, mask=p < num_parts, other=float("-inf"))
        if not BASE_2:
            part_lse = tl.where(part_lse == float("inf"), float("-inf"), part_lse)
        new_top = tl.maximum(top, tl.max(part_lse, 0))
        total = total * tl.math.exp2((top - new_top) * TO_2) + tl.sum(tl.math.exp2((part_lse - new_top) * TO_2), 0)
        top = new_top

    d = tl.arange(0, BLOCK_D)
    in_row = d < HEAD_DIM
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_parts, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        part_lse = tl.load(lses_ptr + p.to(tl.int64) * lses_stride_p + row, mask=p < num_parts, other=float("-inf"))
        if not BASE_2:
            part_lse = tl.where(part_lse == float("inf"), float("-inf"), part_lse)
        weight = tl.math.exp2((part_lse - top) * TO_2)  # [BLOCK_P]
        counts = part_lse != float("-inf")
        part = outs_ptr + (p.to(tl.int64) * outs_stride_p * STRIDE_UNIT + row * HEAD_DIM)[:, None] + d[None, :]
        part = tl.load(part, mask=counts[:, None] & in_row[None, :], other=0.0)  # [BLOCK_P, BLOCK_D]
        acc += tl.sum(to_float32(part, BF16_NATIVE) * weight[:, None], 0)

    empty = total == 0.0  # a NaN total is not empty, it has to be seen
    lse = tl.where(empty, float("-inf"), top * TO_E + tl.math.log2(tl.where(empty, 1.0, total)) * LN_2)
    if sink_ptr is not None:
        sink = tl.load(sink_ptr + h) * LOG2_E - top * TO_2  # relative to the top, in base 2
        total += tl.math.exp2(tl.where(empty, 0.0, sink))
    merged = tl.where(empty, 0.0, acc / tl.where(empty, 1.0, total))
    tl.store(lse_ptr + b * lse_stride_b + s * lse_stride_s + h * lse_stride_h, lse)
    out_row = out_ptr + (b * out_stride_b + s * out_stride_s + h * out_stride_h) * STRIDE_UNIT + d
    if out_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(out_row, to_bfloat16(merged, BF16_NATIVE), mask=in_row)
    else:
        tl.store(out_row, merged.to(out_ptr.dtype.element_ty), mask=in_row)


_launch = TritonLauncher(merge_states_kernel)


def launch(
    out: Tensor,
    lse_out: Tensor,
    outs: Tensor,
    lses: Tensor,
    *,
    attn_sink: Tensor | None,
    base_2: bool,
    bf16_native: bool,
) -> None:
    """Write `out` [B, S, H, D] and `lse_out` [B, S, H] float32, strided as they like; graph-safe, allocates nothing.

    Args:
        outs: [P, ..., D] bf16, fp16 or float32, B * S * H rows of D in a part, contiguous; parts may lie apart.
        lses: [P, ...] float32, likewise; in base 2 where `base_2`.
        attn_sink: [H] float32, applied to the merged result; None for none.
    """
    batch, query_len, num_heads, head_dim = out.shape
    num_rows = batch * query_len * num_heads
    if num_rows == 0:
        return
    out_strides = out.stride()[:3]
    unit = stride_unit(outs.stride(0), *out_strides)
    short = outs.shape[0] <= 2 and head_dim <= SHORT_ROW
    _launch(
        (num_rows,),
        out,
        lse_out,
        outs,
        lses,
        attn_sink,
        lses.shape[0],
        outs.stride(0) // unit,
        lses.stride(0),
        *(stride // unit for stride in out_strides),
        *lse_out.stride(),
        STRIDE_UNIT=unit,
        NUM_HEADS=num_heads,
        QUERY_LEN=query_len,
        HEAD_DIM=head_dim,
        BASE_2=base_2,
        BF16_NATIVE=bf16_native,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_L=2 if short else LSE_TILE,
        BLOCK_P=2 if short else PART_TILE,
        num_warps=1 if short else NUM_WARPS,
        num_stages=1,
    )


def aot_variants() -> list[AotVariant]:
    """Split-KV's use (float32 parts in base 2, a sink, bf16 out) and the primitive's on bf16 parts."""
    shape = {"STRIDE_UNIT": 8, "NUM_HEADS": 16, "QUERY_LEN": 1, "HEAD_DIM": 512, "BF16_NATIVE": True}
    tiles = {"BLOCK_D": 512, "BLOCK_L": LSE_TILE, "BLOCK_P": PART_TILE}
    common = {"out_ptr": "*bf16", "lse_ptr": "*fp32", "lses_ptr": "*fp32", **shape, **tiles}
    split = {"outs_ptr": "*fp32", "sink_ptr": "*fp32", "BASE_2": True}
    primitive = {"outs_ptr": "*bf16", "sink_ptr": None, "BASE_2": False}
    two = {**common, **primitive, "HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_L": 2, "BLOCK_P": 2}
    return [
        variant(merge_states_kernel, "merge_states-split_kv", NUM_WARPS, **{**common, **split}),
        variant(merge_states_kernel, "merge_states-bf16", NUM_WARPS, **{**common, **primitive}),
        variant(merge_states_kernel, "merge_states-two_parts", 1, **two),
    ]
