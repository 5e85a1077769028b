# SPDX-License-Identifier: Apache-2.0
"""cache_write and indexer_cache_write through AITER's `concat_and_cache_mla` and `indexer_k_quant_and_cache`.

Both skip negative slots and do not look for those past the cache. The first reads the strides of the cache; the second takes
blocks that follow one another, and writes e4m3 of the device: OCP's on gfx950, fnuz on gfx942. Both multiply by the
reciprocal of a scale, which rounds as a division does for powers of two alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import Request
from mla_portable.layouts import INDEX_HEAD_SIZE, CacheLayout
from mla_portable_amd.layouts import codes_of, pages_of
from mla_portable_amd.library import Op

_VECTOR_BYTES: Final = 16
"""That are loaded at once."""


def _aligned(rows: Tensor) -> Tensor:
    """Rows [T, width] whose numbers follow one another, each row at a multiple of 16 bytes."""
    starts = (rows.data_ptr(), rows.stride(0) * rows.element_size())
    fits = rows.stride(1) == 1 and not any(start % _VECTOR_BYTES for start in starts)
    return rows if fits else rows.clone(memory_format=torch.contiguous_format)


def _slots_of(cache: Tensor, slot_mapping: Tensor) -> Tensor:
    """Slots of the cache, and -1."""
    count = cache.shape[0] * cache.shape[1]
    return torch.where((slot_mapping >= 0) & (slot_mapping < count), slot_mapping, -1)


def bind_cache_write(op: Op, request: Request[Any]) -> Callable[..., None]:
    """cache_write of bf16 or e4m3 rows through `op(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale)`."""
    code = codes_of(request.kv_layout)
    largest, kind = (None, "auto") if code is None else (torch.finfo(code).max, "fp8")

    def cache_write(
        kv_c: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        *,
        scale_format: str = "pow2",
        kv_scale: Tensor | None = None,
    ) -> None:
        if slot_mapping.shape[0] == 0 or kv_cache.numel() == 0:
            return
        if largest is None or kv_scale is None:
            kv_c, k_pe = kv_c.to(torch.bfloat16), k_pe.to(torch.bfloat16)
        else:  # divided here, as the operation multiplies by a reciprocal
            kv_c, k_pe = ((each.float() / kv_scale).clamp_(-largest, largest) for each in (kv_c, k_pe))
        one = torch.ones(1, dtype=torch.float32, device=kv_c.device)
        op(_aligned(kv_c), _aligned(k_pe), kv_cache, _slots_of(kv_cache, slot_mapping), kind, one)

    return cache_write


def bind_indexer_cache_write(op: Op, request: Request[Any]) -> Callable[..., None]:
    """indexer_cache_write of pow2 scales through `op(k, kv_cache, slot_mapping, quant_block_size, scale_fmt, preshuffle=)`."""
    layout, code, tiles = pages_of(request.kv_layout)

    def indexer_cache_write(k: Tensor, index_cache: Tensor, slot_mapping: Tensor, *, scale_format: str = "pow2") -> None:
        if slot_mapping.shape[0] == 0 or index_cache.numel() == 0:
            return
        blocks, block_size, width = index_cache.shape
        slots, block = _slots_of(index_cache, slot_mapping), block_size * width
        apart, rest = divmod(index_cache.stride(0) if blocks > 1 else block, block)
        pages = index_cache
        if rest:  # blocks lie apart by part of a block: the tokens are packed as blocks of one, and placed
            pages = index_cache.new_empty((k.shape[0], 1, width))
            slots = torch.where(slots < 0, slots, torch.arange(k.shape[0], device=slots.device))
        elif apart > 1:  # by whole blocks: those between count as blocks that no slot names
            pages = index_cache.as_strided((1 + (blocks - 1) * apart, block_size, width), (block, width, 1))
            slots = torch.where(slots < 0, slots, slots // block_size * apart * block_size + slots % block_size)
        op(_aligned(k.contiguous()), pages.view(code), slots, INDEX_HEAD_SIZE, "ue8m0", preshuffle=tiles and not rest)
        if rest:
            _place(pages.squeeze(1), layout, index_cache, _slots_of(index_cache, slot_mapping))

    return indexer_cache_write


def _place(rows: Tensor, layout: CacheLayout, index_cache: Tensor, slots: Tensor) -> None:
    """Rows [T, 132] of blocks of one token, codes and then the scale, at slots [T] of the cache; -1 is left out.

    A token without a slot repeats the first that has one, so that the host need not know how many there are; where none has,
    slot 0 keeps what it holds.
    """
    kept, token = slots >= 0, torch.arange(slots.shape[0], device=slots.device)
    token = torch.where(kept, token, kept.to(torch.uint8).argmax())
    slot = slots[token].clamp(min=0)
    at = slot // index_cache.shape[1], slot % index_cache.shape[1]
    for part, new in zip(layout.parts(index_cache), layout.pieces(rows), strict=True):
        part[at] = torch.where(kept.any(), new[token], part[at])
