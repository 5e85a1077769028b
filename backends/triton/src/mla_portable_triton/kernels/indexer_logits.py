# SPDX-License-Identifier: Apache-2.0
"""indexer_logits: q, head weights and the indexer's paged keys -> a float32 score for each token and position it sees.

Scores, number formats and the request of a token: `index_keys`. A token sees the positions up to its own,
length - (end of its request - token). What is not seen, has no valid block, or belongs to no request is -inf.

decode    a program serves one token: q stays, every so many tiles of keys pass, so that programs of a short context are few.
          128 B (256 B in bf16) and 256 flops a head for a position
prefill   a program serves one tile of keys and some tokens, request by request: the keys stay, queries pass

FILL writes the whole matrix [T, N]. Without it only what a token sees is written, and its bounds to `begin_ptr` and `end_ptr`:
what a top-k of the row needs (`indexer_select`). Rows are counted from `first_token` then.

Programs lie on one axis, those of a token or of some tokens side by side: the others end at 65,535.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.contracts.share import WHOLE, ContextShare
from mla_portable.kit.triton_launcher import TritonLauncher, at_any_address
from mla_portable_triton import index_forms
from mla_portable_triton.aot import AotVariant, variant
from mla_portable_triton.kernels.index_keys import (
    REQUEST_TILE,
    Numbers,
    Tiles,
    find_request,
    form_of_call,
    head_block,
    head_weights,
    key_tile,
    operands,
    own_length,
    query_tile,
    tile_scores,
    tiles_of,
    visible_bytes,
    whole_position,
)

DECODE: Final = {
    "default": Tiles(positions=64, num_warps=4, num_stages=2),
    "sm80": Tiles(positions=128, num_warps=4, num_stages=2, max_registers=168),
    "sm86": Tiles(positions=128, num_warps=4, num_stages=2, max_registers=168),
    "sm86-bf16": Tiles(positions=64, num_warps=4, num_stages=2),
    "sm89": Tiles(positions=128, num_warps=4, num_stages=2),
    "sm89-bf16": Tiles(positions=64, num_warps=4, num_stages=2),
    "sm90": Tiles(positions=128, num_warps=4, num_stages=2, max_registers=128),
    "sm90-bf16": Tiles(positions=256, num_warps=4, num_stages=2),
}
PREFILL: Final = {
    "default": Tiles(positions=64, num_warps=4, num_stages=2, tokens=32),
    "sm80": Tiles(positions=256, num_warps=4, num_stages=0, tokens=64),
    "sm80-bf16": Tiles(positions=128, num_warps=4, num_stages=2, tokens=32),
    "sm86": Tiles(positions=256, num_warps=4, num_stages=0, tokens=64),
    "sm86-bf16": Tiles(positions=64, num_warps=4, num_stages=2, tokens=32),
    "sm89": Tiles(positions=128, num_warps=4, num_stages=2, tokens=64),
    "sm89-bf16": Tiles(positions=64, num_warps=4, num_stages=2, tokens=32),
    "sm90": Tiles(positions=128, num_warps=4, num_stages=3, tokens=64, max_registers=128),
    "sm90-bf16": Tiles(positions=256, num_warps=4, num_stages=3, tokens=64),
}
"""DeviceFacts.arch -> tiles, for up to 64 heads; half the positions for more, and one token. Tuned on an H200, for sm90 and
the code for sm80: 1,024 tokens over 8,192 positions take 176 us (199 with 256 positions and all registers) and 331; of bfloat16
keys 318 and 410. sm80 takes 352 for these with 256 positions, but an A100 has shared memory for one such program, an H200 for
two. sm86 and sm89 are untimed: what takes the fewest instructions for a position of what 99 KiB hold twice
(docs/dev/sm80-sm89.md). 128 positions of bfloat16 miss that by 512 bytes."""
_TOKENS_A_REQUEST: Final = 4
"""From here on, on average, keys stay instead of queries."""
_PROGRAMS: Final = 16
"""Of decode for each multiprocessor, of which four run at a time: the tail of the last wave is short."""
_FREE: Final = ["first_token", "num_requests", "num_blocks", "table_width", "table_stride", "num_logits", "out_stride", "along"]


@triton.jit(do_not_specialize=_FREE, **at_any_address("out_ptr", "begin_ptr", "end_ptr", "start_ptr", "len_ptr", "table_ptr"))
def decode_kernel(
    out_ptr, begin_ptr, end_ptr, q_ptr, weight_ptr, cache_ptr, start_ptr, len_ptr, table_ptr, first_token, num_requests,
    num_blocks, block_stride, table_width, table_stride, num_logits, out_stride, q_stride_t, q_stride_h, weight_stride,
    along,
    NUM_HEADS: tl.constexpr, CACHE_BLOCK: tl.constexpr, FORM: tl.constexpr, BF16_NATIVE: tl.constexpr, FILL: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
    DCP_SIZE: tl.constexpr, DCP_RANK: tl.constexpr, INTERLEAVE: tl.constexpr,
):  # fmt: skip
    """One token, and every `along`-th tile of BLOCK_N positions, a program."""
    number = tl.program_id(0) // along
    place = tl.program_id(0) - number * along
    row, token = number.to(tl.int64), first_token + number
    request, end, owned = find_request(token, start_ptr, num_requests, BLOCK_R)
    length = tl.load(len_ptr + request, mask=owned, other=0).to(tl.int64)
    length = tl.minimum(tl.maximum(length, 0), table_width.to(tl.int64) * (CACHE_BLOCK * DCP_SIZE))
    seen = tl.where(owned, tl.maximum(length - (end - token) + 1, 0), 0).to(tl.int32)
    seen = tl.minimum(own_length(seen, DCP_SIZE, DCP_RANK, INTERLEAVE), num_logits)
    if not FILL:  # noqa: SIM102 - one is known when the kernel is compiled
        if place == 0:
            tl.store(begin_ptr + row, 0)
            tl.store(end_ptr + row, seen)
    first, step = place * BLOCK_N, along * BLOCK_N
    out_row = out_ptr + row * out_stride
    n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    if first < seen:
        q = query_tile(q_ptr, token, q_stride_t, q_stride_h, NUM_HEADS, BLOCK_H, FORM)
        weight = head_weights(weight_ptr, token, weight_stride, NUM_HEADS, BLOCK_H)
        q, odd_q = operands(q, FORM, BF16_NATIVE)
        table_row = table_ptr + request.to(tl.int64) * table_stride
        for begin in tl.range(first, seen, step, num_stages=STAGES):
            position = begin + n  # [BLOCK_N]
            keys, scale = key_tile(cache_ptr, table_row, position, position < seen, num_blocks, block_stride, FORM, CACHE_BLOCK)
            keys, odd_keys = operands(keys, FORM, BF16_NATIVE)
            scores = tile_scores(keys, odd_keys, scale, q, odd_q, weight, NUM_HEADS, BLOCK_H, FORM)
            scores = tl.where(scores == scores, scores, float("-inf"))  # NaN: no key is there, or the score is
            if FILL:
                tl.store(out_row + position, scores, mask=position < num_logits)
            else:
                tl.store(out_row + position, scores, mask=position < seen)
    if FILL:
        written = (tl.maximum(seen - first, 0) + step - 1) // step * step
        for begin in range(first + written, num_logits, step):
            tl.store(out_row + begin + n, tl.full([BLOCK_N], float("-inf"), tl.float32), mask=begin + n < num_logits)


@triton.jit
def _write(out_ptr, row, out_stride, position, scores, seen, num_logits, FILL: tl.constexpr):
    """A token's scores of a tile to its row: those that are seen, or with FILL all of them, -inf where not seen."""
    scores = tl.where(scores == scores, scores, float("-inf"))  # NaN: no key is there, or the score is
    if FILL:
        scores = tl.where(seen, scores, float("-inf"))
        written = position < num_logits
    else:
        written = seen
    tl.store(out_ptr + row.to(tl.int64) * out_stride + position, scores, mask=written)


