# SPDX-License-Identifier: Apache-2.0
"""float32 -> FP8, by integer arithmetic on any target, or by PTX's conversion.

Nearest value, ties to even, saturating at the largest finite one; subnormals included; NaN becomes the all-ones code with
the sign it came with. What torch does to a clamped value, and the same on every target because no float is computed.

A finite float32 is significand * 2**(exponent - 150) with a 24-bit significand. The code keeps its upper MANTISSA_BITS + 1
bits, fewer for values below the smallest normal; a carry out of the rounding moves into the exponent field by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3_MAX_BITS = tl.constexpr(0x43E00000)
"""448 as float32."""
E5M2_MAX_BITS = tl.constexpr(0x47600000)
"""57344 as float32."""


def encodes_natively(arch: str, has_fp8_conversion: bool) -> bool:
    """Whether e4m3_encode may be NATIVE.

    Other vendors' conversions do not saturate by themselves. On sm89 Triton cuts the value to float16 first (`cvt.rz`), so
    that one just above the middle between two codes becomes a tie and may get the lower code; from sm90 on it converts float32.
    """
    return has_fp8_conversion and arch.startswith("sm") and int(arch.removeprefix("sm")) >= 90


@triton.jit
def fp8_encode(value, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr, MAX_BITS: tl.constexpr):
    """A float32 tile as uint8 codes of a format with a sign, MANTISSA_BITS and an exponent of that BIAS."""
    MIN_EXPONENT: tl.constexpr = 128 - BIAS  # float32's exponent field at the smallest normal
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, MAX_BITS)  # saturate: non-negative floats order as their bits do
    exponent = magnitude >> 23
    # A float32 subnormal has no hidden bit, but it is far below half a code and shifts to zero either way.
    significand = (magnitude & 0x7FFFFF) | 0x800000
    # At a shift of 25 every significand rounds to zero: a larger one would only leave the range of int32 shifts.
    shift = tl.minimum(23 - MANTISSA_BITS + tl.maximum(MIN_EXPONENT - exponent, 0), 25)
    tie_to_even = (significand >> shift) & 1
    rounded = (significand + (1 << (shift - 1)) - 1 + tie_to_even) >> shift
    code = (tl.maximum(exponent - MIN_EXPONENT, 0) << MANTISSA_BITS) + rounded
    return (tl.where(is_nan, 0x7F, code) | sign).to(tl.uint8)


@triton.jit
def e4m3_encode(value, NATIVE: tl.constexpr):
    """A float32 tile as e4m3 (finite, no infinities) codes, uint8. NATIVE: PTX's cvt, which rounds and saturates likewise."""
    if NATIVE:
        sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80  # a NaN comes without its own
        code = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True) | sign.to(tl.uint8)
    else:
        code = fp8_encode(value, 3, 7, E4M3_MAX_BITS)
    return code


@triton.jit
def e5m2_encode(value):
    """A float32 tile as e5m2 codes, uint8; saturates at 57344 instead of reaching infinity."""
    return fp8_encode(value, 2, 15, E5M2_MAX_BITS)
