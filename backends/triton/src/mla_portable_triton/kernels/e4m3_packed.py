# SPDX-License-Identifier: Apache-2.0
"""Words of two e4m3 bytes -> bfloat16, exactly, by the instructions of NVIDIA's compute capability 8.0 and later.

Lower and upper bytes are decoded apart, so that no byte is moved beside another: a tile of words becomes the even columns and
the odd columns of the tile of bytes. A register holds two words.

The seven bits of a magnitude, put where a bfloat16's exponent ends and its mantissa begins, are 2**-120 of the value,
subnormals included, and the product with 2**120 is exact. One more than a NaN's magnitude has the byte's sign bit, which is
spread over the product's addend: a NaN. Six instructions decode two upper bytes, seven two lower ones.
"""

import triton
import triton.language as tl

__all__ = ["e4m3_lower", "e4m3_upper"]

_DECODE = """
    and.b32 magnitude, code, 0x7F007F00;
    add.u32 nan, magnitude, 0x01000100;
    prmt.b32 nan, nan, 0, 0xBB99;
    shr.b32 magnitude, magnitude, 4;
    lop3.b32 code, code, 0x80008000, magnitude, 0xEA;
    mov.b32 magnitude, 0x7B807B80;
    fma.rn.bf16x2 $0, code, magnitude, nan;
}"""
_REGISTERS = "{\n    .reg .b32 code, magnitude, nan;"
LOWER = tl.constexpr(f"{_REGISTERS}\n    shl.b32 code, $1, 8;{_DECODE}")
UPPER = tl.constexpr(f"{_REGISTERS}\n    mov.b32 code, $1;{_DECODE}")

if hasattr(tl, "inline_asm_elementwise"):

    @triton.jit
    def e4m3_lower(words):
        """bfloat16 tensor of the lower bytes of `words` (int16); NaN codes stay NaN."""
        return tl.inline_asm_elementwise(LOWER, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)

    @triton.jit
    def e4m3_upper(words):
        """bfloat16 tensor of the upper bytes of `words` (int16); NaN codes stay NaN."""
        return tl.inline_asm_elementwise(UPPER, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)

else:  # Triton 2.1 looks up whatever a kernel could call, also in a branch that is not taken
    e4m3_lower = e4m3_upper = None
