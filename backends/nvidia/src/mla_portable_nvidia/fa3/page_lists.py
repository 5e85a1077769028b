# SPDX-License-Identifier: Apache-2.0
"""The pass in front of FlashAttention 3: chosen rows become lists of pages.

The kernel reads a leading part of each list and follows whatever stands in it, so what is absent has to leave the list.
One Triton kernel: a program for each row, which a prefix sum of what counts puts in order.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from mla_portable.kit.triton_launcher import at_any_address
from mla_portable_nvidia.passes.prepared_passes import Arguments, PreparedPass

_INT32_MAX: Final = 2**31 - 1
_BLOCK_K: Final = 2048


@triton.jit(do_not_specialize=["last_row"], **at_any_address("counts_ptr", "lengths_ptr"))
def _page_list_kernel(
    pages_ptr, counts_ptr, indices_ptr, lengths_ptr, last_row, row_stride, length_stride,
    TOPK: tl.constexpr, HAS_LENGTHS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # rows x TOPK passes 2**31 at 1 048 576 rows of 2048
    limit = TOPK
    if HAS_LENGTHS:
        limit = tl.minimum(limit, tl.load(lengths_ptr + row * length_stride))
    count = 0
    for first in range(0, TOPK, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        index = tl.load(indices_ptr + row * row_stride + k, mask=k < limit, other=-1)  # [BLOCK_K]
        counts = ((index >= 0) & (index <= last_row)).to(tl.int32)  # [BLOCK_K]
        place = count + tl.cumsum(counts, 0) - 1  # [BLOCK_K]
        tl.store(pages_ptr + row * TOPK + place, index, mask=counts != 0)
        count += tl.sum(counts, 0)
    tl.store(counts_ptr + row, count)


_list = PreparedPass(_page_list_kernel)


class PageLists:
    """The pass in one launch; nothing for zero rows. It writes what it is given and does not synchronise."""

    def __call__(self, pages: Tensor, counts: Tensor, indices: Tensor, lengths: Tensor | None, num_rows: int) -> None:
        """Bring the indices that count to the front, in their order.

        Args:
            pages: [T, K] int32 contiguous, written; what stands past a row's count is undefined. counts: [T] int32, written.
            indices: [T, K] int32; those that are negative, `num_rows` or more, or past the row's length do not count.
            lengths: [T] int32.
        """
        num_tokens, topk = indices.shape
        if num_tokens == 0:
            return
        last_row = min(num_rows - 1, _INT32_MAX)
        row_stride, length_stride = indices.stride(0), 0 if lengths is None else lengths.stride(0)
        _list(
            (indices.shape, row_stride, length_stride, lengths is None),
            (pages, counts, indices, indices if lengths is None else lengths),
            lambda: Arguments(
                (num_tokens, 1),
                (row_stride, length_stride),
                {
                    "TOPK": topk,
                    "HAS_LENGTHS": lengths is not None,
                    "BLOCK_K": min(triton.next_power_of_2(topk), _BLOCK_K),
                    "num_warps": 8,
                },
            ),
            (last_row,),  # a workspace is as long as its step needs
        )
