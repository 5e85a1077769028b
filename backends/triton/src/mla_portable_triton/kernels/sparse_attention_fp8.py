# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention over the FP8 cache: the kernel. What it computes, how it is cut and launched: `sparse_attention`.

e4m3 is exact in bf16, so the products run on the codes, and the float32 scale of each 128 columns multiplies the scores
(float32) and the probabilities (before they round to bf16). That is at least as accurate as rounding the product
e4m3 * scale, and costs 8 multiplies for a head and a token instead of 512 for a token.

A row's 512 codes are read as words of two. Even columns are one operand and odd columns another, of queries (q, r), keys,
values and sums (x, y) alike. So words go from shared memory to the registers of the warps that multiply them, are decoded
there and never written back. They are decoded as keys and again as values, which lie in the registers another way; a value may
take a NaN for a number, because the scores have seen it as a key.

A program of 64 heads has two tiles of 32, A and B, which share what is decoded. As one tile they would be multiplied by warp
groups on Hopper, from shared memory: 170 us for 64 rows on an H200, where programs of 32 heads take 137. On AMD, whose matrix
units have no such form, they are one tile, and tokens are decoded once.
"""

import triton
import triton.language as tl

from mla_portable_triton.attention_configs import AttentionConfig, fp8_tile
from mla_portable_triton.kernels.attention_parts import columns, finish, softmax_step, split_keys, token_at
from mla_portable_triton.kernels.bfloat16 import dot_operand
from mla_portable_triton.kernels.e4m3_decode import e4m3_decode
from mla_portable_triton.kernels.e4m3_packed import decodes_packed, e4m3_lower, e4m3_upper
from mla_portable_triton.kernels.paired_columns import load_pairs, store_pairs
from mla_portable_triton.kernels.row_layout import LATENT, ROPE_BYTE, SCALE_BYTE


def fp8_constants(arch: str, config: AttentionConfig, *, e4m3_native: bool, hardware: bool = True) -> dict[str, bool | int]:
    """What this kernel takes beside the constants of the other. hardware: not Triton's interpreter."""
    packed = hardware and decodes_packed(arch)
    return {"E4M3_NATIVE": e4m3_native, "PACKED": packed, "TILE_H": min(config.block_h, fp8_tile(arch))}


@triton.jit
def _words(rows, column: tl.constexpr, valid, PACKED: tl.constexpr):
    """64 words of the rows at `rows` [N, 1], 0 where not valid."""
    w = tl.arange(0, 64)
    words = tl.load(rows + (w + column)[None, :], mask=valid[:, None], other=0)
    if not PACKED:
        # Zeros, unknown to Triton until it has laid the tiles out. What depends on loads alone it would decode in the layouts
        # of both products, and here that is dear.
        words = words | (w >> 16).to(tl.int16)[None, :]
    return words


@triton.jit
def _decoded(words, KEEP_NAN: tl.constexpr, E4M3_NATIVE: tl.constexpr, PACKED: tl.constexpr, BF16_NATIVE: tl.constexpr):
    """The even and the odd columns of `words` as operands of a product, not yet scaled."""
    if PACKED:
        even = e4m3_lower(words, KEEP_NAN)
        odd = e4m3_upper(words, KEEP_NAN)
    else:
        even = dot_operand(e4m3_decode((words & 0xFF).to(tl.uint8), E4M3_NATIVE), BF16_NATIVE)
        odd = dot_operand(e4m3_decode(((words >> 8) & 0xFF).to(tl.uint8), E4M3_NATIVE), BF16_NATIVE)
    return even, odd


@triton.jit
def _add_scores(scores, q, r, even, odd, scale):
    """`scores` [H, N] plus the part of 128 columns, whose scale is `scale` [N]."""
    part = tl.dot(q, tl.trans(even))
    part += tl.dot(r, tl.trans(odd))  # folded into the product by the compiler; Triton 2.1 has no accumulator to pass
    return scores + part * scale[None, :]


