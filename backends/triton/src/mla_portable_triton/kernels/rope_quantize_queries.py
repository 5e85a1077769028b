# SPDX-License-Identifier: Apache-2.0
"""rope_quantize_queries: rotary embedding of a layer's queries; that of its indexer's, their codes and scaled weights.

A program takes BLOCK_R rows, heads of one token after the other: of the queries, or of the indexer's. At 16 rows and four warps
each thread loads and stores whole pieces of a row, 4 numbers of each half of the rotary part and 8 of the rest, so that codes
leave the registers that they were made in. All of a row is loaded before any of it is used; cosines and sines have to wait for
a position.

rotation  a * cos - b * sin, b * cos + a * sin for a pair (a, b), rounded to bfloat16
codes     of the rounded numbers, as `indexer_cache_write` makes them of a key, with pow2 scales
weights   weight * scale * index_scale, float32

Cost, for each token: 2 * 2 * 64 bytes for a query's head; 2 * 128 read and 128 written for one of the indexer's, 6 of weights.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_portable.kit.triton_launcher import TritonLauncher, at_any_address
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.kernels.bfloat16 import to_float32
from mla_portable_triton.kernels.cache_rows import KEY, LEAST_INDEX_AMAX, magnitude_bits, scaled_tile
from mla_portable_triton.kernels.config import Config, config_for
from mla_portable_triton.kernels.e4m3_encode import e4m3_encode, encodes_natively
from mla_portable_triton.kernels.early_start import let_next_start, lets_next_start
from mla_portable_triton.kernels.rotary import cosines_and_sines, load_halves, rounded, store_halves
from mla_portable_triton.kernels.strides import stride_unit

CONFIGS: Final = {"default": Config(tile=16, num_warps=4)}  # tile: rows of a program; untuned


@triton.jit
def _index_queries(
    program,
    code_ptr, weight_out_ptr, query_ptr, weight_ptr, positions_ptr, cos_sin_ptr,
    num_tokens, last_position, stride_t, stride_h, code_stride_t, code_stride_h, weight_stride_t, weight_out_stride_t,
    cos_sin_stride, index_scale,
    STRIDE_UNIT: tl.constexpr, CODE_UNIT: tl.constexpr, HEADS: tl.constexpr, FIRST: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr, E4M3_NATIVE: tl.constexpr,
    BF16_NATIVE: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """BLOCK_R queries of the indexer: both halves of the rotary part, a and b, and the rest."""
    i = tl.arange(0, BLOCK_HALF)[None, :]  # [1, BLOCK_HALF]
    row = program.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    token, head = row // HEADS, row % HEADS
    given = token < num_tokens
    source = (query_ptr + (token * stride_t + head * stride_h) * STRIDE_UNIT)[:, None]
    a, b = load_halves(source + FIRST, given, BLOCK_R, HALF, BLOCK_HALF, INTERLEAVED)  # [BLOCK_R, BLOCK_HALF] each
    if BLOCK_REST > 0:
        r = tl.arange(0, BLOCK_REST)[None, :]  # [1, BLOCK_REST]
        r_column = r + (2 * HALF if FIRST == 0 else 0)
        kept = given[:, None] & (r < KEY - 2 * HALF)  # [BLOCK_R, BLOCK_REST]
        rest = tl.load(source + r_column, mask=kept, other=0.0)
    weight = tl.load(weight_ptr + token * weight_stride_t + head, mask=given, other=0.0)  # [BLOCK_R]
    cos, sin = cosines_and_sines(cos_sin_ptr, positions_ptr, token, given, last_position, cos_sin_stride, i, HALF)

    a, b = to_float32(a, BF16_NATIVE), to_float32(b, BF16_NATIVE)
    cos, sin = to_float32(cos, BF16_NATIVE), to_float32(sin, BF16_NATIVE)
    _, a_turned = rounded(a * cos - b * sin, BF16_NATIVE)
    _, b_turned = rounded(b * cos + a * sin, BF16_NATIVE)
    amax_bits = tl.maximum(magnitude_bits(a_turned), magnitude_bits(b_turned))  # [BLOCK_R]
    if BLOCK_REST > 0:
        rest = to_float32(rest, BF16_NATIVE)
        amax_bits = tl.maximum(amax_bits, magnitude_bits(rest))
    least = tl.full([BLOCK_R], LEAST_INDEX_AMAX, tl.float32).to(tl.int32, bitcast=True)
    amax_bits = tl.maximum(amax_bits, least)
    target = (code_ptr + (token * code_stride_t + head * code_stride_h) * CODE_UNIT)[:, None]
    a_scaled, scale = scaled_tile(a_turned, amax_bits, True)
    b_scaled, scale = scaled_tile(b_turned, amax_bits, True)
    a_code, b_code = e4m3_encode(a_scaled, E4M3_NATIVE), e4m3_encode(b_scaled, E4M3_NATIVE)
    store_halves(target + FIRST, a_code, b_code, given, BLOCK_R, HALF, BLOCK_HALF, INTERLEAVED)
    if BLOCK_REST > 0:
        scaled, scale = scaled_tile(rest, amax_bits, True)
        tl.store(target + r_column, e4m3_encode(scaled, E4M3_NATIVE), mask=kept)
    weight = to_float32(weight, BF16_NATIVE) * scale * index_scale
    tl.store(weight_out_ptr + token * weight_out_stride_t + head, weight, mask=given)


@triton.jit
def _queries(
    program,
    out_ptr, query_ptr, positions_ptr, cos_sin_ptr,
    num_tokens, last_position, stride_t, stride_h, out_stride_t, out_stride_h, cos_sin_stride,
    STRIDE_UNIT: tl.constexpr, HEADS: tl.constexpr, FIRST: tl.constexpr, OUT_FIRST: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BF16_NATIVE: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The rotary parts of BLOCK_R queries."""
    i = tl.arange(0, BLOCK_HALF)[None, :]  # [1, BLOCK_HALF]
    row = program.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    token, head = row // HEADS, row % HEADS
    given = token < num_tokens
    source = (query_ptr + (token * stride_t + head * stride_h) * STRIDE_UNIT + FIRST)[:, None]
    a, b = load_halves(source, given, BLOCK_R, HALF, BLOCK_HALF, INTERLEAVED)  # [BLOCK_R, BLOCK_HALF] each
    cos, sin = cosines_and_sines(cos_sin_ptr, positions_ptr, token, given, last_position, cos_sin_stride, i, HALF)
    a, b = to_float32(a, BF16_NATIVE), to_float32(b, BF16_NATIVE)
    cos, sin = to_float32(cos, BF16_NATIVE), to_float32(sin, BF16_NATIVE)
    a_turned, _ = rounded(a * cos - b * sin, BF16_NATIVE)
    b_turned, _ = rounded(b * cos + a * sin, BF16_NATIVE)
    target = (out_ptr + (token * out_stride_t + head * out_stride_h) * STRIDE_UNIT + OUT_FIRST)[:, None]
    store_halves(target, a_turned, b_turned, given, BLOCK_R, HALF, BLOCK_HALF, INTERLEAVED)


