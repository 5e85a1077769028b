# SPDX-License-Identifier: Apache-2.0
"""The passes around DeepGEMM's scores that give them this project's one meaning, one Triton kernel each.

Before: what each token sees, and a length and a table of blocks for each row of the kernel. DeepGEMM reads a row of its own for
each token, follows any entry of a table and takes lengths as they are. After: -inf wherever a token sees nothing, and for NaN.

describe   reads the batch once for each row, writes 4 bytes for each block that the row needs
finish     4 bytes read and 4 written a score, beside the 132 that a score of one token costs to compute: 6 % of its traffic
erase      4 bytes read a block; writes where a block is absent
window     4 bytes read a score of the range, 4 written for each column
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.kit.triton_launcher import TritonLauncher, at_any_address
from mla_portable_common.deep_gemm.pages import PAGE, IndexPasses, Pages, Rows

_BLOCK_R: Final = 64
_BLOCK_C: Final = 512
_BLOCK_N: Final = 2048
_ERASED: Final = 64
"""Blocks of a row that a program of `erase` looks at."""
_INT32_MAX = tl.constexpr(2**31 - 1)


@triton.jit(
    do_not_specialize=["first", "num_requests", "num_blocks", "table_width", "table_stride", "width", "columns"],
    **at_any_address("zero_ptr", "end_ptr", "owner_ptr", "len_ptr", "target_ptr", "start_ptr", "seq_ptr", "table_ptr"),
)
def _describe_kernel(
    zero_ptr, end_ptr, owner_ptr, len_ptr, target_ptr, start_ptr, seq_ptr, table_ptr, first, num_requests, num_blocks,
    table_width, table_stride, width, columns,
    TOKENS: tl.constexpr, PAGE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One row of the kernel and BLOCK_C columns of its table a program."""
    row = tl.program_id(0).to(tl.int64)
    longest = tl.full([], 1, tl.int64)
    owner = tl.zeros([], tl.int32)
    for i in tl.static_range(TOKENS):
        token = first + row * TOKENS + i
        request = tl.zeros([], tl.int32)
        for begin in range(0, num_requests, BLOCK_R):
            r = begin + tl.arange(0, BLOCK_R)  # [BLOCK_R]
            stops = tl.load(start_ptr + r + 1, mask=r < num_requests, other=_INT32_MAX)  # [BLOCK_R]
            request += tl.sum((stops <= token).to(tl.int32), 0)
        owner = tl.minimum(request, num_requests - 1)
        start = tl.load(start_ptr + owner).to(tl.int64)
        stop = tl.load(start_ptr + owner + 1).to(tl.int64)
        owned = (request < num_requests) & (start <= token) & (token < stop)
        length = tl.load(seq_ptr + owner).to(tl.int64)
        length = tl.minimum(tl.maximum(length, 0), table_width.to(tl.int64) * PAGE)
        seen = tl.where(owned, length - (stop - token) + 1, 0)
        seen = tl.minimum(tl.maximum(seen, 0), width.to(tl.int64))
        longest = tl.maximum(longest, seen)
        if tl.program_id(1) == 0:
            tl.store(zero_ptr + row * TOKENS + i, 0)
            tl.store(end_ptr + row * TOKENS + i, seen.to(tl.int32))
            tl.store(owner_ptr + row * TOKENS + i, owner)
    if tl.program_id(1) == 0:
        for i in tl.static_range(TOKENS):
            tl.store(len_ptr + row * TOKENS + i, longest.to(tl.int32))
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    needed = (column < columns) & (column < (longest + PAGE - 1) // PAGE)
    block = tl.load(table_ptr + owner.to(tl.int64) * table_stride + column, mask=needed, other=0)  # [BLOCK_C]
    block = tl.where((block < 0) | (block >= num_blocks), 0, block)
    tl.store(target_ptr + row * columns + column, block, mask=needed)


@triton.jit(
    do_not_specialize=["num_blocks", "table_stride", "num_logits", "out_stride", "logits_stride"],
    **at_any_address("out_ptr", "logits_ptr", "end_ptr", "owner_ptr", "table_ptr"),
)
def _finish_kernel(
    out_ptr, logits_ptr, end_ptr, owner_ptr, table_ptr, num_blocks, table_stride, num_logits, out_stride, logits_stride,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of a token a program."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    seen = position < tl.load(end_ptr + row)
    table_row = table_ptr + tl.load(owner_ptr + row).to(tl.int64) * table_stride
    block = tl.load(table_row + position // PAGE, mask=seen, other=-1)  # [BLOCK_N]
    there = (block >= 0) & (block < num_blocks)
    scores = tl.load(logits_ptr + row * logits_stride + position, mask=there, other=float("-inf"))  # [BLOCK_N]
    scores = tl.where(scores == scores, scores, float("-inf"))
    tl.store(out_ptr + row * out_stride + position, scores, mask=position < num_logits)


@triton.jit(
    do_not_specialize=["num_blocks", "table_stride", "logits_stride", "width"],
    **at_any_address("logits_ptr", "end_ptr", "owner_ptr", "table_ptr"),
)
def _erase_kernel(
    logits_ptr, end_ptr, owner_ptr, table_ptr, num_blocks, table_stride, logits_stride, width,
    PAGE: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """BLOCK_C blocks of a token a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)  # [BLOCK_C]
    end = tl.load(end_ptr + row)
    seen = column * PAGE < end
    table_row = table_ptr + tl.load(owner_ptr + row).to(tl.int64) * table_stride
    block = tl.load(table_row + column, mask=seen, other=0)  # [BLOCK_C]
    absent = seen & ((block < 0) | (block >= num_blocks))
    if tl.sum(absent.to(tl.int32), 0) > 0:
        position = column[:, None] * PAGE + tl.arange(0, PAGE)[None, :]  # [BLOCK_C, PAGE]
        nothing = tl.full([BLOCK_C, PAGE], float("-inf"), tl.float32)
        tl.store(logits_ptr + row * logits_stride + position, nothing, mask=absent[:, None] & (position < width))


@triton.jit(
    do_not_specialize=["num_logits", "out_stride", "logits_stride"],
    **at_any_address("out_ptr", "logits_ptr", "start_ptr", "end_ptr"),
)
def _window_kernel(
    out_ptr, logits_ptr, start_ptr, end_ptr, num_logits, out_stride, logits_stride,
    RELATIVE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of a row a program."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    start = tl.maximum(tl.load(start_ptr + row), 0)
    inside = (column >= start) & (column < tl.minimum(tl.load(end_ptr + row), num_logits))
    source = logits_ptr + row * logits_stride + column
    if RELATIVE:
        source -= start
    scores = tl.load(source, mask=inside, other=float("-inf"))  # [BLOCK_N]
    scores = tl.where(scores == scores, scores, float("-inf"))
    tl.store(out_ptr + row * out_stride + column, scores, mask=column < num_logits)


_describe, _finish, _erase, _window = map(TritonLauncher, (_describe_kernel, _finish_kernel, _erase_kernel, _window_kernel))


class TritonIndexPasses(IndexPasses):
    """One launch each; see IndexPasses."""

    def describe(self, rows: Rows, pages: Pages, first: int) -> None:
        """Write `rows` of the tokens from `first` on. More than one token a row: for a single request alone."""
        (num_rows, tokens), columns, table = rows.lens.shape, rows.table.shape[1], pages.block_table
        _describe(
            (num_rows, triton.cdiv(columns, _BLOCK_C)),
            rows.starts, rows.ends, rows.owners, rows.lens, rows.table, pages.query_start_loc, pages.seq_lens, table,
            first, pages.seq_lens.shape[0], pages.num_blocks, table.shape[1], table.stride(0), pages.width, columns,
            TOKENS=tokens, PAGE=PAGE, BLOCK_R=_BLOCK_R, BLOCK_C=_BLOCK_C, num_warps=4,
        )  # fmt: skip

    def finish(self, out: Tensor, logits: Tensor, rows: Rows, pages: Pages) -> None:
        """Copy logits [n, width] float32 to out [n, N]: what a token sees and has a block; else, and for NaN, -inf."""
        num_tokens, num_logits = out.shape
        _finish(
            (num_tokens, triton.cdiv(num_logits, _BLOCK_N)),
            out, logits, rows.ends, rows.owners, pages.block_table, pages.num_blocks, pages.block_table.stride(0),
            num_logits, out.stride(0), logits.stride(0),
            PAGE=PAGE, BLOCK_N=_BLOCK_N, num_warps=4,
        )  # fmt: skip

    def erase(self, logits: Tensor, rows: Rows, pages: Pages) -> None:
        """Write -inf to positions of logits [n, width] that a token sees and that have no block in the cache.

        What it does not see may be overwritten as well.
        """
        _erase(
            (logits.shape[0], triton.cdiv(rows.table.shape[1], _ERASED)),
            logits, rows.ends, rows.owners, pages.block_table, pages.num_blocks, pages.block_table.stride(0),
            logits.stride(0), pages.width,
            PAGE=PAGE, BLOCK_C=_ERASED, num_warps=4,
        )  # fmt: skip

    def window(self, out: Tensor, logits: Tensor, row_starts: Tensor, row_ends: Tensor, relative: bool) -> None:
        """See IndexPasses."""
        num_rows, num_logits = out.shape
        _window(
            (num_rows, triton.cdiv(num_logits, _BLOCK_N)),
            out, logits, row_starts, row_ends, num_logits, out.stride(0), logits.stride(0),
            RELATIVE=relative, BLOCK_N=_BLOCK_N, num_warps=4,
        )  # fmt: skip
