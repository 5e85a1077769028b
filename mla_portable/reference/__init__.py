# SPDX-License-Identifier: Apache-2.0
"""The reference backend: every primitive in plain torch, on any device; attention and the indexer in float64 where it can.

It is the embedded default: always there, never fast on a GPU. The oracle of each primitive (`mla_portable.problems`) judges it,
and every other backend, in float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from mla_portable.contracts import LAYOUTS, BoundPrimitive, Implementation, Primitive, Registrar, Request, Support, hookimpl
from mla_portable.primitives import (
    CACHE_WRITE,
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    INDEXER_LOGITS,
    MERGE_STATES,
    QUANTIZE_PER_TENSOR,
    SPARSE_DECODE,
    SPARSE_PREFILL,
    CacheWrite,
    ConvertIndices,
    GatherUpconvert,
    IndexerLogits,
    MergeStates,
    QuantizePerTensor,
    SparseDecode,
    SparsePrefill,
)
from mla_portable.reference.attention import chunk_bytes, sparse_decode, sparse_prefill
from mla_portable.reference.cache import cache_write, gather_upconvert
from mla_portable.reference.indexer import indexer_logits
from mla_portable.reference.indices import convert_indices
from mla_portable.reference.merge import merge_states
from mla_portable.reference.quantize import quantize_per_tensor

__all__ = [
    "cache_write",
    "convert_indices",
    "gather_upconvert",
    "indexer_logits",
    "merge_states",
    "mla_portable_register",
    "quantize_per_tensor",
    "sparse_decode",
    "sparse_prefill",
]

_NAME: Final = "reference.torch"
_PREFERENCE: Final = 1000.0
_CACHED: Final = tuple(LAYOUTS)
_ROWS: Final = "mla_portable.reference.rows"
_ARITHMETIC: Final = "mla_portable.reference.arithmetic"
_LAYOUT: Final = "mla_portable.contracts.layouts"
_PRODUCTS: Final = (SPARSE_DECODE, SPARSE_PREFILL, INDEXER_LOGITS)
"""Those that multiply matrices, and take the `dtype` to do it in."""

# primitive -> its function, the cache layouts it reads or writes, the modules below mla_portable.reference that decide it
_PRIMITIVES: Final[dict[Primitive, tuple[BoundPrimitive, tuple[str, ...], tuple[str, ...]]]] = {
    CACHE_WRITE: (cache_write, _CACHED, ("mla_portable.reference.cache", _ROWS, _LAYOUT)),
    CONVERT_INDICES: (convert_indices, _CACHED, ("mla_portable.reference.indices",)),
    GATHER_UPCONVERT: (gather_upconvert, _CACHED, ("mla_portable.reference.cache", _ROWS, _LAYOUT)),
    SPARSE_DECODE: (sparse_decode, _CACHED, ("mla_portable.reference.attention", _ROWS, _LAYOUT)),
    SPARSE_PREFILL: (sparse_prefill, _CACHED, ("mla_portable.reference.attention", _ROWS, _LAYOUT)),
    MERGE_STATES: (merge_states, (), ("mla_portable.reference.merge",)),
    QUANTIZE_PER_TENSOR: (quantize_per_tensor, (), ("mla_portable.reference.quantize",)),
    INDEXER_LOGITS: (indexer_logits, (), ("mla_portable.reference.indexer",)),
}

if TYPE_CHECKING:
    # the type checker holds each function against its Protocol here
    _cache: tuple[CacheWrite, GatherUpconvert, ConvertIndices] = (cache_write, gather_upconvert, convert_indices)
    _attention: tuple[SparseDecode, SparsePrefill] = (sparse_decode, sparse_prefill)
    _rest: tuple[MergeStates, QuantizePerTensor, IndexerLogits] = (merge_states, quantize_per_tensor, indexer_logits)


def _bind_to(function: BoundPrimitive, primitive: Primitive) -> Callable[[Request], BoundPrimitive]:
    """A `bind`: one function for every shape; products in float32 where the device's float64 cannot be trusted."""

    def bind(request: Request) -> BoundPrimitive:
        if primitive in _PRODUCTS and not request.device.has_fp64:
            return partial(function, dtype=torch.float32)
        return function

    return bind


def _attention_workspace(request: Request) -> int:
    return chunk_bytes(request.device.device_type)


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    """Offer `reference.torch` for every primitive, on every device that torch can use."""
    attention = (SPARSE_DECODE, SPARSE_PREFILL)
    for primitive, (function, kv_layouts, sources) in _PRIMITIVES.items():
        registrar.add(
            Implementation(
                name=_NAME,
                primitive=primitive,
                support=Support(
                    source="mla_portable.reference: plain torch, arithmetic in float64 or float32",
                    device_types=None,
                    kv_layouts=kv_layouts,
                    graph=False,  # it allocates as it goes, and loops on the host
                    needs_bf16=False,
                    workspace_bytes=_attention_workspace if primitive in attention else None,
                ),
                bind=_bind_to(function, primitive),
                preference=_PREFERENCE,
                sources=(*sources, _ARITHMETIC),
            )
        )
