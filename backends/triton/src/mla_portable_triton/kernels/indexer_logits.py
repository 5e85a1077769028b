# SPDX-License-Identifier: Apache-2.0
"""indexer_logits: q, head weights and the indexer's paged keys -> a float32 score for each token and position it sees.

value     sum_h weight[h] * max(q[h] . k[position], 0); the dots in float32 over bf16, the ReLU before the weights
request   the number of requests that end at or before the token: ends ascend, so nothing is read back. A token before the
          first request's start, or past the last end, belongs to none
position  a token sees the positions up to its own, length - (end of its request - token)
absent    -inf: not seen, no valid block, a token of no request

One program serves one token and BLOCK_N positions, with all heads in tiles of BLOCK_H. Tokens of a request read the same keys;
they come from L2. Cost of a token and a position: 256 B from cache or memory and 256 flops a head.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.contracts.triton_launcher import TritonLauncher
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.kernels.bfloat16 import dot_operand
from mla_portable_triton.kernels.config import Config, config_for

__all__ = ["CONFIGS", "aot_variants", "indexer_logits_kernel", "launch"]

CONFIGS: Final = {"default": Config(tile=64, num_warps=4)}  # tile: positions; untuned
HEAD_TILE: Final = 64
REQUEST_TILE: Final = 64
_KEY = tl.constexpr(128)
_INT32_MAX = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["num_requests", "num_blocks", "table_width", "table_stride", "num_logits", "out_stride"])
def indexer_logits_kernel(
    out_ptr,
    q_ptr,
    weight_ptr,
    cache_ptr,
    start_ptr,
    len_ptr,
    table_ptr,
    num_requests,
    num_blocks,
    block_stride,
    table_width,
    table_stride,
    num_logits,
    out_stride,
    q_stride_t,
    q_stride_h,
    weight_stride,
    NUM_HEADS: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    BF16_NATIVE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One token and BLOCK_N positions a program."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]

    request = 0
    for begin in range(0, num_requests, BLOCK_R):
        r = begin + tl.arange(0, BLOCK_R)  # [BLOCK_R]
        ends = tl.load(start_ptr + r + 1, mask=r < num_requests, other=_INT32_MAX)  # [BLOCK_R]
        request += tl.sum((ends <= token).to(tl.int32), 0)
    is_request = request < num_requests
    begin = tl.load(start_ptr + request, mask=is_request, other=0)
    end = tl.load(start_ptr + request + 1, mask=is_request, other=0)
    owned = (begin <= token) & (token < end)  # false past the last request; values that do not ascend leave no table row
    length = tl.load(len_ptr + request, mask=owned, other=0).to(tl.int64)
    length = tl.minimum(tl.maximum(length, 0), table_width.to(tl.int64) * CACHE_BLOCK)
    own = length - (end - token)  # negative where the request has more tokens than context

    seen = owned & (position <= own)  # [BLOCK_N]; so the column is in the table
    column = position // CACHE_BLOCK  # [BLOCK_N]
    table_row = table_ptr + request.to(tl.int64) * table_stride
    block = tl.load(table_row + column, mask=seen, other=-1).to(tl.int64)  # [BLOCK_N]
    valid = seen & (block >= 0) & (block < num_blocks)  # [BLOCK_N]
    rows = cache_ptr + (block * block_stride + position % CACHE_BLOCK * _KEY)  # [BLOCK_N] pointers
    d = tl.arange(0, _KEY)[None, :]  # [1, 128]
    keys = tl.load(rows[:, None] + d, mask=valid[:, None], other=0.0)  # [BLOCK_N, 128]
    keys = tl.trans(dot_operand(keys, BF16_NATIVE))  # [128, BLOCK_N]

    logits = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, NUM_HEADS, BLOCK_H):
        h = first + tl.arange(0, BLOCK_H)  # [BLOCK_H]
        q_rows = q_ptr + token * q_stride_t + h[:, None] * q_stride_h  # [BLOCK_H, 1] pointers
        q = tl.load(q_rows + d, mask=h[:, None] < NUM_HEADS, other=0.0)  # [BLOCK_H, 128]
        weight = tl.load(weight_ptr + token * weight_stride + h, mask=h < NUM_HEADS, other=0.0)  # [BLOCK_H]
        scores = tl.dot(dot_operand(q, BF16_NATIVE), keys)  # [BLOCK_H, BLOCK_N]
        logits += tl.sum(tl.maximum(scores, 0.0) * weight[:, None], 0)
    tl.store(out_ptr + token * out_stride + position, tl.where(valid, logits, float("-inf")), mask=position < num_logits)


_launch = TritonLauncher(indexer_logits_kernel)


def launch(
    out: Tensor,
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    bf16_native: bool,
    config: Config,
) -> None:
    """Write `out` [T, N]. Graph-safe.

    Blocks of the cache may lie apart, and rows of q, weights, block_table and out; everything else is contiguous.
    """
    num_tokens, num_logits = out.shape
    if num_tokens == 0 or num_logits == 0:
        return
    num_heads = q.shape[1]
    _launch(
        (num_tokens, triton.cdiv(num_logits, config.tile)),
        out,
        q,
        weights,
        index_cache,
        query_start_loc,
        seq_lens,
        block_table,
        seq_lens.shape[0],
        index_cache.shape[0],
        index_cache.stride(0),
        block_table.shape[1],
        block_table.stride(0),
        num_logits,
        out.stride(0),
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        NUM_HEADS=num_heads,
        CACHE_BLOCK=index_cache.shape[1],
        BF16_NATIVE=bf16_native,
        BLOCK_H=min(max(16, triton.next_power_of_2(num_heads)), HEAD_TILE),
        BLOCK_N=config.tile,
        BLOCK_R=REQUEST_TILE,
        num_warps=config.num_warps,
        num_stages=1,
    )


def aot_variants(arch: str = "default") -> list[AotVariant]:
    """The 64 heads of DeepSeek-V3.2's indexer, and one."""
    config = config_for(CONFIGS, arch)
    pointers = {"out_ptr": "*fp32", "q_ptr": "*bf16", "weight_ptr": "*fp32", "cache_ptr": "*bf16"}
    pointers |= dict.fromkeys(["start_ptr", "len_ptr", "table_ptr"], "*i32")
    tiles = {"BLOCK_N": config.tile, "BLOCK_R": REQUEST_TILE}
    return [
        variant(
            indexer_logits_kernel,
            f"indexer_logits-h{num_heads}",
            config.num_warps,
            **pointers,
            NUM_HEADS=num_heads,
            CACHE_BLOCK=64,
            BF16_NATIVE=True,
            BLOCK_H=max(16, num_heads),
            **tiles,
        )
        for num_heads in (64, 1)
    ]
