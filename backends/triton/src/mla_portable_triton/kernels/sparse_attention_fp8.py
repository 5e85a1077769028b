# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention over the FP8 cache: the kernel. What it computes, how it is cut and launched: `sparse_attention`.

e4m3 is exact in float16, so the products run on the codes, and the float32 scale of each 128 columns multiplies the scores
(float32) and the probabilities (before they round to float16). That is more accurate than rounding the product e4m3 * scale to
bfloat16, and costs 8 multiplies for a head and a token instead of 512 for a token.

A row's 512 codes are read as words of two. Even columns are one operand and odd columns another, of queries (q, r), keys,
values and sums (x, y) alike. So words go from shared memory to the registers of the warps that multiply them, are decoded
there and never written back. They are decoded as keys and again as values, which lie in the registers another way; a value may
take a NaN for a number, because the scores have seen it as a key.

Range of float16: a head's queries are scaled by a power of two, their largest to between 2**13 and 2**14, the rotary ones too;
what is 2**28 times smaller than that loses bits. Probabilities are relative to a level of their head, in which a token counts
with its score and its largest scale. The level is set so that the largest product of both is about 2**6, and the sums are
scaled to it. It stays until a product would pass 2**15, which after the first step is rare. Scales below 2**-60 count as that.

Tiles of 64 heads take longer on Hopper (170 us for 64 rows on an H200 where tiles of 32 took 139, both with products of
bfloat16): warp groups multiply them from shared memory, where what was decoded would have to be written.
"""

import triton
import triton.language as tl

from mla_portable_triton.kernels.attention_parts import columns, finish, split_keys, split_union, token_at, union_slots
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
from mla_portable_triton.kernels.row_layout import LATENT, ROPE_BYTE, SCALE_BYTE


@triton.jit(
    do_not_specialize=[
        *("topk", "num_slots", "q_stride_b", "q_stride_s", "q_stride_h", "indices_stride_b", "indices_stride_s"),
        *("lengths_stride_b", "lengths_stride_s", "out_stride_p", "out_stride_b", "out_stride_s", "out_stride_h"),
        *("lse_stride_p", "lse_stride_b", "lse_stride_s", "lse_stride_h", "extra_topk", "extra_slots"),
        *("extra_indices_stride_b", "extra_indices_stride_s", "extra_lengths_stride_b", "extra_lengths_stride_s"),
    ]
)
def sparse_attention_fp8_kernel(
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
    ROPE: tl.constexpr,  # width of the rotary part, 64; 0: q has none and that of the rows is not read
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
    q0, r0 = load_pairs(q_rows, 0, in_heads, BLOCK_H)  # [BLOCK_H, 64]
    q1, r1 = load_pairs(q_rows, 128, in_heads, BLOCK_H)
    q2, r2 = load_pairs(q_rows, 256, in_heads, BLOCK_H)
    q3, r3 = load_pairs(q_rows, 384, in_heads, BLOCK_H)
    top = tl.maximum(magnitude(q0, r0, BF16_NATIVE), magnitude(q1, r1, BF16_NATIVE))
    top = tl.maximum(top, tl.maximum(magnitude(q2, r2, BF16_NATIVE), magnitude(q3, r3, BF16_NATIVE)))
    if ROPE > 0:
        q_rope = tl.load(q_rows + (tl.arange(0, ROPE) + LATENT)[None, :], mask=in_heads[:, None], other=0.0)  # [BLOCK_H, ROPE]
        top = tl.maximum(top, tl.abs(to_float32(q_rope, BF16_NATIVE)))  # the rotary part is as wide, 64
    top = tl.max(top, 1)  # [BLOCK_H]
    factor, inverse_factor = query_scale(top)  # [BLOCK_H]
    q0 = half_operand(to_float32(q0, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    r0 = half_operand(to_float32(r0, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    q1 = half_operand(to_float32(q1, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    r1 = half_operand(to_float32(r1, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    q2 = half_operand(to_float32(q2, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    r2 = half_operand(to_float32(r2, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    q3 = half_operand(to_float32(q3, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    r3 = half_operand(to_float32(r3, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    if ROPE > 0:
        q_rope = dot_operand(to_float32(q_rope, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    score_scale = scale_log2 * inverse_factor  # [BLOCK_H]

    scale_ptr = kv_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
    word_ptr = kv_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    rope_ptr = kv_ptr.to(tl.pointer_type(tl.bfloat16), bitcast=True)

    level = tl.full([BLOCK_H], -1.0e30, tl.float32)  # what probabilities are relative to, base 2
    sums = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)  # of probabilities
    x0 = tl.zeros([BLOCK_H, 64], tl.float32)
    y0 = tl.zeros([BLOCK_H, 64], tl.float32)
    x1 = tl.zeros([BLOCK_H, 64], tl.float32)
    y1 = tl.zeros([BLOCK_H, 64], tl.float32)
    x2 = tl.zeros([BLOCK_H, 64], tl.float32)
    y2 = tl.zeros([BLOCK_H, 64], tl.float32)
    x3 = tl.zeros([BLOCK_H, 64], tl.float32)
    y3 = tl.zeros([BLOCK_H, 64], tl.float32)
    for start in range(begin, end, BLOCK_N):
        slot = ahead
        # int64 before the first product: a cache may pass 2**31 elements
        if extra_ptr is None:
            k = start + BLOCK_N + n
            ahead = tl.load(indices_row + k, mask=k < end, other=-1)
            valid = (slot >= 0) & (slot < num_slots)  # [BLOCK_N]
            token = token_at(tl.where(valid, slot, 0).to(tl.int64), CACHE_BLOCK, TOKEN_STRIDE, BLOCK_STRIDE)  # [BLOCK_N]
            scale_rows, code_rows, rope_rows = scale_ptr, word_ptr, rope_ptr
        else:
            ahead = union_slots(indices_row, extra_row, start + BLOCK_N, num_keys, second, end, BLOCK_N)
            is_second = start >= second
            valid = (slot >= 0) & (slot < tl.where(is_second, extra_slots, num_slots))  # [BLOCK_N]
            place = tl.where(valid, slot, 0).to(tl.int64)
            token = token_at(place, CACHE_BLOCK, TOKEN_STRIDE, BLOCK_STRIDE)
            token = tl.where(is_second, token_at(place, EXTRA_BLOCK, TOKEN_STRIDE, EXTRA_STRIDE), token)  # [BLOCK_N]
            cache_ptr = tl.where(is_second, extra_ptr, kv_ptr)
            scale_rows = cache_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
            code_rows = cache_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
            rope_rows = cache_ptr.to(tl.pointer_type(tl.bfloat16), bitcast=True)
        scales = scale_rows + token // 4 + SCALE_BYTE // 4  # [BLOCK_N]
        f0 = tl.load(scales, mask=valid, other=0.0)  # [BLOCK_N]
        f1 = tl.load(scales + 1, mask=valid, other=0.0)
        f2 = tl.load(scales + 2, mask=valid, other=0.0)
        f3 = tl.load(scales + 3, mask=valid, other=0.0)
        word_rows = code_rows + (token // 2)[:, None]  # [BLOCK_N, 1]

        if ROPE > 0:
            k_rope = columns(rope_rows + (token // 2)[:, None], ROPE_BYTE // 2, ROPE, valid, BF16_NATIVE)  # [BLOCK_N, ROPE]
            scores = tl.dot(q_rope, tl.trans(k_rope))  # [BLOCK_H, BLOCK_N]
        else:
            scores = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        w0 = words(word_rows, 0, 64, valid, PACKED)  # [BLOCK_N, 64]
        even, odd = decoded(w0, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
        scores = add_scores(scores, q0, r0, even, odd, f0 * KEY_UNIT)
        w1 = words(word_rows, 64, 64, valid, PACKED)
        even, odd = decoded(w1, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
        scores = add_scores(scores, q1, r1, even, odd, f1 * KEY_UNIT)
        w2 = words(word_rows, 128, 64, valid, PACKED)
        even, odd = decoded(w2, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
        scores = add_scores(scores, q2, r2, even, odd, f2 * KEY_UNIT)
        w3 = words(word_rows, 192, 64, valid, PACKED)
        even, odd = decoded(w3, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
        scores = add_scores(scores, q3, r3, even, odd, f3 * KEY_UNIT)
        if PACKED and not E4M3_NATIVE:
            scores += scores * 0.0  # a NaN code made them infinite
        scores = tl.where(valid[None, :], scores * score_scale[:, None], float("-inf"))
        weight = exponent(tl.maximum(tl.maximum(f0, f1), tl.maximum(f2, f3)))  # [BLOCK_N]
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

    lse_row = lse_ptr + split * lse_stride_p + b * lse_stride_b + s * lse_stride_s
    inverse = finish(lse_row, lse_stride_h, sink_ptr, level, tl.sum(sums, 1), h, in_heads, IS_SPLIT) * VALUE_UNIT
    written = in_heads[:, None]
    if IS_SPLIT:
        written = written & (begin < end)  # merge_states does not read the part of an empty split
    out_rows = out_ptr + (split * out_stride_p + b * out_stride_b + s * out_stride_s) * STRIDE_UNIT
    out_rows += h[:, None] * (out_stride_h.to(tl.int64) * STRIDE_UNIT)  # [BLOCK_H, 1]
    store_pairs(out_rows, 0, x0 * inverse, y0 * inverse, written, BLOCK_H, BF16_NATIVE)
    store_pairs(out_rows, 128, x1 * inverse, y1 * inverse, written, BLOCK_H, BF16_NATIVE)
    store_pairs(out_rows, 256, x2 * inverse, y2 * inverse, written, BLOCK_H, BF16_NATIVE)
    store_pairs(out_rows, 384, x3 * inverse, y3 * inverse, written, BLOCK_H, BF16_NATIVE)
