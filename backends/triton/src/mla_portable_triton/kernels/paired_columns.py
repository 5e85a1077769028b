# SPDX-License-Identifier: Apache-2.0
"""Columns of rows as their even ones and their odd ones.

Where Triton can, from 3.0 on, columns are taken apart and put together in registers, so that memory is read and written whole;
in 16 heads on an H200 every other column takes 10 us longer of 106.
"""

import triton
import triton.language as tl

from mla_portable_triton.kernels.attention_parts import store_as

if hasattr(tl, "join"):

    @triton.jit
    def load_pairs(rows, column: tl.constexpr, valid, HEIGHT: tl.constexpr, WIDTH: tl.constexpr = 128):
        """The even and the odd ones of columns [column, column + WIDTH) of bf16 rows at `rows` [HEIGHT, 1], 0 where not valid:
        [HEIGHT, WIDTH / 2] each."""
        tile = tl.load(rows + (tl.arange(0, WIDTH) + column)[None, :], mask=valid[:, None], other=0.0)
        return tl.split(tl.reshape(tile, (HEIGHT, WIDTH // 2, 2)))

    @triton.jit
    def store_pairs(
        rows,
        column: tl.constexpr,
        even,
        odd,
        written,
        HEIGHT: tl.constexpr,
        BF16_NATIVE: tl.constexpr,
        WIDTH: tl.constexpr = 128,
    ):
        """The opposite of `load_pairs`, of float32 tiles, in the type of `rows`."""
        tile = tl.reshape(tl.join(even, odd), (HEIGHT, WIDTH))
        store_as(rows + (tl.arange(0, WIDTH) + column)[None, :], tile, written, BF16_NATIVE)

else:

    @triton.jit
    def load_pairs(rows, column: tl.constexpr, valid, HEIGHT: tl.constexpr, WIDTH: tl.constexpr = 128):
        """The even and the odd ones of columns [column, column + WIDTH) of bf16 rows at `rows` [HEIGHT, 1], 0 where not valid:
        [HEIGHT, WIDTH / 2] each."""
        pairs = rows + (2 * tl.arange(0, WIDTH // 2) + column)[None, :]
        even = tl.load(pairs, mask=valid[:, None], other=0.0)
        odd = tl.load(pairs + 1, mask=valid[:, None], other=0.0)
        return even, odd

    @triton.jit
    def store_pairs(
        rows,
        column: tl.constexpr,
        even,
        odd,
        written,
        HEIGHT: tl.constexpr,
        BF16_NATIVE: tl.constexpr,
        WIDTH: tl.constexpr = 128,
    ):
        """The opposite of `load_pairs`, of float32 tiles, in the type of `rows`."""
        pairs = rows + (2 * tl.arange(0, WIDTH // 2) + column)[None, :]
        store_as(pairs, even, written, BF16_NATIVE)
        store_as(pairs + 1, odd, written, BF16_NATIVE)
