# SPDX-License-Identifier: Apache-2.0
"""indexer_logits_ragged: q, head weights and gathered keys -> a float32 score for each token and key of its range, else -inf.

A program serves a tile of keys, which stay, and some tokens, whose queries pass. Scores and number formats: `index_keys`.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.kit.triton_launcher import TritonLauncher, at_any_address
from mla_portable_triton import index_forms
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.kernels.index_keys import (
    Numbers,
    form_of_call,
    head_block,
    head_weights,
    load_rows,
    operands,
    query_tile,
    tile_scores,
    tiles_of,
    visible_bytes,
)
from mla_portable_triton.kernels.indexer_logits import PREFILL

_BF16 = tl.constexpr(index_forms.BF16)
_FREE: Final = ["num_tokens", "num_keys", "out_stride", "along"]


@triton.jit(do_not_specialize=_FREE, **at_any_address("out_ptr", "scale_ptr", "start_ptr", "end_ptr"))
def ragged_kernel(
    out_ptr, q_ptr, weight_ptr, key_ptr, scale_ptr, start_ptr, end_ptr, num_tokens, num_keys, out_stride, key_stride,
    q_stride_t, q_stride_h, weight_stride, along,
    NUM_HEADS: tl.constexpr, FORM: tl.constexpr, BF16_NATIVE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
    REPEAT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """REPEAT tokens and one of `along` tiles of BLOCK_N keys a program, those of the same tokens side by side on one axis."""
    run = tl.program_id(0) // along
    first = (tl.program_id(0) - run * along) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    token = run * REPEAT
    last = tl.minimum(token + REPEAT, num_tokens)
    tokens = token + tl.arange(0, REPEAT)  # [REPEAT]
    starts = tl.load(start_ptr + tokens, mask=tokens < last, other=0)
    ends = tl.load(end_ptr + tokens, mask=tokens < last, other=0)
    wanted = (starts < ends) & (starts < first + BLOCK_N) & (ends > first)  # [REPEAT]
    if tl.max(wanted.to(tl.int32), 0) > 0:
        there = n < num_keys
        keys, odd_keys = operands(load_rows(key_ptr + n.to(tl.int64)[:, None] * key_stride, there, FORM), FORM, BF16_NATIVE)
        if FORM == _BF16:
            scale = tl.full([BLOCK_N], 1.0, tl.float32)
        else:
            scale = tl.load(scale_ptr + n, mask=there, other=0.0)
        if STAGES == 0:
            t = token
            ahead = query_tile(q_ptr, t, q_stride_t, q_stride_h, NUM_HEADS, BLOCK_H, FORM)
            while t < last:
                q, odd_q = operands(ahead, FORM, BF16_NATIVE)
                ahead = query_tile(q_ptr, tl.minimum(t + 1, last - 1), q_stride_t, q_stride_h, NUM_HEADS, BLOCK_H, FORM)
                weight = head_weights(weight_ptr, t, weight_stride, NUM_HEADS, BLOCK_H)
                scores = tile_scores(keys, odd_keys, scale, q, odd_q, weight, NUM_HEADS, BLOCK_H, FORM)
                seen = (n >= tl.load(start_ptr + t)) & (n < tl.load(end_ptr + t)) & (scores == scores)  # not NaN
                row = out_ptr + t.to(tl.int64) * out_stride
                tl.store(row + n, tl.where(seen, scores, float("-inf")), mask=there)
                t += 1
        else:
            for i in tl.range(0, last - token, num_stages=STAGES):
                t = token + i
                q = query_tile(q_ptr, t, q_stride_t, q_stride_h, NUM_HEADS, BLOCK_H, FORM)
                weight = head_weights(weight_ptr, t, weight_stride, NUM_HEADS, BLOCK_H)
                q, odd_q = operands(q, FORM, BF16_NATIVE)
                scores = tile_scores(keys, odd_keys, scale, q, odd_q, weight, NUM_HEADS, BLOCK_H, FORM)
                seen = (n >= tl.load(start_ptr + t)) & (n < tl.load(end_ptr + t)) & (scores == scores)  # not NaN
                row = out_ptr + t.to(tl.int64) * out_stride
                tl.store(row + n, tl.where(seen, scores, float("-inf")), mask=there)
    else:
        for i in range(last - token):
            t = token + i
            row = out_ptr + t.to(tl.int64) * out_stride
            tl.store(row + n, tl.full([BLOCK_N], float("-inf"), tl.float32), mask=n < num_keys)


_launch = TritonLauncher(ragged_kernel)


def launch(
    out: Tensor,
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scales: Tensor | None,
    row_starts: Tensor,
    row_ends: Tensor,
    *,
    numbers: Numbers,
) -> None:
    """Write `out` [T, N]. Graph-safe. Rows of q, weights, keys and out may lie apart; everything else is contiguous."""
    num_tokens, num_keys = out.shape
    if num_tokens == 0 or num_keys == 0:
        return
    num_heads, tiles = q.shape[1], tiles_of(PREFILL, numbers.arch, numbers.form)
    block_h = head_block(num_heads)
    positions = tiles.positions if block_h <= 64 else tiles.positions // 2
    along = triton.cdiv(num_keys, positions)
    _launch(
        (along * triton.cdiv(num_tokens, tiles.tokens),),
        out,
        visible_bytes(q),
        weights,
        visible_bytes(keys),
        weights if key_scales is None else key_scales,
        row_starts,
        row_ends,
        num_tokens,
        num_keys,
        out.stride(0),
        keys.stride(0),
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        along,
        NUM_HEADS=num_heads,
        FORM=form_of_call(numbers.form, q, keys),
        BF16_NATIVE=numbers.bf16_native,
        BLOCK_H=block_h,
        BLOCK_N=positions,
        REPEAT=tiles.tokens,
        STAGES=tiles.num_stages,
        **tiles.options,
    )


def aot_variants(arch: str = "default", *, e4m3_native: bool = False) -> list[AotVariant]:
    """The 64 heads of DeepSeek-V3.2's indexer, in FP8 and bfloat16."""
    pointers = dict.fromkeys(["out_ptr", "weight_ptr", "scale_ptr"], "*fp32") | dict.fromkeys(["start_ptr", "end_ptr"], "*i32")
    quantized = index_forms.form_of(True, arch, e4m3_native, 64)
    return [
        variant(
            ragged_kernel, f"indexer_logits_ragged-{word}", tiles.num_warps, max_registers=tiles.max_registers,
            **pointers, q_ptr=stored, key_ptr=stored, NUM_HEADS=64, FORM=form, BF16_NATIVE=True, BLOCK_H=64,
            BLOCK_N=tiles.positions, REPEAT=tiles.tokens, STAGES=tiles.num_stages,
        )
        for word, form, stored in (("fp8", quantized, "*u8"), ("bf16", index_forms.BF16, "*bf16"))
        for tiles in (tiles_of(PREFILL, arch, form),)
    ]  # fmt: skip
