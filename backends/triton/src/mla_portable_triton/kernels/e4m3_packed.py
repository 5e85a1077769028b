# SPDX-License-Identifier: Apache-2.0
"""Words of two e4m3 bytes -> float16, exactly, by the instructions of NVIDIA's compute capability 8.0 and later.

Lower and upper bytes are decoded apart, into two tensors: a tile of words becomes the even columns and the odd columns of the
tile of bytes. A register holds two words.

From 8.9 on an instruction converts two bytes that are neighbours. One permutation serves the lower and the upper bytes.

Elsewhere the seven bits of a magnitude are put where a float16's exponent ends and its mantissa begins. They are then 2**-8 of
the value, subnormals included. Three instructions do that for two bytes: a permutation takes each byte and fills the one above
with its sign, a shift brings the magnitude to its place, and a mask leaves one bit of the sign. ptxas makes the shift a
multiplication, so that the units of bit operations, which would be the busiest, have two of the three. A NaN code so becomes
2**-8 of 480. Where it has to be seen, one product more makes them 140 times the value. A code has four significant bits and 140
has six, so all of that is exact; 448 becomes 62,720, and 480 is infinite.

The functions are None in a Triton without inline assembly: 2.1 looks up whatever a kernel names, in a branch
that is not taken too.
"""

import triton
import triton.language as tl

__all__ = [
    "CONVERT_LOWER",
    "CONVERT_UPPER",
    "HALF_LOWER",
    "HALF_UPPER",
    "LOUD_LOWER",
    "LOUD_UPPER",
    "decodes_packed",
    "e4m3_converted",
    "e4m3_lower_half",
    "e4m3_times_140",
    "e4m3_upper_half",
]


def decodes_packed(arch: str) -> bool:
    """`arch` (DeviceFacts.arch) has the instructions, and Triton can say them."""
    return hasattr(tl, "inline_asm_elementwise") and arch.startswith("sm") and int(arch.removeprefix("sm")) >= 80


def _assembly(*instructions: str) -> tl.constexpr:
    return tl.constexpr("{ " + "".join(f"{each}; " for each in instructions) + "}")


def _bits(selector: str, result: str, *more: str) -> tl.constexpr:
    """selector: of two bytes, each with its sign above it."""
    first = (f"prmt.b32 magnitude, $1, 0, {selector}", "shl.b32 magnitude, magnitude, 7")
    return _assembly(".reg .b32 magnitude, factor", *first, f"and.b32 {result}, magnitude, 0xBF80BF80", *more)


def _convert(half: str) -> tl.constexpr:
    declared = (".reg .b32 pairs", ".reg .b16 lower, upper")
    return _assembly(
        *declared, "prmt.b32 pairs, $1, 0, 0x3120", "mov.b32 {lower, upper}, pairs", f"cvt.rn.f16x2.e4m3x2 $0, {half}"
    )


_LOWER, _UPPER = "0xA280", "0xB391"  # a digit is a byte, from the lowest up: of the source, or 8 more for its sign in all bits
_TIMES_140 = ("mov.b32 factor, 0x78607860", "mul.rn.f16x2 $0, magnitude, factor")
HALF_LOWER, HALF_UPPER = (_bits(selector, "$0") for selector in (_LOWER, _UPPER))
LOUD_LOWER, LOUD_UPPER = (_bits(selector, "magnitude", *_TIMES_140) for selector in (_LOWER, _UPPER))
CONVERT_LOWER, CONVERT_UPPER = _convert("lower"), _convert("upper")


@triton.jit
def e4m3_lower_half(words):
    """float16 tensor of 2**-8 of the lower bytes of `words` (int16); a NaN code is 2**-8 of 480 or -480."""
    return tl.inline_asm_elementwise(HALF_LOWER, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def e4m3_upper_half(words):
    """float16 tensor of 2**-8 of the upper bytes of `words` (int16); a NaN code is 2**-8 of 480 or -480."""
    return tl.inline_asm_elementwise(HALF_UPPER, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def e4m3_times_140(words):
    """Two float16 tensors: 140 times the lower and the upper bytes of `words` (int16); a NaN code becomes infinite."""
    lower = tl.inline_asm_elementwise(LOUD_LOWER, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    upper = tl.inline_asm_elementwise(LOUD_UPPER, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    return lower, upper


@triton.jit
def e4m3_converted(words):
    """Two float16 tensors, the lower and the upper bytes of `words` (int16), by the conversion of 8.9; NaN stays NaN."""
    lower = tl.inline_asm_elementwise(CONVERT_LOWER, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    upper = tl.inline_asm_elementwise(CONVERT_UPPER, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    return lower, upper


if not hasattr(tl, "inline_asm_elementwise"):
    e4m3_lower_half = e4m3_upper_half = e4m3_times_140 = e4m3_converted = None
