# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention: each query row attends to the cached tokens that its indices name.

One program serves BLOCK_H heads of a row over one split of its indices, BLOCK_N at a time: gather the tokens once, use
their latent as key and as value, keep a running maximum and sum in base 2 (`softmax_scale * log2(e)` is folded into the
scores). Splits write normalised partial results for `merge_states`. A workspace is a cache of one-token blocks.

FP8 rows: e4m3 is exact in bf16, so the dots run on the codes and the float32 scale of each 128 columns multiplies the
scores (float32) and the probabilities (before they round to bf16). That is at least as accurate as rounding the product
e4m3 * scale, and costs 8 multiplies for a head and a token instead of 512 for a token.

Absence: an index that is negative, not below `num_slots` or past `lengths` loads zeros (never the row's bytes, which may
be NaN) and scores -inf. The maximum starts at a finite value below any score, so that no -inf meets another.

Cost of a row: K * 656 B (FP8), K * 1152 B (bf16) or K * 1024 B (bf16 without a rotary part) from memory once for each head
tile, 2 * H * K * (1024 + ROPE) flops.
"""

import itertools
from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.contracts.triton_launcher import TritonLauncher
from mla_portable.layouts import LAYOUTS
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.attention_configs import CONFIGS, AttentionConfig
from mla_portable_triton.kernels.bfloat16 import dot_operand, to_bfloat16
from mla_portable_triton.kernels.e4m3_decode import e4m3_decode
from mla_portable_triton.kernels.row_layout import LATENT, ROPE_BYTE, SCALE_BYTE
from mla_portable_triton.kernels.strides import stride_unit

LOG2_E = 1.4426950408889634


@triton.jit
def _latent(rows, column: tl.constexpr, valid, E4M3_NATIVE: tl.constexpr, BF16_NATIVE: tl.constexpr):
    """Columns [column, column + 128) of tokens at `rows` [N, 1], 0 where not valid; e4m3 codes are not yet scaled."""
    tile = tl.load(rows + (tl.arange(0, 128) + column)[None, :], mask=valid[:, None], other=0)  # [N, 128]
    if tile.dtype == tl.uint8:
        # The select changes no value. It stands in the way of Triton's moving the conversion to the operand layouts
        # above the decoding: tiles would be decoded once for each of the two dots, and their loads not pipelined.
        tile = tl.where(valid[:, None], e4m3_decode(tile, E4M3_NATIVE), 0.0)
    return dot_operand(tile, BF16_NATIVE)


@triton.jit
def _slice(rows, column: tl.constexpr, WIDTH: tl.constexpr, valid, BF16_NATIVE: tl.constexpr):
    """Columns [column, column + WIDTH) of bf16 rows at `rows` [N, 1], 0 where not valid."""
    tile = tl.load(rows + (tl.arange(0, WIDTH) + column)[None, :], mask=valid[:, None], other=0.0)  # [N, WIDTH]
    return dot_operand(tile, BF16_NATIVE)


@triton.jit
def _add_scores(scores, q, v, scale, IS_FP8: tl.constexpr):
    """`scores` [BLOCK_H, N] plus the part of 128 columns; `scale` [N] is that of e4m3 codes."""
    if IS_FP8:
        scores += tl.dot(q, tl.trans(v)) * scale[None, :]
    else:
        scores += tl.dot(q, tl.trans(v))  # folded into the dot by the compiler; Triton 2.1 has no accumulator to pass
    return scores


@triton.jit
def _add_values(acc, decay, p, v, scale, IS_FP8: tl.constexpr, BF16_NATIVE: tl.constexpr):
    """`acc` [BLOCK_H, 128] decayed, plus the values of probabilities `p` [BLOCK_H, N]."""
    if IS_FP8:
        p = p * scale[None, :]
    return acc * decay[:, None] + tl.dot(dot_operand(p, BF16_NATIVE), v)


@triton.jit
def _store(rows, column: tl.constexpr, tile, written, BF16_NATIVE: tl.constexpr):
    """Write float32 `tile` [BLOCK_H, 128] as columns [column, column + 128) of `rows`, in their type."""
    if rows.dtype.element_ty == tl.bfloat16:
        tile = to_bfloat16(tile, BF16_NATIVE)
    tl.store(rows + (tl.arange(0, 128) + column)[None, :], tile, mask=written)


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
    E4M3_NATIVE: tl.constexpr,
    BF16_NATIVE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (rows * head tiles, splits): the head tiles of a row are neighbours, so that they share its tokens in L2."""
    IS_FP8: tl.constexpr = kv_ptr.dtype.element_ty == tl.uint8
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
    q0 = _slice(q_rows, 0, 128, in_heads, BF16_NATIVE)  # [BLOCK_H, 128]
    q1 = _slice(q_rows, 128, 128, in_heads, BF16_NATIVE)
    q2 = _slice(q_rows, 256, 128, in_heads, BF16_NATIVE)
    q3 = _slice(q_rows, 384, 128, in_heads, BF16_NATIVE)
    if ROPE > 0:
        q_rope = _slice(q_rows, LATENT, ROPE, in_heads, BF16_NATIVE)  # [BLOCK_H, ROPE]

    indices_row = indices_ptr + b * indices_stride_b + s * indices_stride_s
    num_keys = topk
    if lengths_ptr is not None:
        num_keys = tl.minimum(num_keys, tl.load(lengths_ptr + b * lengths_stride_b + s * lengths_stride_s))
    # the keys that the row has are shared among its splits, a whole number of tiles each
    split_len = ((tl.maximum(num_keys, 1) - 1) // (tl.num_programs(1) * BLOCK_N) + 1) * BLOCK_N
    begin = split.to(tl.int32) * split_len
    end = tl.minimum(begin + split_len, num_keys)

    if IS_FP8:
        scale_ptr = kv_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
        rope_ptr = kv_ptr.to(tl.pointer_type(tl.bfloat16), bitcast=True)

    m = tl.full([BLOCK_H], -1.0e30, tl.float32)  # running maximum, base 2
    total = tl.zeros([BLOCK_H], tl.float32)  # running sum
    acc0 = tl.zeros([BLOCK_H, 128], tl.float32)
    acc1 = tl.zeros([BLOCK_H, 128], tl.float32)
    acc2 = tl.zeros([BLOCK_H, 128], tl.float32)
    acc3 = tl.zeros([BLOCK_H, 128], tl.float32)
    ahead = tl.load(indices_row + begin + n, mask=begin + n < end, other=-1)  # [BLOCK_N], of the next step
    for start in range(begin, end, BLOCK_N):
        slot = ahead
        k = start + BLOCK_N + n
        ahead = tl.load(indices_row + k, mask=k < end, other=-1)
        valid = (slot >= 0) & (slot < num_slots)  # [BLOCK_N]
        # int64 before the first product: a cache may pass 2**31 elements
        slot = tl.where(valid, slot, 0).to(tl.int64)
        if CACHE_BLOCK == 1:
            token = slot * BLOCK_STRIDE  # [BLOCK_N]
        else:
            token = slot // CACHE_BLOCK * BLOCK_STRIDE + slot % CACHE_BLOCK * TOKEN_STRIDE

        rows = kv_ptr + token[:, None]  # [BLOCK_N, 1]
        if IS_FP8:
            scales = scale_ptr + token // 4 + SCALE_BYTE // 4  # [BLOCK_N]
            f0 = tl.load(scales, mask=valid, other=0.0)  # [BLOCK_N]
            f1 = tl.load(scales + 1, mask=valid, other=0.0)
            f2 = tl.load(scales + 2, mask=valid, other=0.0)
            f3 = tl.load(scales + 3, mask=valid, other=0.0)
            k_rope = _slice(rope_ptr + (token // 2)[:, None], ROPE_BYTE // 2, ROPE, valid, BF16_NATIVE)  # [BLOCK_N, ROPE]
        else:
            f0 = None
            f1 = None
            f2 = None
            f3 = None
            if ROPE > 0:
                k_rope = _slice(rows, LATENT, ROPE, valid, BF16_NATIVE)

        if ROPE > 0:
            scores = tl.dot(q_rope, tl.trans(k_rope))  # [BLOCK_H, BLOCK_N]
        else:
            scores = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        v0 = _latent(rows, 0, valid, E4M3_NATIVE, BF16_NATIVE)  # [BLOCK_N, 128]
        scores = _add_scores(scores, q0, v0, f0, IS_FP8)
        v1 = _latent(rows, 128, valid, E4M3_NATIVE, BF16_NATIVE)
        scores = _add_scores(scores, q1, v1, f1, IS_FP8)
        v2 = _latent(rows, 256, valid, E4M3_NATIVE, BF16_NATIVE)
        scores = _add_scores(scores, q2, v2, f2, IS_FP8)
        v3 = _latent(rows, 384, valid, E4M3_NATIVE, BF16_NATIVE)
        scores = _add_scores(scores, q3, v3, f3, IS_FP8)
        scores = tl.where(valid[None, :], scores * scale_log2, float("-inf"))

        m_new = tl.maximum(m, tl.max(scores, 1))  # [BLOCK_H]
        decay = tl.math.exp2(m - m_new)  # [BLOCK_H]
        p = tl.math.exp2(scores - m_new[:, None])  # [BLOCK_H, BLOCK_N], 0 where absent
        total = total * decay + tl.sum(p, 1)
        m = m_new
        acc0 = _add_values(acc0, decay, p, v0, f0, IS_FP8, BF16_NATIVE)  # [BLOCK_H, 128]
        acc1 = _add_values(acc1, decay, p, v1, f1, IS_FP8, BF16_NATIVE)
        acc2 = _add_values(acc2, decay, p, v2, f2, IS_FP8, BF16_NATIVE)
        acc3 = _add_values(acc3, decay, p, v3, f3, IS_FP8, BF16_NATIVE)

    empty = total == 0.0  # [BLOCK_H]; a NaN sum is not empty, it has to be seen
    lse = tl.where(empty, float("-inf"), m + tl.math.log2(tl.where(empty, 1.0, total)))
    if not IS_SPLIT:
        lse = lse * 0.6931471805599453  # ln(2)
        if sink_ptr is not None:
            # out * exp(lse) / (exp(lse) + exp(sink)), with both sides divided by 2**m
            sink = tl.load(sink_ptr + h, mask=in_heads, other=0.0) * 1.4426950408889634  # log2(e)
            total += tl.math.exp2(tl.where(empty, 0.0, sink - m))
    inverse = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))[:, None]

    lse_row = lse_ptr + split * lse_stride_p + b * lse_stride_b + s * lse_stride_s
    tl.store(lse_row + h * lse_stride_h.to(tl.int64), lse, mask=in_heads)
    written = in_heads[:, None]
    if IS_SPLIT:
        written = written & (begin < end)  # merge_states does not read the part of an empty split
    out_rows = out_ptr + (split * out_stride_p + b * out_stride_b + s * out_stride_s) * STRIDE_UNIT
    out_rows += h[:, None] * (out_stride_h.to(tl.int64) * STRIDE_UNIT)  # [BLOCK_H, 1]
    _store(out_rows, 0, acc0 * inverse, written, BF16_NATIVE)
    _store(out_rows, 128, acc1 * inverse, written, BF16_NATIVE)
    _store(out_rows, 256, acc2 * inverse, written, BF16_NATIVE)
    _store(out_rows, 384, acc3 * inverse, written, BF16_NATIVE)


_launch = TritonLauncher(sparse_attention_kernel)


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
    e4m3_native: bool,
    bf16_native: bool,
) -> None:
    """Attend; write `out` and `lse_out`. Graph-safe, allocates nothing; leading strides are free, last dimensions are not.

    Args:
        out: [B, S, H, 512] bf16 and lse_out [B, S, H] float32, natural; or, where num_splits > 1, the parts for
            merge_states, [num_splits, B * S, H, 512] and [num_splits, B * S, H] float32, lse in base 2, no sink applied.
        q: [B, S, H, 512 + ROPE] bf16. kv: [W, 512 + ROPE] bf16, or [blocks, block_size, 512 + ROPE] bf16 or [.., 656] uint8,
            whole rows that follow one another within a block. ROPE is 64 or, for bf16 rows without a rotary part, 0.
        indices: [B, S, K] int32. lengths: [B, S] int32. attn_sink: [H] float32.
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
    _launch(
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
        E4M3_NATIVE=e4m3_native,
        BF16_NATIVE=bf16_native,
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
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
            yield variant(
                sparse_attention_kernel,
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
                E4M3_NATIVE=e4m3_native,
                BF16_NATIVE=True,
                BLOCK_H=config.block_h,
                BLOCK_N=config.block_n,
            )
