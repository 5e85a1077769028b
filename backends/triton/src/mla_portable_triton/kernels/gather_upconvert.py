# SPDX-License-Identifier: Apache-2.0
"""gather_upconvert: the cached tokens of each request -> consecutive bfloat16 rows of a workspace, FP8 scales undone.

owner     the request p with workspace_starts[p] <= row < workspace_starts[p] + seq_lens[p]; the last one, if several
slot      block_table[p, (row - start) // block_size] * block_size + (row - start) % block_size
value     latent = bf16(e4m3 * float32 scale), the product in float32, rounded once; rope bit for bit
absent    a row without an owner is left alone; a token whose table entry is out of range becomes a row of zeros

The grid covers the rows of the workspace, which the host knows, and each program looks its owners up: nothing is read
back, and a captured graph follows lengths that change. The look-up compares a tile of rows with all requests: 8 B per
request from L2 beside 1.8 KB per row, so it asks for no order among the starts.
Cost: 656 B read and 1152 B written per row (fp8_nope: 528 and 1024, fp8_v4: 584 and 1024); 65 536 rows are 119 MB.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.kit.triton_launcher import TritonLauncher, at_any_address
from mla_portable.layouts import BF16, BF16_128_32, BF16_NOPE, FP8_DS_MLA, FP8_NOPE, FP8_V4
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.kernels.bfloat16 import to_bfloat16
from mla_portable_triton.kernels.config import Config, config_for
from mla_portable_triton.kernels.e4m3_decode import e4m3_to_float32
from mla_portable_triton.kernels.row_layout import (
    FP8_ROWS,
    GROUP,
    GROUPS,
    ROPE_BYTE,
    SCALE_BYTE,
    V4_CODES,
    V4_GROUP,
    V4_ROW_BYTES,
    V4_ROWS,
    V4_SCALE_BYTES,
    V4_TAIL,
    e8m0_to_float32,
    rows_of,
    rows_of_layout,
)

CONFIGS: Final = {"default": Config(tile=8, num_warps=4)}  # tile: rows; untuned
REQUEST_TILE: Final = 64


@triton.jit
def _owner_of(row, start_ptr, len_ptr, num_requests, BLOCK_P: tl.constexpr):
    """The last request that owns each row, and the row's position in it: [rows] int32 and int64; -1 where there is none."""
    owner = tl.full(row.shape, -1, tl.int32)
    for begin in range(0, num_requests, BLOCK_P):
        p = begin + tl.arange(0, BLOCK_P)  # [BLOCK_P]
        start = tl.load(start_ptr + p, mask=p < num_requests, other=0).to(tl.int64)
        length = tl.load(len_ptr + p, mask=p < num_requests, other=0)
        position = row[:, None] - start[None, :]  # [rows, BLOCK_P]
        owns = (position >= 0) & (position < length[None, :])
        owner = tl.maximum(owner, tl.max(tl.where(owns, p[None, :], -1), 1))
    start = tl.load(start_ptr + owner, mask=owner >= 0, other=0).to(tl.int64)
    return owner, tl.where(owner >= 0, row - start, -1)