@triton.jit(
    do_not_specialize=[*_FREE, "last_token"],
    **at_any_address("out_ptr", "begin_ptr", "end_ptr", "start_ptr", "len_ptr", "table_ptr"),
)
def prefill_kernel(
    out_ptr, begin_ptr, end_ptr, q_ptr, weight_ptr, cache_ptr, start_ptr, len_ptr, table_ptr, first_token, num_requests,
    num_blocks, block_stride, table_width, table_stride, num_logits, out_stride, q_stride_t, q_stride_h, weight_stride,
    along, last_token,
    NUM_HEADS: tl.constexpr, CACHE_BLOCK: tl.constexpr, FORM: tl.constexpr, BF16_NATIVE: tl.constexpr, FILL: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, REPEAT: tl.constexpr, BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr, DCP_SIZE: tl.constexpr, DCP_RANK: tl.constexpr, INTERLEAVE: tl.constexpr,
):  # fmt: skip
    """REPEAT tokens, request by request, and one of `along` tiles of BLOCK_N positions a program."""
    run = tl.program_id(0) // along
    tile = tl.program_id(0) - run * along
    position = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    place = whole_position(position, DCP_SIZE, DCP_RANK, INTERLEAVE)  # [BLOCK_N], in the sequence
    first_place = whole_position(tile * BLOCK_N, DCP_SIZE, DCP_RANK, INTERLEAVE)
    token = first_token + run * REPEAT
    last = tl.minimum(token + REPEAT, last_token)
    r = tl.arange(0, REPEAT)  # [REPEAT]
    while token < last:
        request, end, owned = find_request(token, start_ptr, num_requests, BLOCK_R)
        length = tl.load(len_ptr + request, mask=owned, other=0).to(tl.int64)
        length = tl.minimum(tl.maximum(length, 0), table_width.to(tl.int64) * (CACHE_BLOCK * DCP_SIZE))
        stop = tl.where(owned, tl.minimum(end, last), token + 1)
        after_own = tl.where(owned, length - end, -token - 1).to(tl.int32)  # added to a token, its own position
        if not FILL:  # noqa: SIM102
            if tile == 0:
                tokens = token + r  # [REPEAT]
                tl.store(begin_ptr + tokens - first_token, tl.zeros([REPEAT], tl.int32), mask=tokens < stop)
                ends = own_length(tl.maximum(tokens + after_own + 1, 0), DCP_SIZE, DCP_RANK, INTERLEAVE)
                tl.store(end_ptr + tokens - first_token, ends, mask=tokens < stop)
        if first_place < stop + after_own:  # the last of these tokens sees some of the tile
            table_row = table_ptr + request.to(tl.int64) * table_stride
            inside = place < stop + after_own
            keys, scale = key_tile(cache_ptr, table_row, position, inside, num_blocks, block_stride, FORM, CACHE_BLOCK)
            keys, odd_keys = operands(keys, FORM, BF16_NATIVE)
            if STAGES == 0:
                t = token
                ahead = query_tile(q_ptr, t, q_stride_t, q_stride_h, NUM_HEADS, BLOCK_H, FORM)
                while t < stop:
                    q, odd_q = operands(ahead, FORM, BF16_NATIVE)
                    ahead = query_tile(q_ptr, tl.minimum(t + 1, stop - 1), q_stride_t, q_stride_h, NUM_HEADS, BLOCK_H, FORM)
                    weight = head_weights(weight_ptr, t, weight_stride, NUM_HEADS, BLOCK_H)
                    scores = tile_scores(keys, odd_keys, scale, q, odd_q, weight, NUM_HEADS, BLOCK_H, FORM)
                    seen = place <= t + after_own
                    _write(out_ptr, t - first_token, out_stride, position, scores, seen, num_logits, FILL)
                    t += 1
            else:
                for i in tl.range(0, stop - token, num_stages=STAGES):
                    t = token + i
                    q = query_tile(q_ptr, t, q_stride_t, q_stride_h, NUM_HEADS, BLOCK_H, FORM)
                    weight = head_weights(weight_ptr, t, weight_stride, NUM_HEADS, BLOCK_H)
                    q, odd_q = operands(q, FORM, BF16_NATIVE)
                    scores = tile_scores(keys, odd_keys, scale, q, odd_q, weight, NUM_HEADS, BLOCK_H, FORM)
                    seen = place <= t + after_own
                    _write(out_ptr, t - first_token, out_stride, position, scores, seen, num_logits, FILL)
        elif FILL:
            for i in range(stop - token):
                t = token + i
                out_row = out_ptr + (t - first_token).to(tl.int64) * out_stride
                tl.store(out_row + position, tl.full([BLOCK_N], float("-inf"), tl.float32), mask=position < num_logits)
        token = stop


