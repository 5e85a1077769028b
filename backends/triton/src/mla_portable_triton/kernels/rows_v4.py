# SPDX-License-Identifier: Apache-2.0
"""Rows of V4_ROWS as the attention kernel reads them: 7 groups of 64 codes, scaled by powers of two, and a bfloat16 tail.

The seven scales of a token are read as one word from behind the rows of its block.
"""

from typing import Final

import triton
import triton.language as tl

from mla_portable_triton.kernels.row_layout import V4_CODES, V4_GROUP, V4_ROW_BYTES, V4_SCALE_BYTES, V4_TAIL, e8m0_to_float32

CONSTANTS: Final = {
    "GROUPS": V4_CODES.value // V4_GROUP.value,
    "PAIRS": V4_GROUP.value // 2,
    "REST_BYTE": V4_CODES.value,
    "TAIL": V4_TAIL.value,
}
"""What `coded_rows` describes."""


@triton.jit
def scales_at(slot, CACHE_BLOCK: tl.constexpr, BLOCK_STRIDE: tl.constexpr):
    """Where the scales of slots (int64) begin, in bytes of the cache."""
    return slot // CACHE_BLOCK * BLOCK_STRIDE + (slot % CACHE_BLOCK * V4_SCALE_BYTES + CACHE_BLOCK * V4_ROW_BYTES)


@triton.jit
def scales_of(cache_ptr, at, valid):
    """Each token's eight bytes, [N] int64."""
    scale_ptr = cache_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    return tl.load(scale_ptr + at // V4_SCALE_BYTES, mask=valid, other=0)


@triton.jit
def scale_of(scales, GROUP: tl.constexpr):
    """The scale of a group of columns, [N] float32; of no meaning where not valid."""
    return e8m0_to_float32((scales >> (8 * GROUP)) & 0xFF)
