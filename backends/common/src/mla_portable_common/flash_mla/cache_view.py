# SPDX-License-Identifier: Apache-2.0
"""The paged cache with the axes that FlashMLA's decode wants, refused where the kernel cannot read it."""

from __future__ import annotations

from functools import partial
from typing import Final

from torch import Tensor

from mla_portable.contracts import InvalidArgument
from mla_portable.layouts import FP8_DS_MLA, CacheLayout
from mla_portable_common.kept_views import KeptViews

_LOAD_BYTES: Final = 16
"""Of a load, which begins at a multiple of as many."""


class CacheView(KeptViews[Tensor]):
    """[blocks, page, 1, row width] of a cache's own memory; blocks may lie apart. For caches of at least one block.

    `of` raises InvalidArgument for an alignment that the kernel cannot read.
    """

    def __init__(self, layout: CacheLayout = FP8_DS_MLA, *, whole_rows: bool = False) -> None:
        """layout: of the caches. whole_rows: the kernel wants a whole number of rows from block to block."""
        super().__init__(partial(_view, layout=layout, whole_rows=whole_rows))


def _view(kv_cache: Tensor, *, layout: CacheLayout, whole_rows: bool) -> Tensor:
    (blocks, page, width), address = kv_cache.shape, kv_cache.data_ptr()
    stride = kv_cache.stride(0) if blocks > 1 else page * width
    size = layout.dtype.itemsize
    multiple = layout.row_pitch if whole_rows else _LOAD_BYTES // size
    if blocks == 1:  # nothing is read at a stride
        stride = -(-stride // multiple) * multiple
    if address % _LOAD_BYTES or stride % multiple:
        strides = f"a stride that is one of {multiple * size} bytes"
        raise InvalidArgument(
            "sparse_decode",
            "kv_cache",
            got=f"address {address:#x}, block stride {stride * size} bytes",
            expected=f"an address that is a multiple of 16, {strides}, for FlashMLA's kernel",
            remedy="Allocate the cache by itself, pad its blocks by whole rows, or take another backend.",
        )
    return kv_cache.as_strided((blocks, page, 1, width), (stride, width, width, 1))
