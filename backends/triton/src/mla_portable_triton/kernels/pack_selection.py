# SPDX-License-Identifier: Apache-2.0
"""pack_selection: positions -> bit masks, a program for each row.

bit j of word w   position starts[t] + 32 w + j is listed; negative positions and those outside of the row are left out

A program clears its row, then sets a bit for each position by an atomic operation, which any order and repetition of positions
leave right. Cost: 4 bytes a position read and an atomic operation in L2, 4 bytes a word written.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.kit.triton_launcher import TritonLauncher, at_any_address
from mla_portable_triton.aot import AotVariant, variant

_TILE: Final = 1024
"""Words that are cleared, or positions that are read, at a time."""
_NUM_WARPS: Final = 4


@triton.jit(
    do_not_specialize=["topk", "width", "num_words", "topk_stride", "out_stride"],
    **at_any_address("out_ptr", "topk_ptr", "start_ptr"),
)
def pack_selection_kernel(
    out_ptr,
    topk_ptr,
    start_ptr,  # None: rows start at 0
    topk,
    width,
    num_words,
    topk_stride,
    out_stride,
    TILE: tl.constexpr,
):
    """Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, TILE)  # [TILE]
    out_row, topk_row = out_ptr + row * out_stride, topk_ptr + row * topk_stride
    for first in range(0, num_words, TILE):
        tl.store(out_row + first + i, tl.zeros([TILE], tl.int32), mask=first + i < num_words)
    tl.debug_barrier()  # every word is clear before one gets a bit
    start = tl.full([], 0, tl.int64)
    if start_ptr is not None:
        start = tl.load(start_ptr + row).to(tl.int64)
    for first in range(0, topk, TILE):
        position = tl.load(topk_row + first + i, mask=first + i < topk, other=-1)  # [TILE] int32
        offset = position.to(tl.int64) - start
        inside = (position >= 0) & (offset >= 0) & (offset < width)
        offset = tl.where(inside, offset, 0).to(tl.int32)
        tl.atomic_or(out_row + offset // 32, tl.full([TILE], 1, tl.int32) << (offset % 32), mask=inside)


_launch = TritonLauncher(pack_selection_kernel)


def launch(out: Tensor, topk_indices: Tensor, starts: Tensor | None, *, width: int) -> None:
    """Write `out` [T, W] int32; its rows and those of topk_indices [T, K] may lie apart. Graph-safe, allocates nothing."""
    num_tokens, topk = topk_indices.shape
    if num_tokens == 0:
        return
    strides = topk_indices.stride(0), out.stride(0)
    _launch(
        (num_tokens,), out, topk_indices, starts, topk, width, out.shape[1], *strides, TILE=_TILE, num_warps=_NUM_WARPS
    )  # fmt: skip


def aot_variants() -> list[AotVariant]:
    """Rows that start at 0, and rows that start anywhere."""
    given = {"out_ptr": "*i32", "topk_ptr": "*i32", "TILE": _TILE}
    return [
        variant(pack_selection_kernel, f"pack_selection-{name}", _NUM_WARPS, **given, start_ptr=start)
        for name, start in (("whole", None), ("starts", "*i32"))
    ]
