# SPDX-License-Identifier: Apache-2.0
"""indexer_logits_blocks: scores of the keys in candidate blocks of each query token, of MXFP8 or MXFP4 numbers.

slot      starts[token, column // block_tokens] + column % block_tokens; its page is slot // page
number    e4m3 or e2m1 times the e8m0 scale of its 32 columns: a bfloat16, exactly, of which the products are made
score     sum_h weight[h] * max(q[h] . k, 0), in float32, rounded once; -inf for what no block has, and for NaN
halves    64 columns are multiplied at a time; of e2m1, two in a byte, the even ones and the odd ones, so that none moves

A tile has BLOCK_N columns of one token, whose queries it loads; a tile without a key that is seen loads none.
Cost of a key: 132 B, or 68 B of MXFP4, and 8 B for each block; 2 B written. 2,048 blocks of 8 are 2.2 MB a token, or 1.1 MB.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_portable.kit.triton_launcher import TritonLauncher, at_any_address
from mla_portable.layouts import INDEX_HEAD_SIZE
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.kernels.bfloat16 import dot_operand, to_bfloat16, to_float32
from mla_portable_triton.kernels.config import Config, config_for
from mla_portable_triton.kernels.e4m3_decode import e4m3_to_float32
from mla_portable_triton.kernels.index_keys import head_block
from mla_portable_triton.kernels.row_layout import e8m0_to_float32

CONFIGS: Final = {"default": Config(tile=64, num_warps=8)}  # tile: columns; untuned, but 4 warps spill on sm90 and sm100
_HALF = tl.constexpr(INDEX_HEAD_SIZE // 2)
_FREE: Final = [
    *("num_columns", "num_slots", "out_stride", "starts_stride", "lengths_stride", "along"),
    *("q_stride_t", "q_stride_h", "q_scale_stride_t", "weight_stride", "page_stride", "scale_stride"),
]


@triton.jit
def _scales(packed, columns, GROUP: tl.constexpr):
    """[R, C] float32: scales of `columns` [C], GROUP columns each, of rows that have four e8m0 in an int32, `packed` [R]."""
    byte = (packed[:, None] >> (columns // GROUP * 8)[None, :]) & 0xFF
    return tl.where(byte == 255, float("nan"), e8m0_to_float32(byte))


@triton.jit
def _e2m1_to_float32(nibble):
    """Values of the lower four bits of integers: sign, two bits of exponent with bias 1, one of mantissa."""
    # as float16 the bits hold the value times 2**-14, subnormals included
    half = ((nibble & 8) << 12) | ((nibble & 7) << 9)
    return half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _half(rows, packed, there, SECOND: tl.constexpr, FP4: tl.constexpr, E4M3_NATIVE: tl.constexpr, BF16_NATIVE: tl.constexpr):
    """64 of the 128 columns of the rows of bytes at `rows` [R] as an operand of tl.dot, 0 where not `there`: of FP4 the even
    ones, which lie in lower halves of bytes, or the odd ones, else the first or the last."""
    c = tl.arange(0, _HALF)  # [_HALF]
    if FP4:
        byte = tl.load(rows[:, None] + c[None, :], mask=there[:, None], other=0).to(tl.int32)  # [R, _HALF]
        values = _e2m1_to_float32(byte >> 4 if SECOND else byte) * _scales(packed, c, _HALF // 4)
    else:
        c += _HALF if SECOND else 0
        byte = tl.load(rows[:, None] + c[None, :], mask=there[:, None], other=0)  # [R, _HALF]
        values = e4m3_to_float32(byte, E4M3_NATIVE, BF16_NATIVE) * _scales(packed, c, _HALF // 2)
    return dot_operand(values, BF16_NATIVE)


@triton.jit(
    do_not_specialize=_FREE,
    **at_any_address("out_ptr", "q_scale_ptr", "weight_ptr", "scale_ptr", "starts_ptr", "lengths_ptr"),
)
def blocks_kernel(
    out_ptr, q_ptr, q_scale_ptr, weight_ptr, key_ptr, scale_ptr, starts_ptr, lengths_ptr, num_columns, num_slots, out_stride,
    starts_stride, lengths_stride, q_stride_t, q_stride_h, q_scale_stride_t, weight_stride, page_stride, row_stride,
    scale_stride, along,
    NUM_HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, PAGE: tl.constexpr,  # 1 where keys are evenly spaced
    FP4: tl.constexpr, E4M3_NATIVE: tl.constexpr, BF16_NATIVE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One of `along` tiles of a token's columns a program, those of a token side by side."""
    token = (tl.program_id(0) // along).to(tl.int64)
    n = tl.program_id(0) % along * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    inside = n < num_columns
    block = n // BLOCK_TOKENS
    offset = n % BLOCK_TOKENS
    start = tl.load(starts_ptr + token * starts_stride + block, mask=inside, other=-1)  # [BLOCK_N]
    length = tl.load(lengths_ptr + token * lengths_stride + block, mask=inside, other=0)
    slot = start.to(tl.int64) + offset  # a start may be the largest of its type
    seen = (start >= 0) & (offset < length) & (slot < num_slots)
    scores = tl.full([BLOCK_N], float("-inf"), tl.float32)
    if tl.max(seen.to(tl.int32), 0) > 0:
        slot = tl.where(seen, slot, 0)
        page = slot // PAGE
        rest = slot % PAGE
        packed = tl.load(scale_ptr + (page * scale_stride + rest), mask=seen, other=0)  # [BLOCK_N]
        key_rows = key_ptr + (page * page_stride + rest * row_stride)  # [BLOCK_N] pointers
        h = tl.arange(0, BLOCK_H)  # [BLOCK_H]
        in_heads = h < NUM_HEADS
        packed_q = tl.load(q_scale_ptr + token * q_scale_stride_t + h, mask=in_heads, other=0)
        q_rows = q_ptr + token * q_stride_t + h * q_stride_h
        weight = tl.load(weight_ptr + token * weight_stride + h, mask=in_heads, other=0.0)
        keys = _half(key_rows, packed, seen, False, FP4, E4M3_NATIVE, BF16_NATIVE)  # [BLOCK_N, 64]
        dots = tl.dot(keys, tl.trans(_half(q_rows, packed_q, in_heads, False, FP4, E4M3_NATIVE, BF16_NATIVE)))
        keys = _half(key_rows, packed, seen, True, FP4, E4M3_NATIVE, BF16_NATIVE)
        dots += tl.dot(keys, tl.trans(_half(q_rows, packed_q, in_heads, True, FP4, E4M3_NATIVE, BF16_NATIVE)))
        dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
        scores = tl.sum(tl.where(in_heads[None, :], dots * to_float32(weight, BF16_NATIVE)[None, :], 0.0), 1)
        scores = tl.where(seen & (scores == scores), scores, float("-inf"))  # not NaN
    tl.store(out_ptr + token * out_stride + n, to_bfloat16(scores, BF16_NATIVE), mask=inside)


_launch = TritonLauncher(blocks_kernel)


def launch(
    out: Tensor,
    q: Tensor,
    q_scales: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scales: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    block_tokens: int,
    e4m3_native: bool,
    bf16_native: bool,
    config: Config,
) -> None:
    """Write `out` [T, B * block_tokens]. Graph-safe. Rows of every argument and pages may lie apart."""
    num_tokens, num_columns = out.shape
    if num_tokens == 0 or num_columns == 0:
        return
    pages, page, _ = keys.shape
    num_heads, even = q.shape[1], pages == 1
    along = triton.cdiv(num_columns, config.tile)
    _launch(
        (along * num_tokens,),
        out,
        q.view(torch.uint8),
        q_scales,
        weights,
        keys.view(torch.uint8),
        key_scales,
        starts,
        lengths,
        num_columns,
        pages * page,
        out.stride(0),
        starts.stride(0),
        lengths.stride(0),
        q.stride(0),
        q.stride(1),
        q_scales.stride(0),
        weights.stride(0),
        keys.stride(1) if even else keys.stride(0),
        keys.stride(1),
        1 if even else key_scales.stride(0),
        along,
        NUM_HEADS=num_heads,
        BLOCK_TOKENS=block_tokens,
        PAGE=1 if even else page,
        FP4=q.dtype == torch.int8,
        E4M3_NATIVE=e4m3_native,
        BF16_NATIVE=bf16_native,
        BLOCK_H=head_block(num_heads),
        BLOCK_N=config.tile,
        num_warps=config.num_warps,
        num_stages=1,
    )


def aot_variants(arch: str = "default", *, e4m3_native: bool = False) -> list[AotVariant]:
    """The 32 heads of DeepSeek-V4.1's indexer over pages of 64 keys and over gathered ones, both number formats."""
    config = config_for(CONFIGS, arch)
    return [
        variant(
            blocks_kernel,
            f"indexer_logits_blocks-{'mxfp4' if fp4 else 'mxfp8'}-{'gathered' if page == 1 else 'paged'}",
            config.num_warps,
            **dict.fromkeys(("out_ptr", "weight_ptr"), "*bf16"),
            **dict.fromkeys(("q_ptr", "key_ptr"), "*u8"),
            **dict.fromkeys(("q_scale_ptr", "scale_ptr", "starts_ptr", "lengths_ptr"), "*i32"),
            NUM_HEADS=32,
            BLOCK_TOKENS=8,
            PAGE=page,
            FP4=fp4,
            E4M3_NATIVE=e4m3_native,
            BF16_NATIVE=True,
            BLOCK_H=32,
            BLOCK_N=config.tile,
        )
        for fp4 in (False, True)
        for page in (64, 1)
    ]
