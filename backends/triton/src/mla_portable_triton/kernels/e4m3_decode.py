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
    """bfloat16 tensor of the shape of `byte` (uint8).

    NATIVE converts through tl.float8e4nv. Otherwise integers build the bfloat16's bits: neither bfloat16 arithmetic,
    which some targets emulate, nor subnormal floats, which some targets flush, take part.
    """
    if NATIVE:
        value = byte.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    else:
        code = byte.to(tl.int32)
        size = code & 0x7F
        # normal: mantissa and exponent move up four places, the bias grows by 127 - 7
        bits = (size << 4) + 0x3C00
        # subnormal size * 2**-9, one branch for each place of the leading bit: 4..7, 2..3, 1, 0
        bits = tl.where(size < 8, (size << 5) + 0x3B80, bits)
        bits = tl.where(size < 4, (size << 6) + 0x3B00, bits)
        bits = tl.where(size < 2, size * 0x3B00, bits)
        bits = tl.where(size == 0x7F, 0x7FC0, bits)
        bits |= (code & 0x80) << 8
        value = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value


@triton.jit
def e4m3_to_float32(byte, NATIVE: tl.constexpr, BF16_NATIVE: tl.constexpr):
    """The same values as float32, without a detour over bfloat16 where the target converts by itself."""
    if NATIVE:
        value = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        value = to_float32(e4m3_decode(byte, NATIVE), BF16_NATIVE)
    return value
