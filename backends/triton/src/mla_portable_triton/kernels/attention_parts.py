# SPDX-License-Identifier: Apache-2.0
"""What the attention kernels share: the keys of a split, a step of the softmax, and what is left when the keys are over."""

import triton
import triton.language as tl

from mla_portable_triton.kernels.bfloat16 import dot_operand, to_bfloat16


@triton.jit
def split_keys(lengths_ptr, at, topk, BLOCK_N: tl.constexpr):
    """First and end of this program's indices: a row's keys, topk or fewer by its length, are shared among its splits in whole
    tiles. at: of the row in `lengths_ptr`, which may be None."""
    RUN: tl.constexpr = BLOCK_N if BLOCK_N > 64 else 64  # merging shorter runs takes longer than they save
    num_keys = topk
    if lengths_ptr is not None:
        num_keys = tl.minimum(num_keys, tl.load(lengths_ptr + at))
    split_len = ((tl.maximum(num_keys, 1) - 1) // (tl.num_programs(1) * RUN) + 1) * RUN
    begin = tl.program_id(1) * split_len
    return begin, tl.minimum(begin + split_len, num_keys)


@triton.jit
def split_union(lengths_ptr, at, topk, extra_lengths_ptr, extra_at, extra_topk, BLOCK_N: tl.constexpr):
    """Likewise of a row with two lists, whose tiles follow one another: keys of the first list, where the second one's tiles
    begin, and first and end of this program's share. Places from the second of these on are the second list's, less it."""
    RUN: tl.constexpr = BLOCK_N if BLOCK_N > 64 else 64
    num_keys = topk
    if lengths_ptr is not None:
        num_keys = tl.minimum(num_keys, tl.load(lengths_ptr + at))
    num_keys = tl.maximum(num_keys, 0)
    more_keys = extra_topk
    if extra_lengths_ptr is not None:
        more_keys = tl.minimum(more_keys, tl.load(extra_lengths_ptr + extra_at))
    second = (num_keys + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    total = second + tl.maximum(more_keys, 0)
    split_len = ((tl.maximum(total, 1) - 1) // (tl.num_programs(1) * RUN) + 1) * RUN
    begin = tl.program_id(1) * split_len
    return num_keys, second, begin, tl.minimum(begin + split_len, total)


@triton.jit
def union_slots(row, extra_row, start, num_keys, second, end, BLOCK_N: tl.constexpr):
    """The slots of the tile at `start`, -1 past the end of its list; which list that is, its program alone knows by `start`."""
    k = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    is_second = start >= second
    place = tl.where(is_second, extra_row - second, row) + k
    return tl.load(place, mask=k < tl.where(is_second, end, tl.minimum(end, num_keys)), other=-1)


@triton.jit
def token_at(slot, CACHE_BLOCK: tl.constexpr, TOKEN_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr):
    """Where the tokens of slots (int64) begin, in elements of the cache. CACHE_BLOCK is 1 where slots are evenly spaced."""
    if CACHE_BLOCK == 1:
        token = slot * BLOCK_STRIDE
    else:
        token = slot // CACHE_BLOCK * BLOCK_STRIDE + slot % CACHE_BLOCK * TOKEN_STRIDE
    return token


@triton.jit
def columns(rows, column: tl.constexpr, WIDTH: tl.constexpr, valid, BF16_NATIVE: tl.constexpr):
    """Columns [column, column + WIDTH) of bf16 rows at `rows` [N, 1], 0 where not valid, as an operand of a product."""
    tile = tl.load(rows + (tl.arange(0, WIDTH) + column)[None, :], mask=valid[:, None], other=0.0)  # [N, WIDTH]
    return dot_operand(tile, BF16_NATIVE)


@triton.jit
def softmax_step(m, total, scores, valid, scale_log2):
    """(maximum, sum, decay of what was added so far, probabilities [H, N]) after `scores` [H, N]; base 2."""
    scores = tl.where(valid[None, :], scores * scale_log2, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))  # [H]
    decay = tl.math.exp2(m - m_new)  # [H]
    p = tl.math.exp2(scores - m_new[:, None])  # [H, N], 0 where absent
    return m_new, total * decay + tl.sum(p, 1), decay, p


@triton.jit
def finish(lse_row, lse_stride_h, sink_ptr, m, total, h, in_heads, IS_SPLIT: tl.constexpr):
    """Store the lse of heads `h`; what their sums of values are multiplied by, [H, 1]."""
    empty = total == 0.0  # [H]; a NaN sum is not empty, it has to be seen
    lse = tl.where(empty, float("-inf"), m + tl.math.log2(tl.where(empty, 1.0, total)))
    if not IS_SPLIT:
        lse = lse * 0.6931471805599453  # ln(2)
        if sink_ptr is not None:
            # out * exp(lse) / (exp(lse) + exp(sink)), with both sides divided by 2**m
            sink = tl.load(sink_ptr + h, mask=in_heads, other=0.0) * 1.4426950408889634  # log2(e)
            total += tl.math.exp2(tl.where(empty, 0.0, sink - m))
    tl.store(lse_row + h * lse_stride_h.to(tl.int64), lse, mask=in_heads)
    return tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))[:, None]


@triton.jit
def store_as(pointers, tile, written, BF16_NATIVE: tl.constexpr):
    """Write a float32 tile in the type of what is pointed to: float32 or bfloat16."""
    if pointers.dtype.element_ty == tl.bfloat16:
        tile = to_bfloat16(tile, BF16_NATIVE)
    tl.store(pointers, tile, mask=written)
