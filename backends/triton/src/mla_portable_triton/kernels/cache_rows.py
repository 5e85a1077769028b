# SPDX-License-Identifier: Apache-2.0
"""Rows of the paged caches as their writers make them: scales, codes, and where each part of a row goes.

pow2      scale = 2 ** ceil(log2(amax / 448)), at least 2**-13, read off the bits of amax
amax      scale = amax / 448 by true division, at least the smallest normal float32
latent    e4m3(x / scale), to nearest even, saturating; rope as bfloat16
fp8_v4    pow2 scales as bytes of their exponent, for 448 values; the other 64 as bfloat16
index     e4m3(x / scale), scales of max(amax, 1e-4); a page is block_size * 128 bytes, then block_size float32 scales
skipped   slot < 0, or past the cache

amax is a maximum over bits: non-negative floats order as integers do, and a NaN, the largest of them, is not lost.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.layouts import E4M3_MAX, INDEX_HEAD_SIZE, INDEX_LEAST_AMAX, POW2_MIN_EXPONENT
from mla_portable_triton.kernels.bfloat16 import to_bfloat16, to_float32
from mla_portable_triton.kernels.e4m3_encode import e4m3_encode
from mla_portable_triton.kernels.row_layout import (
    BF16_ROWS,
    FP8_ROWS,
    GROUP,
    ROPE_BYTE,
    SCALE_BYTE,
    V4_CODES,
    V4_GROUP,
    V4_ROW_BYTES,
    V4_ROWS,
    V4_SCALE_BYTES,
    V4_TAIL,
)

KEY = tl.constexpr(INDEX_HEAD_SIZE)
LEAST_INDEX_AMAX = tl.constexpr(INDEX_LEAST_AMAX)
_E4M3_MAX = tl.constexpr(E4M3_MAX)
# float32 bits of 448 = 1.75 * 2**8 times the least scale, 2**-13 or 2**-126
_LEAST_POW2_BITS = tl.constexpr(((8 + POW2_MIN_EXPONENT + 127) << 23) | 0x600000)
_LEAST_AMAX_BITS = tl.constexpr(((8 - 126 + 127) << 23) | 0x600000)


@triton.jit
def scaled_tile(values, amax_bits, POW2: tl.constexpr):
    """values / scale, and the scale, float32 and without the last axis.

    values: float32. amax_bits: int32, of the largest magnitude along their last axis, raised to the least that counts.
    """
    if POW2:
        # amax = m * 2**e with 1 <= m < 2, and 448 = 1.75 * 2**8: one more where m > 1.75
        exponent = (amax_bits >> 23) - 135 + ((amax_bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
        reciprocal = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        scaled = values * tl.expand_dims(reciprocal, -1)  # exact but for underflow, like the division
    else:
        scale = tl.math.div_rn(amax_bits.to(tl.float32, bitcast=True), _E4M3_MAX)
        scaled = tl.math.div_rn(values, tl.broadcast_to(tl.expand_dims(scale, -1), values.shape))
    return scaled, scale


@triton.jit
def magnitude_bits(values):
    """Bits of the largest |value| along the last axis of a float32 tile [BLOCK_T, WIDTH]: int32 [BLOCK_T]."""
    return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def as_cached(values, BF16_NATIVE: tl.constexpr):
    """Half-precision values as bfloat16."""
    if values.dtype != tl.bfloat16:
        values = to_bfloat16(to_float32(values, BF16_NATIVE), BF16_NATIVE)
    return values


@triton.jit
def row_pointers(
    cache_ptr, slot, block_stride, CACHE_BLOCK: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr
):
    """Where the rows of `slot` [BLOCK_T] int64 begin. The cache pointer is to bfloat16 of BF16_ROWS, to bytes otherwise."""
    ROW: tl.constexpr = V4_ROW_BYTES if ROWS == V4_ROWS else ROPE_BYTE + 2 * ROPE if ROWS == FP8_ROWS else LATENT + ROPE
    return cache_ptr + (slot // CACHE_BLOCK * block_stride + slot % CACHE_BLOCK * ROW)


@triton.jit
def rope_pointers(row, LATENT: tl.constexpr, ROWS: tl.constexpr):
    """Where the rotary parts of `row` [BLOCK_T] pointers begin, as bfloat16; not of V4_ROWS, which have none."""
    if ROWS == FP8_ROWS:
        place = (row + ROPE_BYTE).to(tl.pointer_type(tl.bfloat16))
    else:
        place = row + LATENT
    return place


@triton.jit
def store_latent(
    cache_ptr,
    row,
    slot,
    written,
    latent,
    tail,
    group,
    column,
    block_stride,
    CACHE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    POW2: tl.constexpr,
    E4M3_NATIVE: tl.constexpr,
    BF16_NATIVE: tl.constexpr,
):
    """The latent parts of rows, scales included.

    row: [BLOCK_T] of `row_pointers`, of slot [BLOCK_T] int64 where written [BLOCK_T]. latent: [BLOCK_T, GROUPS, WIDTH] in half
    precision, WIDTH columns of a scale. tail: of V4_ROWS, the last V4_TAIL columns once more, [BLOCK_T, V4_TAIL].
    group, column: of `columns_of_a_scale`.
    """
    if ROWS != BF16_ROWS:
        wide = to_float32(latent, BF16_NATIVE)  # [BLOCK_T, GROUPS, WIDTH]
        amax_bits = tl.max(wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)  # [BLOCK_T, GROUPS]
        # by bits, so that a NaN stays
        amax_bits = tl.maximum(amax_bits, _LEAST_POW2_BITS if POW2 else _LEAST_AMAX_BITS)
        scaled, scale = scaled_tile(wide, amax_bits, POW2)  # [BLOCK_T, GROUPS, WIDTH], [BLOCK_T, GROUPS]
    if ROWS == FP8_ROWS:
        tl.store(row[:, None, None] + column, e4m3_encode(scaled, E4M3_NATIVE), mask=written[:, None, None])
        scale_row = (row + SCALE_BYTE).to(tl.pointer_type(tl.float32))  # [BLOCK_T] pointers
        tl.store(scale_row[:, None] + group, scale, mask=written[:, None])
    elif ROWS == V4_ROWS:
        # the last group is not coded; the byte of its scale is the padding, 0
        coded = group * V4_GROUP < V4_CODES  # [1, GROUPS]
        stored = written[:, None, None] & coded[:, :, None]  # [BLOCK_T, GROUPS, 1]
        tl.store(row[:, None, None] + column, e4m3_encode(scaled, E4M3_NATIVE), mask=stored)
        exponent = tl.where(coded, scale.to(tl.int32, bitcast=True) >> 23, 0).to(tl.uint8)  # [BLOCK_T, GROUPS]
        at = slot % CACHE_BLOCK
        apart = CACHE_BLOCK * V4_ROW_BYTES + at * V4_SCALE_BYTES  # [BLOCK_T]
        scale_row = cache_ptr + (slot // CACHE_BLOCK * block_stride + apart)  # [BLOCK_T] pointers
        tl.store(scale_row[:, None] + group, exponent, mask=written[:, None])
        tail_row = (row + V4_CODES).to(tl.pointer_type(tl.bfloat16))  # [BLOCK_T] pointers
        t = tl.arange(0, V4_TAIL)[None, :]  # [1, V4_TAIL]
        tl.store(tail_row[:, None] + t, as_cached(tail, BF16_NATIVE), mask=written[:, None])
    else:
        tl.store(row[:, None, None] + column, as_cached(latent, BF16_NATIVE), mask=written[:, None, None])


@triton.jit
def columns_of_a_scale(LATENT: tl.constexpr, ROWS: tl.constexpr):
    """WIDTH of `store_latent`, and the latent's columns as it takes them: [1, GROUPS], [1, GROUPS, WIDTH]."""
    WIDTH: tl.constexpr = V4_GROUP if ROWS == V4_ROWS else GROUP
    group = tl.arange(0, LATENT // WIDTH)[None, :]
    return group, group[:, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]


def in_whole_vectors(cache: Tensor) -> bool:
    """Rows start at multiples of 16 bytes. Elsewhere codes are stored two at a time by way of shared memory, and those of PTX's
    conversion came out wrong there on an H200 (Triton 3.6: `st.shared.v2.b8` of registers whose upper byte is another code)."""
    return (cache.data_ptr() | cache.stride(0) * cache.element_size()) % 16 == 0
