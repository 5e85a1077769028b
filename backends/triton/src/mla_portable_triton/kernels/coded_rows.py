# SPDX-License-Identifier: Apache-2.0
"""Rows of e4m3 codes of any layout, as `sparse_attention_fp8` reads them: what it is compiled for, and where scales are.

A row has GROUPS groups of 2 * PAIRS codes with a scale each, side by side from its first byte, which are key and value; then,
from REST_BYTE on, bfloat16 columns: the rotary part, key alone, or TAIL columns, if there are any, that are key and value.
A layout is a module with these CONSTANTS and with the functions that are chosen here.
"""

from collections.abc import Mapping
from typing import Final

import triton
import triton.language as tl

from mla_portable_triton.kernels import rows_v4, rows_v32
from mla_portable_triton.kernels.row_layout import FP8_ROWS, V4_ROWS
from mla_portable_triton.kernels.rows_v4 import scale_of as v4_scale_of
from mla_portable_triton.kernels.rows_v4 import scales_at as v4_scales_at
from mla_portable_triton.kernels.rows_v4 import scales_of as v4_scales_of
from mla_portable_triton.kernels.rows_v32 import scale_of as v32_scale_of
from mla_portable_triton.kernels.rows_v32 import scales_of as v32_scales_of

CONSTANTS: Final[Mapping[int, Mapping[str, int]]] = {
    rows: {"ROWS": rows, **constants}
    for rows, constants in ((FP8_ROWS.value, rows_v32.CONSTANTS), (V4_ROWS.value, rows_v4.CONSTANTS))
}
"""ROWS -> what the kernel is compiled with."""


@triton.jit
def scales_at(slot, token, CACHE_BLOCK: tl.constexpr, BLOCK_STRIDE: tl.constexpr, ROWS: tl.constexpr):
    """By what `scales_of` finds the scales of slots (int64), whose rows begin at `token`, in bytes of the cache."""
    if ROWS == V4_ROWS:
        at = v4_scales_at(slot, CACHE_BLOCK, BLOCK_STRIDE)
    else:
        at = token
    return at


@triton.jit
def scales_of(cache_ptr, at, valid, ROWS: tl.constexpr):
    """What `scale_of` takes the scales of the tokens at `at` from."""
    if ROWS == V4_ROWS:
        scales = v4_scales_of(cache_ptr, at, valid)
    else:
        scales = v32_scales_of(cache_ptr, at)
    return scales


@triton.jit
def scale_of(scales, GROUP: tl.constexpr, valid, ROWS: tl.constexpr):
    """The scale of a group of columns, [N] float32."""
    if ROWS == V4_ROWS:
        scale = v4_scale_of(scales, GROUP)
    else:
        scale = v32_scale_of(scales, GROUP, valid)
    return scale
