# SPDX-License-Identifier: Apache-2.0
"""The cache's row layouts as compile-time constants and functions of kernels; `mla_portable.layouts` is where they are defined.

A kernel takes ROWS, one of BF16_ROWS, FP8_ROWS and V4_ROWS (`rows_of`), and asks here where things are:

| ROWS | a row | value |
|---|---|---|
| BF16_ROWS | LATENT bfloat16, ROPE bfloat16 or none | the first LATENT |
| FP8_ROWS | 512 e4m3, GROUPS float32 scales of GROUP columns each, ROPE bfloat16 or none | the first 512 |
| V4_ROWS | V4_CODES e4m3, V4_TAIL bfloat16; 7 e8m0 scales of V4_GROUP columns each behind the rows of the block | all |

LATENT, the width of the latent, and ROPE, that of the rotary part, 0 where a layout has none, are parameters of kernels too.
SCALE_BYTE and ROPE_BYTE place things in a row of FP8_ROWS, which ends with its rotary part; V4_ROW_BYTES and V4_SCALE_BYTES in
a block of V4_ROWS.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_portable.layouts import (
    FP8_DS_MLA,
    FP8_V4,
    KV_LORA_RANK,
    SCALE_GROUP,
    CacheLayout,
)
from mla_portable.layouts import V4_CODES as _V4_CODES
from mla_portable.layouts import V4_ROW_BYTES as _V4_ROW_BYTES
from mla_portable.layouts import V4_SCALE_BYTES as _V4_SCALE_BYTES
from mla_portable.layouts import V4_SCALE_GROUP as _V4_SCALE_GROUP

GROUP = tl.constexpr(SCALE_GROUP)
GROUPS = tl.constexpr(KV_LORA_RANK // SCALE_GROUP)
SCALE_BYTE = tl.constexpr(FP8_DS_MLA.scale_offset)
ROPE_BYTE = tl.constexpr(FP8_DS_MLA.rope_offset)
V4_CODES = tl.constexpr(_V4_CODES)
V4_TAIL = tl.constexpr(KV_LORA_RANK - _V4_CODES)
V4_GROUP = tl.constexpr(_V4_SCALE_GROUP)
V4_ROW_BYTES = tl.constexpr(_V4_ROW_BYTES)
V4_SCALE_BYTES = tl.constexpr(_V4_SCALE_BYTES)

BF16_ROWS = tl.constexpr(0)
FP8_ROWS = tl.constexpr(1)
V4_ROWS = tl.constexpr(2)
_V4_WIDTH = FP8_V4.row_width


def rows_of(element_size: int, width: int) -> int:
    """ROWS of a cache with rows of `width` elements of that size. Bytes that are not V4's are FP8_ROWS, of any width."""
    if element_size > 1:
        return BF16_ROWS.value
    return V4_ROWS.value if width == _V4_WIDTH else FP8_ROWS.value


def rows_of_layout(layout: CacheLayout) -> int:
    """Likewise of a layout."""
    return rows_of(layout.dtype.itemsize, layout.row_width)


@triton.jit
def e8m0_to_float32(byte):
    """2 ** (byte - 127) of bytes (any integer type). 0 is read as 0 and 255 as infinity, which no writer stores."""
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)
