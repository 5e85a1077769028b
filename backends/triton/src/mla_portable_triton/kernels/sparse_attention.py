# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention: each query row attends to the cached tokens that its indices name.

One program serves BLOCK_H heads of a row over one split of its indices, BLOCK_N at a time: gather the tokens once, use
their latent as key and as value, keep a running maximum and sum in base 2 (`softmax_scale * log2(e)` is folded into the
scores). Splits write normalised partial results for `merge_states`. A workspace is a cache of one-token blocks.

The kernel here is that of bf16 rows; FP8 rows have one of their own (`sparse_attention_fp8`), with the same parameters.

Splits share the keys that a row has, so that all are at work on a row that is shorter than K. Indices are loaded a step ahead,
into registers, and with num_stages of 3 the rows of two steps are on their way while a third is multiplied: a load that waits
for another load of the same step has no buffer before its turn.

Absence: an index that is negative, not below `num_slots` or past `lengths` loads zeros (never the row's bytes, which may
be NaN) and scores -inf. The maximum starts at a finite value below any score, so that no -inf meets another.

Cost of a row: K * 656 B (FP8), K * 1152 B (bf16) or K * 1024 B (bf16 without a rotary part) from memory once for each head
tile, 2 * H * K * (1024 + ROPE) flops.
"""

import itertools
from collections.abc import Iterator, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_portable.contracts.triton_launcher import TritonLauncher
from mla_portable.layouts import LAYOUTS
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.attention_configs import CONFIGS, AttentionConfig
from mla_portable_triton.kernels.attention_parts import columns, finish, softmax_step, split_keys, store_as, token_at
from mla_portable_triton.kernels.bfloat16 import dot_operand
from mla_portable_triton.kernels.row_layout import LATENT
from mla_portable_triton.kernels.sparse_attention_fp8 import fp8_constants, sparse_attention_fp8_kernel
from mla_portable_triton.kernels.strides import stride_unit

LOG2_E = 1.4426950408889634


@triton.jit(
    do_not_specialize=[
        *("topk", "num_slots", "q_stride_b", "q_stride_s", "q_stride_h", "indices_stride_b", "indices_stride_s"),
        *("lengths_stride_b", "lengths_stride_s", "out_stride_p", "out_stride_b", "out_stride_s", "out_stride_h"),
        *("lse_stride_p", "lse_stride_b", "lse_stride_s", "lse_stride_h"),
    ]
)
def sparse_attention_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    kv_ptr,
    indices_ptr,
    lengths_ptr,  # None: all K entries are read
    sink_ptr,  # None: no sink
    scale_log2,  # softmax_scale * log2(e)
    topk,
    num_slots,
    q_stride_b,  # strides of q and out count STRIDE_UNIT elements, those of indices, lengths and lse one
    q_stride_s,
    q_stride_h,
    indices_stride_b,
    indices_stride_s,
    lengths_stride_b,
    lengths_stride_s,
    out_stride_p,
    out_stride_b,
    out_stride_s,
    out_stride_h,
    lse_stride_p,
    lse_stride_b,
    lse_stride_s,
    lse_stride_h,
    NUM_HEADS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,  # 1 where slots are evenly spaced
    TOKEN_STRIDE: tl.constexpr,  # between tokens of a block, in elements of kv
    BLOCK_STRIDE: tl.constexpr,  # between blocks
    STRIDE_UNIT: tl.constexpr,
    ROPE: tl.constexpr,  # width of the rotary part; 0: there is none
    IS_SPLIT: tl.constexpr,  # write a part for merge_states: float32, lse in base 2, no sink
    BF16_NATIVE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (rows * head tiles, splits): the head tiles of a row are neighbours, so that they share its tokens in L2."""
    HEAD_TILES: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    row = (tl.program_id(0) // HEAD_TILES).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    b = row // QUERY_LEN
    s = row % QUERY_LEN
    h = (tl.program_id(0) % HEAD_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)  # [BLOCK_H]
    in_heads = h < NUM_HEADS  # [BLOCK_H]
    n = tl.arange(0, BLOCK_N)  # [BLOCK_N]

    q_rows = q_ptr + (b * q_stride_b + s * q_stride_s) * STRIDE_UNIT
    q_rows += h[:, None] * (q_stride_h.to(tl.int64) * STRIDE_UNIT)  # [BLOCK_H, 1]
    q0 = columns(q_rows, 0, 128, in_heads, BF16_NATIVE)  # [BLOCK_H, 128]
    q1 = columns(q_rows, 128, 128, in_heads, BF16_NATIVE)
    q2 = columns(q_rows, 256, 128, in_heads, BF16_NATIVE)
    q3 = columns(q_rows, 384, 128, in_heads, BF16_NATIVE)
    if ROPE > 0:
        q_rope = columns(q_rows, LATENT, ROPE, in_heads, BF16_NATIVE)  # [BLOCK_H, ROPE]

    indices_row = indices_ptr + b * indices_stride_b + s * indices_stride_s
    begin, end = split_keys(lengths_ptr, b * lengths_stride_b + s * lengths_stride_s, topk, BLOCK_N)

    m = tl.full([BLOCK_H], -1.0e30, tl.float32)  # running maximum, base 2
    total = tl.zeros([BLOCK_H], tl.float32)  # running sum
    acc0 = tl.zeros([BLOCK_H, 128], tl.float32)
    acc1 = tl.zeros([BLOCK_H, 128], tl.float32)
    acc2 = tl.zeros([BLOCK_H, 128], tl.float32)
    acc3 = tl.zeros([BLOCK_H, 128], tl.float32)
    ahead = tl.load(indices_row + begin + n, mask=begin + n < end, other=-1)  # [BLOCK_N], slots of the next step
    for start in range(begin, end, BLOCK_N):
        slot = ahead
        k = start + BLOCK_N + n
        ahead = tl.load(indices_row + k, mask=k < end, other=-1)
        valid = (slot >= 0) & (slot < num_slots)  # [BLOCK_N]
        # int64 before the first product: a cache may pass 2**31 elements
        token = token_at(tl.where(valid, slot, 0).to(tl.int64), CACHE_BLOCK, TOKEN_STRIDE, BLOCK_STRIDE)  # [BLOCK_N]
        rows = kv_ptr + token[:, None]  # [BLOCK_N, 1]
        if ROPE > 0:
            scores = tl.dot(q_rope, tl.trans(columns(rows, LATENT, ROPE, valid, BF16_NATIVE)))  # [BLOCK_H, BLOCK_N]
        else:
            scores = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        v0 = columns(rows, 0, 128, valid, BF16_NATIVE)  # [BLOCK_N, 128]
        scores += tl.dot(q0, tl.trans(v0))  # folded into the product by the compiler; Triton 2.1 has no accumulator to pass
        v1 = columns(rows, 128, 128, valid, BF16_NATIVE)
        scores += tl.dot(q1, tl.trans(v1))
        v2 = columns(rows, 256, 128, valid, BF16_NATIVE)
        scores += tl.dot(q2, tl.trans(v2))
        v3 = columns(rows, 384, 128, valid, BF16_NATIVE)
        scores += tl.dot(q3, tl.trans(v3))
        m, total, decay, p = softmax_step(m, total, scores, valid, scale_log2)
        p = dot_operand(p, BF16_NATIVE)
        acc0 = acc0 * decay[:, None] + tl.dot(p, v0)  # [BLOCK_H, 128]
        acc1 = acc1 * decay[:, None] + tl.dot(p, v1)
        acc2 = acc2 * decay[:, None] + tl.dot(p, v2)
        acc3 = acc3 * decay[:, None] + tl.dot(p, v3)

    lse_row = lse_ptr + split * lse_stride_p + b * lse_stride_b + s * lse_stride_s
    inverse = finish(lse_row, lse_stride_h, sink_ptr, m, total, h, in_heads, IS_SPLIT)
    written = in_heads[:, None]
    if IS_SPLIT:
        written = written & (begin < end)  # merge_states does not read the part of an empty split
    out_rows = out_ptr + (split * out_stride_p + b * out_stride_b + s * out_stride_s) * STRIDE_UNIT
    out_rows += h[:, None] * (out_stride_h.to(tl.int64) * STRIDE_UNIT) + tl.arange(0, 128)[None, :]  # [BLOCK_H, 128]
    store_as(out_rows, acc0 * inverse, written, BF16_NATIVE)
    store_as(out_rows + 128, acc1 * inverse, written, BF16_NATIVE)
    store_as(out_rows + 256, acc2 * inverse, written, BF16_NATIVE)
    store_as(out_rows + 384, acc3 * inverse, written, BF16_NATIVE)


_launch, _launch_fp8 = TritonLauncher(sparse_attention_kernel), TritonLauncher(sparse_attention_fp8_kernel)


def launch(
    out: Tensor,
    lse_out: Tensor,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    softmax_scale: float,
    lengths: Tensor | None,
    attn_sink: Tensor | None,
    num_splits: int,
    config: AttentionConfig,
    fp8: Mapping[str, bool],
    bf16_native: bool,
) -> None:
    """Attend; write `out` and `lse_out`. Graph-safe, allocates nothing; leading strides are free, last dimensions are not.

    Args:
        out: [B, S, H, 512] bf16 and lse_out [B, S, H] float32, natural; or, where num_splits > 1, the parts for
            merge_states, [num_splits, B * S, H, 512] and [num_splits, B * S, H] float32, lse in base 2, no sink applied.
        q: [B, S, H, 512 + ROPE] bf16. kv: [W, 512 + ROPE] bf16, or [blocks, block_size, 512 + ROPE] bf16 or [.., 656] uint8,
            whole rows that follow one another within a block. ROPE is 64, or 0 where q has no rotary part; that of FP8 rows,
            if they have one, is not read then.
        indices: [B, S, K] int32. lengths: [B, S] int32. attn_sink: [H] float32.
        fp8: `fp8_constants`.
    """
    batch, query_len, num_heads, key_width = q.shape
    num_rows = batch * query_len
    if num_rows == 0:
        return
    is_split = num_splits > 1
    if is_split:
        out_stride_p, out_stride_s, out_stride_h, _ = out.stride()
        lse_stride_p, lse_stride_s, lse_stride_h = lse_out.stride()
        out_stride_b, lse_stride_b = out_stride_s * query_len, lse_stride_s * query_len
    else:
        out_stride_p = lse_stride_p = 0
        out_stride_b, out_stride_s, out_stride_h, _ = out.stride()
        lse_stride_b, lse_stride_s, lse_stride_h = lse_out.stride()
    q_stride_b, q_stride_s, q_stride_h, _ = q.stride()
    indices_stride_b, indices_stride_s, _ = indices.stride()
    lengths_stride_b, lengths_stride_s = (0, 0) if lengths is None else lengths.stride()
    num_slots, cache_block, token_stride, block_stride = slot_geometry(kv)
    head_tiles = -(-num_heads // config.block_h)
    unit = stride_unit(q_stride_b, q_stride_s, q_stride_h, out_stride_p, out_stride_b, out_stride_s, out_stride_h)
    launch_kernel, constants = (_launch, {}) if kv.dtype == torch.bfloat16 else (_launch_fp8, fp8)
    launch_kernel(
        (num_rows * head_tiles, num_splits),
        out,
        lse_out,
        q,
        kv,
        indices,
        lengths,
        attn_sink,
        softmax_scale * LOG2_E,
        indices.shape[2],
        num_slots,
        q_stride_b // unit,
        q_stride_s // unit,
        q_stride_h // unit,
        indices_stride_b,
        indices_stride_s,
        lengths_stride_b,
        lengths_stride_s,
        out_stride_p // unit,
        out_stride_b // unit,
        out_stride_s // unit,
        out_stride_h // unit,
        lse_stride_p,
        lse_stride_b,
        lse_stride_s,
        lse_stride_h,
        NUM_HEADS=num_heads,
        QUERY_LEN=query_len,
        CACHE_BLOCK=cache_block,
        TOKEN_STRIDE=token_stride,
        BLOCK_STRIDE=block_stride,
        STRIDE_UNIT=unit,
        ROPE=key_width - out.shape[-1],
        IS_SPLIT=is_split,
        BF16_NATIVE=bf16_native,
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **constants,
    )


def slot_geometry(kv: Tensor) -> tuple[int, int, int, int]:
    """How a slot becomes an address: (num_slots, block size, token stride, block stride), strides in elements.

    The block size is 1 where slots are evenly spaced, so that a kernel need not divide: a workspace [W, width], or a cache
    whose blocks follow one another.
    """
    if kv.dim() == 2:
        return kv.shape[0], 1, kv.stride(0), kv.stride(0)
    num_blocks, block_size, width = kv.shape
    block_stride = kv.stride(0)
    if num_blocks <= 1 or block_stride == block_size * width:
        return num_blocks * block_size, 1, width, width
    return num_blocks * block_size, block_size, width, block_stride


def aot_variants(arch: str = "default", *, e4m3_native: bool = False) -> Iterator[AotVariant]:
    """What `arch` runs: each of its configurations on all layouts, whole rows with a sink and lengths, and splits."""
    for kv_layout, table in CONFIGS.get(arch, CONFIGS["default"]).items():
        layout = LAYOUTS[kv_layout]
        # blocks of 64 tokens, padded for FP8 so that slots are divided into block and offset
        padded = layout.is_quantized
        for (max_heads, config), is_split in itertools.product(table, (False, True)):
            constants = fp8_constants(arch, e4m3_native=e4m3_native) if padded else {}
            yield variant(
                sparse_attention_fp8_kernel if padded else sparse_attention_kernel,
                f"sparse_attention-{kv_layout}-h{max_heads}-{'split' if is_split else 'whole'}",
                config.num_warps,
                config.num_stages,
                out_ptr="*fp32" if is_split else "*bf16",
                lse_ptr="*fp32",
                q_ptr="*bf16",
                kv_ptr="*u8" if padded else "*bf16",
                indices_ptr="*i32",
                lengths_ptr=None if is_split else "*i32",
                sink_ptr=None if is_split else "*fp32",
                scale_log2="fp32",
                NUM_HEADS=max_heads,
                QUERY_LEN=1,
                CACHE_BLOCK=64 if padded else 1,
                TOKEN_STRIDE=layout.row_width,
                BLOCK_STRIDE=65 * layout.row_width if padded else layout.row_width,
                STRIDE_UNIT=8,
                ROPE=layout.rope_width,
                IS_SPLIT=is_split,
                BF16_NATIVE=True,
                BLOCK_H=config.block_h,
                BLOCK_N=config.block_n,
                **constants,
            )
