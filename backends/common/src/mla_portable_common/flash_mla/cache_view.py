# SPDX-License-Identifier: Apache-2.0
"""The paged FP8 cache with the axes that FlashMLA's decode wants, refused where the kernel cannot read it."""

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
    """[blocks, page, 1, row bytes] of a cache's own memory; blocks may lie apart. For caches of at least one block.

    `of` raises InvalidArgument for an alignment that the kernel cannot read.
    """

    def __init__(self, arch: str, layout: CacheLayout = FP8_DS_MLA) -> None:
        """layout: of the caches, whose rows are bytes."""
        super().__init__(partial(_view, arch=arch, row_bytes=layout.row_bytes, row_pitch=layout.row_pitch))


def _view(kv_cache: Tensor, *, arch: str, row_bytes: int, row_pitch: int) -> Tensor:
    (blocks, page, _), address = kv_cache.shape, kv_cache.data_ptr()
    stride = kv_cache.stride(0) if blocks > 1 else page * row_bytes
    multiple = _LOAD_BYTES if arch == "sm90" else row_pitch
    if blocks == 1:  # nothing is read at a stride
        stride = -(-stride // multiple) * multiple
    if address % _LOAD_BYTES or stride % multiple:
        raise InvalidArgument(
            "sparse_decode",
            "kv_cache",
            got=f"address {address:#x}, block stride {stride} bytes",
            expected=f"an address that is a multiple of 16, a stride that is one of {multiple} bytes, for FlashMLA on {arch}",
            remedy="Allocate the cache by itself, pad its blocks by whole rows, or take another backend.",
        )
    return kv_cache.as_strided((blocks, page, 1, row_bytes), (stride, row_bytes, row_bytes, 1))
