# SPDX-License-Identifier: Apache-2.0
"""masked_prefill: attention of prompts over per-head keys, causal and under a selection of keys.

A program serves BLOCK_M queries of one head of one request. It goes over the keys that its last query sees, BLOCK_N at a time,
with a running maximum and sum in base 2 (`softmax_scale * log2(e)` is folded into the scores). The selection has a bit for each
query and key: a tile reads BLOCK_N / 32 words of each of its rows, as vectors that are broadcast along the row. A gathered
load of [BLOCK_M, BLOCK_N] words made the same kernel four times slower on an H200.

Head dimensions that are no power of two are two products: 192 = 128 + 64.

Values of a key that a query may not see are multiplied by a probability of 0; where one is not finite, that makes the row NaN.
A program whose result has a NaN computes it again, with the values of keys that none of its queries selects replaced by zeros.

Programs of the longest rows start first: the tiles of a request run from its last to its first.

Cost: 2 * H * (Dqk + Dv) flops for each query and key of the tiles; keys and values are read once for each BLOCK_M queries.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_portable.contracts.triton_launcher import TritonLauncher
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.kernels.bfloat16 import dot_operand, to_bfloat16
from mla_portable_triton.kernels.strides import stride_unit

LOG2_E: Final = 1.4426950408889634


@triton.jit
def _columns(rows, column: tl.constexpr, WIDTH: tl.constexpr, valid, BF16_NATIVE: tl.constexpr):
    """Columns [column, column + WIDTH) of rows at `rows` [N, 1], 0 where not valid, as an operand of a product."""
    tile = tl.load(rows + (tl.arange(0, WIDTH) + column)[None, :], mask=valid[:, None], other=0.0)  # [N, WIDTH]
    return dot_operand(tile, BF16_NATIVE)


@triton.jit
def _visible(selection_rows, in_rows, words_in_row, key0, limit, num_keys, HAS_SELECTION: tl.constexpr, CAUSAL: tl.constexpr,
             BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """[BLOCK_M, BLOCK_N]: the queries of `selection_rows` [BLOCK_M] see and select the keys from `key0` on."""
    n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    seen = (key0 + n < num_keys)[None, :] & in_rows[:, None]
    if CAUSAL:
        seen = seen & (key0 + n[None, :] < limit[:, None])
    if HAS_SELECTION:
        word = key0 // 32
        low = tl.load(selection_rows + word, mask=in_rows & (word < words_in_row), other=0)  # [BLOCK_M]
        words = low[:, None]
        if BLOCK_N == 64:
            high = tl.load(selection_rows + word + 1, mask=in_rows & (word + 1 < words_in_row), other=0)
            words = tl.where(n[None, :] < 32, words, high[:, None])
        seen = seen & (((words >> (n & 31)[None, :]) & 1) != 0)
    return seen


@triton.jit
def _attend(q0, q1, k_rows, v_rows, selection_rows, in_rows, words_in_row, limit, num_keys, end, scale_log2,
            k_stride_n, v_stride_n, STRIDE_UNIT: tl.constexpr, DQK: tl.constexpr, DV: tl.constexpr, HAS_SELECTION: tl.constexpr,
            CAUSAL: tl.constexpr, CLEAN: tl.constexpr, BF16_NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(maximum, sum, sums of values) over keys [0, end). CLEAN: values of keys that no query here sees count as zeros."""
    FIRST: tl.constexpr = 256 if DQK == 256 else 128
    n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    m = tl.full([BLOCK_M], -1.0e30, tl.float32)  # a finite start, so that no -inf meets another
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV], tl.float32)
    for key0 in range(0, end, BLOCK_N):
        there = key0 + n < num_keys  # [BLOCK_N]
        at = (key0 + n).to(tl.int64)[:, None]
        keys = k_rows + at * (k_stride_n.to(tl.int64) * STRIDE_UNIT)  # [BLOCK_N, 1]
        scores = tl.dot(q0, tl.trans(_columns(keys, 0, FIRST, there, BF16_NATIVE)))  # [BLOCK_M, BLOCK_N]
        if DQK > FIRST:
            scores += tl.dot(q1, tl.trans(_columns(keys, FIRST, DQK - FIRST, there, BF16_NATIVE)))
        seen = _visible(selection_rows, in_rows, words_in_row, key0, limit, num_keys, HAS_SELECTION, CAUSAL, BLOCK_M, BLOCK_N)
        scores = tl.where(seen, scores * scale_log2, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        decay = tl.math.exp2(m - m_new)
        p = tl.math.exp2(scores - m_new[:, None])  # 0 where not seen
        valued = there
        if CLEAN:
            valued = there & (tl.max(seen.to(tl.int32), 0) > 0)
        values = _columns(v_rows + at * (v_stride_n.to(tl.int64) * STRIDE_UNIT), 0, DV, valued, BF16_NATIVE)  # [BLOCK_N, DV]
        acc = acc * decay[:, None] + tl.dot(dot_operand(p, BF16_NATIVE), values)
        total = total * decay + tl.sum(p, 1)
        m = m_new
    return m, total, acc


@triton.jit(
    do_not_specialize=[
        *("num_heads", "query_tiles", "words_in_row", "q_stride_t", "q_stride_h", "k_stride_n", "k_stride_h", "v_stride_n"),
        *("v_stride_h", "selection_stride_t", "out_stride_t", "out_stride_h", "lse_stride_t", "lse_stride_h"),
    ]
)
def masked_prefill_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    query_start_loc_ptr,
    key_start_loc_ptr,
    selection_ptr,  # None: all that is visible
    scale_log2,
    num_heads,
    query_tiles,  # of BLOCK_M queries, of the longest request
    words_in_row,
    q_stride_t,  # strides of q, k, v and out count STRIDE_UNIT elements
    q_stride_h,
    k_stride_n,
    k_stride_h,
    v_stride_n,
    v_stride_h,
    selection_stride_t,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    DQK: tl.constexpr,
    DV: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    CAUSAL: tl.constexpr,
    BF16_NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # 32 or 64
):
    """Grid (query tiles * heads, requests)."""
    FIRST: tl.constexpr = 256 if DQK == 256 else 128
    request = tl.program_id(1)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    tile = query_tiles - 1 - tl.program_id(0) // num_heads
    q_start = tl.load(query_start_loc_ptr + request)
    num_queries = tl.load(query_start_loc_ptr + request + 1) - q_start
    k_start = tl.load(key_start_loc_ptr + request)
    num_keys = tl.load(key_start_loc_ptr + request + 1) - k_start
    q0 = tile * BLOCK_M
    if q0 < num_queries:
        rows = q0 + tl.arange(0, BLOCK_M)  # [BLOCK_M], of the request
        in_rows = rows < num_queries
        tokens = (q_start + rows).to(tl.int64)
        limit = rows + 1 + num_keys - num_queries  # [BLOCK_M], keys that each sees
        end = num_keys
        if CAUSAL:
            end = tl.maximum(tl.minimum(end, tl.minimum(q0 + BLOCK_M, num_queries) + num_keys - num_queries), 0)

        q_rows = q_ptr + head * (q_stride_h.to(tl.int64) * STRIDE_UNIT)
        q_rows += tokens[:, None] * (q_stride_t.to(tl.int64) * STRIDE_UNIT)  # [BLOCK_M, 1]
        first = _columns(q_rows, 0, FIRST, in_rows, BF16_NATIVE)
        second = first
        if DQK > FIRST:
            second = _columns(q_rows, FIRST, DQK - FIRST, in_rows, BF16_NATIVE)
        start = k_start.to(tl.int64)
        k_rows = k_ptr + head * (k_stride_h.to(tl.int64) * STRIDE_UNIT) + start * (k_stride_n.to(tl.int64) * STRIDE_UNIT)
        v_rows = v_ptr + head * (v_stride_h.to(tl.int64) * STRIDE_UNIT) + start * (v_stride_n.to(tl.int64) * STRIDE_UNIT)
        HAS_SELECTION: tl.constexpr = selection_ptr is not None
        selection_rows = tokens
        if HAS_SELECTION:
            selection_rows = selection_ptr + tokens * selection_stride_t.to(tl.int64)  # [BLOCK_M]
        m, total, acc = _attend(first, second, k_rows, v_rows, selection_rows, in_rows, words_in_row, limit, num_keys, end,
                                scale_log2, k_stride_n, v_stride_n, STRIDE_UNIT, DQK, DV, HAS_SELECTION, CAUSAL, False,
                                BF16_NATIVE, BLOCK_M, BLOCK_N)
        if tl.sum(tl.sum((acc != acc).to(tl.int32), 1), 0) > 0:
            m, total, acc = _attend(first, second, k_rows, v_rows, selection_rows, in_rows, words_in_row, limit, num_keys, end,
                                    scale_log2, k_stride_n, v_stride_n, STRIDE_UNIT, DQK, DV, HAS_SELECTION, CAUSAL, True,
                                    BF16_NATIVE, BLOCK_M, BLOCK_N)
        empty = total == 0.0  # a NaN sum is not empty, it has to be seen
        lse = tl.where(empty, float("-inf"), (m + tl.math.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453)
        tl.store(lse_ptr + tokens * lse_stride_t.to(tl.int64) + head * lse_stride_h.to(tl.int64), lse, mask=in_rows)
        acc = acc * tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))[:, None]
        out_rows = out_ptr + head * (out_stride_h.to(tl.int64) * STRIDE_UNIT)
        out_rows += tokens[:, None] * (out_stride_t.to(tl.int64) * STRIDE_UNIT) + tl.arange(0, DV)[None, :]
        tl.store(out_rows, to_bfloat16(acc, BF16_NATIVE), mask=in_rows[:, None])
