# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention: each query row attends to the cached tokens that its indices name.

One program serves BLOCK_H heads of a row over one split of its indices, BLOCK_N at a time: gather the tokens once, use
their latent as key and as value, keep a running maximum and sum in base 2 (`softmax_scale * log2(e)` is folded into the
scores). Splits write normalised partial results for `merge_states`. A workspace is a cache of one-token blocks.

The kernel here is that of bf16 rows. Rows of e4m3 codes of any layout have another (`sparse_attention_fp8`), with the same
parameters and those of `coded_rows`.

With a second cache the tiles of its list follow those of the first. A tile has slots of one list alone, so that a scalar
chooses the cache's pointer and geometry; no more than the loads of a step know of it.

Splits share the keys that a row has, so that all are at work on a row that is shorter than K. Indices are loaded a step ahead,
into registers, and with num_stages of 3 the rows of two steps are on their way while a third is multiplied: a load that waits
for another load of the same step has no buffer before its turn.

Absence: an index that is negative, not below `num_slots` or past `lengths` loads zeros (never the row's bytes, which may
be NaN) and scores -inf. The maximum starts at a finite value below any score, so that no -inf meets another.

Cost of a row: K times 656 B (FP8), 528 B (fp8_nope), 584 B (fp8_v4), 1152 B (bf16), 1024 B (bf16 without a rotary part) or
320 B (bf16_128_32) from memory once for each head tile, 2 * H * K * (2 * LATENT + ROPE) flops.
"""

from collections.abc import Iterator, Mapping

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.kit.triton_launcher import TritonLauncher, at_any_address
from mla_portable.layouts import LAYOUTS
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.attention_configs import CONFIGS, AttentionConfig
from mla_portable_triton.kernels.attention_parts import (
    columns,
    finish,
    softmax_step,
    split_keys,
    split_union,
    store_as,
    token_at,
    union_slots,
)
from mla_portable_triton.kernels.bfloat16 import dot_operand
from mla_portable_triton.kernels.coded_products import fp8_constants
from mla_portable_triton.kernels.coded_rows import CONSTANTS as CODED_ROWS
from mla_portable_triton.kernels.row_layout import V4_ROW_BYTES, V4_ROWS, rows_of, rows_of_layout
from mla_portable_triton.kernels.sparse_attention_fp8 import sparse_attention_fp8_kernel
from mla_portable_triton.kernels.strides import stride_unit

LOG2_E = 1.4426950408889634


@triton.jit(
    do_not_specialize=[
        *("topk", "num_slots", "q_stride_b", "q_stride_s", "q_stride_h", "indices_stride_b", "indices_stride_s"),
        *("lengths_stride_b", "lengths_stride_s", "out_stride_p", "out_stride_b", "out_stride_s", "out_stride_h"),
        *("lse_stride_p", "lse_stride_b", "lse_stride_s", "lse_stride_h", "extra_topk", "extra_slots"),
        *("extra_indices_stride_b", "extra_indices_stride_s", "extra_lengths_stride_b", "extra_lengths_stride_s"),
    ],
    **at_any_address("lse_ptr", "indices_ptr", "lengths_ptr", "sink_ptr", "extra_indices_ptr", "extra_lengths_ptr"),
)
def sparse_attention_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    kv_ptr,
    indices_ptr,
    lengths_ptr,  # None: all K entries are read
    sink_ptr,  # None: no sink
    extra_ptr,  # the second cache; None: there is none, and what else is called extra is not looked at
    extra_indices_ptr,
    extra_lengths_ptr,  # None: all are read
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
    extra_topk,
    extra_slots,
    extra_indices_stride_b,
    extra_indices_stride_s,
    extra_lengths_stride_b,
    extra_lengths_stride_s,
    NUM_HEADS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,  # 1 where slots are evenly spaced
    TOKEN_STRIDE: tl.constexpr,  # between tokens of a block, in elements of kv
    BLOCK_STRIDE: tl.constexpr,  # between blocks
    EXTRA_BLOCK: tl.constexpr,  # of the second cache, as CACHE_BLOCK
    EXTRA_STRIDE: tl.constexpr,  # as BLOCK_STRIDE
    STRIDE_UNIT: tl.constexpr,
    ROPE: tl.constexpr,  # width of the rotary part; 0: there is none
    LATENT: tl.constexpr,  # width of the latent, 512 or 128
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
    if LATENT == 512:
        q1 = columns(q_rows, 128, 128, in_heads, BF16_NATIVE)
        q2 = columns(q_rows, 256, 128, in_heads, BF16_NATIVE)
        q3 = columns(q_rows, 384, 128, in_heads, BF16_NATIVE)
    if ROPE > 0:
        q_rope = columns(q_rows, LATENT, ROPE, in_heads, BF16_NATIVE)  # [BLOCK_H, ROPE]

    indices_row = indices_ptr + b * indices_stride_b + s * indices_stride_s
    lengths_at = b * lengths_stride_b + s * lengths_stride_s
    if extra_ptr is None:
        begin, end = split_keys(lengths_ptr, lengths_at, topk, BLOCK_N)
    else:
        extra_row = extra_indices_ptr + b * extra_indices_stride_b + s * extra_indices_stride_s
        extra_at = b * extra_lengths_stride_b + s * extra_lengths_stride_s
        num_keys, second, begin, end = split_union(
            lengths_ptr, lengths_at, topk, extra_lengths_ptr, extra_at, extra_topk, BLOCK_N
        )

    m = tl.full([BLOCK_H], -1.0e30, tl.float32)  # running maximum, base 2
    total = tl.zeros([BLOCK_H], tl.float32)  # running sum
    acc0 = tl.zeros([BLOCK_H, 128], tl.float32)
    if LATENT == 512:
        acc1 = tl.zeros([BLOCK_H, 128], tl.float32)
        acc2 = tl.zeros([BLOCK_H, 128], tl.float32)
        acc3 = tl.zeros([BLOCK_H, 128], tl.float32)
    if extra_ptr is None:
        ahead = tl.load(indices_row + begin + n, mask=begin + n < end, other=-1)  # [BLOCK_N], slots of the next step
    else:
        ahead = union_slots(indices_row, extra_row, begin, num_keys, second, end, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        slot = ahead
        # int64 before the first product: a cache may pass 2**31 elements
        if extra_ptr is None:
            k = start + BLOCK_N + n
            ahead = tl.load(indices_row + k, mask=k < end, other=-1)
            valid = (slot >= 0) & (slot < num_slots)  # [BLOCK_N]
            token = token_at(tl.where(valid, slot, 0).to(tl.int64), CACHE_BLOCK, TOKEN_STRIDE, BLOCK_STRIDE)  # [BLOCK_N]
            cache_ptr = kv_ptr
        else:
            ahead = union_slots(indices_row, extra_row, start + BLOCK_N, num_keys, second, end, BLOCK_N)
            is_second = start >= second
            valid = (slot >= 0) & (slot < tl.where(is_second, extra_slots, num_slots))  # [BLOCK_N]
            place = tl.where(valid, slot, 0).to(tl.int64)
            token = token_at(place, CACHE_BLOCK, TOKEN_STRIDE, BLOCK_STRIDE)
            token = tl.where(is_second, token_at(place, EXTRA_BLOCK, TOKEN_STRIDE, EXTRA_STRIDE), token)  # [BLOCK_N]
            cache_ptr = tl.where(is_second, extra_ptr, kv_ptr)
        rows = cache_ptr + token[:, None]  # [BLOCK_N, 1]
        if ROPE > 0:
            scores = tl.dot(q_rope, tl.trans(columns(rows, LATENT, ROPE, valid, BF16_NATIVE)))  # [BLOCK_H, BLOCK_N]
        else:
            scores = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        v0 = columns(rows, 0, 128, valid, BF16_NATIVE)  # [BLOCK_N, 128]
        scores += tl.dot(q0, tl.trans(v0))  # folded into the product by the compiler; Triton 2.1 has no accumulator to pass
        if LATENT == 512:
            v1 = columns(rows, 128, 128, valid, BF16_NATIVE)
            scores += tl.dot(q1, tl.trans(v1))
            v2 = columns(rows, 256, 128, valid, BF16_NATIVE)
            scores += tl.dot(q2, tl.trans(v2))
            v3 = columns(rows, 384, 128, valid, BF16_NATIVE)
            scores += tl.dot(q3, tl.trans(v3))
        m, total, decay, p = softmax_step(m, total, scores, valid, scale_log2)
        p = dot_operand(p, BF16_NATIVE)
        acc0 = acc0 * decay[:, None] + tl.dot(p, v0)  # [BLOCK_H, 128]
        if LATENT == 512:
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
    if LATENT == 512:
        store_as(out_rows + 128, acc1 * inverse, written, BF16_NATIVE)
        store_as(out_rows + 256, acc2 * inverse, written, BF16_NATIVE)
        store_as(out_rows + 384, acc3 * inverse, written, BF16_NATIVE)


_launcher = TritonLauncher(sparse_attention_kernel)
_launcher_fp8 = TritonLauncher(sparse_attention_fp8_kernel)


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
    extra_kv_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    num_splits: int,
    config: AttentionConfig,
    fp8: Mapping[str, bool],
    bf16_native: bool,
) -> None:
    """Attend; write `out` and `lse_out`. Graph-safe, allocates nothing; leading strides are free, last dimensions are not.

    Args:
        out: [B, S, H, 512] bf16 and lse_out [B, S, H] float32, natural; or, where num_splits > 1, the parts for
            merge_states, [num_splits, B * S, H, 512] and [num_splits, B * S, H] float32, lse in base 2, no sink applied.
        q: [B, S, H, 512 + ROPE] bf16. kv: [W, 512 + ROPE] bf16, or [blocks, block_size, 512 + ROPE] bf16 or [.., 656 or 528]
            uint8, whole rows that follow one another within a block. ROPE is 64, or 0 where q has no rotary part; that of FP8
            rows, if they have one, is not read then.
            Or [blocks, block_size, 584] uint8 of fp8_v4, and q [B, S, H, 512]. Or BF16 rows with a latent of 128 in place of
            512, as wide as out and q have it.
        indices: [B, S, K] int32. lengths: [B, S] int32. attn_sink: [H] float32.
        extra_kv_cache, extra_indices [B, S, E], extra_lengths [B, S]: a second cache like kv, and its list.
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
    if extra_kv_cache is None or extra_indices is None:
        extra_topk = extra_slots = extra_stride_b = extra_stride_s = 0
        extra_block = extra_block_stride = 1
    else:
        extra_slots, extra_block, _, extra_block_stride = slot_geometry(extra_kv_cache)
        extra_stride_b, extra_stride_s, _ = extra_indices.stride()
        extra_topk = extra_indices.shape[2]
    extra_lengths_strides = (0, 0) if extra_lengths is None else extra_lengths.stride()
    coded = CODED_ROWS.get(rows_of(kv.element_size(), kv.shape[-1]))
    launcher = _launcher if coded is None else _launcher_fp8
    launcher(
        (num_rows * head_tiles, num_splits),
        out,
        lse_out,
        q,
        kv,
        indices,
        lengths,
        attn_sink,
        extra_kv_cache,
        extra_indices,
        extra_lengths,
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
        extra_topk,
        extra_slots,
        extra_stride_b,
        extra_stride_s,
        *extra_lengths_strides,
        NUM_HEADS=num_heads,
        QUERY_LEN=query_len,
        CACHE_BLOCK=cache_block,
        TOKEN_STRIDE=token_stride,
        BLOCK_STRIDE=block_stride,
        EXTRA_BLOCK=extra_block,
        EXTRA_STRIDE=extra_block_stride,
        STRIDE_UNIT=unit,
        ROPE=key_width - out.shape[-1],
        IS_SPLIT=is_split,
        BF16_NATIVE=bf16_native,
        BLOCK_H=config.block_h,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"LATENT": out.shape[-1]} if coded is None else {**fp8, **coded}),
    )


