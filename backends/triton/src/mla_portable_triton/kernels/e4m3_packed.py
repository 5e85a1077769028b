# SPDX-License-Identifier: Apache-2.0
"""Words of two e4m3 bytes -> bfloat16 or float16, exactly, by the instructions of NVIDIA's compute capability 8.0 and later.

Lower and upper bytes are decoded apart, so that no byte is moved beside another: a tile of words becomes the even columns and
the odd columns of the tile of bytes. A register holds two words.

The seven bits of a magnitude, put where a bfloat16's exponent ends and its mantissa begins, are 2**-120 of the value,
subnormals included, and the product with 2**120 is exact: four instructions for two upper bytes, five for two lower ones. A NaN
code so becomes 480 with its sign. Where it has to stay NaN, two more instructions spread the carry of its magnitude plus one
over the product's addend.

As a float16, shifted by one place instead of four, the bits are 2**-8 of the value, subnormals included. Where that factor can
be undone later, three instructions decode two upper bytes and four two lower ones.

The functions are None in a Triton without inline assembly: 2.1 looks up whatever a kernel names, in a branch
that is not taken too.
"""

import triton
import triton.language as tl

__all__ = [
    "HALF_LOWER",
    "HALF_UPPER",
    "LOWER",
    "LOWER_NAN",
    "UPPER",
    "UPPER_NAN",
    "decodes_packed",
    "e4m3_lower",
    "e4m3_lower_half",
    "e4m3_upper",
    "e4m3_upper_half",
]


def decodes_packed(arch: str) -> bool:
    """`arch` (DeviceFacts.arch) has the instructions, and Triton can say them."""
    return hasattr(tl, "inline_asm_elementwise") and arch.startswith("sm") and int(arch.removeprefix("sm")) >= 80


def _assembly(*first: str, addend: tuple[str, ...]) -> tl.constexpr:
    instructions = (
        ".reg .b32 code, magnitude, addend, factor",
        *first,
        "and.b32 magnitude, code, 0x7F007F00",
        *addend,
        "shr.b32 magnitude, magnitude, 4",
        "lop3.b32 code, code, 0x80008000, magnitude, 0xEA",
        "mov.b32 factor, 0x7B807B80",
        "fma.rn.bf16x2 $0, code, factor, addend",
    )
    return tl.constexpr("{ " + "".join(f"{each}; " for each in instructions) + "}")


def _half(*first: str) -> tl.constexpr:
    instructions = (".reg .b32 code, magnitude", *first, "and.b32 magnitude, magnitude, 0x3F803F80")
    instructions += ("lop3.b32 $0, code, 0x80008000, magnitude, 0xEA",)
    return tl.constexpr("{ " + "".join(f"{each}; " for each in instructions) + "}")


_MINUS_ZERO = ("mov.b32 addend, 0x80008000",)
_NAN = ("add.u32 addend, magnitude, 0x01000100", "prmt.b32 addend, addend, 0, 0xBB99")
LOWER, LOWER_NAN = (_assembly("shl.b32 code, $1, 8", addend=addend) for addend in (_MINUS_ZERO, _NAN))
UPPER, UPPER_NAN = (_assembly("mov.b32 code, $1", addend=addend) for addend in (_MINUS_ZERO, _NAN))

HALF_LOWER = _half("shl.b32 code, $1, 8", "shl.b32 magnitude, $1, 7")
HALF_UPPER = _half("mov.b32 code, $1", "shr.b32 magnitude, $1, 1")


@triton.jit
def e4m3_lower(words, KEEP_NAN: tl.constexpr):
    """bfloat16 tensor of the lower bytes of `words` (int16); where not KEEP_NAN a NaN code is 480 or -480."""
    if KEEP_NAN:
        value = tl.inline_asm_elementwise(LOWER_NAN, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        value = tl.inline_asm_elementwise(LOWER, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    return value


@triton.jit
def e4m3_upper(words, KEEP_NAN: tl.constexpr):
    """bfloat16 tensor of the upper bytes of `words` (int16); where not KEEP_NAN a NaN code is 480 or -480."""
    if KEEP_NAN:
        value = tl.inline_asm_elementwise(UPPER_NAN, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        value = tl.inline_asm_elementwise(UPPER, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    return value


@triton.jit
def e4m3_lower_half(words):
    """float16 tensor of 2**-8 of the lower bytes of `words` (int16); a NaN code is 2**-8 of 480 or -480."""
    return tl.inline_asm_elementwise(HALF_LOWER, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def e4m3_upper_half(words):
    """float16 tensor of 2**-8 of the upper bytes of `words` (int16); a NaN code is 2**-8 of 480 or -480."""
    return tl.inline_asm_elementwise(HALF_UPPER, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)


if not hasattr(tl, "inline_asm_elementwise"):
    e4m3_lower = e4m3_upper = e4m3_lower_half = e4m3_upper_half = None
