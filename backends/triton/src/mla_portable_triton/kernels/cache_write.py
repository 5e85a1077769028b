# SPDX-License-Identifier: Apache-2.0
"""cache_write: new tokens -> rows of the paged cache, FP8 with a scale per 128 latent values (fp8_v4: 64), or plain bfloat16.

`cache_rows` says what a row is made of.
Cost: 1152 B read and 656 or 1152 B written per token, 1024 B each (fp8_nope: 528 B written, fp8_v4: 584) where there is no
rotary part; the launch dominates below some thousand tokens.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.kit.triton_launcher import TritonLauncher, at_any_address
from mla_portable.layouts import BF16, BF16_128_32, BF16_NOPE, FP8_DS_MLA, FP8_NOPE, FP8_V4
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.kernels.cache_rows import (
    as_cached,
    columns_of_a_scale,
    in_whole_vectors,
    rope_pointers,
    row_pointers,
    store_latent,
)
from mla_portable_triton.kernels.config import Config, config_for
from mla_portable_triton.kernels.e4m3_encode import encodes_natively
from mla_portable_triton.kernels.row_layout import V4_CODES, V4_ROWS, V4_TAIL, rows_of, rows_of_layout

CONFIGS: Final = {"default": Config(tile=4, num_warps=4)}  # tile: tokens; untuned


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
    written = (slot >= 0) & (slot // CACHE_BLOCK < num_blocks)
    row = row_pointers(cache_ptr, slot, block_stride, CACHE_BLOCK, LATENT, ROPE, ROWS)  # [BLOCK_T]; meaningless where slot < 0

    group, column = columns_of_a_scale(LATENT, ROWS)
    latent = tl.load(kv_c_ptr + token[:, None, None] * kv_c_stride + column, mask=given[:, None, None])
    if ROPE > 0:
        d = tl.arange(0, ROPE)[None, :]  # [1, ROPE]
        rope = tl.load(k_pe_ptr + token[:, None] * k_pe_stride + d, mask=given[:, None])  # [BLOCK_T, ROPE]
    tail = latent
    if ROWS == V4_ROWS:
        t = tl.arange(0, V4_TAIL)[None, :]  # [1, V4_TAIL]
        tail = tl.load(kv_c_ptr + token[:, None] * kv_c_stride + V4_CODES + t, mask=given[:, None])  # [BLOCK_T, V4_TAIL]
    store_latent(
        cache_ptr, row, slot, written, latent, tail, group, column, block_stride,
        CACHE_BLOCK, ROWS, POW2, E4M3_NATIVE, BF16_NATIVE,
    )  # fmt: skip
    if ROPE > 0:
        tl.store(rope_pointers(row, LATENT, ROWS)[:, None] + d, as_cached(rope, BF16_NATIVE), mask=written[:, None])


_launch = TritonLauncher(cache_write_kernel)


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
