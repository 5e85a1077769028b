# SPDX-License-Identifier: Apache-2.0
"""cache_write: write new tokens into the paged cache."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import Primitive
from mla_portable.contracts.values import refuse
from mla_portable.dispatch import find, opaque
from mla_portable.kit.rules import check_cache, check_dense
from mla_portable.kit.tensor_scales import check_kv_scale, tensor_scales
from mla_portable.kit.tensor_table import Axes, Checked, TensorTable
from mla_portable.layouts import KV, Cache, CacheLayout, layout_of, scale_formats
from mla_portable.primitives._reference import isolated

__all__ = ["CACHE_WRITE", "CacheWrite", "cache_write"]

_HALF: Final = (torch.bfloat16, torch.float16)
_CHUNK_TOKENS: Final = 16384
"""Tokens handled at a time: some 100 MB of float32 rows with their temporaries, whatever the batch."""

TENSORS: Final = TensorTable(
    "cache_write",
    {
        "kv_c": Axes("T latent"),
        "k_pe": Axes("T rope"),
        "kv_cache": Checked(written=True),
        "slot_mapping": Axes("T", torch.int64),
    },
    given="latent rope",
)


class CacheWrite(Protocol):
    """Write new tokens into the paged cache.

    kv_c [T, 512] bf16/fp16, k_pe [T, 64] same dtype; kv_cache [blocks, block_size, 576] bf16 or [.., 656] uint8, written;
    for a layout without a rotary part k_pe is [T, 0], whose memory is not read;
    slot_mapping [T] int64, a negative or out-of-range slot is skipped; scale_format "pow2" or "amax" (FP8 only).
    """

    def __call__(
        self, kv_c: Tensor, k_pe: Tensor, kv_cache: Any, slot_mapping: Tensor, *, scale_format: str = "pow2"
    ) -> None: ...


@opaque
def cache_write(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Cache,
    slot_mapping: Tensor,
    *,
    scale_format: str = "pow2",
    kv_scale: Tensor | None = None,
    kv_layout: str | None = None,
    backend: str | None = None,
) -> None:
    """Write new tokens into the paged cache.

    Args:
        kv_c: [T, 512] bf16 or fp16, the compressed latent. k_pe: [T, 64] of the same dtype, the rotary key.
        kv_cache: [blocks, block_size, 576] bf16 or [blocks, block_size, 656] uint8, written in place; blocks may lie
            further apart than a block is long.
        slot_mapping: [T] int64; a slot that is negative or past the cache is skipped.
        scale_format: how FP8 scales are made: "pow2" (powers of two) or "amax" (amax / 448). A bf16 cache has none.
        kv_scale: float32, one element: numbers are divided by it; for layouts with `tensor_scale` and no others.
        kv_layout, backend: see `mla_portable.primitives`.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe. Row formats: `mla_portable.layouts`.
    """
    facts = check(kv_c, k_pe, kv_cache, slot_mapping, scale_format, kv_scale, kv_layout)
    scales = tensor_scales(kv_scale)
    find(CACHE_WRITE, backend, kv_c, facts).call(kv_c, k_pe, kv_cache, slot_mapping, scale_format=scale_format, **scales)


class Facts(NamedTuple):
    """The fields of a Request that a call's arguments decide, here and of indexer_cache_write."""

    kv_layout: str
    block_size: int | None
    cache_alignment: int
    uneven_blocks: bool
    scale_format: str | None


def check(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Cache,
    slot_mapping: Tensor,
    scale_format: str,
    kv_scale: Tensor | None = None,
    kv_layout: str | None = None,
) -> Facts:
    """Raise InvalidArgument, or return the facts."""
    where = TENSORS.where
    check_dense(where, "kv_c", kv_c, "[T, 512]")
    if kv_c.dtype not in _HALF:
        refuse(where, "kv_c", kv_c.dtype, "torch.bfloat16 or torch.float16")
    cache = check_cache(where, "kv_cache", kv_cache, kv_c.device, kv_layout=kv_layout)
    layout = cache.layout
    check_kv_scale(where, layout, kv_scale, kv_c.device)
    widths = {"latent": layout.value_width, "rope": layout.rope_width}
    TENSORS.check((kv_c, k_pe, kv_cache, slot_mapping), widths, kv_c.dtype)
    formats = layout.scale_formats or scale_formats()
    if scale_format not in formats:
        refuse(where, "scale_format", repr(scale_format), " or ".join(map(repr, formats)))
    written = scale_format if layout.scale_formats else None
    return Facts(*cache, written)


@isolated
def reference(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Cache,
    slot_mapping: Tensor,
    *,
    scale_format: str = "pow2",
    kv_scale: Tensor | None = None,
    kv_layout: str | None = None,
) -> None:
    """Write new tokens into the paged cache.

    Rows are exactly what the layout's `pack` makes. Synchronises the host on a GPU. Not graph-safe.
    """
    layout = layout_of(kv_cache, name=kv_layout, where="cache_write")
    write_rows(layout, kv_cache, slot_mapping, kv_c, k_pe, scale_format, kv_scale)


def write_rows(
    layout: CacheLayout,
    cache: Cache,
    slot_mapping: Tensor,
    latent: Tensor,
    rope: Tensor,
    scale_format: str,
    kv_scale: Tensor | None = None,
) -> None:
    """Pack the tokens [T, ..] whose slot is in the cache, and place them."""
    parts = layout.parts(cache)
    blocks, block_size = parts[0].shape[:2]
    for begin in range(0, slot_mapping.shape[0], _CHUNK_TOKENS):
        chunk = slice(begin, begin + _CHUNK_TOKENS)
        slots = slot_mapping[chunk].long()
        kept = ((slots >= 0) & (slots < blocks * block_size)).nonzero().squeeze(1)
        slots = slots[kept]
        values_of = latent[chunk][kept], rope[chunk][kept]
        if kv_scale is not None:
            values_of = values_of[0].float() / kv_scale, values_of[1].float() / kv_scale
        rows = layout.pack(*values_of, scale_format)
        for part, values in zip(parts, layout.pieces(rows), strict=True):
            part[slots // block_size, slots % block_size] = values


CACHE_WRITE: Final = Primitive[CacheWrite](
    "cache_write",
    module=__name__,
    facts=Facts._fields,
    cache=KV,
    reference=reference,
)
