# SPDX-License-Identifier: Apache-2.0
"""norm_rope_write: norms, rotary embedding and both cache writes of new tokens, in one launch.

Each part has programs of its own, so that a single token's three parts run side by side: a token's q_a; KV_TOKENS latents with
their rotary parts; INDEX_TOKENS keys of the indexer. That many are 16 bytes a thread of four warps. A program loads its rows,
the norm's weights and the positions before it uses any of them; cosines and sines have to wait for a position.

norm      x / sqrt(mean(x * x) + eps) * weight; of the indexer's key (x - mean) / sqrt(var + eps) * weight + bias
rotation  a * cos - b * sin, b * cos + a * sin for a pair (a, b)
rounding  to bfloat16 behind a norm and behind a rotation, which takes the rounded norm; rows are made of rounded numbers

Cost: 2 * (Q + 576 + 128) bytes read and 2 * Q + 656 + 132 written for each token of fp8_ds_mla, 8,320 with a Q of 1,536.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.kit.triton_launcher import TritonLauncher, at_any_address
from mla_portable.layouts import BF16, BF16_128_32, FP8_DS_MLA, FP8_V4, INDEX_FP8, CacheLayout
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.kernels.bfloat16 import to_float32
from mla_portable_triton.kernels.cache_rows import (
    KEY,
    LEAST_INDEX_AMAX,
    columns_of_a_scale,
    in_whole_vectors,
    magnitude_bits,
    rope_pointers,
    row_pointers,
    scaled_tile,
    store_latent,
)
from mla_portable_triton.kernels.config import Config, config_for
from mla_portable_triton.kernels.e4m3_encode import e4m3_encode, encodes_natively
from mla_portable_triton.kernels.early_start import let_next_start, lets_next_start
from mla_portable_triton.kernels.rotary import cosines_and_sines, pair_columns, rounded
from mla_portable_triton.kernels.row_layout import V4_CODES, V4_ROWS, V4_TAIL, rows_of, rows_of_layout
from mla_portable_triton.kernels.strides import stride_unit

CONFIGS: Final = {"default": Config(tile=1024, num_warps=4)}  # tile: elements of latents and keys in a program; untuned
NO_ROWS = tl.constexpr(-1)
"""ROWS of a call that writes no cache of attention."""


@triton.jit
def _latents(
    program,
    latent_out_ptr, rope_out_ptr, cache_ptr, latent_ptr, positions_ptr, slot_ptr, cos_sin_ptr, kv_norm_ptr,
    num_tokens, last_position, num_blocks,
    latent_stride, latent_out_stride, rope_out_stride, cos_sin_stride, block_stride, eps,
    STRIDE_UNIT: tl.constexpr, TOKENS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr, CACHE_BLOCK: tl.constexpr, ROWS: tl.constexpr, POW2: tl.constexpr,
    E4M3_NATIVE: tl.constexpr, BF16_NATIVE: tl.constexpr,
):  # fmt: skip
    """TOKENS latents: RMS norm, rotation of the rotary part, rows of the cache and outputs."""
    i = tl.arange(0, BLOCK_HALF)[None, :]  # [1, BLOCK_HALF]
    in_half = i < HALF
    token = program.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
    given = token < num_tokens
    group, column = columns_of_a_scale(LATENT, ROWS)  # [1, GROUPS], [1, GROUPS, WIDTH]
    source = latent_ptr + token * latent_stride * STRIDE_UNIT  # [TOKENS] pointers
    latent = tl.load(source[:, None, None] + column, mask=given[:, None, None], other=0.0)
    # weights for each token, so that Triton lays them out as latents, and nothing has to change places
    norm = kv_norm_ptr + tl.zeros([TOKENS], tl.int32)  # [TOKENS] pointers
    weight = tl.load(norm[:, None, None] + column)  # [TOKENS, GROUPS, WIDTH]
    if ROPE > 0:
        a_column, b_column = pair_columns(i, HALF, INTERLEAVED)
        paired = given[:, None] & in_half  # [TOKENS, BLOCK_HALF]
        a = tl.load(source[:, None] + LATENT + a_column, mask=paired, other=0.0)
        b = tl.load(source[:, None] + LATENT + b_column, mask=paired, other=0.0)
    if ROWS == V4_ROWS:
        t = tl.arange(0, V4_TAIL)[None, :]  # [1, V4_TAIL]
        tail = tl.load(source[:, None] + V4_CODES + t, mask=given[:, None], other=0.0)  # [TOKENS, V4_TAIL]
        tail_weight = tl.load(norm[:, None] + V4_CODES + t)
    if ROWS != NO_ROWS:
        slot = tl.load(slot_ptr + token, mask=given, other=-1)  # [TOKENS] int64
    if ROPE > 0:
        cos, sin = cosines_and_sines(
            cos_sin_ptr, positions_ptr, token, given, last_position, cos_sin_stride, i, HALF
        )  # [TOKENS, BLOCK_HALF] each

    wide = to_float32(latent, BF16_NATIVE)  # [TOKENS, GROUPS, WIDTH]
    scale = 1.0 / tl.sqrt(tl.sum(tl.sum(wide * wide, 2), 1) / LATENT + eps)  # [TOKENS]
    normed, _ = rounded(wide * scale[:, None, None] * to_float32(weight, BF16_NATIVE), BF16_NATIVE)
    if latent_out_ptr is not None:
        target = latent_out_ptr + token * latent_out_stride * STRIDE_UNIT  # [TOKENS] pointers
        tl.store(target[:, None, None] + column, normed, mask=given[:, None, None])
    if ROPE > 0:
        a, b = to_float32(a, BF16_NATIVE), to_float32(b, BF16_NATIVE)
        cos, sin = to_float32(cos, BF16_NATIVE), to_float32(sin, BF16_NATIVE)
        a_turned, _ = rounded(a * cos - b * sin, BF16_NATIVE)  # [TOKENS, BLOCK_HALF]
        b_turned, _ = rounded(b * cos + a * sin, BF16_NATIVE)
        if rope_out_ptr is not None:
            target = rope_out_ptr + token * rope_out_stride * STRIDE_UNIT  # [TOKENS] pointers
            tl.store(target[:, None] + a_column, a_turned, mask=paired)
            tl.store(target[:, None] + b_column, b_turned, mask=paired)
    if ROWS != NO_ROWS:
        written = (slot >= 0) & (slot // CACHE_BLOCK < num_blocks)
        row = row_pointers(cache_ptr, slot, block_stride, CACHE_BLOCK, LATENT, ROPE, ROWS)  # [TOKENS]
        last = normed
        if ROWS == V4_ROWS:
            last = to_float32(tail, BF16_NATIVE) * scale[:, None] * to_float32(tail_weight, BF16_NATIVE)
            last, _ = rounded(last, BF16_NATIVE)  # [TOKENS, V4_TAIL]
        store_latent(
            cache_ptr, row, slot, written, normed, last, group, column, block_stride,
            CACHE_BLOCK, ROWS, POW2, E4M3_NATIVE, BF16_NATIVE,
        )  # fmt: skip
        if ROPE > 0:
            place, stored = rope_pointers(row, LATENT, ROWS)[:, None], written[:, None] & in_half
            tl.store(place + a_column, a_turned, mask=stored)
            tl.store(place + b_column, b_turned, mask=stored)


@triton.jit
def _index_keys(
    program,
    cache_ptr, key_ptr, positions_ptr, slot_ptr, cos_sin_ptr, weight_ptr, bias_ptr,
    num_tokens, last_position, num_blocks, key_stride, cos_sin_stride, block_stride, eps,
    STRIDE_UNIT: tl.constexpr, TOKENS: tl.constexpr, FIRST: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr, INTERLEAVED: tl.constexpr, CACHE_BLOCK: tl.constexpr, FP8: tl.constexpr,
    BF16_NATIVE: tl.constexpr,
):  # fmt: skip
    """TOKENS keys of the indexer: layer norm, rotation, rows of its cache.

    A row is three tiles: both halves of the rotary part, a and b, and the rest.
    """
    i = tl.arange(0, BLOCK_HALF)[None, :]  # [1, BLOCK_HALF]
    in_half = i < HALF
    token = program.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
    given = token < num_tokens
    paired = given[:, None] & in_half  # [TOKENS, BLOCK_HALF]
    a_column, b_column = pair_columns(i, HALF, INTERLEAVED)
    a_column += FIRST
    b_column += FIRST
    source = (key_ptr + token * key_stride * STRIDE_UNIT)[:, None]  # [TOKENS, 1] pointers
    a = tl.load(source + a_column, mask=paired, other=0.0)  # [TOKENS, BLOCK_HALF]
    b = tl.load(source + b_column, mask=paired, other=0.0)
    each = tl.zeros([TOKENS], tl.int32)[:, None]  # weights and biases for each token, as in `_latents`
    weights, biases = weight_ptr + each, bias_ptr + each  # [TOKENS, 1] pointers
    a_weight = tl.load(weights + a_column, mask=paired, other=0.0)
    b_weight = tl.load(weights + b_column, mask=paired, other=0.0)
    a_bias = tl.load(biases + a_column, mask=paired, other=0.0)
    b_bias = tl.load(biases + b_column, mask=paired, other=0.0)
    if BLOCK_REST > 0:
        r = tl.arange(0, BLOCK_REST)[None, :]  # [1, BLOCK_REST]
        in_rest = r < KEY - 2 * HALF
        r_column = r + (2 * HALF if FIRST == 0 else 0)
        kept = given[:, None] & in_rest  # [TOKENS, BLOCK_REST]
        r_weight = tl.load(weights + r_column, mask=kept, other=0.0)
        r_bias = tl.load(biases + r_column, mask=kept, other=0.0)
        rest = to_float32(tl.load(source + r_column, mask=kept, other=0.0), BF16_NATIVE)
    slot = tl.load(slot_ptr + token, mask=given, other=-1)  # [TOKENS] int64
    cos, sin = cosines_and_sines(cos_sin_ptr, positions_ptr, token, given, last_position, cos_sin_stride, i, HALF)

    a, b = to_float32(a, BF16_NATIVE), to_float32(b, BF16_NATIVE)
    total = tl.sum(a, 1) + tl.sum(b, 1)  # [TOKENS]
    if BLOCK_REST > 0:
        total += tl.sum(rest, 1)
    mean = (total / KEY)[:, None]
    a, b = tl.where(in_half, a - mean, 0.0), tl.where(in_half, b - mean, 0.0)
    squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
    if BLOCK_REST > 0:
        rest = tl.where(in_rest, rest - mean, 0.0)
        squares += tl.sum(rest * rest, 1)
    scale = (1.0 / tl.sqrt(squares / KEY + eps))[:, None]  # [TOKENS, 1]
    _, a = rounded(a * scale * to_float32(a_weight, BF16_NATIVE) + to_float32(a_bias, BF16_NATIVE), BF16_NATIVE)
    _, b = rounded(b * scale * to_float32(b_weight, BF16_NATIVE) + to_float32(b_bias, BF16_NATIVE), BF16_NATIVE)
    cos, sin = to_float32(cos, BF16_NATIVE), to_float32(sin, BF16_NATIVE)
    a_key, a_turned = rounded(a * cos - b * sin, BF16_NATIVE)
    b_key, b_turned = rounded(b * cos + a * sin, BF16_NATIVE)
    if BLOCK_REST > 0:
        rest = rest * scale * to_float32(r_weight, BF16_NATIVE) + to_float32(r_bias, BF16_NATIVE)
        r_key, rest = rounded(rest, BF16_NATIVE)

    block, at = slot // CACHE_BLOCK, slot % CACHE_BLOCK  # [TOKENS]; meaningless where slot < 0
    written = (slot >= 0) & (block < num_blocks)
    page = cache_ptr + block * block_stride  # [TOKENS] pointers
    row = (page + at * KEY)[:, None]  # [TOKENS, 1] pointers
    stored = written[:, None] & in_half
    if FP8:
        amax_bits = tl.maximum(magnitude_bits(a_turned), magnitude_bits(b_turned))  # [TOKENS]
        if BLOCK_REST > 0:
            amax_bits = tl.maximum(amax_bits, magnitude_bits(rest))
        least = tl.full([TOKENS], LEAST_INDEX_AMAX, tl.float32).to(tl.int32, bitcast=True)
        amax_bits = tl.maximum(amax_bits, least)
        # few codes, and less than 16 bytes of them a thread: by integers, see `cache_rows.in_whole_vectors`
        scaled, scale = scaled_tile(a_turned, amax_bits, True)
        tl.store(row + a_column, e4m3_encode(scaled, False), mask=stored)
        scaled, scale = scaled_tile(b_turned, amax_bits, True)
        tl.store(row + b_column, e4m3_encode(scaled, False), mask=stored)
        if BLOCK_REST > 0:
            scaled, scale = scaled_tile(rest, amax_bits, True)
            tl.store(row + r_column, e4m3_encode(scaled, False), mask=written[:, None] & in_rest)
        tl.store((page + CACHE_BLOCK * KEY).to(tl.pointer_type(tl.float32)) + at, scale, mask=written)
    else:
        tl.store(row + a_column, a_key, mask=stored)
        tl.store(row + b_column, b_key, mask=stored)
        if BLOCK_REST > 0:
            tl.store(row + r_column, r_key, mask=written[:, None] & in_rest)


@triton.jit
def _norm_row(
    program, out_ptr, x_ptr, weight_ptr, stride, out_stride, eps,
    STRIDE_UNIT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BF16_NATIVE: tl.constexpr,
):  # fmt: skip
    """RMS norm of a token."""
    token = program.to(tl.int64)
    c = tl.arange(0, BLOCK)  # [BLOCK]
    in_row = c < WIDTH
    x = tl.load(x_ptr + token * stride * STRIDE_UNIT + c, mask=in_row, other=0.0)
    weight = tl.load(weight_ptr + c, mask=in_row, other=0.0)
    wide = to_float32(x, BF16_NATIVE)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    normed, _ = rounded(wide * scale * to_float32(weight, BF16_NATIVE), BF16_NATIVE)
    tl.store(out_ptr + token * out_stride * STRIDE_UNIT + c, normed, mask=in_row)


@triton.jit(
    do_not_specialize=[
        *("num_tokens", "last_position", "num_blocks", "index_num_blocks"),
        *("q_stride", "latent_stride", "index_stride", "q_out_stride", "latent_out_stride", "rope_out_stride"),
    ],
    **at_any_address("positions_ptr", "slot_ptr"),
)
def norm_rope_write_kernel(
    q_out_ptr,
    latent_out_ptr,  # None where not asked for
    rope_out_ptr,  # likewise
    cache_ptr,
    index_cache_ptr,
    q_ptr,
    latent_ptr,
    index_ptr,
    positions_ptr,
    slot_ptr,
    cos_sin_ptr,
    q_norm_ptr,
    kv_norm_ptr,
    index_weight_ptr,
    index_bias_ptr,
    num_tokens,
    last_position,
    num_blocks,
    index_num_blocks,
    q_stride,  # strides of inputs and outputs count STRIDE_UNIT elements
    latent_stride,
    index_stride,
    q_out_stride,
    latent_out_stride,
    rope_out_stride,
    cos_sin_stride,
    block_stride,
    index_block_stride,
    eps,
    index_eps,
    STRIDE_UNIT: tl.constexpr,
    Q: tl.constexpr,  # 0: there is no q_a
    BLOCK_Q: tl.constexpr,
    KV_TOKENS: tl.constexpr,  # of a program; 0: there is no latent
    LATENT: tl.constexpr,  # its width without the rotary part
    ROPE: tl.constexpr,  # width of the latent's rotary part, or 0
    INDEX_TOKENS: tl.constexpr,  # of a program; 0: there is no key of the indexer
    INDEX_FIRST: tl.constexpr,  # its first rotary column
    HALF: tl.constexpr,  # pairs of a rotation
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,  # columns of the indexer's key that are not rotated, rounded up; 0: all are
    INTERLEAVED: tl.constexpr,
    INDEX_INTERLEAVED: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,  # the layout, see `row_layout`, or NO_ROWS
    POW2: tl.constexpr,
    INDEX_BLOCK: tl.constexpr,
    INDEX_FP8: tl.constexpr,
    E4M3_NATIVE: tl.constexpr,
    BF16_NATIVE: tl.constexpr,
    LETS_NEXT_START: tl.constexpr,
):
    """Grid: programs of the latents, then of the indexer's keys, then of q_a. The cache pointer is to bfloat16 of BF16_ROWS, to
    bytes otherwise; the index cache pointer is to bytes where INDEX_FP8, to bfloat16 otherwise."""
    if LETS_NEXT_START:
        let_next_start()
    program = tl.program_id(0)
    kv_programs = 0
    if KV_TOKENS > 0:
        kv_programs = (num_tokens + KV_TOKENS - 1) // KV_TOKENS
        if program < kv_programs:
            _latents(
                program,
                latent_out_ptr, rope_out_ptr, cache_ptr, latent_ptr, positions_ptr, slot_ptr, cos_sin_ptr, kv_norm_ptr,
                num_tokens, last_position, num_blocks,
                latent_stride, latent_out_stride, rope_out_stride, cos_sin_stride, block_stride, eps,
                STRIDE_UNIT, KV_TOKENS, LATENT, ROPE, HALF, BLOCK_HALF, INTERLEAVED, CACHE_BLOCK, ROWS, POW2, E4M3_NATIVE,
                BF16_NATIVE,
            )  # fmt: skip
    program -= kv_programs
    index_programs = 0
    if INDEX_TOKENS > 0:
        index_programs = (num_tokens + INDEX_TOKENS - 1) // INDEX_TOKENS
        if (program >= 0) & (program < index_programs):
            _index_keys(
                program,
                index_cache_ptr, index_ptr, positions_ptr, slot_ptr, cos_sin_ptr, index_weight_ptr, index_bias_ptr,
                num_tokens, last_position, index_num_blocks, index_stride, cos_sin_stride, index_block_stride, index_eps,
                STRIDE_UNIT, INDEX_TOKENS, INDEX_FIRST, HALF, BLOCK_HALF, BLOCK_REST, INDEX_INTERLEAVED, INDEX_BLOCK, INDEX_FP8,
                BF16_NATIVE,
            )  # fmt: skip
    program -= index_programs
    if Q > 0:  # noqa: SIM102
        if program >= 0:
            _norm_row(program, q_out_ptr, q_ptr, q_norm_ptr, q_stride, q_out_stride, eps, STRIDE_UNIT, Q, BLOCK_Q, BF16_NATIVE)


_launch = TritonLauncher(norm_rope_write_kernel)


def _stride(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0)


def launch(
    q_a: Tensor | None,
    latent: Tensor | None,
    index_key: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor | None,
    *,
    q_norm: Tensor | None,
    kv_norm: Tensor | None,
    index_norm: tuple[Tensor, Tensor] | None,
    eps: float,
    index_eps: float | None,
    kv_cache: Tensor | None,
    slot_mapping: Tensor | None,
    index_cache: Tensor | None,
    interleaved: bool,
    index_interleaved: bool,
    index_first: bool,
    pow2: bool,
    q_out: Tensor | None,
    latent_out: Tensor | None,
    k_rope_out: Tensor | None,
    e4m3_native: bool,
    bf16_native: bool,
    lets_next_start: bool,
    config: Config,
) -> None:
    """Arguments as NormRopeWrite. Graph-safe, allocates nothing."""
    num_tokens = positions.shape[0]
    if num_tokens == 0:
        return
    width = 0 if q_a is None else q_a.shape[1]
    rotary = 2 if cos_sin is None else cos_sin.shape[1]
    width_of_latent = 0 if kv_norm is None else kv_norm.shape[0]
    rope = 0 if latent is None else latent.shape[1] - width_of_latent
    kv_tokens = 0 if latent is None else config.tile // width_of_latent
    index_tokens = 0 if index_key is None else config.tile // KEY.value
    rest = KEY.value - rotary
    rows, block, num_blocks, block_stride = NO_ROWS.value, 1, 0, 0
    if kv_cache is not None:
        rows, block = rows_of(kv_cache.element_size(), kv_cache.shape[2]), kv_cache.shape[1]
        num_blocks, block_stride = kv_cache.shape[0], kv_cache.stride(0)
        e4m3_native = e4m3_native and in_whole_vectors(kv_cache)
    index_block, index_num_blocks, index_block_stride = 1, 0, 0
    if index_cache is not None:
        index_num_blocks, index_block = index_cache.shape[:2]
        index_block_stride = index_cache.stride(0)
    tensors = (q_a, latent, index_key, q_out, latent_out, k_rope_out if rope else None)
    strides = [_stride(each) for each in tensors]
    unit = stride_unit(*strides)
    programs = num_tokens if width else 0
    programs += triton.cdiv(num_tokens, kv_tokens) if kv_tokens else 0
    programs += triton.cdiv(num_tokens, index_tokens) if index_tokens else 0
    index_weight, index_bias = (None, None) if index_norm is None else index_norm
    _launch(
        (programs,),
        q_out,
        latent_out,
        k_rope_out if rope else None,
        kv_cache,
        index_cache,
        q_a,
        latent,
        index_key,
        positions,
        slot_mapping,
        cos_sin,
        q_norm,
        kv_norm,
        index_weight,
        index_bias,
        num_tokens,
        0 if cos_sin is None else cos_sin.shape[0] - 1,
        num_blocks,
        index_num_blocks,
        *(stride // unit for stride in strides),
        _stride(cos_sin),
        block_stride,
        index_block_stride,
        float(eps),
        float(eps if index_eps is None else index_eps),
        STRIDE_UNIT=unit,
        Q=width,
        BLOCK_Q=triton.next_power_of_2(width),
        KV_TOKENS=kv_tokens,
        LATENT=width_of_latent,
        ROPE=rope,
        INDEX_TOKENS=index_tokens,
        INDEX_FIRST=0 if index_first else rest,
        HALF=rotary // 2,
        BLOCK_HALF=triton.next_power_of_2(rotary // 2),
        BLOCK_REST=triton.next_power_of_2(rest) if rest > 0 else 0,
        INTERLEAVED=interleaved,
        INDEX_INTERLEAVED=index_interleaved,
        CACHE_BLOCK=block,
        ROWS=rows,
        POW2=pow2,
        INDEX_BLOCK=index_block,
        INDEX_FP8=index_cache is not None and index_cache.dtype == INDEX_FP8.dtype,
        E4M3_NATIVE=e4m3_native,
        BF16_NATIVE=bf16_native,
        LETS_NEXT_START=lets_next_start and positions.is_cuda,
        num_warps=config.num_warps,
        num_stages=1,
    )


def aot_variants(arch: str = "default", *, e4m3_native: bool = False) -> list[AotVariant]:
    """DeepSeek-V3.2's step with all three parts, on each layout; the norms and outputs of a prompt alone."""
    config = config_for(CONFIGS, arch)

    def made(word: str, layout: CacheLayout | None, rotary: int, table: str, index: bool, outputs: bool) -> AotVariant:
        fp8 = layout is not None and layout.is_quantized
        latent_width, rope = (512, 64) if layout is None else (layout.value_width, layout.rope_width)
        rest = KEY.value - rotary
        return variant(
            norm_rope_write_kernel,
            f"norm_rope_write-{word}",
            config.num_warps,
            q_out_ptr="*bf16",
            latent_out_ptr="*bf16" if outputs else None,
            rope_out_ptr="*bf16" if outputs and rope else None,
            cache_ptr=None if layout is None else "*u8" if fp8 else "*bf16",
            index_cache_ptr=None if not index else "*u8" if fp8 else "*bf16",
            q_ptr="*bf16",
            latent_ptr="*bf16",
            index_ptr="*bf16" if index else None,
            positions_ptr="*i64",
            slot_ptr=None if layout is None else "*i64",
            cos_sin_ptr=table,
            q_norm_ptr="*bf16",
            kv_norm_ptr="*bf16",
            index_weight_ptr="*fp32" if index else None,
            index_bias_ptr="*fp32" if index else None,
            eps="fp32",
            index_eps="fp32",
            STRIDE_UNIT=8,
            Q=1_536,
            BLOCK_Q=2_048,
            KV_TOKENS=config.tile // latent_width,
            LATENT=latent_width,
            ROPE=rope,
            INDEX_TOKENS=config.tile // KEY.value if index else 0,
            INDEX_FIRST=0,
            HALF=rotary // 2,
            BLOCK_HALF=triton.next_power_of_2(rotary // 2),
            BLOCK_REST=triton.next_power_of_2(rest),
            INTERLEAVED=True,
            INDEX_INTERLEAVED=outputs,
            CACHE_BLOCK=64,
            ROWS=NO_ROWS.value if layout is None else rows_of_layout(layout),
            POW2=True,
            INDEX_BLOCK=64,
            INDEX_FP8=fp8,
            E4M3_NATIVE=encodes_natively(arch, e4m3_native),
            BF16_NATIVE=True,
            LETS_NEXT_START=lets_next_start(arch),
        )

    return [
        made("fp8_ds_mla", FP8_DS_MLA, 64, "*fp32", index=True, outputs=False),
        made("fp8_ds_mla-outputs", FP8_DS_MLA, 64, "*bf16", index=True, outputs=True),
        made("fp8_v4", FP8_V4, 64, "*fp32", index=True, outputs=True),
        made("bf16", BF16, 64, "*bf16", index=True, outputs=False),
        made("bf16_128_32", BF16_128_32, 32, "*bf16", index=True, outputs=False),
        made("outputs", None, 64, "*fp32", index=False, outputs=True),
    ]