@triton.jit
def _add_values(x, y, decay, p, even, odd, scale, BF16_NATIVE: tl.constexpr):
    """Sums `x` and `y` [H, 64] decayed, plus the values of probabilities `p` [H, N]."""
    p = dot_operand(p * scale[None, :], BF16_NATIVE)
    return x * decay[:, None] + tl.dot(p, even), y * decay[:, None] + tl.dot(p, odd)


@triton.jit(
    do_not_specialize=[
        *("topk", "num_slots", "q_stride_b", "q_stride_s", "q_stride_h", "indices_stride_b", "indices_stride_s"),
        *("lengths_stride_b", "lengths_stride_s", "out_stride_p", "out_stride_b", "out_stride_s", "out_stride_h"),
        *("lse_stride_p", "lse_stride_b", "lse_stride_s", "lse_stride_h"),
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
    NUM_HEADS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,  # 1 where slots are evenly spaced
    TOKEN_STRIDE: tl.constexpr,  # between tokens of a block, in elements of kv
    BLOCK_STRIDE: tl.constexpr,  # between blocks
    STRIDE_UNIT: tl.constexpr,
    ROPE: tl.constexpr,  # width of the rotary part; 0: there is none
    IS_SPLIT: tl.constexpr,  # write a part for merge_states: float32, lse in base 2, no sink
    E4M3_NATIVE: tl.constexpr,
    PACKED: tl.constexpr,  # decode by NVIDIA's instructions
    TILE_H: tl.constexpr,  # BLOCK_H, or half of it
    BF16_NATIVE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (rows * head tiles, splits): the head tiles of a row are neighbours, so that they share its tokens in L2."""
    TWO: tl.constexpr = BLOCK_H > TILE_H
    PROGRAMS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H  # of a row and a split
    row = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    b = row // QUERY_LEN
    s = row % QUERY_LEN
    h = (tl.program_id(0) % PROGRAMS) * BLOCK_H + tl.arange(0, TILE_H)  # [TILE_H], of tile A
    in_heads = h < NUM_HEADS  # [TILE_H]
    n = tl.arange(0, BLOCK_N)  # [BLOCK_N]

    q_rows = q_ptr + (b * q_stride_b + s * q_stride_s) * STRIDE_UNIT
    head_stride = q_stride_h.to(tl.int64) * STRIDE_UNIT
    rows_a = q_rows + h[:, None] * head_stride  # [TILE_H, 1]
    qa0, ra0 = load_pairs(rows_a, 0, in_heads, TILE_H, BF16_NATIVE)
    qa1, ra1 = load_pairs(rows_a, 128, in_heads, TILE_H, BF16_NATIVE)
    qa2, ra2 = load_pairs(rows_a, 256, in_heads, TILE_H, BF16_NATIVE)
    qa3, ra3 = load_pairs(rows_a, 384, in_heads, TILE_H, BF16_NATIVE)
    qa_rope = columns(rows_a, LATENT, ROPE, in_heads, BF16_NATIVE)  # [TILE_H, ROPE]
    if TWO:
        h_b = h + TILE_H
        in_heads_b = h_b < NUM_HEADS
        rows_b = q_rows + h_b[:, None] * head_stride
        qb0, rb0 = load_pairs(rows_b, 0, in_heads_b, TILE_H, BF16_NATIVE)
        qb1, rb1 = load_pairs(rows_b, 128, in_heads_b, TILE_H, BF16_NATIVE)
        qb2, rb2 = load_pairs(rows_b, 256, in_heads_b, TILE_H, BF16_NATIVE)
        qb3, rb3 = load_pairs(rows_b, 384, in_heads_b, TILE_H, BF16_NATIVE)
        qb_rope = columns(rows_b, LATENT, ROPE, in_heads_b, BF16_NATIVE)  # [TILE_H, ROPE]

    indices_row = indices_ptr + b * indices_stride_b + s * indices_stride_s
    begin, end = split_keys(lengths_ptr, b * lengths_stride_b + s * lengths_stride_s, topk, BLOCK_N)
    scale_ptr = kv_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
    word_ptr = kv_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    rope_ptr = kv_ptr.to(tl.pointer_type(tl.bfloat16), bitcast=True)

    m_a = tl.full([TILE_H], -1.0e30, tl.float32)  # running maximum, base 2
    total_a = tl.zeros([TILE_H], tl.float32)  # running sum
    xa0 = tl.zeros([TILE_H, 64], tl.float32)
    ya0 = tl.zeros([TILE_H, 64], tl.float32)
    xa1 = tl.zeros([TILE_H, 64], tl.float32)
    ya1 = tl.zeros([TILE_H, 64], tl.float32)
    xa2 = tl.zeros([TILE_H, 64], tl.float32)
    ya2 = tl.zeros([TILE_H, 64], tl.float32)
    xa3 = tl.zeros([TILE_H, 64], tl.float32)
    ya3 = tl.zeros([TILE_H, 64], tl.float32)
    if TWO:
        m_b = tl.full([TILE_H], -1.0e30, tl.float32)
        total_b = tl.zeros([TILE_H], tl.float32)
        xb0 = tl.zeros([TILE_H, 64], tl.float32)
        yb0 = tl.zeros([TILE_H, 64], tl.float32)
        xb1 = tl.zeros([TILE_H, 64], tl.float32)
        yb1 = tl.zeros([TILE_H, 64], tl.float32)
        xb2 = tl.zeros([TILE_H, 64], tl.float32)
        yb2 = tl.zeros([TILE_H, 64], tl.float32)
        xb3 = tl.zeros([TILE_H, 64], tl.float32)
        yb3 = tl.zeros([TILE_H, 64], tl.float32)
    ahead = tl.load(indices_row + begin + n, mask=begin + n < end, other=-1)  # [BLOCK_N], slots of the next step
    for start in range(begin, end, BLOCK_N):
        slot = ahead
        k = start + BLOCK_N + n
        ahead = tl.load(indices_row + k, mask=k < end, other=-1)
        valid = (slot >= 0) & (slot < num_slots)  # [BLOCK_N]
        # int64 before the first product: a cache may pass 2**31 elements
        token = token_at(tl.where(valid, slot, 0).to(tl.int64), CACHE_BLOCK, TOKEN_STRIDE, BLOCK_STRIDE)  # [BLOCK_N]
        scales = scale_ptr + token // 4 + SCALE_BYTE // 4  # [BLOCK_N]
        f0 = tl.load(scales, mask=valid, other=0.0)  # [BLOCK_N]
        f1 = tl.load(scales + 1, mask=valid, other=0.0)
        f2 = tl.load(scales + 2, mask=valid, other=0.0)
        f3 = tl.load(scales + 3, mask=valid, other=0.0)
        k_rope = columns(rope_ptr + (token // 2)[:, None], ROPE_BYTE // 2, ROPE, valid, BF16_NATIVE)  # [BLOCK_N, ROPE]
        word_rows = word_ptr + (token // 2)[:, None]  # [BLOCK_N, 1]
        w0 = _words(word_rows, 0, valid, PACKED)  # [BLOCK_N, 64]
        w1 = _words(word_rows, 64, valid, PACKED)  # [BLOCK_N, 64]
        w2 = _words(word_rows, 128, valid, PACKED)  # [BLOCK_N, 64]
        w3 = _words(word_rows, 192, valid, PACKED)  # [BLOCK_N, 64]

        scores_a = tl.dot(qa_rope, tl.trans(k_rope))  # [TILE_H, BLOCK_N]
        if TWO:
            scores_b = tl.dot(qb_rope, tl.trans(k_rope))
        even, odd = _decoded(w0, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
        scores_a = _add_scores(scores_a, qa0, ra0, even, odd, f0)
        if TWO:
            scores_b = _add_scores(scores_b, qb0, rb0, even, odd, f0)
        even, odd = _decoded(w1, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
        scores_a = _add_scores(scores_a, qa1, ra1, even, odd, f1)
        if TWO:
            scores_b = _add_scores(scores_b, qb1, rb1, even, odd, f1)
        even, odd = _decoded(w2, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
        scores_a = _add_scores(scores_a, qa2, ra2, even, odd, f2)
        if TWO:
            scores_b = _add_scores(scores_b, qb2, rb2, even, odd, f2)
        even, odd = _decoded(w3, True, E4M3_NATIVE, PACKED, BF16_NATIVE)
        scores_a = _add_scores(scores_a, qa3, ra3, even, odd, f3)
        if TWO:
            scores_b = _add_scores(scores_b, qb3, rb3, even, odd, f3)
        m_a, total_a, decay_a, p_a = softmax_step(m_a, total_a, scores_a, valid, scale_log2)
        if TWO:
            m_b, total_b, decay_b, p_b = softmax_step(m_b, total_b, scores_b, valid, scale_log2)
        even, odd = _decoded(w0, False, E4M3_NATIVE, PACKED, BF16_NATIVE)
        xa0, ya0 = _add_values(xa0, ya0, decay_a, p_a, even, odd, f0, BF16_NATIVE)
        if TWO:
            xb0, yb0 = _add_values(xb0, yb0, decay_b, p_b, even, odd, f0, BF16_NATIVE)
        even, odd = _decoded(w1, False, E4M3_NATIVE, PACKED, BF16_NATIVE)
        xa1, ya1 = _add_values(xa1, ya1, decay_a, p_a, even, odd, f1, BF16_NATIVE)
        if TWO:
            xb1, yb1 = _add_values(xb1, yb1, decay_b, p_b, even, odd, f1, BF16_NATIVE)
        even, odd = _decoded(w2, False, E4M3_NATIVE, PACKED, BF16_NATIVE)
        xa2, ya2 = _add_values(xa2, ya2, decay_a, p_a, even, odd, f2, BF16_NATIVE)
        if TWO:
            xb2, yb2 = _add_values(xb2, yb2, decay_b, p_b, even, odd, f2, BF16_NATIVE)
        even, odd = _decoded(w3, False, E4M3_NATIVE, PACKED, BF16_NATIVE)
        xa3, ya3 = _add_values(xa3, ya3, decay_a, p_a, even, odd, f3, BF16_NATIVE)
        if TWO:
            xb3, yb3 = _add_values(xb3, yb3, decay_b, p_b, even, odd, f3, BF16_NATIVE)

    lse_row = lse_ptr + split * lse_stride_p + b * lse_stride_b + s * lse_stride_s
    out_rows = out_ptr + (split * out_stride_p + b * out_stride_b + s * out_stride_s) * STRIDE_UNIT
    head_stride = out_stride_h.to(tl.int64) * STRIDE_UNIT
    some = True
    if IS_SPLIT:
        some = begin < end  # merge_states does not read the part of an empty split
    inverse = finish(lse_row, lse_stride_h, sink_ptr, m_a, total_a, h, in_heads, IS_SPLIT)
    rows_a = out_rows + h[:, None] * head_stride  # [TILE_H, 1]
    written = in_heads[:, None] & some
    store_pairs(rows_a, 0, xa0 * inverse, ya0 * inverse, written, TILE_H, BF16_NATIVE)
    store_pairs(rows_a, 128, xa1 * inverse, ya1 * inverse, written, TILE_H, BF16_NATIVE)
    store_pairs(rows_a, 256, xa2 * inverse, ya2 * inverse, written, TILE_H, BF16_NATIVE)
    store_pairs(rows_a, 384, xa3 * inverse, ya3 * inverse, written, TILE_H, BF16_NATIVE)
    if TWO:
        inverse = finish(lse_row, lse_stride_h, sink_ptr, m_b, total_b, h_b, in_heads_b, IS_SPLIT)
        rows_b = out_rows + h_b[:, None] * head_stride
        written = in_heads_b[:, None] & some
        store_pairs(rows_b, 0, xb0 * inverse, yb0 * inverse, written, TILE_H, BF16_NATIVE)
        store_pairs(rows_b, 128, xb1 * inverse, yb1 * inverse, written, TILE_H, BF16_NATIVE)
        store_pairs(rows_b, 256, xb2 * inverse, yb2 * inverse, written, TILE_H, BF16_NATIVE)
        store_pairs(rows_b, 384, xb3 * inverse, yb3 * inverse, written, TILE_H, BF16_NATIVE)