_decode, _prefill = TritonLauncher(decode_kernel), TritonLauncher(prefill_kernel)


def launch(
    out: Tensor,
    q: Tensor,
    weights: Tensor,
    index_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    numbers: Numbers,
    bounds: Tensor | None = None,
    first_token: int = 0,
    share: ContextShare = WHOLE,
) -> None:
    """Write `out` [T', N], of the T' tokens from `first_token` on. Graph-safe.

    Without `bounds` every element is written. With it, [2, T'] int32, the positions that tokens see are, and where these begin
    and end is written to it. Columns are own positions of `share`, whose interleave divides the size of blocks. Blocks of the
    cache may lie apart, and rows of q, weights, block_table and out; everything else is contiguous.
    """
    num_rows, num_logits = out.shape
    if num_rows == 0 or num_logits == 0:
        return
    num_tokens, num_heads, _ = q.shape
    num_requests, columns = block_table.shape
    prefill = num_tokens >= _TOKENS_A_REQUEST * max(num_requests, 1)
    tiles = tiles_of(PREFILL if prefill else DECODE, numbers.arch, numbers.form)
    block_h = head_block(num_heads)
    positions = tiles.positions if block_h <= 64 else tiles.positions // 2
    arguments = (
        out, *((out, out) if bounds is None else bounds), visible_bytes(q), weights, index_cache, query_start_loc, seq_lens,
        block_table, first_token, num_requests, index_cache.shape[0], index_cache.stride(0), columns, block_table.stride(0),
        num_logits, out.stride(0), q.stride(0), q.stride(1), weights.stride(0),
    )  # fmt: skip
    options = {
        "NUM_HEADS": num_heads, "CACHE_BLOCK": index_cache.shape[1], "FORM": form_of_call(numbers.form, q),
        "BF16_NATIVE": numbers.bf16_native, "FILL": bounds is None, "BLOCK_H": block_h, "BLOCK_N": positions,
        "BLOCK_R": REQUEST_TILE, "STAGES": tiles.num_stages, **tiles.options,
        "DCP_SIZE": share.size, "DCP_RANK": share.rank, "INTERLEAVE": share.interleave,
    }  # fmt: skip
    if prefill:
        along = triton.cdiv(num_logits, positions)
        grid = (along * triton.cdiv(num_rows, tiles.tokens),)
        _prefill(grid, *arguments, along, first_token + num_rows, REPEAT=tiles.tokens, **options)
    else:
        programs = triton.cdiv(max(numbers.num_sms, 1) * _PROGRAMS, num_rows)
        along = min(triton.cdiv(num_logits, positions), programs)
        _decode((along * num_rows,), *arguments, along, **options)


