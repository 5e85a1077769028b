# SPDX-License-Identifier: Apache-2.0
"""Products with e4m3 codes, float16: what the attention kernels over FP8 rows share. `sparse_attention_fp8` says why so."""

import triton
import triton.language as tl

from mla_portable_triton.kernels.bfloat16 import half_operand, to_float32
from mla_portable_triton.kernels.e4m3_decode import e4m3_to_half
from mla_portable_triton.kernels.e4m3_packed import (
    decodes_packed,
    e4m3_converted,
    e4m3_lower_half,
    e4m3_times_140,
    e4m3_upper_half,
)


def fp8_constants(arch: str, *, e4m3_native: bool, hardware: bool = True) -> dict[str, bool]:
    """What kernels over FP8 rows take beside the constants of the other. hardware: not Triton's interpreter."""
    return {"E4M3_NATIVE": e4m3_native, "PACKED": hardware and decodes_packed(arch)}


@triton.jit
def words(rows, column: tl.constexpr, WIDTH: tl.constexpr, valid, PACKED: tl.constexpr):
    """WIDTH words of the rows at `rows` [N, 1], 0 where not valid."""
    w = tl.arange(0, WIDTH)
    tile = tl.load(rows + (w + column)[None, :], mask=valid[:, None], other=0)
    if not PACKED:
        # Zeros, unknown to Triton until it has laid the tiles out. What depends on loads alone it would decode in the layouts
        # of both products, and here that is dear.
        tile = tile | (w >> 16).to(tl.int16)[None, :]
    return tile


@triton.jit
def decoded(words, AS_KEYS: tl.constexpr, E4M3_NATIVE: tl.constexpr, PACKED: tl.constexpr, BF16_NATIVE: tl.constexpr):
    """The even and the odd columns of `words` as operands of a product, in units of KEY_UNIT or VALUE_UNIT."""
    if PACKED and E4M3_NATIVE:
        even, odd = e4m3_converted(words)
    elif PACKED and AS_KEYS:
        even, odd = e4m3_times_140(words)
    elif PACKED:
        even = e4m3_lower_half(words)
        odd = e4m3_upper_half(words)
    else:
        even = half_operand(e4m3_to_half((words & 0xFF).to(tl.uint8), E4M3_NATIVE), BF16_NATIVE)
        odd = half_operand(e4m3_to_half(((words >> 8) & 0xFF).to(tl.uint8), E4M3_NATIVE), BF16_NATIVE)
    return even, odd


@triton.jit
def magnitude(x, y, BF16_NATIVE: tl.constexpr):
    """Of bf16 tiles `x` and `y`, the larger of each two numbers, float32."""
    return tl.maximum(tl.abs(to_float32(x, BF16_NATIVE)), tl.abs(to_float32(y, BF16_NATIVE)))


@triton.jit
def query_scale(top):
    """A power of two that brings magnitudes of at most `top` [H] below 2**14, and its inverse; infinity stays infinite."""
    exponent = tl.maximum(top.to(tl.int32, bitcast=True) >> 23, 14)  # 127 of 1.0
    return ((267 - exponent) << 23).to(tl.float32, bitcast=True), ((exponent - 13) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent(x):
    """The least whole number above log2(x), float32; -60 of all that is below 2**-60."""
    return ((tl.maximum(x, 2.0**-60).to(tl.int32, bitcast=True) >> 23) - 126).to(tl.float32)


@triton.jit
def any_above(tile, LIMIT: tl.constexpr):
    """Whether a number of `tile` is above LIMIT, NaN aside: one answer for the whole program."""
    return tl.max((tile > LIMIT).to(tl.int32)) > 0


@triton.jit
def add_scores(scores, q, r, even, odd, scale):
    """`scores` [H, N] plus the part of the columns whose scale is `scale` [N]."""
    part = tl.dot(q, tl.trans(even))
    part += tl.dot(r, tl.trans(odd))  # folded into the product by the compiler; Triton 2.1 has no accumulator to pass
    return scores + part * scale[None, :]


@triton.jit
def add_values(x, y, p, even, odd, scale, BF16_NATIVE: tl.constexpr):
    """Sums `x` and `y` plus the values of probabilities `p` [H, N]."""
    p = half_operand(p * scale[None, :], BF16_NATIVE)
    return x + tl.dot(p, even), y + tl.dot(p, odd)
