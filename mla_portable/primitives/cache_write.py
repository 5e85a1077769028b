# SPDX-License-Identifier: Apache-2.0
"""cache_write: write new tokens into the paged cache."""

from __future__ import annotations

from typing import Final, Protocol

from torch import Tensor

from mla_portable.contracts.primitive import Primitive

__all__ = ["CACHE_WRITE", "CacheWrite"]


class CacheWrite(Protocol):
    """Write new tokens into the paged cache.

    kv_c [T, 512] bf16/fp16, k_pe [T, 64] same dtype; kv_cache [blocks, block_size, 576] bf16 or [.., 656] uint8, written;
    for a layout without a rotary part k_pe is [T, 0], whose memory is not read;
    slot_mapping [T] int64, a negative or out-of-range slot is skipped; scale_format "pow2" or "amax" (FP8 only).
    """

    def __call__(
        self, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *, scale_format: str = "pow2"
    ) -> None: ...


CACHE_WRITE: Final = Primitive[CacheWrite](
    "cache_write",
    module=__name__,
    facts=("kv_layout", "block_size", "cache_alignment", "uneven_blocks", "scale_format"),
    has_layout=True,
)