def aot_variants(arch: str = "default", *, e4m3_native: bool = False) -> list[AotVariant]:
    """The 64 heads of DeepSeek-V3.2's indexer, FP8 and bfloat16: the matrix; what a top-k needs; that on one of two ranks."""
    pointers = dict.fromkeys(["start_ptr", "len_ptr", "table_ptr", "begin_ptr", "end_ptr"], "*i32") | {
        "weight_ptr": "*fp32",
        "out_ptr": "*fp32",
    }
    quantized = index_forms.form_of(True, arch, e4m3_native, 64)
    return [
        variant(
            kernel, f"indexer_logits-{name}-{word}{use}", tiles.num_warps, max_registers=tiles.max_registers,
            **pointers, **tokens, q_ptr=stored, cache_ptr=stored, NUM_HEADS=64, CACHE_BLOCK=64, FORM=form, BF16_NATIVE=True,
            FILL=use == "-fill", BLOCK_H=64, BLOCK_N=tiles.positions, BLOCK_R=REQUEST_TILE, STAGES=tiles.num_stages,
            DCP_SIZE=2 if use == "-dcp" else 1, DCP_RANK=1 if use == "-dcp" else 0, INTERLEAVE=1,
        )
        for kernel, name, table in ((decode_kernel, "decode", DECODE), (prefill_kernel, "prefill", PREFILL))
        for word, form, stored in (("fp8", quantized, "*u8"), ("bf16", index_forms.BF16, "*bf16"))
        for tiles in (tiles_of(table, arch, form),)
        for tokens in ({"REPEAT": tiles.tokens} if tiles.tokens else {},)
        for use in ("", "-fill", *(("-dcp",) if word == "fp8" else ()))
    ]  # fmt: skip
