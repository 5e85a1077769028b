# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention over rows of e4m3 codes: the kernel. What it computes, how it is cut and launched: `sparse_attention`.

Where the codes, scales and other columns of a row are is for `coded_rows` to say.

e4m3 is exact in float16, so the products run on the codes, and the scale of each group of columns multiplies the scores
(float32) and the probabilities (before they round to float16). That is more accurate than rounding the product e4m3 * scale to
bfloat16, and costs 8 multiplies for a head and a token, 14 in fp8_v4, instead of 512 for a token.

A row's codes are read as words of two. Even columns are one operand and odd columns another, of queries (q, r), keys,
values and sums (x, y) alike. So words go from shared memory to the registers of the warps that multiply them, are decoded
there and never written back. They are decoded as keys and again as values, which lie in the registers another way; a value may
take a NaN for a number, because the scores have seen it as a key. bfloat16 columns have products of bfloat16; where they are
values, they take the same probabilities, and need no level to stay in range.

Range of float16: a head's queries are scaled by a power of two, their largest to between 2**13 and 2**14, the rotary ones too;
what is 2**28 times smaller than that loses bits. Probabilities are relative to a level of their head, in which a token counts
with its score and its largest scale. The level is set so that the largest product of both is about 2**6, and the sums are
scaled to it. It stays until a product would pass 2**15, which after the first step is rare. Scales below 2**-60 count as that.

