# SPDX-License-Identifier: Apache-2.0
"""The paged FP8 cache with the axes that FlashMLA's decode wants, refused where the kernel cannot read it.

Creating a view costs more host time than the rest of a plain call, and layers pass the same caches in every step. So a view is
kept for as long as the caller's tensor lives, and no longer: it never keeps a cache's memory alive.
"""

from __future__ import annotations

import weakref
from typing import Final

from torch import Tensor

from mla_portable.contracts import InvalidArgument
from mla_portable.layouts import FP8_DS_MLA

_ROW_BYTES: Final = FP8_DS_MLA.row_bytes

_Seen = tuple["weakref.ref[Tensor]", int, tuple[int, ...], tuple[int, ...], Tensor]
"""A caller's tensor; its address, shape and strides when the view was made; the view."""


class CacheView:
    """[blocks, page, 1, 656] of a cache's own memory; blocks may lie apart."""

    def __init__(self, arch: str) -> None:
        self._arch = arch
        self._block_stride_multiple = _ROW_BYTES if arch != "sm90" else 16
        self._seen: dict[int, _Seen] = {}  # by the identity of the caller's tensor

    def known(self, kv_cache: Tensor) -> Tensor | None:
        """What `of` returned for this tensor, unless its memory, shape or strides have changed since; else None."""
        seen = self._seen.get(id(kv_cache))
        if seen is None:
            return None
        tensor, address, shape, strides, rows = seen
        same = tensor() is kv_cache and kv_cache.data_ptr() == address
        return rows if same and kv_cache.shape == shape and kv_cache.stride() == strides else None

    def of(self, kv_cache: Tensor) -> Tensor:
        """The view of a cache of at least one block. Raises: InvalidArgument for an alignment that the kernel cannot read."""
        rows = self.known(kv_cache)
        return self._look_at(kv_cache) if rows is None else rows

    def _look_at(self, kv_cache: Tensor) -> Tensor:
        shape, address = kv_cache.shape, kv_cache.data_ptr()
        blocks, page, _ = shape
        stride = kv_cache.stride(0) if blocks > 1 else page * _ROW_BYTES
        if address % 16 or stride % self._block_stride_multiple:
            raise InvalidArgument(
                "sparse_decode",
                "kv_cache",
                got=f"address {address:#x}, block stride {stride} bytes",
                expected=f"an address that is a multiple of 16, a stride that is one of {self._block_stride_multiple} bytes, "
                f"for FlashMLA on {self._arch}",
                remedy="Allocate the cache by itself, pad its blocks by whole rows, or take another backend.",
            )
        # detached: the view of a tensor that autograd knows about would keep that tensor alive
        rows = kv_cache.detach().as_strided((blocks, page, 1, _ROW_BYTES), (stride, _ROW_BYTES, _ROW_BYTES, 1))
        key = id(kv_cache)
        self._seen[key] = (
            weakref.ref(kv_cache, lambda tensor: self._forget(key, tensor)),
            address,
            shape,
            kv_cache.stride(),
            rows,
        )
        return rows

    def _forget(self, key: int, tensor: weakref.ref[Tensor]) -> None:
        if key in self._seen and self._seen[key][0] is tensor:
            del self._seen[key]