def slot_geometry(kv: Tensor) -> tuple[int, int, int, int]:
    """How a slot becomes an address: (num_slots, block size, token stride, block stride), strides in elements.

    The block size is 1 where slots are evenly spaced, so that a kernel need not divide: a workspace [W, width], or a cache
    whose blocks follow one another. Not of fp8_v4, whose scales are found by the place of a token in its block.
    """
    if kv.dim() == 2:
        return kv.shape[0], 1, kv.stride(0), kv.stride(0)
    num_blocks, block_size, width = kv.shape
    block_stride = kv.stride(0) if num_blocks > 1 else block_size * width
    if rows_of(kv.element_size(), width) == V4_ROWS.value:
        return num_blocks * block_size, block_size, V4_ROW_BYTES.value, block_stride
    if block_stride == block_size * width:
        return num_blocks * block_size, 1, width, width
    return num_blocks * block_size, block_size, width, block_stride


def aot_variants(arch: str = "default", *, e4m3_native: bool = False) -> Iterator[AotVariant]:
    """What `arch` runs: each configuration on all layouts, on whole rows with sinks and lengths; the largest on splits too.

    The smallest one of each layout with a second cache and without; the others without, over rows of V4 with.
    """
    for kv_layout, table in CONFIGS.get(arch, CONFIGS["default"]).items():
        layout = LAYOUTS[kv_layout]
        rows = rows_of_layout(layout)
        # blocks of 64 tokens, padded for FP8 so that slots are divided into block and offset
        padded, pitch = layout.is_quantized, layout.row_pitch
        constants = {"LATENT": layout.value_width}
        if padded:
            constants = {**fp8_constants(arch, e4m3_native=e4m3_native), **CODED_ROWS[rows]}
        for number, ((max_heads, config), is_split) in enumerate([*((each, False) for each in table), (table[-1], True)]):
            for extra in (False, True) if number == 0 else (rows == V4_ROWS.value,):
                cache, lengths = "*u8" if padded else "*bf16", None if is_split else "*i32"
                yield variant(
                    sparse_attention_fp8_kernel if padded else sparse_attention_kernel,
                    f"sparse_attention-{kv_layout}-h{max_heads}-{'split' if is_split else 'whole'}{'-extra' if extra else ''}",
                    config.num_warps,
                    config.num_stages,
                    out_ptr="*fp32" if is_split else "*bf16",
                    lse_ptr="*fp32",
                    q_ptr="*bf16",
                    kv_ptr=cache,
                    indices_ptr="*i32",
                    lengths_ptr=lengths,
                    sink_ptr=None if is_split else "*fp32",
                    extra_ptr=cache if extra else None,
                    extra_indices_ptr="*i32" if extra else None,
                    extra_lengths_ptr=lengths if extra else None,
                    scale_log2="fp32",
                    NUM_HEADS=max_heads,
                    QUERY_LEN=1,
                    CACHE_BLOCK=64 if padded else 1,
                    TOKEN_STRIDE=pitch,
                    BLOCK_STRIDE=65 * pitch if padded else pitch,
                    EXTRA_BLOCK=2 if extra and padded else 1,
                    EXTRA_STRIDE=3 * pitch if extra and padded else pitch if extra else 1,
                    STRIDE_UNIT=8,
                    ROPE=layout.rope_width,
                    IS_SPLIT=is_split,
                    BF16_NATIVE=True,
                    BLOCK_H=config.block_h,
                    BLOCK_N=config.block_n,
                    **constants,
                )
