# SPDX-License-Identifier: Apache-2.0
"""concat_mla_k: each head's own columns and those that all heads share -> keys, one pass.

A program copies ROWS keys, BLOCK_H heads of some tokens, so that the shared columns of a token are read from memory once and
from the first-level cache after that. Widths that are multiples of 8 go 16 bytes at a time.

Cost: 2 * H * P + 2 * R bytes read and 2 * H * (P + R) written for each token.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.kit.triton_launcher import TritonLauncher
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.kernels.config import Config, config_for
from mla_portable_triton.kernels.strides import stride_unit

CONFIGS: Final = {"default": Config(tile=32, num_warps=4)}
"""tile: keys of a program. Eight loads of 16 bytes a thread at P = 128 are 64 keys, four are 32; untuned."""
_MOST_HEADS: Final = 16
"""Of a program."""


@triton.jit(
    do_not_specialize=[
        *("num_tokens", "num_heads", "head_blocks", "nope_stride_n", "nope_stride_h", "rope_stride_n"),
        *("out_stride_n", "out_stride_h"),
    ]
)
def concat_mla_k_kernel(
    out_ptr,
    nope_ptr,
    rope_ptr,
    num_tokens,
    num_heads,
    head_blocks,
    nope_stride_n,  # strides count STRIDE_UNIT elements
    nope_stride_h,
    rope_stride_n,
    out_stride_n,
    out_stride_h,
    STRIDE_UNIT: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (blocks of tokens * head_blocks,): the heads of a token are neighbours."""
    TOKENS: tl.constexpr = ROWS // BLOCK_H
    pid = tl.program_id(0)
    i = tl.arange(0, ROWS)  # [ROWS]
    token = (pid // head_blocks).to(tl.int64) * TOKENS + i // BLOCK_H
    head = (pid % head_blocks) * BLOCK_H + i % BLOCK_H
    there = ((token < num_tokens) & (head < num_heads))[:, None]
    head = head.to(tl.int64)
    p, r = tl.arange(0, BLOCK_P)[None, :], tl.arange(0, BLOCK_R)[None, :]

    nope_row = nope_ptr + (token * nope_stride_n + head * nope_stride_h)[:, None] * STRIDE_UNIT
    rope_row = rope_ptr + (token * rope_stride_n)[:, None] * STRIDE_UNIT
    out_row = out_ptr + (token * out_stride_n + head * out_stride_h)[:, None] * STRIDE_UNIT
    nope = tl.load(nope_row + p, mask=there & (p < P))  # [ROWS, BLOCK_P]
    rope = tl.load(rope_row + r, mask=there & (r < R))  # [ROWS, BLOCK_R]
    tl.store(out_row + p, nope, mask=there & (p < P))
    tl.store(out_row + P + r, rope, mask=there & (r < R))


_launch = TritonLauncher(concat_mla_k_kernel)


def launch(out: Tensor, k_nope: Tensor, k_rope: Tensor, *, config: Config) -> None:
    """Write `out` [N, H, P + R]; arguments as ConcatMlaK. Graph-safe, allocates nothing."""
    num_tokens, num_heads, own = k_nope.shape
    if num_tokens == 0:
        return
    shared = k_rope.shape[1]
    strides = (*k_nope.stride()[:2], k_rope.stride(0), *out.stride()[:2])
    unit = stride_unit(*strides)
    block_h = min(triton.next_power_of_2(num_heads), _MOST_HEADS)
    head_blocks = triton.cdiv(num_heads, block_h)
    _launch(
        (triton.cdiv(num_tokens * block_h, config.tile) * head_blocks,),
        out,
        k_nope,
        k_rope,
        num_tokens,
        num_heads,
        head_blocks,
        *(stride // unit for stride in strides),
        STRIDE_UNIT=unit,
        P=own,
        R=shared,
        BLOCK_P=triton.next_power_of_2(own),
        BLOCK_R=triton.next_power_of_2(shared),
        BLOCK_H=block_h,
        ROWS=config.tile,
        num_warps=config.num_warps,
        num_stages=1,
    )


def aot_variants(arch: str = "default") -> list[AotVariant]:
    """DeepSeek-V3.2's and GLM-5's widths."""
    config = config_for(CONFIGS, arch)
    pointers = {"out_ptr": "*bf16", "nope_ptr": "*bf16", "rope_ptr": "*bf16"}
    return [
        variant(
            concat_mla_k_kernel,
            f"concat_mla_k-{own}-{shared}",
            config.num_warps,
            **pointers,
            STRIDE_UNIT=8,
            P=own,
            R=shared,
            BLOCK_P=triton.next_power_of_2(own),
            BLOCK_R=triton.next_power_of_2(shared),
            BLOCK_H=16,
            ROWS=config.tile,
        )
        for own, shared in ((128, 64), (192, 64))
    ]
