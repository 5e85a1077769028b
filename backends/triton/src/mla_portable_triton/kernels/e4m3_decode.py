# SPDX-License-Identifier: Apache-2.0
"""e4m3 bytes -> bfloat16, exactly, on targets with and without a conversion instruction.

An e4m3 code is s eeee mmm with bias 7; bfloat16 keeps three mantissa bits with room to spare, so every finite code has
an exact bfloat16. Codes 0x7F and 0xFF are NaN; there is no infinity.
"""

import triton
import triton.language as tl

from mla_portable_triton.kernels.bfloat16 import to_float32


@triton.jit
def e4m3_decode(byte, NATIVE: tl.constexpr):
    """bfloat16 tensor of the shape of `byte` (uint8); NaN codes stay NaN.

    NATIVE converts through tl.float8e4nv. Otherwise integers build a float16's bits, because every target converts float16 to
    float32 exactly, while some emulate bfloat16 arithmetic or flush subnormal float32 values.
    """
    if NATIVE:
        # through float32: the direct conversion is one scalar instruction a value on sm90 and sm100
        value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(tl.bfloat16)
    else:
        # float16 has one more exponent bit and a bias larger by 8, so these bits hold the value times 2**-8, subnormals
        # included. Extending the sign puts it into bit 15; adding 1 to a NaN's magnitude carries into bit 14.
        code = byte.to(tl.int8, bitcast=True).to(tl.int32) << 7
        half = (code & 0xBF80) | (((code & 0x3F80) + 0x80) & 0x4000)
        value = (half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(tl.bfloat16)
    return value


@triton.jit
def e4m3_to_float32(byte, NATIVE: tl.constexpr, BF16_NATIVE: tl.constexpr):
    """The same values as float32, without a detour over bfloat16 where the target converts by itself."""
    if NATIVE:
        value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        value = to_float32(e4m3_decode(byte, NATIVE), BF16_NATIVE)
    return value


@triton.jit
def e4m3_to_half(byte, NATIVE: tl.constexpr):
    """float16 tensor of the values of `byte` (uint8), or of 2**-8 of them where not NATIVE; NaN codes stay NaN."""
    if NATIVE:
        value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        code = byte.to(tl.int8, bitcast=True).to(tl.int16) << 7
        # as in e4m3_decode; -0x4080 is 0xBF80 of 16 bits
        half = (code & -0x4080) | (((code & 0x3F80) + 0x80) & 0x4000)
        value = half.to(tl.int16).to(tl.float16, bitcast=True)
    return value
