# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention over rows of fp8_v4: the kernel. What it computes, how it is cut and launched: `sparse_attention`.

As over other FP8 rows (`sparse_attention_fp8`, which says why) the products run on float16 codes, even and odd columns apart,
and scales multiply scores and probabilities. Here each 64 columns have a scale, a power of two, of which a token's seven are
read as one word from behind the rows of its block. All 512 columns are key and value: the last 64 are bfloat16 and have
products of bfloat16, with the same probabilities; these need no level to stay in range.
"""

import triton
import triton.language as tl

from mla_portable_triton.kernels.attention_parts import (
    columns,
    finish,
    split_keys,
    split_union,
    store_as,
    token_at,
    union_slots,
)
from mla_portable_triton.kernels.bfloat16 import dot_operand, half_operand, to_float32
from mla_portable_triton.kernels.coded_products import (
    add_scores,
    add_values,
    any_above,
    decoded,
    exponent,
    magnitude,
    query_scale,
    words,
)
from mla_portable_triton.kernels.paired_columns import load_pairs, store_pairs
from mla_portable_triton.kernels.row_layout import (
    V4_CODES,
    V4_ROW_BYTES,
    V4_SCALE_BYTES,
    V4_TAIL,
    e8m0_to_float32,
)


@triton.jit
def scales_at(slot, CACHE_BLOCK: tl.constexpr, BLOCK_STRIDE: tl.constexpr):
    """Where the scales of slots (int64) begin, in bytes of the cache."""
    return slot // CACHE_BLOCK * BLOCK_STRIDE + (slot % CACHE_BLOCK * V4_SCALE_BYTES + CACHE_BLOCK * V4_ROW_BYTES)


@triton.jit
def scale_of(exponents, GROUP: tl.constexpr):
    """The scale of a group of columns, float32, from the eight bytes of each token (int64)."""
    return e8m0_to_float32((exponents >> (8 * GROUP)) & 0xFF)


@triton.jit(
    do_not_specialize=[
        *("topk", "num_slots", "q_stride_b", "q_stride_s", "q_stride_h", "indices_stride_b", "indices_stride_s"),
        *("lengths_stride_b", "lengths_stride_s", "out_stride_p", "out_stride_b", "out_stride_s", "out_stride_h"),
        *("lse_stride_p", "lse_stride_b", "lse_stride_s", "lse_stride_h", "extra_topk", "extra_slots"),
        *("extra_indices_stride_b", "extra_indices_stride_s", "extra_lengths_stride_b", "extra_lengths_stride_s"),
    ]
)
def sparse_attention_v4_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    kv_ptr,
    indices_ptr,
    lengths_ptr,  # None: all K entries are read
    sink_ptr,  # None: no sink
    extra_ptr,  # the second cache; None: there is none, and what else is called extra is not looked at
    extra_indices_ptr,
    extra_lengths_ptr,  # None: all are read
    scale_log2,  # softmax_scale * log2(e)
    topk,
    num_slots,
    q_stride_b,  # strides of q and out count STRIDE_UNIT elements, those of indices, lengths and lse one
    q_stride_s,
    q_stride_h,
    indices_stride_b,
    indices_stride_s,
    lengths_stride_b,
    lengths_stride_s,
    out_stride_p,
    out_stride_b,
    out_stride_s,
    out_stride_h,
    lse_stride_p,
    lse_stride_b,
    lse_stride_s,
    lse_stride_h,
    extra_topk,
    extra_slots,
    extra_indices_stride_b,
    extra_indices_stride_s,
    extra_lengths_stride_b,
    extra_lengths_stride_s,
    NUM_HEADS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,  # 1 where slots are evenly spaced
    TOKEN_STRIDE: tl.constexpr,  # between tokens of a block, in elements of kv
    BLOCK_STRIDE: tl.constexpr,  # between blocks
    EXTRA_BLOCK: tl.constexpr,  # of the second cache, as CACHE_BLOCK
    EXTRA_STRIDE: tl.constexpr,  # as BLOCK_STRIDE
    STRIDE_UNIT: tl.constexpr,
    ROPE: tl.constexpr,  # 0: there is none
    IS_SPLIT: tl.constexpr,  # write a part for merge_states: float32, lse in base 2, no sink
    E4M3_NATIVE: tl.constexpr,
    PACKED: tl.constexpr,  # decode by NVIDIA's instructions
    BF16_NATIVE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (rows * head tiles, splits): the head tiles of a row are neighbours, so that they share its tokens in L2."""
    KEY_UNIT: tl.constexpr = 1.0 if E4M3_NATIVE else 1.0 / 140.0 if PACKED else 256.0
    VALUE_UNIT: tl.constexpr = 1.0 if E4M3_NATIVE else 256.0
    HEAD_TILES: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    row = (tl.program_id(0) // HEAD_TILES).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    b = row // QUERY_LEN
    s = row % QUERY_LEN
    h = (tl.program_id(0) % HEAD_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    in_heads = h < NUM_HEADS  # [BLOCK_H]
    n = tl.arange(0, BLOCK_N)  # [BLOCK_N]

    indices_row = indices_ptr + b * indices_stride_b + s * indices_stride_s
    lengths_at = b * lengths_stride_b + s * lengths_stride_s
    if extra_ptr is None:
        begin, end = split_keys(lengths_ptr, lengths_at, topk, BLOCK_N)
        ahead = tl.load(indices_row + begin + n, mask=begin + n < end, other=-1)  # [BLOCK_N], slots of the next step
    else:
        extra_row = extra_indices_ptr + b * extra_indices_stride_b + s * extra_indices_stride_s
        extra_at = b * extra_lengths_stride_b + s * extra_lengths_stride_s
        num_keys, second, begin, end = split_union(
            lengths_ptr, lengths_at, topk, extra_lengths_ptr, extra_at, extra_topk, BLOCK_N
        )
        ahead = union_slots(indices_row, extra_row, begin, num_keys, second, end, BLOCK_N)

    q_rows = q_ptr + (b * q_stride_b + s * q_stride_s) * STRIDE_UNIT
    q_rows += h[:, None] * (q_stride_h.to(tl.int64) * STRIDE_UNIT)  # [BLOCK_H, 1]
    q0, r0 = load_pairs(q_rows, 0, in_heads, BLOCK_H, 64)  # [BLOCK_H, 32]
    q1, r1 = load_pairs(q_rows, 64, in_heads, BLOCK_H, 64)
    q2, r2 = load_pairs(q_rows, 128, in_heads, BLOCK_H, 64)
    q3, r3 = load_pairs(q_rows, 192, in_heads, BLOCK_H, 64)
    q4, r4 = load_pairs(q_rows, 256, in_heads, BLOCK_H, 64)
    q5, r5 = load_pairs(q_rows, 320, in_heads, BLOCK_H, 64)
    q6, r6 = load_pairs(q_rows, 384, in_heads, BLOCK_H, 64)
    q_tail = tl.load(
        q_rows + (tl.arange(0, V4_TAIL) + V4_CODES)[None, :], mask=in_heads[:, None], other=0.0
    )  # [BLOCK_H, V4_TAIL]
    top = magnitude(q0, r0, BF16_NATIVE)
    top = tl.maximum(top, magnitude(q1, r1, BF16_NATIVE))
    top = tl.maximum(top, magnitude(q2, r2, BF16_NATIVE))
    top = tl.maximum(top, magnitude(q3, r3, BF16_NATIVE))
    top = tl.maximum(top, magnitude(q4, r4, BF16_NATIVE))
    top = tl.maximum(top, magnitude(q5, r5, BF16_NATIVE))
    top = tl.maximum(top, magnitude(q6, r6, BF16_NATIVE))
    top = tl.maximum(tl.max(top, 1), tl.max(tl.abs(to_float32(q_tail, BF16_NATIVE)), 1))  # [BLOCK_H]
    factor, inverse_factor = query_scale(top)  # [BLOCK_H]
    q0 = half_operand(to_float32(q0, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    r0 = half_operand(to_float32(r0, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    q1 = half_operand(to_float32(q1, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    r1 = half_operand(to_float32(r1, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    q2 = half_operand(to_float32(q2, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    r2 = half_operand(to_float32(r2, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    q3 = half_operand(to_float32(q3, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    r3 = half_operand(to_float32(r3, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    q4 = half_operand(to_float32(q4, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    r4 = half_operand(to_float32(r4, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    q5 = half_operand(to_float32(q5, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    r5 = half_operand(to_float32(r5, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    q6 = half_operand(to_float32(q6, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    r6 = half_operand(to_float32(r6, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    q_tail = dot_operand(to_float32(q_tail, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    score_scale = scale_log2 * inverse_factor  # [BLOCK_H]

    level = tl.full([BLOCK_H], -1.0e30, tl.float32)  # what probabilities are relative to, base 2
    sums = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)  # of probabilities
    x0 = tl.zeros([BLOCK_H, 32], tl.float32)
    y0 = tl.zeros([BLOCK_H, 32], tl.float32)
    x1 = tl.zeros([BLOCK_H, 32], tl.float32)
    y1 = tl.zeros([BLOCK_H, 32], tl.float32)
    x2 = tl.zeros([BLOCK_H, 32], tl.float32)
    y2 = tl.zeros([BLOCK_H, 32], tl.float32)
    x3 = tl.zeros([BLOCK_H, 32], tl.float32)
    y3 = tl.zeros([BLOCK_H, 32], tl.float32)
    x4 = tl.zeros([BLOCK_H, 32], tl.float32)
    y4 = tl.zeros([BLOCK_H, 32], tl.float32)
    x5 = tl.zeros([BLOCK_H, 32], tl.float32)
    y5 = tl.zeros([BLOCK_H, 32], tl.float32)
    x6 = tl.zeros([BLOCK_H, 32], tl.float32)
    y6 = tl.zeros([BLOCK_H, 32], tl.float32)
    tail = tl.zeros([BLOCK_H, V4_TAIL], tl.float32)
    for start in range(begin, end, BLOCK_N):
        slot = ahead
        # int64 before the first product: a cache may pass 2**31 elements
        if extra_ptr is None:
            k = start + BLOCK_N + n
            ahead = tl.load(indices_row + k, mask=k < end, other=-1)
            valid = (slot >= 0) & (slot < num_slots)  # [BLOCK_N]
            place = tl.where(valid, slot, 0).to(tl.int64)
            token = token_at(place, CACHE_BLOCK, TOKEN_STRIDE, BLOCK_STRIDE)  # [BLOCK_N]
            apart = scales_at(place, CACHE_BLOCK, BLOCK_STRIDE)  # [BLOCK_N]
            cache_ptr = kv_ptr
        else:
            ahead = union_slots(indices_row, extra_row, start + BLOCK_N, num_keys, second, end, BLOCK_N)
            is_second = start >= second
            valid = (slot >= 0) & (slot < tl.where(is_second, extra_slots, num_slots))  # [BLOCK_N]
            place = tl.where(valid, slot, 0).to(tl.int64)
            token = token_at(place, CACHE_BLOCK, TOKEN_STRIDE, BLOCK_STRIDE)
            token = tl.where(is_second, token_at(place, EXTRA_BLOCK, TOKEN_STRIDE, EXTRA_STRIDE), token)  # [BLOCK_N]
            apart = scales_at(place, CACHE_BLOCK, BLOCK_STRIDE)
            apart = tl.where(is_second, scales_at(place, EXTRA_BLOCK, EXTRA_STRIDE), apart)  # [BLOCK_N]
            cache_ptr = tl.where(is_second, extra_ptr, kv_ptr)
        scale_ptr = cache_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
        word_ptr = cache_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        tail_ptr = cache_ptr.to(tl.pointer_type(tl.bfloat16), bitcast=True)
        exponents = tl.load(scale_ptr + apart // V4_SCALE_BYTES, mask=valid, other=0)  # [BLOCK_N]
        f0 = scale_of(exponents, 0)  # [BLOCK_N]
        f1 = scale_of(exponents, 1)
        f2 = scale_of(exponents, 2)
        f3 = scale_of(exponents, 3)
        f4 = scale_of(exponents, 4)
        f5 = scale_of(exponents, 5)
        f6 = scale_of(exponents, 6)
        word_rows = word_ptr + (token // 2)[:, None]  # [BLOCK_N, 1]

        k_tail = columns(tail_ptr + (token // 2)[:, None], V4_CODES // 2, V4_TAIL, valid, BF16_NATIVE)  # [BLOCK_N, V4_TAIL]
        scores = tl.dot(q_tail, tl.trans(k_tail))  # [BLOCK_H, BLOCK_N]
        w0 = words(word_rows, 0, 32, valid, PACKED)  # [BLOCK_N, 32]
        even, odd = decoded(w0, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
        scores = add_scores(scores, q0, r0, even, odd, f0 * KEY_UNIT)
        w1 = words(word_rows, 32, 32, valid, PACKED)
        even, odd = decoded(w1, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
        scores = add_scores(scores, q1, r1, even, odd, f1 * KEY_UNIT)
        w2 = words(word_rows, 64, 32, valid, PACKED)
        even, odd = decoded(w2, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
        scores = add_scores(scores, q2, r2, even, odd, f2 * KEY_UNIT)
        w3 = words(word_rows, 96, 32, valid, PACKED)
        even, odd = decoded(w3, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
        scores = add_scores(scores, q3, r3, even, odd, f3 * KEY_UNIT)
        w4 = words(word_rows, 128, 32, valid, PACKED)
        even, odd = decoded(w4, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
        scores = add_scores(scores, q4, r4, even, odd, f4 * KEY_UNIT)
        w5 = words(word_rows, 160, 32, valid, PACKED)
        even, odd = decoded(w5, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
        scores = add_scores(scores, q5, r5, even, odd, f5 * KEY_UNIT)
        w6 = words(word_rows, 192, 32, valid, PACKED)
        even, odd = decoded(w6, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
        scores = add_scores(scores, q6, r6, even, odd, f6 * KEY_UNIT)
        if PACKED and not E4M3_NATIVE:
            scores += scores * 0.0  # a NaN code made them infinite
        scores = tl.where(valid[None, :], scores * score_scale[:, None], float("-inf"))
        largest = tl.maximum(tl.maximum(tl.maximum(f0, f1), tl.maximum(f2, f3)), tl.maximum(tl.maximum(f4, f5), f6))
        weight = exponent(largest)  # [BLOCK_N]
        if any_above(scores + weight[None, :] - level[:, None], 15.0):
            risen = tl.maximum(level, tl.max(scores + weight[None, :], 1) - 6.0)
            decay = tl.math.exp2(level - risen)[:, None]
            level = risen
            sums *= decay
            x0 *= decay
            y0 *= decay
            x1 *= decay
            y1 *= decay
            x2 *= decay
            y2 *= decay
            x3 *= decay
            y3 *= decay
            x4 *= decay
            y4 *= decay
            x5 *= decay
            y5 *= decay
            x6 *= decay
            y6 *= decay
            tail *= decay
        p = tl.math.exp2(scores - level[:, None])  # [BLOCK_H, BLOCK_N], 0 where absent
        sums += p
        even, odd = decoded(w0, False, E4M3_NATIVE, PACKED, BF16_NATIVE)
        x0, y0 = add_values(x0, y0, p, even, odd, f0, BF16_NATIVE)
        even, odd = decoded(w1, False, E4M3_NATIVE, PACKED, BF16_NATIVE)
        x1, y1 = add_values(x1, y1, p, even, odd, f1, BF16_NATIVE)
        even, odd = decoded(w2, False, E4M3_NATIVE, PACKED, BF16_NATIVE)
        x2, y2 = add_values(x2, y2, p, even, odd, f2, BF16_NATIVE)
        even, odd = decoded(w3, False, E4M3_NATIVE, PACKED, BF16_NATIVE)
        x3, y3 = add_values(x3, y3, p, even, odd, f3, BF16_NATIVE)
        even, odd = decoded(w4, False, E4M3_NATIVE, PACKED, BF16_NATIVE)
        x4, y4 = add_values(x4, y4, p, even, odd, f4, BF16_NATIVE)
        even, odd = decoded(w5, False, E4M3_NATIVE, PACKED, BF16_NATIVE)
        x5, y5 = add_values(x5, y5, p, even, odd, f5, BF16_NATIVE)
        even, odd = decoded(w6, False, E4M3_NATIVE, PACKED, BF16_NATIVE)
        x6, y6 = add_values(x6, y6, p, even, odd, f6, BF16_NATIVE)
        tail += tl.dot(dot_operand(p, BF16_NATIVE), k_tail)

    lse_row = lse_ptr + split * lse_stride_p + b * lse_stride_b + s * lse_stride_s
    inverse = finish(lse_row, lse_stride_h, sink_ptr, level, tl.sum(sums, 1), h, in_heads, IS_SPLIT)
    written = in_heads[:, None]
    if IS_SPLIT:
        written = written & (begin < end)  # merge_states does not read the part of an empty split
    out_rows = out_ptr + (split * out_stride_p + b * out_stride_b + s * out_stride_s) * STRIDE_UNIT
    out_rows += h[:, None] * (out_stride_h.to(tl.int64) * STRIDE_UNIT)  # [BLOCK_H, 1]
    store_as(out_rows + (tl.arange(0, V4_TAIL) + V4_CODES)[None, :], tail * inverse, written, BF16_NATIVE)
    inverse *= VALUE_UNIT
    store_pairs(out_rows, 0, x0 * inverse, y0 * inverse, written, BLOCK_H, BF16_NATIVE, 64)
    store_pairs(out_rows, 64, x1 * inverse, y1 * inverse, written, BLOCK_H, BF16_NATIVE, 64)
    store_pairs(out_rows, 128, x2 * inverse, y2 * inverse, written, BLOCK_H, BF16_NATIVE, 64)
    store_pairs(out_rows, 192, x3 * inverse, y3 * inverse, written, BLOCK_H, BF16_NATIVE, 64)
    store_pairs(out_rows, 256, x4 * inverse, y4 * inverse, written, BLOCK_H, BF16_NATIVE, 64)
    store_pairs(out_rows, 320, x5 * inverse, y5 * inverse, written, BLOCK_H, BF16_NATIVE, 64)
    store_pairs(out_rows, 384, x6 * inverse, y6 * inverse, written, BLOCK_H, BF16_NATIVE, 64)