@triton.jit(
    do_not_specialize=[
        *("num_tokens", "last_position"),
        *("q_stride_t", "q_stride_h", "q_out_stride_t", "q_out_stride_h"),
        *("index_stride_t", "index_stride_h", "code_stride_t", "code_stride_h", "weight_stride_t", "weight_out_stride_t"),
    ],
    **at_any_address("positions_ptr", "weight_ptr", "weight_out_ptr"),
)
def rope_quantize_queries_kernel(
    q_out_ptr,
    code_ptr,
    weight_out_ptr,
    q_ptr,
    index_ptr,
    weight_ptr,
    positions_ptr,
    cos_sin_ptr,
    num_tokens,
    last_position,
    q_stride_t,  # strides of q, q_out and index_q count STRIDE_UNIT elements, those of codes CODE_UNIT
    q_stride_h,
    q_out_stride_t,
    q_out_stride_h,
    index_stride_t,
    index_stride_h,
    code_stride_t,
    code_stride_h,
    weight_stride_t,
    weight_out_stride_t,
    cos_sin_stride,
    index_scale,
    STRIDE_UNIT: tl.constexpr,
    CODE_UNIT: tl.constexpr,
    H: tl.constexpr,  # 0: there is no q
    Q_FIRST: tl.constexpr,  # its first rotary column, and that of q_out
    Q_OUT_FIRST: tl.constexpr,
    INDEX_H: tl.constexpr,  # 0: there is no index_q
    INDEX_FIRST: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,  # columns of index_q that are not rotated, rounded up; 0: all are
    INTERLEAVED: tl.constexpr,
    INDEX_INTERLEAVED: tl.constexpr,
    E4M3_NATIVE: tl.constexpr,
    BF16_NATIVE: tl.constexpr,
    LETS_NEXT_START: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid: programs of the indexer's queries, then of q. The code pointer is to bytes."""
    if LETS_NEXT_START:
        let_next_start()
    program = tl.program_id(0)
    index_programs = 0
    if INDEX_H > 0:
        index_programs = ((num_tokens.to(tl.int64) * INDEX_H + (BLOCK_R - 1)) // BLOCK_R).to(tl.int32)
        if program < index_programs:
            _index_queries(
                program,
                code_ptr, weight_out_ptr, index_ptr, weight_ptr, positions_ptr, cos_sin_ptr,
                num_tokens, last_position, index_stride_t, index_stride_h, code_stride_t, code_stride_h,
                weight_stride_t, weight_out_stride_t, cos_sin_stride, index_scale,
                STRIDE_UNIT, CODE_UNIT, INDEX_H, INDEX_FIRST, HALF, BLOCK_HALF, BLOCK_REST, INDEX_INTERLEAVED,
                E4M3_NATIVE, BF16_NATIVE, BLOCK_R,
            )  # fmt: skip
    program -= index_programs
    if H > 0:  # noqa: SIM102
        if program >= 0:
            _queries(
                program,
                q_out_ptr, q_ptr, positions_ptr, cos_sin_ptr,
                num_tokens, last_position, q_stride_t, q_stride_h, q_out_stride_t, q_out_stride_h, cos_sin_stride,
                STRIDE_UNIT, H, Q_FIRST, Q_OUT_FIRST, HALF, BLOCK_HALF, INTERLEAVED, BF16_NATIVE, BLOCK_R,
            )  # fmt: skip


_launch = TritonLauncher(rope_quantize_queries_kernel)


def _strides(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1))


def launch(
    q: Tensor | None,
    index_q: Tensor | None,
    index_weights: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    q_out: Tensor | None,
    index_q_out: Tensor | None,
    index_weights_out: Tensor | None,
    index_scale: float,
    interleaved: bool,
    index_interleaved: bool,
    index_first: bool,
    e4m3_native: bool,
    bf16_native: bool,
    lets_next_start: bool,
    config: Config,
) -> None:
    """Arguments as RopeQuantizeQueries. Graph-safe, allocates nothing."""
    num_tokens = positions.shape[0]
    if num_tokens == 0:
        return
    rotary = cos_sin.shape[1]
    rest = KEY.value - rotary
    heads, q_first = (0, 0) if q is None else (q.shape[1], q.shape[2] - rotary)
    index_heads = 0 if index_q is None else index_q.shape[1]
    strides = (*_strides(q), *_strides(q_out), *_strides(index_q))
    code_strides = _strides(index_q_out)
    unit, code_unit = stride_unit(*strides, q_first), stride_unit(*code_strides)
    codes = None if index_q_out is None else index_q_out.view(torch.uint8)
    whole = codes is None or (code_unit == 8 and codes.data_ptr() % 16 == 0)
    programs = sum(triton.cdiv(num_tokens * count, config.tile) for count in (index_heads, heads))
    _launch(
        (programs,),
        q_out,
        codes,
        index_weights_out,
        q,
        index_q,
        index_weights,
        positions,
        cos_sin,
        num_tokens,
        cos_sin.shape[0] - 1,
        *(stride // unit for stride in strides),
        *(stride // code_unit for stride in code_strides),
        _strides(index_weights)[0],
        _strides(index_weights_out)[0],
        cos_sin.stride(0),
        float(index_scale),
        STRIDE_UNIT=unit,
        CODE_UNIT=code_unit,
        H=heads,
        Q_FIRST=q_first,
        Q_OUT_FIRST=0 if q_out is None else q_out.shape[2] - rotary,
        INDEX_H=index_heads,
        INDEX_FIRST=0 if index_first else rest,
        HALF=rotary // 2,
        BLOCK_HALF=triton.next_power_of_2(rotary // 2),
        BLOCK_REST=triton.next_power_of_2(rest) if rest > 0 else 0,
        INTERLEAVED=interleaved,
        INDEX_INTERLEAVED=index_interleaved,
        E4M3_NATIVE=e4m3_native and whole,
        BF16_NATIVE=bf16_native,
        LETS_NEXT_START=lets_next_start and positions.is_cuda,
        BLOCK_R=config.tile,
        num_warps=config.num_warps,
        num_stages=1,
    )


def aot_variants(arch: str = "default", *, e4m3_native: bool = False) -> list[AotVariant]:
    """DeepSeek-V3.2's two parts, GLM-5's interleaved indexer, and queries alone."""
    config = config_for(CONFIGS, arch)

    def made(word: str, heads: int, index_heads: int, table: str, interleaved: bool) -> AotVariant:
        index = index_heads > 0
        return variant(
            rope_quantize_queries_kernel,
            f"rope_quantize_queries-{word}",
            config.num_warps,
            q_out_ptr="*bf16" if heads else None,
            code_ptr="*u8" if index else None,
            weight_out_ptr="*fp32" if index else None,
            q_ptr="*bf16" if heads else None,
            index_ptr="*bf16" if index else None,
            weight_ptr="*bf16" if index else None,
            positions_ptr="*i64",
            cos_sin_ptr=table,
            index_scale="fp32",
            STRIDE_UNIT=8,
            CODE_UNIT=8,
            H=heads,
            Q_FIRST=128,
            Q_OUT_FIRST=512,
            INDEX_H=index_heads,
            INDEX_FIRST=0,
            HALF=32,
            BLOCK_HALF=32,
            BLOCK_REST=64,
            INTERLEAVED=True,
            INDEX_INTERLEAVED=interleaved,
            E4M3_NATIVE=encodes_natively(arch, e4m3_native),
            BF16_NATIVE=True,
            LETS_NEXT_START=lets_next_start(arch),
            BLOCK_R=config.tile,
        )

    return [
        made("both", 16, 64, "*fp32", interleaved=False),
        made("both-interleaved", 16, 32, "*bf16", interleaved=True),
        made("queries", 16, 0, "*bf16", interleaved=False),
        made("index", 0, 64, "*fp32", interleaved=False),
    ]
