# SPDX-License-Identifier: Apache-2.0
"""quantize_per_tensor: a tensor -> FP8 codes with one float32 scale, without a read-back and without atomics.

first launch    each program takes the largest magnitude of its share, as bits: integers order as the floats do, NaN on top
second launch   every program reduces those few hundred numbers again, scale = max(amax, 1e-10) / max(dtype), and encodes
                x / scale by true division; the first one stores the scale

The order in which programs run decides nothing, so the result is the same bits each time.
Cost: x is read twice, the second time from L2 where it fits, and one byte per element is written.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_portable.kit.triton_launcher import TritonLauncher
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.kernels.bfloat16 import to_float32
from mla_portable_triton.kernels.config import Config, config_for
from mla_portable_triton.kernels.e4m3_encode import e4m3_encode, e5m2_encode

CONFIGS: Final = {"default": Config(tile=4096, num_warps=8)}  # tile: elements; untuned
MAX_PARTS: Final = 512
"""Programs of the first launch at most; the second reads as many numbers in each of its programs."""

_LEAST_AMAX = tl.constexpr(1e-10)
_E4M3_MAX = tl.constexpr(torch.finfo(torch.float8_e4m3fn).max)
_E5M2_MAX = tl.constexpr(torch.finfo(torch.float8_e5m2).max)


# num_elements is specialised on: divisible by 16, the usual case, it lets loads and stores go 16 bytes at a time
@triton.jit
def partial_amax_kernel(part_ptr, x_ptr, num_elements, BF16_NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    """part[program] = bits of the largest |x| among the tiles program, program + programs, ..."""
    lane = tl.arange(0, BLOCK)  # [BLOCK]
    first = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    largest = tl.zeros([BLOCK], tl.int32)
    for begin in range(first, num_elements, step):
        x = tl.load(x_ptr + begin + lane, mask=begin + lane < num_elements, other=0.0)  # [BLOCK]
        largest = tl.maximum(largest, to_float32(x, BF16_NATIVE).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(part_ptr + tl.program_id(0), tl.max(largest, 0))


@triton.jit(do_not_specialize=["num_parts"])
def quantize_kernel(
    code_ptr,
    scale_ptr,
    x_ptr,
    part_ptr,
    num_parts,
    num_elements,
    E5M2: tl.constexpr,
    BF16_NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """One tile a program; all partial maxima fit BLOCK_PARTS."""
    part = tl.arange(0, BLOCK_PARTS)  # [BLOCK_PARTS]
    amax_bits = tl.max(tl.load(part_ptr + part, mask=part < num_parts, other=0), 0)
    amax = amax_bits.to(tl.float32, bitcast=True)
    amax = tl.where(amax < _LEAST_AMAX, _LEAST_AMAX, amax)  # a NaN is not less, and stays
    scale = tl.math.div_rn(amax, _E5M2_MAX if E5M2 else _E4M3_MAX)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)

    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    in_range = offset < num_elements
    x = tl.load(x_ptr + offset, mask=in_range, other=0.0)  # [BLOCK]
    scaled = tl.math.div_rn(to_float32(x, BF16_NATIVE), tl.full([BLOCK], 0.0, tl.float32) + scale)
    code = e5m2_encode(scaled) if E5M2 else e4m3_encode(scaled, False)
    tl.store(code_ptr + offset, code, mask=in_range)


def num_parts(num_elements: int, config: Config) -> int:
    """How many partial maxima a tensor takes: at least one, so that an empty tensor has a scale too."""
    return max(1, min(triton.cdiv(num_elements, config.tile), MAX_PARTS))


_launch_partial_amax = TritonLauncher(partial_amax_kernel)


_launch_quantize = TritonLauncher(quantize_kernel)


def launch(codes: Tensor, scale: Tensor, parts: Tensor, x: Tensor, *, e5m2: bool, bf16_native: bool, config: Config) -> None:
    """Write `codes`, uint8 of x's size, and `scale`, one float32. Graph-safe.

    `x` is contiguous; `parts` is int32 scratch of `num_parts(x.numel(), config)`.
    """
    num_elements = x.numel()
    _launch_partial_amax(
        (parts.shape[0],),
        parts,
        x,
        num_elements,
        BF16_NATIVE=bf16_native,
        BLOCK=config.tile,
        num_warps=config.num_warps,
        num_stages=1,
    )
    _launch_quantize(
        (max(1, triton.cdiv(num_elements, config.tile)),),
        codes,
        scale,
        x,
        parts,
        parts.shape[0],
        num_elements,
        E5M2=e5m2,
        BF16_NATIVE=bf16_native,
        BLOCK=config.tile,
        BLOCK_PARTS=MAX_PARTS,
        num_warps=config.num_warps,
        num_stages=1,
    )


def aot_variants(arch: str = "default") -> list[AotVariant]:
    """Both launches, to both FP8 types."""
    config = config_for(CONFIGS, arch)
    warps, tile = config.num_warps, {"x_ptr": "*bf16", "BF16_NATIVE": True, "BLOCK": config.tile}
    codes = {"code_ptr": "*u8", "scale_ptr": "*fp32", "part_ptr": "*i32", "BLOCK_PARTS": MAX_PARTS, **tile}
    return [
        variant(partial_amax_kernel, "quantize_per_tensor-amax", warps, part_ptr="*i32", **tile),
        variant(quantize_kernel, "quantize_per_tensor-e4m3", warps, E5M2=False, **codes),
        variant(quantize_kernel, "quantize_per_tensor-e5m2", warps, E5M2=True, **codes),
    ]
