# SPDX-License-Identifier: Apache-2.0
"""cache_write: new tokens -> rows of the paged cache, FP8 with a scale per 128 latent values (fp8_v4: 64), or plain bfloat16.

pow2      scale = 2 ** ceil(log2(amax / 448)), at least 2**-13, read off the bits of amax
amax      scale = amax / 448 by true division, at least the smallest normal float32
latent    e4m3(x / scale), to nearest even, saturating; rope as bfloat16
fp8_v4    pow2 scales as bytes of their exponent, for 448 values; the other 64 as bfloat16
skipped   slot < 0, or past the cache

amax is a maximum over bits: non-negative floats order as integers do, and a NaN, the largest of them, is not lost.
Cost: 1152 B read and 656 or 1152 B written per token, 1024 B each (fp8_nope: 528 B written, fp8_v4: 584) where there is no
rotary part; the launch dominates below some thousand tokens.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.kit.triton_launcher import TritonLauncher, at_any_address
from mla_portable.layouts import BF16, BF16_128_32, BF16_NOPE, E4M3_MAX, FP8_DS_MLA, FP8_NOPE, FP8_V4, POW2_MIN_EXPONENT
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.kernels.bfloat16 import to_bfloat16, to_float32
from mla_portable_triton.kernels.config import Config, config_for
from mla_portable_triton.kernels.e4m3_encode import e4m3_encode, encodes_natively
from mla_portable_triton.kernels.row_layout import (
    BF16_ROWS,
    FP8_ROWS,
    GROUP,
    ROPE_BYTE,
    SCALE_BYTE,
    V4_CODES,
    V4_GROUP,
    V4_ROW_BYTES,
    V4_ROWS,
    V4_SCALE_BYTES,
    V4_TAIL,
    rows_of,
    rows_of_layout,
)

CONFIGS: Final = {"default": Config(tile=4, num_warps=4)}  # tile: tokens; untuned

_E4M3_MAX = tl.constexpr(E4M3_MAX)
# float32 bits of 448 = 1.75 * 2**8 times the least scale, 2**-13 or 2**-126
_LEAST_POW2_BITS = tl.constexpr(((8 + POW2_MIN_EXPONENT + 127) << 23) | 0x600000)
_LEAST_AMAX_BITS = tl.constexpr(((8 - 126 + 127) << 23) | 0x600000)


@triton.jit
def scaled_tile(values, amax_bits, POW2: tl.constexpr):
    """values / scale, and the scale, float32 and without the last axis.

    values: float32. amax_bits: int32, of the largest magnitude along their last axis, raised to the least that counts.
    """
    if POW2:
        # amax = m * 2**e with 1 <= m < 2, and 448 = 1.75 * 2**8: one more where m > 1.75
        exponent = (amax_bits >> 23) - 135 + ((amax_bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        scale = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
        reciprocal = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        scaled = values * tl.expand_dims(reciprocal, -1)  # exact but for underflow, like the division
    else:
        scale = tl.math.div_rn(amax_bits.to(tl.float32, bitcast=True), _E4M3_MAX)
        scaled = tl.math.div_rn(values, tl.broadcast_to(tl.expand_dims(scale, -1), values.shape))
    return scaled, scale


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"], **at_any_address("slot_ptr"))
def cache_write_kernel(
    kv_c_ptr,
    k_pe_ptr,
    cache_ptr,
    slot_ptr,
    num_tokens,
    num_blocks,
    kv_c_stride,
    k_pe_stride,
    block_stride,
    CACHE_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,  # width of k_pe; 0: there is none, and its pointer is not read
    LATENT: tl.constexpr,  # width of the latent: 512, of BF16_ROWS also 128
    ROWS: tl.constexpr,  # the layout, see `row_layout`
    POW2: tl.constexpr,
    E4M3_NATIVE: tl.constexpr,
    BF16_NATIVE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """BLOCK_T tokens a program. The cache pointer is to bfloat16 of BF16_ROWS, to bytes otherwise."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    given = token < num_tokens  # [BLOCK_T]; reading a token that is skipped is cheaper than waiting for its slot
    slot = tl.load(slot_ptr + token, mask=given, other=-1)  # [BLOCK_T] int64
    block = slot // CACHE_BLOCK  # [BLOCK_T]; meaningless where slot < 0
    written = (slot >= 0) & (block < num_blocks)  # [BLOCK_T]
    WIDTH: tl.constexpr = V4_GROUP if ROWS == V4_ROWS else GROUP  # columns of a scale
    ROW: tl.constexpr = V4_ROW_BYTES if ROWS == V4_ROWS else ROPE_BYTE + 2 * ROPE if ROWS == FP8_ROWS else LATENT + ROPE
    row = cache_ptr + (block * block_stride + slot % CACHE_BLOCK * ROW)  # [BLOCK_T] pointers

    group = tl.arange(0, LATENT // WIDTH)[None, :]  # [1, GROUPS]
    column = group[:, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]  # [1, GROUPS, WIDTH]
    latent = tl.load(kv_c_ptr + token[:, None, None] * kv_c_stride + column, mask=given[:, None, None])
    if ROPE > 0:
        d = tl.arange(0, ROPE)[None, :]  # [1, ROPE]
        rope = tl.load(k_pe_ptr + token[:, None] * k_pe_stride + d, mask=given[:, None])  # [BLOCK_T, ROPE]
        if rope.dtype != tl.bfloat16:
            rope = to_bfloat16(to_float32(rope, BF16_NATIVE), BF16_NATIVE)

    if ROWS != BF16_ROWS:
        latent = to_float32(latent, BF16_NATIVE)  # [BLOCK_T, GROUPS, WIDTH]
        amax_bits = tl.max(latent.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)  # [BLOCK_T, GROUPS]
        # by bits, so that a NaN stays
        amax_bits = tl.maximum(amax_bits, _LEAST_POW2_BITS if POW2 else _LEAST_AMAX_BITS)
        scaled, scale = scaled_tile(latent, amax_bits, POW2)  # [BLOCK_T, GROUPS, WIDTH], [BLOCK_T, GROUPS]
    if ROWS == FP8_ROWS:
        tl.store(row[:, None, None] + column, e4m3_encode(scaled, E4M3_NATIVE), mask=written[:, None, None])
        scale_row = (row + SCALE_BYTE).to(tl.pointer_type(tl.float32))  # [BLOCK_T] pointers
        tl.store(scale_row[:, None] + group, scale, mask=written[:, None])
        if ROPE > 0:
            rope_row = (row + ROPE_BYTE).to(tl.pointer_type(tl.bfloat16))  # [BLOCK_T] pointers
            tl.store(rope_row[:, None] + d, rope, mask=written[:, None])
    elif ROWS == V4_ROWS:
        # the last group is not coded; the byte of its scale is the padding, 0
        coded = group * WIDTH < V4_CODES  # [1, GROUPS]
        stored = written[:, None, None] & coded[:, :, None]  # [BLOCK_T, GROUPS, 1]
        tl.store(row[:, None, None] + column, e4m3_encode(scaled, E4M3_NATIVE), mask=stored)
        exponent = tl.where(coded, scale.to(tl.int32, bitcast=True) >> 23, 0).to(tl.uint8)  # [BLOCK_T, GROUPS]
        apart = CACHE_BLOCK * V4_ROW_BYTES + slot % CACHE_BLOCK * V4_SCALE_BYTES  # [BLOCK_T]
        scale_row = cache_ptr + (block * block_stride + apart)  # [BLOCK_T] pointers
        tl.store(scale_row[:, None] + group, exponent, mask=written[:, None])
        t = tl.arange(0, V4_TAIL)[None, :]  # [1, V4_TAIL]
        tail = tl.load(kv_c_ptr + token[:, None] * kv_c_stride + V4_CODES + t, mask=given[:, None])  # [BLOCK_T, V4_TAIL]
        if tail.dtype != tl.bfloat16:
            tail = to_bfloat16(to_float32(tail, BF16_NATIVE), BF16_NATIVE)
        tail_row = (row + V4_CODES).to(tl.pointer_type(tl.bfloat16))  # [BLOCK_T] pointers
        tl.store(tail_row[:, None] + t, tail, mask=written[:, None])
    else:
        if latent.dtype != tl.bfloat16:
            latent = to_bfloat16(to_float32(latent, BF16_NATIVE), BF16_NATIVE)
        tl.store(row[:, None, None] + column, latent, mask=written[:, None, None])
        if ROPE > 0:
            tl.store(row[:, None] + LATENT + d, rope, mask=written[:, None])


_launch = TritonLauncher(cache_write_kernel)


def in_whole_vectors(cache: Tensor) -> bool:
    """Rows start at multiples of 16 bytes. Elsewhere codes are stored two at a time by way of shared memory, and those of PTX's
    conversion came out wrong there on an H200 (Triton 3.6: `st.shared.v2.b8` of registers whose upper byte is another code)."""
    return (cache.data_ptr() | cache.stride(0) * cache.element_size()) % 16 == 0


def launch(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    pow2: bool,
    e4m3_native: bool,
    bf16_native: bool,
    config: Config,
) -> None:
    """Write the tokens' rows of `kv_cache`, of kv_c [T, LATENT] and k_pe [T, ROPE] or [T, 0]. Graph-safe.

    Rows of `kv_c` and `k_pe` and blocks of the cache may lie apart; rows within a block are contiguous.
    """
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0:
        return
    _launch(
        (triton.cdiv(num_tokens, config.tile),),
        kv_c,
        k_pe,
        kv_cache,
        slot_mapping,
        num_tokens,
        kv_cache.shape[0],
        kv_c.stride(0),
        k_pe.stride(0),
        kv_cache.stride(0),
        CACHE_BLOCK=kv_cache.shape[1],
        ROPE=k_pe.shape[1],
        LATENT=kv_c.shape[1],
        ROWS=rows_of(kv_cache.element_size(), kv_cache.shape[2]),
        POW2=pow2,
        E4M3_NATIVE=e4m3_native and in_whole_vectors(kv_cache),
        BF16_NATIVE=bf16_native,
        BLOCK_T=config.tile,
        num_warps=config.num_warps,
        num_stages=1,
    )


def aot_variants(arch: str = "default", *, e4m3_native: bool = False) -> list[AotVariant]:
    """All layouts, both scale formats, both input types; e4m3 encoded by bits, as every target can, or natively."""
    config = config_for(CONFIGS, arch)
    fp8 = ((FP8_DS_MLA, True, "bf16"), (FP8_DS_MLA, False, "fp16"), (FP8_NOPE, False, "bf16"), (FP8_V4, True, "bf16"))
    rows = (*fp8, (BF16, True, "fp16"), (BF16_NOPE, True, "bf16"), (BF16_128_32, True, "bf16"))
    return [
        variant(
            cache_write_kernel,
            f"cache_write-{layout.name}{('-pow2' if pow2 else '-amax') if layout.is_quantized else ''}-from-{dtype}",
            config.num_warps,
            kv_c_ptr=f"*{dtype}",
            k_pe_ptr=f"*{dtype}",
            cache_ptr="*u8" if layout.is_quantized else "*bf16",
            slot_ptr="*i64",
            CACHE_BLOCK=64,
            ROPE=layout.rope_width,
            LATENT=layout.value_width,
            ROWS=rows_of_layout(layout),
            POW2=pow2,
            E4M3_NATIVE=encodes_natively(arch, e4m3_native),
            BF16_NATIVE=True,
            BLOCK_T=config.tile,
        )
        for layout, pow2, dtype in rows
    ]
