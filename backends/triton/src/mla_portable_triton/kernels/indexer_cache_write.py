# SPDX-License-Identifier: Apache-2.0
"""indexer_cache_write: the indexer's keys of new tokens -> its pages, e4m3 with a scale for each token, or plain bfloat16.

`cache_rows` says what a page is made of.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.kit.triton_launcher import TritonLauncher, at_any_address
from mla_portable.layouts import INDEX_FP8
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.kernels.bfloat16 import to_float32
from mla_portable_triton.kernels.cache_rows import (
    KEY,
    LEAST_INDEX_AMAX,
    as_cached,
    in_whole_vectors,
    magnitude_bits,
    scaled_tile,
)
from mla_portable_triton.kernels.config import Config, config_for
from mla_portable_triton.kernels.e4m3_encode import e4m3_encode, encodes_natively

CONFIGS: Final = {"default": Config(tile=16, num_warps=4)}  # tile: tokens; untuned


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"], **at_any_address("slot_ptr"))
def index_write_kernel(
    key_ptr, cache_ptr, slot_ptr, num_tokens, num_blocks, key_stride, block_stride,
    CACHE_BLOCK: tl.constexpr, FP8: tl.constexpr, POW2: tl.constexpr, E4M3_NATIVE: tl.constexpr, BF16_NATIVE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """BLOCK_T tokens a program. The cache pointer is to bytes where FP8, to bfloat16 otherwise."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    given = token < num_tokens
    slot = tl.load(slot_ptr + token, mask=given, other=-1)  # [BLOCK_T] int64
    block, at = slot // CACHE_BLOCK, slot % CACHE_BLOCK  # [BLOCK_T]; meaningless where slot < 0
    written = (slot >= 0) & (block < num_blocks)
    page = cache_ptr + block * block_stride  # [BLOCK_T] pointers
    d = tl.arange(0, KEY)[None, :]  # [1, 128]
    key = tl.load(key_ptr + token[:, None] * key_stride + d, mask=given[:, None])  # [BLOCK_T, 128]
    row = (page + at * KEY)[:, None] + d  # [BLOCK_T, 128] pointers
    if FP8:
        key = to_float32(key, BF16_NATIVE)
        amax_bits = magnitude_bits(key)  # [BLOCK_T]
        least = tl.full([BLOCK_T], LEAST_INDEX_AMAX, tl.float32).to(tl.int32, bitcast=True)
        scaled, scale = scaled_tile(key, tl.maximum(amax_bits, least), POW2)
        tl.store(row, e4m3_encode(scaled, E4M3_NATIVE), mask=written[:, None])
        tl.store((page + CACHE_BLOCK * KEY).to(tl.pointer_type(tl.float32)) + at, scale, mask=written)
    else:
        tl.store(row, as_cached(key, BF16_NATIVE), mask=written[:, None])


_launch = TritonLauncher(index_write_kernel)


def launch(
    k: Tensor, index_cache: Tensor, slot_mapping: Tensor, *, pow2: bool, e4m3_native: bool, bf16_native: bool, config: Config
) -> None:
    """Write the tokens' keys [T, 128]. Graph-safe. Rows of `k` and blocks of the cache may lie apart."""
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0:
        return
    _launch(
        (triton.cdiv(num_tokens, config.tile),),
        k,
        index_cache,
        slot_mapping,
        num_tokens,
        index_cache.shape[0],
        k.stride(0),
        index_cache.stride(0),
        CACHE_BLOCK=index_cache.shape[1],
        FP8=index_cache.dtype == INDEX_FP8.dtype,
        POW2=pow2,
        E4M3_NATIVE=e4m3_native and in_whole_vectors(index_cache),
        BF16_NATIVE=bf16_native,
        BLOCK_T=config.tile,
        num_warps=config.num_warps,
        num_stages=1,
    )


def aot_variants(arch: str = "default", *, e4m3_native: bool = False) -> list[AotVariant]:
    """Both layouts, both scale formats, both input types."""
    config, native = config_for(CONFIGS, arch), encodes_natively(arch, e4m3_native)
    return [
        variant(
            index_write_kernel, f"indexer_cache_write-{word}", config.num_warps, key_ptr=f"*{dtype}", slot_ptr="*i64",
            cache_ptr="*u8" if fp8 else "*bf16", CACHE_BLOCK=64, FP8=fp8, POW2=pow2, E4M3_NATIVE=native, BF16_NATIVE=True,
            BLOCK_T=config.tile,
        )
        for word, fp8, pow2, dtype in (
            ("fp8-pow2-from-bf16", True, True, "bf16"),
            ("fp8-amax-from-fp16", True, False, "fp16"),
            ("bf16-from-fp16", False, True, "fp16"),
        )
    ]  # fmt: skip
