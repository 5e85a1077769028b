# SPDX-License-Identifier: Apache-2.0
"""indexer_cache_write: write the indexer's keys of new tokens into its paged cache."""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import Primitive
from mla_portable.contracts.values import refuse
from mla_portable.dispatch import find, opaque
from mla_portable.kit.rules import check_cache, check_dense
from mla_portable.kit.tensor_table import Axes, Checked, TensorTable
from mla_portable.layouts import INDEX, INDEX_HEAD_SIZE, layout_of, scale_formats
from mla_portable.primitives._reference import isolated
from mla_portable.primitives.cache_write import Facts, write_rows

__all__ = ["INDEXER_CACHE_WRITE", "IndexerCacheWrite", "indexer_cache_write"]

_HALF: Final = (torch.bfloat16, torch.float16)

TENSORS: Final = TensorTable(
    "indexer_cache_write",
    {
        "k": Axes("T width"),
        "index_cache": Checked(written=True),
        "slot_mapping": Axes("T", torch.int64),
    },
    given="width",
)


class IndexerCacheWrite(Protocol):
    """Write the indexer's keys of new tokens into its paged cache.

    k [T, 128] bf16/fp16; index_cache [blocks, block_size, 128] bf16 or [blocks, block_size, 132] uint8, written;
    slot_mapping [T] int64: a slot that is negative or past the cache is skipped; slots are distinct.
    scale_format "pow2" or "amax" (`mla_portable.layouts.index`); a bf16 cache has no scales and ignores it.
    """

    def __call__(self, k: Tensor, index_cache: Tensor, slot_mapping: Tensor, *, scale_format: str = "pow2") -> None: ...


@opaque
def indexer_cache_write(
    k: Tensor,
    index_cache: Tensor,
    slot_mapping: Tensor,
    *,
    scale_format: str = "pow2",
    kv_layout: str | None = None,
    backend: str | None = None,
) -> None:
    """Write the indexer's keys of new tokens into its paged cache.

    Args:
        k: [T, 128] bf16 or fp16.
        index_cache: [blocks, block_size, 128] bf16, or [blocks, block_size, 132] uint8, whose blocks are block_size * 128 e4m3
            bytes and then block_size float32 scales; written.
        slot_mapping: [T] int64; a slot that is negative or past the cache is skipped. Slots are distinct.
        scale_format: "pow2" or "amax", how FP8 scales are chosen; ignored for a bf16 cache.
        kv_layout, backend: see `mla_portable.primitives`.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe. Formats: `mla_portable.layouts.index`.
    """
    facts = check(k, index_cache, slot_mapping, scale_format, kv_layout)
    find(INDEXER_CACHE_WRITE, backend, k, facts).call(k, index_cache, slot_mapping, scale_format=scale_format)


def check(k: Tensor, index_cache: Tensor, slot_mapping: Tensor, scale_format: str, kv_layout: str | None = None) -> Facts:
    """Raise InvalidArgument, or return the facts."""
    where = TENSORS.where
    check_dense(where, "k", k, "[T, 128]")
    if k.dtype not in _HALF:
        refuse(where, "k", k.dtype, "torch.bfloat16 or torch.float16")
    cache = check_cache(where, "index_cache", index_cache, k.device, INDEX, kv_layout=kv_layout)
    layout = cache.layout
    TENSORS.check((k, index_cache, slot_mapping), {"width": INDEX_HEAD_SIZE}, k.dtype)
    formats = layout.scale_formats or scale_formats()
    if scale_format not in formats:
        refuse(where, "scale_format", repr(scale_format), " or ".join(map(repr, formats)))
    written = scale_format if layout.is_quantized else None
    return Facts(*cache, written)


@isolated
def reference(
    k: Tensor, index_cache: Tensor, slot_mapping: Tensor, *, scale_format: str = "pow2", kv_layout: str | None = None
) -> None:
    """Rows are exactly what the layout's `pack` makes. Synchronises the host on a GPU. Not graph-safe."""
    layout = layout_of(index_cache, name=kv_layout, where="indexer_cache_write", argument="index_cache", cache=INDEX)
    write_rows(layout, index_cache, slot_mapping, k, k[:, :0], scale_format)


INDEXER_CACHE_WRITE: Final = Primitive[IndexerCacheWrite](
    "indexer_cache_write",
    module=__name__,
    facts=Facts._fields,
    cache=INDEX,
    typical={"kv_layout": "index_fp8"},
    reference=reference,
)
