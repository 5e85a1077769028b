# SPDX-License-Identifier: Apache-2.0
"""What the indexer's kernels share: number formats of q and keys, the request of a token, a tile of keys from pages.

form      FORM says how q and keys are stored and multiplied: `index_forms`
score     sum_h weight[h] * max(q[h] . k[position], 0) * scale of the key; dots and sums in float32, the ReLU before the weights
tile      positions are rows of the dot and heads its columns, so that the sum over heads stays within a warp
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla_portable.layouts import INDEX_HEAD_SIZE
from mla_portable_triton.index_forms import BF16, FP8, FP8_DECODED, FP8_WORDS
from mla_portable_triton.kernels.bfloat16 import dot_operand
from mla_portable_triton.kernels.e4m3_decode import e4m3_decode
from mla_portable_triton.kernels.e4m3_packed import e4m3_lower_half, e4m3_upper_half

__all__ = [
    "KEY",
    "REQUEST_TILE",
    "Numbers",
    "Tiles",
    "find_request",
    "form_of_call",
    "head_block",
    "head_weights",
    "key_tile",
    "load_rows",
    "operands",
    "own_length",
    "query_tile",
    "tile_scores",
    "tiles_of",
    "visible_bytes",
    "whole_position",
]

REQUEST_TILE: Final = 64
KEY = tl.constexpr(INDEX_HEAD_SIZE)
_BF16 = tl.constexpr(BF16)
_FP8 = tl.constexpr(FP8)
_FP8_WORDS = tl.constexpr(FP8_WORDS)
_INT32_MAX = tl.constexpr(2**31 - 1)
_UINT8, _E4M3 = torch.uint8, torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the work is cut. positions: of a tile. tokens: of a program whose keys stay.

    num_stages: of the loop; 0 where keys stay in registers, as operands, and the next token's queries are on their way there,
    instead of both in shared memory.
    max_registers: of a thread, on NVIDIA's targets, so that more programs run at once; 0 for no limit.
    """

    positions: int
    num_warps: int
    num_stages: int
    tokens: int = 0
    max_registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        """The options of a launch."""
        return {"num_warps": self.num_warps} | ({"maxnreg": self.max_registers} if self.max_registers else {})


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a launch needs of the request that it was bound for.

    Attributes:
        form: FORM. bf16_native: False in Triton's interpreter. arch: whose tiles it runs (`tile_arch`). num_sms: of the device.
    """

    form: int
    bf16_native: bool
    arch: str
    num_sms: int


def form_of_call(form: int, *rows: Tensor) -> int:
    """FORM of a call that reads these tensors of e4m3 bytes: words lie at even addresses."""
    odd = form == FP8_WORDS and any((t.data_ptr() | t.stride(0) | t.stride(-2)) & 1 for t in rows)
    return FP8_DECODED if odd else form


def head_block(num_heads: int) -> int:
    """Columns of the dot."""
    return max(16, triton.next_power_of_2(num_heads))


def tiles_of(table: Mapping[str, Tiles], arch: str, form: int) -> Tiles:
    """The row of an architecture, `default` where it has none. BF16 may have one of its own: "sm90-bf16"."""
    own = table.get(f"{arch}-bf16") if form == BF16 else None
    return own or table.get(arch, table["default"])


def visible_bytes(tensor: Tensor) -> Tensor:
    """e4m3 numbers as uint8, of which every target can load; all else as it is."""
    return tensor.view(_UINT8) if tensor.dtype == _E4M3 else tensor


@triton.jit
def own_length(length, DCP_SIZE: tl.constexpr, DCP_RANK: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Own tokens among the first `length`, at least 0, of a sequence: `ContextShare.length`."""
    if DCP_SIZE > 1:
        rest = length % (DCP_SIZE * INTERLEAVE) - DCP_RANK * INTERLEAVE
        length = length // (DCP_SIZE * INTERLEAVE) * INTERLEAVE + tl.minimum(tl.maximum(rest, 0), INTERLEAVE)
    return length


