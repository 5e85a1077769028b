# SPDX-License-Identifier: Apache-2.0
"""Words of two e4m3 bytes -> bfloat16, exactly, by the instructions of NVIDIA's compute capability 8.0 and later.

Lower and upper bytes are decoded apart, so that no byte is moved beside another: a tile of words becomes the even columns and
the odd columns of the tile of bytes. A register holds two words.

The seven bits of a magnitude, put where a bfloat16's exponent ends and its mantissa begins, are 2**-120 of the value,
subnormals included, and the product with 2**120 is exact: four instructions for two upper bytes, five for two lower ones. A NaN
code so becomes 480 with its sign. Where it has to stay NaN, two more instructions spread the carry of its magnitude plus one
over the product's addend.

`e4m3_lower` and `e4m3_upper` are None in a Triton without inline assembly: 2.1 looks up whatever a kernel names, in a branch
that is not taken too.
"""

import triton
import triton.language as tl

__all__ = ["LOWER", "LOWER_NAN", "UPPER", "UPPER_NAN", "decodes_packed", "e4m3_lower", "e4m3_upper"]


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


_MINUS_ZERO = ("mov.b32 addend, 0x80008000",)
_NAN = ("add.u32 addend, magnitude, 0x01000100", "prmt.b32 addend, addend, 0, 0xBB99")
LOWER, LOWER_NAN = (_assembly("shl.b32 code, $1, 8", addend=addend) for addend in (_MINUS_ZERO, _NAN))
UPPER, UPPER_NAN = (_assembly("mov.b32 code, $1", addend=addend) for addend in (_MINUS_ZERO, _NAN))


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


if not hasattr(tl, "inline_asm_elementwise"):
    e4m3_lower = e4m3_upper = None