@triton.jit(
    do_not_specialize=["num_blocks", "table_width", "table_stride", "num_requests", "num_rows"],
    **at_any_address("table_ptr", "len_ptr", "start_ptr"),
)
def gather_upconvert_kernel(
    out_ptr,
    cache_ptr,
    table_ptr,
    len_ptr,
    start_ptr,
    num_blocks,
    block_stride,
    table_width,
    table_stride,
    num_requests,
    num_rows,
    CACHE_BLOCK: tl.constexpr,
    ROPE: tl.constexpr,  # width of the rotary part; 0: there is none
    LATENT: tl.constexpr,  # width of the latent: 512, of BF16_ROWS also 128
    ROWS: tl.constexpr,  # the layout, see `row_layout`
    E4M3_NATIVE: tl.constexpr,
    BF16_NATIVE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """BLOCK_R rows of the workspace a program. The cache pointer is to bfloat16 of BF16_ROWS, to bytes otherwise."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)  # [BLOCK_R]
    owner, position = _owner_of(row, start_ptr, len_ptr, num_requests, BLOCK_P)  # [BLOCK_R] each
    owned = (owner >= 0) & (row < num_rows)  # [BLOCK_R]

    column = position // CACHE_BLOCK  # [BLOCK_R]
    in_table = owned & (column < table_width)  # [BLOCK_R]
    block = tl.load(table_ptr + owner.to(tl.int64) * table_stride + column, mask=in_table, other=-1).to(tl.int64)
    present = (block >= 0) & (block < num_blocks)  # [BLOCK_R]
    KEY: tl.constexpr = LATENT + ROPE
    WIDTH: tl.constexpr = V4_ROW_BYTES if ROWS == V4_ROWS else ROPE_BYTE + 2 * ROPE if ROWS == FP8_ROWS else LATENT + ROPE
    source = cache_ptr + (block * block_stride + position % CACHE_BLOCK * WIDTH)  # [BLOCK_R] pointers
    target = out_ptr + row * KEY  # [BLOCK_R] pointers

    if ROPE > 0:
        d = tl.arange(0, ROPE)[None, :]  # [1, ROPE]
    if ROWS == FP8_ROWS:
        group = tl.arange(0, GROUPS)[None, :]  # [1, GROUPS]
        latent_column = group[:, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]  # [1, GROUPS, GROUP]
        code = tl.load(source[:, None, None] + latent_column, mask=present[:, None, None], other=0)  # [BLOCK_R, GROUPS, GROUP]
        scale_row = (source + SCALE_BYTE).to(tl.pointer_type(tl.float32))  # [BLOCK_R] pointers
        scale = tl.load(scale_row[:, None] + group, mask=present[:, None], other=0.0)  # [BLOCK_R, GROUPS]
        if ROPE > 0:
            rope_row = (source + ROPE_BYTE).to(tl.pointer_type(tl.bfloat16))  # [BLOCK_R] pointers
            rope = tl.load(rope_row[:, None] + d, mask=present[:, None], other=0.0)  # [BLOCK_R, ROPE]
        wide = e4m3_to_float32(code, E4M3_NATIVE, BF16_NATIVE) * scale[:, :, None]
        latent = to_bfloat16(wide, BF16_NATIVE)
        tl.store(target[:, None, None] + latent_column, latent, mask=owned[:, None, None])
    elif ROWS == V4_ROWS:
        group = tl.arange(0, LATENT // V4_GROUP)[None, :]  # [1, 8], of which the last is not coded
        coded = group * V4_GROUP < V4_CODES  # [1, 8]
        latent_column = group[:, :, None] * V4_GROUP + tl.arange(0, V4_GROUP)[None, None, :]  # [1, 8, V4_GROUP]
        there = present[:, None] & coded  # [BLOCK_R, 8]
        code = tl.load(source[:, None, None] + latent_column, mask=there[:, :, None], other=0)  # [BLOCK_R, 8, V4_GROUP]
        apart = CACHE_BLOCK * V4_ROW_BYTES + position % CACHE_BLOCK * V4_SCALE_BYTES  # [BLOCK_R]
        scale_row = cache_ptr + (block * block_stride + apart)  # [BLOCK_R] pointers
        scale = e8m0_to_float32(tl.load(scale_row[:, None] + group, mask=there, other=0))  # [BLOCK_R, 8]
        wide = e4m3_to_float32(code, E4M3_NATIVE, BF16_NATIVE) * scale[:, :, None]
        latent = to_bfloat16(wide, BF16_NATIVE)
        tl.store(target[:, None, None] + latent_column, latent, mask=(owned[:, None] & coded)[:, :, None])
        t = tl.arange(0, V4_TAIL)[None, :]  # [1, V4_TAIL]
        tail_row = (source + V4_CODES).to(tl.pointer_type(tl.bfloat16))  # [BLOCK_R] pointers
        tail = tl.load(tail_row[:, None] + t, mask=present[:, None], other=0.0)  # [BLOCK_R, V4_TAIL]
        tl.store(target[:, None] + V4_CODES + t, tail, mask=owned[:, None])
    else:
        latent_column = tl.arange(0, LATENT)[None, :]  # [1, LATENT]
        latent = tl.load(source[:, None] + latent_column, mask=present[:, None], other=0.0)  # [BLOCK_R, LATENT]
        if ROPE > 0:
            rope = tl.load(source[:, None] + LATENT + d, mask=present[:, None], other=0.0)  # [BLOCK_R, ROPE]
        tl.store(target[:, None] + latent_column, latent, mask=owned[:, None])
    if ROPE > 0:
        tl.store(target[:, None] + LATENT + d, rope, mask=owned[:, None])


_launch = TritonLauncher(gather_upconvert_kernel)


def launch(
    out: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    workspace_starts: Tensor,
    *,
    latent: int,
    e4m3_native: bool,
    bf16_native: bool,
    config: Config,
) -> None:
    """Write the rows of `out` [W, latent + ROPE] that requests own. Graph-safe.

    Blocks of the cache and rows of `block_table` may lie apart; everything else is contiguous.
    """
    num_rows = out.shape[0]
    num_requests = seq_lens.shape[0]
    if num_rows == 0 or num_requests == 0:
        return
    _launch(
        (triton.cdiv(num_rows, config.tile),),
        out,
        kv_cache,
        block_table,
        seq_lens,
        workspace_starts,
        kv_cache.shape[0],
        kv_cache.stride(0),
        block_table.shape[1],
        block_table.stride(0),
        num_requests,
        num_rows,
        CACHE_BLOCK=kv_cache.shape[1],
        ROPE=out.shape[1] - latent,
        LATENT=latent,
        ROWS=rows_of(kv_cache.element_size(), kv_cache.shape[2]),
        E4M3_NATIVE=e4m3_native,
        BF16_NATIVE=bf16_native,
        BLOCK_R=config.tile,
        BLOCK_P=REQUEST_TILE,
        num_warps=config.num_warps,
        num_stages=1,
    )


def aot_variants(arch: str = "default", *, e4m3_native: bool = False) -> list[AotVariant]:
    """All layouts; e4m3 decoded by bits, as every target can, or natively."""
    config = config_for(CONFIGS, arch)
    return [
        variant(
            gather_upconvert_kernel,
            f"gather_upconvert-{layout.name}",
            config.num_warps,
            out_ptr="*bf16",
            cache_ptr="*u8" if layout.is_quantized else "*bf16",
            table_ptr="*i32",
            len_ptr="*i32",
            start_ptr="*i32",
            CACHE_BLOCK=64,
            ROPE=layout.rope_width,
            LATENT=layout.value_width,
            ROWS=rows_of_layout(layout),
            E4M3_NATIVE=e4m3_native,
            BF16_NATIVE=True,
            BLOCK_R=config.tile,
            BLOCK_P=REQUEST_TILE,
        )
        for layout in (FP8_DS_MLA, FP8_NOPE, FP8_V4, BF16, BF16_NOPE, BF16_128_32)
    ]
