# SPDX-License-Identifier: Apache-2.0
"""Rows of FP8_ROWS as the attention kernel reads them: 4 groups of 128 codes, a float32 scale each, then the rotary part."""

from typing import Final

import triton
import triton.language as tl

from mla_portable_triton.kernels.row_layout import GROUP, GROUPS, ROPE_BYTE, SCALE_BYTE

CONSTANTS: Final = {"GROUPS": GROUPS.value, "PAIRS": GROUP.value // 2, "REST_BYTE": ROPE_BYTE.value, "TAIL": 0}
"""What `coded_rows` describes."""


@triton.jit
def scales_of(cache_ptr, at):
    """Where each token's scales are, [N] pointers."""
    return cache_ptr.to(tl.pointer_type(tl.float32), bitcast=True) + at // 4 + SCALE_BYTE // 4


@triton.jit
def scale_of(scales, GROUP: tl.constexpr, valid):
    """The scale of a group of columns, [N] float32, 0 where not valid."""
    return tl.load(scales + GROUP, mask=valid, other=0.0)
