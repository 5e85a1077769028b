# SPDX-License-Identifier: Apache-2.0
"""Rounding float32 to bfloat16 alike on hardware and in Triton's interpreter.

The interpreter (triton 3.5 to 3.9) keeps bfloat16 as uint16: its casts from float32 cut instead of rounding, and its dots
and sums would work on the bit patterns. So a kernel that runs in both takes NATIVE: hardware's own conversion and
bfloat16 operands where it is True, rounding by integer arithmetic and float32 operands of the same value where not.
"""

import triton
import triton.language as tl


@triton.jit
def to_bfloat16(x, NATIVE: tl.constexpr):
    """`x` (float32) as bfloat16: nearest, ties to even; NaN stays NaN, what overflows becomes infinite."""
    if NATIVE:
        value = x.to(tl.bfloat16)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        # rounding could carry a NaN's payload into the sign: a NaN keeps its upper half, made quiet
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded)
        value = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value


@triton.jit
def to_float32(x, NATIVE: tl.constexpr):
    """`x` (a float of at most 32 bits) as float32, exactly; bfloat16 by its bits where not NATIVE."""
    if NATIVE or x.dtype != tl.bfloat16:
        value = x.to(tl.float32)
    else:
        value = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return value


@triton.jit
def dot_operand(x, NATIVE: tl.constexpr):
    """`x` (bfloat16 or float32) as an operand of tl.dot: bfloat16, or the float32 of the same value where not NATIVE."""
    if NATIVE:
        value = x.to(tl.bfloat16)
    elif x.dtype == tl.bfloat16:
        value = to_float32(x, NATIVE)
    else:
        value = to_float32(to_bfloat16(x, NATIVE), NATIVE)
    return value


@triton.jit
def half_operand(x, NATIVE: tl.constexpr):
    """`x` (float16 or float32) as an operand of tl.dot: float16, or the float32 of the same value where not NATIVE."""
    value = x.to(tl.float16)
    if not NATIVE:
        value = value.to(tl.float32)
    return value
