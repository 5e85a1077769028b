# SPDX-License-Identifier: Apache-2.0
"""The paged FP8 cache with the axes that FlashMLA's decode wants, refused where the kernel cannot read it."""

from __future__ import annotations

from functools import partial
from typing import Final

from torch import Tensor

from mla_portable.contracts import InvalidArgument
from mla_portable.layouts import FP8_DS_MLA
from mla_portable_nvidia.kept_views import KeptViews

_ROW_BYTES: Final = FP8_DS_MLA.row_bytes


class CacheView(KeptViews[Tensor]):
    """[blocks, page, 1, 656] of a cache's own memory; blocks may lie apart. For caches of at least one block.

    `of` raises InvalidArgument for an alignment that the kernel cannot read.
    """

    def __init__(self, arch: str) -> None:
        super().__init__(partial(_view, arch=arch))


def _view(kv_cache: Tensor, arch: str) -> Tensor:
    (blocks, page, _), address = kv_cache.shape, kv_cache.data_ptr()
    stride = kv_cache.stride(0) if blocks > 1 else page * _ROW_BYTES
    multiple = 16 if arch == "sm90" else _ROW_BYTES
    if address % 16 or stride % multiple:
        raise InvalidArgument(
            "sparse_decode",
            "kv_cache",
            got=f"address {address:#x}, block stride {stride} bytes",
            expected=f"an address that is a multiple of 16, a stride that is one of {multiple} bytes, for FlashMLA on {arch}",
            remedy="Allocate the cache by itself, pad its blocks by whole rows, or take another backend.",
        )
    return kv_cache.as_strided((blocks, page, 1, _ROW_BYTES), (stride, _ROW_BYTES, _ROW_BYTES, 1))