@triton.jit
def whole_position(own, DCP_SIZE: tl.constexpr, DCP_RANK: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Positions in the sequence of own positions: `ContextShare.positions`."""
    if DCP_SIZE > 1:
        own = (own // INTERLEAVE * DCP_SIZE + DCP_RANK) * INTERLEAVE + own % INTERLEAVE
    return own


@triton.jit
def operands(numbers, FORM: tl.constexpr, BF16_NATIVE: tl.constexpr):
    """A tile of `load_rows` as operands of tl.dot: of FP8_WORDS the even and the odd columns, else all of them, twice."""
    if FORM == _FP8_WORDS:
        even = e4m3_lower_half(numbers)
        odd = e4m3_upper_half(numbers)
    elif FORM == _FP8:
        even = numbers
        odd = even
    elif FORM == _BF16:
        even = dot_operand(numbers, BF16_NATIVE)
        odd = even
    else:
        even = dot_operand(e4m3_decode(numbers, False), BF16_NATIVE)
        odd = even
    return even, odd


@triton.jit
def find_request(token, start_ptr, num_requests, BLOCK_R: tl.constexpr):
    """The request of a token: how many end at or before it, since ends ascend. Also its first token, its end and whether it
    is one: tokens before the first start or past the last end belong to none."""
    request = 0
    for begin in range(0, num_requests, BLOCK_R):
        r = begin + tl.arange(0, BLOCK_R)  # [BLOCK_R]
        ends = tl.load(start_ptr + r + 1, mask=r < num_requests, other=_INT32_MAX)  # [BLOCK_R]
        request += tl.sum((ends <= token).to(tl.int32), 0)
    is_request = request < num_requests
    begin = tl.load(start_ptr + request, mask=is_request, other=0)
    end = tl.load(start_ptr + request + 1, mask=is_request, other=0)
    return request, end, (begin <= token) & (token < end)  # values that do not ascend leave no table row


@triton.jit
def load_rows(rows, there, FORM: tl.constexpr):
    """The 128 numbers of rows at `rows` [R, 1], 0 where not `there` [R]: [R, 128], or [R, 64] words of FP8_WORDS."""
    if FORM == _FP8_WORDS:
        rows = rows.to(tl.pointer_type(tl.int16), bitcast=True)
        numbers = tl.load(rows + tl.arange(0, KEY // 2)[None, :], mask=there[:, None], other=0)
    else:
        if FORM == _FP8:
            rows = rows.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
        numbers = tl.load(rows + tl.arange(0, KEY)[None, :], mask=there[:, None], other=0.0)
    return numbers


@triton.jit
def query_tile(
    q_ptr, token, q_stride_t, q_stride_h, NUM_HEADS: tl.constexpr, BLOCK_H: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """q of a token as `load_rows` has it; 0 past the last head."""
    h = tl.arange(0, BLOCK_H)
    rows = q_ptr + token.to(tl.int64) * q_stride_t + h * q_stride_h  # [BLOCK_H]
    q = load_rows(rows[:, None], h < NUM_HEADS, FORM)
    if FORM == _FP8_WORDS:
        # Zeros, unknown to Triton until it has laid the tiles out. What depends on loads alone it would decode in the layout of
        # the product, where every warp needs every head.
        q = q | (tl.arange(0, KEY // 2) >> 16).to(tl.int16)[None, :]
    return q


@triton.jit
def head_weights(weight_ptr, token, weight_stride, NUM_HEADS: tl.constexpr, BLOCK_H: tl.constexpr):
    """Weights [BLOCK_H] of a token's heads; 0 past the last."""
    h = tl.arange(0, BLOCK_H)
    return tl.load(weight_ptr + token.to(tl.int64) * weight_stride + h, mask=h < NUM_HEADS, other=0.0)


@triton.jit
def key_tile(
    cache_ptr, table_row_ptr, position, inside, num_blocks, block_stride, FORM: tl.constexpr, CACHE_BLOCK: tl.constexpr
):
    """The keys as `load_rows` has them, and their scales [BLOCK_N]: 1 where the layout has none, NaN where no key is there.

    position: [BLOCK_N]. inside: [BLOCK_N], those whose column is in the table. block_stride: in elements of the cache.
    """
    unsigned = position.to(tl.uint32)  # divides by shifts alone
    block = tl.load(table_row_ptr + unsigned // CACHE_BLOCK, mask=inside, other=-1)  # [BLOCK_N]
    there = inside & (block >= 0) & (block < num_blocks)
    page = cache_ptr + tl.where(there, block, 0).to(tl.int64) * block_stride  # [BLOCK_N] pointers
    at = (unsigned % CACHE_BLOCK).to(tl.int32)  # [BLOCK_N]
    keys = load_rows(page[:, None] + at[:, None] * KEY, there, FORM)
    if FORM == _BF16:
        scale = tl.where(there, 1.0, float("nan"))
    else:
        scale = tl.load((page + CACHE_BLOCK * KEY).to(tl.pointer_type(tl.float32)) + at, mask=there, other=float("nan"))
    return keys, scale


@triton.jit
def tile_scores(keys, odd_keys, scale, q, odd_q, weight, NUM_HEADS: tl.constexpr, BLOCK_H: tl.constexpr, FORM: tl.constexpr):
    """[BLOCK_N] scores of `operands` of keys and of a token's queries."""
    dots = tl.dot(keys, tl.trans(q))  # [BLOCK_N, BLOCK_H] float32
    if FORM == _FP8_WORDS:
        dots = tl.dot(odd_keys, tl.trans(odd_q), dots)
        scale = scale * 65536.0  # of operands that are 2**-8 of the numbers
    if FORM == _FP8 or FORM == _FP8_WORDS:  # noqa: SIM109 - Triton has no `in`
        # twice the positive ones, exactly: e4m3 has no infinity. NVIDIA's GPUs add twice as fast as they compare
        dots = (dots + tl.abs(dots)) * weight[None, :]
        scale = scale * 0.5
    else:
        dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if NUM_HEADS < BLOCK_H and FORM == _BF16:  # past the last head 0 times an infinite key is NaN; e4m3 has no infinity
            dots = tl.where(tl.arange(0, BLOCK_H)[None, :] < NUM_HEADS, dots, 0.0)
        dots = dots * weight[None, :]
    return tl.sum(dots, 1) * scale