Tiles of 64 heads take longer on Hopper (170 us for 64 rows on an H200 where tiles of 32 took 139, both with products of
bfloat16): warp groups multiply them from shared memory, where what was decoded would have to be written.
"""

import triton
import triton.language as tl

from mla_portable.kit.triton_launcher import at_any_address
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
from mla_portable_triton.kernels.coded_rows import scale_of, scales_at, scales_of
from mla_portable_triton.kernels.paired_columns import load_pairs, store_pairs


@triton.jit(
    do_not_specialize=[
        *("topk", "num_slots", "q_stride_b", "q_stride_s", "q_stride_h", "indices_stride_b", "indices_stride_s"),
        *("lengths_stride_b", "lengths_stride_s", "out_stride_p", "out_stride_b", "out_stride_s", "out_stride_h"),
        *("lse_stride_p", "lse_stride_b", "lse_stride_s", "lse_stride_h", "extra_topk", "extra_slots"),
        *("extra_indices_stride_b", "extra_indices_stride_s", "extra_lengths_stride_b", "extra_lengths_stride_s"),
    ],
    **at_any_address("lse_ptr", "indices_ptr", "lengths_ptr", "sink_ptr", "extra_indices_ptr", "extra_lengths_ptr"),
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
    ROWS: tl.constexpr,  # the layout; this and what follows is `coded_rows.CONSTANTS`
    GROUPS: tl.constexpr,  # 4 or 7
    PAIRS: tl.constexpr,
    REST_BYTE: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Grid (rows * head tiles, splits): the head tiles of a row are neighbours, so that they share its tokens in L2."""
    KEY_UNIT: tl.constexpr = 1.0 if E4M3_NATIVE else 1.0 / 140.0 if PACKED else 256.0
    VALUE_UNIT: tl.constexpr = 1.0 if E4M3_NATIVE else 256.0
    WIDTH: tl.constexpr = 2 * PAIRS
    REST: tl.constexpr = ROPE + TAIL  # bfloat16 columns of q and of a row
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
    q0, r0 = load_pairs(q_rows, 0, in_heads, BLOCK_H, WIDTH)  # [BLOCK_H, PAIRS]
    q1, r1 = load_pairs(q_rows, WIDTH, in_heads, BLOCK_H, WIDTH)
    q2, r2 = load_pairs(q_rows, 2 * WIDTH, in_heads, BLOCK_H, WIDTH)
    q3, r3 = load_pairs(q_rows, 3 * WIDTH, in_heads, BLOCK_H, WIDTH)
    top = tl.maximum(magnitude(q0, r0, BF16_NATIVE), magnitude(q1, r1, BF16_NATIVE))
    top = tl.maximum(top, tl.maximum(magnitude(q2, r2, BF16_NATIVE), magnitude(q3, r3, BF16_NATIVE)))
    if GROUPS == 7:
        q4, r4 = load_pairs(q_rows, 4 * WIDTH, in_heads, BLOCK_H, WIDTH)
        q5, r5 = load_pairs(q_rows, 5 * WIDTH, in_heads, BLOCK_H, WIDTH)
        q6, r6 = load_pairs(q_rows, 6 * WIDTH, in_heads, BLOCK_H, WIDTH)
        top = tl.maximum(top, tl.maximum(magnitude(q4, r4, BF16_NATIVE), magnitude(q5, r5, BF16_NATIVE)))
        top = tl.maximum(top, magnitude(q6, r6, BF16_NATIVE))
    if REST > 0:
        rest = tl.arange(0, REST) + GROUPS * WIDTH
        q_rest = tl.load(q_rows + rest[None, :], mask=in_heads[:, None], other=0.0)  # [BLOCK_H, REST]
        if REST == PAIRS:
            top = tl.max(tl.maximum(top, tl.abs(to_float32(q_rest, BF16_NATIVE))), 1)  # [BLOCK_H]
        else:
            top = tl.maximum(tl.max(top, 1), tl.max(tl.abs(to_float32(q_rest, BF16_NATIVE)), 1))
    else:
        top = tl.max(top, 1)
    factor, inverse_factor = query_scale(top)  # [BLOCK_H]
    q0 = half_operand(to_float32(q0, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    r0 = half_operand(to_float32(r0, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    q1 = half_operand(to_float32(q1, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    r1 = half_operand(to_float32(r1, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    q2 = half_operand(to_float32(q2, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    r2 = half_operand(to_float32(r2, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    q3 = half_operand(to_float32(q3, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    r3 = half_operand(to_float32(r3, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    if GROUPS == 7:
        q4 = half_operand(to_float32(q4, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
        r4 = half_operand(to_float32(r4, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
        q5 = half_operand(to_float32(q5, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
        r5 = half_operand(to_float32(r5, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
        q6 = half_operand(to_float32(q6, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
        r6 = half_operand(to_float32(r6, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    if REST > 0:
        q_rest = dot_operand(to_float32(q_rest, BF16_NATIVE) * factor[:, None], BF16_NATIVE)
    score_scale = scale_log2 * inverse_factor  # [BLOCK_H]

    level = tl.full([BLOCK_H], -1.0e30, tl.float32)  # what probabilities are relative to, base 2
    sums = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)  # of probabilities
    x0 = tl.zeros([BLOCK_H, PAIRS], tl.float32)
    y0 = tl.zeros([BLOCK_H, PAIRS], tl.float32)
    x1 = tl.zeros([BLOCK_H, PAIRS], tl.float32)
    y1 = tl.zeros([BLOCK_H, PAIRS], tl.float32)
    x2 = tl.zeros([BLOCK_H, PAIRS], tl.float32)
    y2 = tl.zeros([BLOCK_H, PAIRS], tl.float32)
    x3 = tl.zeros([BLOCK_H, PAIRS], tl.float32)
    y3 = tl.zeros([BLOCK_H, PAIRS], tl.float32)
    if GROUPS == 7:
        x4 = tl.zeros([BLOCK_H, PAIRS], tl.float32)
        y4 = tl.zeros([BLOCK_H, PAIRS], tl.float32)
        x5 = tl.zeros([BLOCK_H, PAIRS], tl.float32)
        y5 = tl.zeros([BLOCK_H, PAIRS], tl.float32)
        x6 = tl.zeros([BLOCK_H, PAIRS], tl.float32)
        y6 = tl.zeros([BLOCK_H, PAIRS], tl.float32)
    if TAIL > 0:
        tail = tl.zeros([BLOCK_H, TAIL], tl.float32)
    for start in range(begin, end, BLOCK_N):
        slot = ahead
        # int64 before the first product: a cache may pass 2**31 elements
        if extra_ptr is None:
            k = start + BLOCK_N + n
            ahead = tl.load(indices_row + k, mask=k < end, other=-1)
            valid = (slot >= 0) & (slot < num_slots)  # [BLOCK_N]
            place = tl.where(valid, slot, 0).to(tl.int64)
            token = token_at(place, CACHE_BLOCK, TOKEN_STRIDE, BLOCK_STRIDE)  # [BLOCK_N]
            scaled = scales_at(place, token, CACHE_BLOCK, BLOCK_STRIDE, ROWS)  # [BLOCK_N]
            cache_ptr = kv_ptr
        else:
            ahead = union_slots(indices_row, extra_row, start + BLOCK_N, num_keys, second, end, BLOCK_N)
            is_second = start >= second
            valid = (slot >= 0) & (slot < tl.where(is_second, extra_slots, num_slots))  # [BLOCK_N]
            place = tl.where(valid, slot, 0).to(tl.int64)
            token = token_at(place, CACHE_BLOCK, TOKEN_STRIDE, BLOCK_STRIDE)
            token = tl.where(is_second, token_at(place, EXTRA_BLOCK, TOKEN_STRIDE, EXTRA_STRIDE), token)  # [BLOCK_N]
            scaled = scales_at(place, token, CACHE_BLOCK, BLOCK_STRIDE, ROWS)
            scaled = tl.where(is_second, scales_at(place, token, EXTRA_BLOCK, EXTRA_STRIDE, ROWS), scaled)  # [BLOCK_N]
            cache_ptr = tl.where(is_second, extra_ptr, kv_ptr)
        scales = scales_of(cache_ptr, scaled, valid, ROWS)
        f0 = scale_of(scales, 0, valid, ROWS)  # [BLOCK_N]
        f1 = scale_of(scales, 1, valid, ROWS)
        f2 = scale_of(scales, 2, valid, ROWS)
        f3 = scale_of(scales, 3, valid, ROWS)
        if GROUPS == 7:
            f4 = scale_of(scales, 4, valid, ROWS)
            f5 = scale_of(scales, 5, valid, ROWS)
            f6 = scale_of(scales, 6, valid, ROWS)
        word_rows = cache_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + (token // 2)[:, None]  # [BLOCK_N, 1]

        if REST > 0:
            rest_rows = cache_ptr.to(tl.pointer_type(tl.bfloat16), bitcast=True) + (token // 2)[:, None]
            k_rest = columns(rest_rows, REST_BYTE // 2, REST, valid, BF16_NATIVE)  # [BLOCK_N, REST]
            scores = tl.dot(q_rest, tl.trans(k_rest))  # [BLOCK_H, BLOCK_N]
        else:
            scores = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        w0 = words(word_rows, 0, PAIRS, valid, PACKED)  # [BLOCK_N, PAIRS]
        even, odd = decoded(w0, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
        scores = add_scores(scores, q0, r0, even, odd, f0 * KEY_UNIT)
        w1 = words(word_rows, PAIRS, PAIRS, valid, PACKED)
        even, odd = decoded(w1, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
        scores = add_scores(scores, q1, r1, even, odd, f1 * KEY_UNIT)
        w2 = words(word_rows, 2 * PAIRS, PAIRS, valid, PACKED)
        even, odd = decoded(w2, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
        scores = add_scores(scores, q2, r2, even, odd, f2 * KEY_UNIT)
        w3 = words(word_rows, 3 * PAIRS, PAIRS, valid, PACKED)
        even, odd = decoded(w3, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
        scores = add_scores(scores, q3, r3, even, odd, f3 * KEY_UNIT)
        if GROUPS == 7:
            w4 = words(word_rows, 4 * PAIRS, PAIRS, valid, PACKED)
            even, odd = decoded(w4, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
            scores = add_scores(scores, q4, r4, even, odd, f4 * KEY_UNIT)
            w5 = words(word_rows, 5 * PAIRS, PAIRS, valid, PACKED)
            even, odd = decoded(w5, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
            scores = add_scores(scores, q5, r5, even, odd, f5 * KEY_UNIT)
            w6 = words(word_rows, 6 * PAIRS, PAIRS, valid, PACKED)
            even, odd = decoded(w6, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
            scores = add_scores(scores, q6, r6, even, odd, f6 * KEY_UNIT)
        if PACKED and not E4M3_NATIVE:
            scores += scores * 0.0  # a NaN code made them infinite
        scores = tl.where(valid[None, :], scores * score_scale[:, None], float("-inf"))
        largest = tl.maximum(tl.maximum(f0, f1), tl.maximum(f2, f3))
        if GROUPS == 7:
            largest = tl.maximum(largest, tl.maximum(tl.maximum(f4, f5), f6))
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
            if GROUPS == 7:
                x4 *= decay
                y4 *= decay
                x5 *= decay
                y5 *= decay
                x6 *= decay
                y6 *= decay
            if TAIL > 0:
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
        if GROUPS == 7:
            even, odd = decoded(w4, False, E4M3_NATIVE, PACKED, BF16_NATIVE)
            x4, y4 = add_values(x4, y4, p, even, odd, f4, BF16_NATIVE)
            even, odd = decoded(w5, False, E4M3_NATIVE, PACKED, BF16_NATIVE)
            x5, y5 = add_values(x5, y5, p, even, odd, f5, BF16_NATIVE)
            even, odd = decoded(w6, False, E4M3_NATIVE, PACKED, BF16_NATIVE)
            x6, y6 = add_values(x6, y6, p, even, odd, f6, BF16_NATIVE)
        if TAIL > 0:
            tail += tl.dot(dot_operand(p, BF16_NATIVE), k_rest)

    lse_row = lse_ptr + split * lse_stride_p + b * lse_stride_b + s * lse_stride_s
    inverse = finish(lse_row, lse_stride_h, sink_ptr, level, tl.sum(sums, 1), h, in_heads, IS_SPLIT)  # [BLOCK_H, 1]
    if TAIL > 0:
        tail *= inverse
    inverse *= VALUE_UNIT
    written = in_heads[:, None]
    if IS_SPLIT:
        written = written & (begin < end)  # merge_states does not read the part of an empty split
    out_rows = out_ptr + (split * out_stride_p + b * out_stride_b + s * out_stride_s) * STRIDE_UNIT
    out_rows += h[:, None] * (out_stride_h.to(tl.int64) * STRIDE_UNIT)  # [BLOCK_H, 1]
    if TAIL > 0:
        last = tl.arange(0, TAIL) + GROUPS * WIDTH
        store_as(out_rows + last[None, :], tail, written, BF16_NATIVE)
    store_pairs(out_rows, 0, x0 * inverse, y0 * inverse, written, BLOCK_H, BF16_NATIVE, WIDTH)
    store_pairs(out_rows, WIDTH, x1 * inverse, y1 * inverse, written, BLOCK_H, BF16_NATIVE, WIDTH)
    store_pairs(out_rows, 2 * WIDTH, x2 * inverse, y2 * inverse, written, BLOCK_H, BF16_NATIVE, WIDTH)
    store_pairs(out_rows, 3 * WIDTH, x3 * inverse, y3 * inverse, written, BLOCK_H, BF16_NATIVE, WIDTH)
    if GROUPS == 7:
        store_pairs(out_rows, 4 * WIDTH, x4 * inverse, y4 * inverse, written, BLOCK_H, BF16_NATIVE, WIDTH)
        store_pairs(out_rows, 5 * WIDTH, x5 * inverse, y5 * inverse, written, BLOCK_H, BF16_NATIVE, WIDTH)
        store_pairs(out_rows, 6 * WIDTH, x6 * inverse, y6 * inverse, written, BLOCK_H, BF16_NATIVE, WIDTH)
