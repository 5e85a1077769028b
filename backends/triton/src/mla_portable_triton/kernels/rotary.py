# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of rows: the two numbers of each pair as two tiles, [rows, HALF], whichever pairs these are.

Pair i of HALF is the columns 2i and 2i + 1 where INTERLEAVED, else i and i + HALF, counted from the first rotary column.
`load_halves` and `store_halves` are for tiles of many rows. Where Triton can, from 3.0 on, they take pairs of neighbours apart
and put them together in registers, so that memory is read and written whole.
"""

import triton
import triton.language as tl

from mla_portable_triton.kernels.bfloat16 import to_bfloat16, to_float32
from mla_portable_triton.kernels.paired_columns import load_pairs


@triton.jit
def pair_columns(i, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Columns of the first and of the second number of each pair `i`."""
    if INTERLEAVED:
        first = 2 * i
        second = first + 1
    else:
        first = i
        second = i + HALF
    return first, second


@triton.jit
def load_halves(rows, there, HEIGHT: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two numbers of each pair [HEIGHT, BLOCK_HALF] of bf16 rows [HEIGHT, 1] pointers at the first rotary column, 0 where
    not `there` [HEIGHT]."""
    if INTERLEAVED and HALF == BLOCK_HALF:
        a, b = load_pairs(rows, 0, there, HEIGHT, 2 * HALF)
    else:
        i = tl.arange(0, BLOCK_HALF)[None, :]
        first, second = pair_columns(i, HALF, INTERLEAVED)
        a = tl.load(rows + first, mask=there[:, None] & (i < HALF), other=0.0)
        b = tl.load(rows + second, mask=there[:, None] & (i < HALF), other=0.0)
    return a, b


@triton.jit
def _store_apart(rows, a, b, there, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    i = tl.arange(0, BLOCK_HALF)[None, :]
    first, second = pair_columns(i, HALF, INTERLEAVED)
    tl.store(rows + first, a, mask=there[:, None] & (i < HALF))
    tl.store(rows + second, b, mask=there[:, None] & (i < HALF))


if hasattr(tl, "join"):

    @triton.jit
    def store_halves(
        rows, a, b, there, HEIGHT: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr
    ):
        """The opposite of `load_halves`, of rows of any type, which `a` and `b` have."""
        if INTERLEAVED and HALF == BLOCK_HALF:
            tile = tl.reshape(tl.join(a, b), (HEIGHT, 2 * HALF))
            tl.store(rows + tl.arange(0, 2 * HALF)[None, :], tile, mask=there[:, None])
        else:
            _store_apart(rows, a, b, there, HALF, BLOCK_HALF, INTERLEAVED)

else:

    @triton.jit
    def store_halves(
        rows, a, b, there, HEIGHT: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr
    ):
        """The opposite of `load_halves`, of rows of any type, which `a` and `b` have."""
        _store_apart(rows, a, b, there, HALF, BLOCK_HALF, INTERLEAVED)


@triton.jit
def cosines_and_sines(cos_sin_ptr, positions_ptr, token, there, last_position, cos_sin_stride, i, HALF: tl.constexpr):
    """float32 [BLOCK_T, HALF] of tokens [BLOCK_T]. A position outside of the table is taken for the nearest one in it."""
    position = tl.load(positions_ptr + token, mask=there, other=0)  # [BLOCK_T] int64
    position = tl.minimum(tl.maximum(position, 0), last_position)
    row = cos_sin_ptr + (position.to(tl.int64) * cos_sin_stride)[:, None]
    known = there[:, None] & (i < HALF)
    cos = tl.load(row + i, mask=known, other=0.0)
    sin = tl.load(row + HALF + i, mask=known, other=0.0)
    return cos, sin


@triton.jit
def rounded(x, BF16_NATIVE: tl.constexpr):
    """float32 rounded to bfloat16, and its float32."""
    narrow = to_bfloat16(x, BF16_NATIVE)
    return narrow, to_float32(narrow, BF16_NATIVE)
