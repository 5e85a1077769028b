# SPDX-License-Identifier: Apache-2.0
"""Portable Triton kernels for mla_portable: the plugin.

Importing this module and registering bring in neither triton nor a kernel; `check` and `bind` do, when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Final

from mla_portable.contracts import (
    Implementation,
    Primitive,
    Registrar,
    Request,
    Tunable,
    hookimpl,
)
from mla_portable.contracts.primitive import F
from mla_portable.kit.split_kv import ProgramShape, split_kv_kind
from mla_portable.primitives import (
    CACHE_WRITE,
    CONCAT_MLA_K,
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    INDEXER_CACHE_WRITE,
    INDEXER_LOGITS,
    INDEXER_LOGITS_BLOCKS,
    INDEXER_LOGITS_RAGGED,
    INDEXER_SELECT,
    MASKED_PREFILL,
    MERGE_STATES,
    NORM_ROPE_WRITE,
    PACK_SELECTION,
    QUANTIZE_PER_TENSOR,
    ROPE_QUANTIZE_QUERIES,
    SPARSE_DECODE,
    SPARSE_PREFILL,
    TOPK_SELECT,
)
from mla_portable_triton.attention_configs import program_shape
from mla_portable_triton.attention_tuning import bound_config, configurations
from mla_portable_triton.bind_attention import bind_merge_states, bind_sparse_decode, bind_sparse_prefill
from mla_portable_triton.bind_data import (
    bind_cache_write,
    bind_convert_indices,
    bind_gather_upconvert,
    bind_quantize_per_tensor,
)
from mla_portable_triton.bind_indexer import (
    bind_indexer_cache_write,
    bind_indexer_logits,
    bind_indexer_logits_blocks,
    bind_indexer_logits_ragged,
    bind_indexer_select,
    bind_topk_select,
)
from mla_portable_triton.bind_projections import bind_norm_rope_write, bind_rope_quantize_queries
from mla_portable_triton.bind_prompts import bind_concat_mla_k, bind_masked_prefill, bind_pack_selection
from mla_portable_triton.support import NAME, SUPPORT, check, check_triton_3

__all__ = ["NAME", "mla_portable_register"]

_PREFERENCE: Final = 50.0
_PACKAGE: Final = "mla_portable_triton"

_TRITON_3: Final = (
    *(INDEXER_LOGITS, INDEXER_LOGITS_RAGGED, INDEXER_LOGITS_BLOCKS, TOPK_SELECT, INDEXER_SELECT),
    *(PACK_SELECTION, MASKED_PREFILL),
)
"""Primitives whose kernels are pipelined by `tl.range`, or have tensors without an axis."""


def _program(request: Request) -> ProgramShape:
    return program_shape(bound_config(request), request.kv_layout, request.device)


def _offer(primitive: Primitive[F], bind: Callable[[Request[F]], F]) -> Implementation[F]:
    return Implementation(
        name=NAME,
        primitive=primitive,
        support=SUPPORT[primitive],
        bind=bind,
        check=check_triton_3 if primitive in _TRITON_3 else check,
        preference=_PREFERENCE,
        schedule_kind=split_kv_kind(_program) if primitive == SPARSE_DECODE else None,
    )


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    """Offer `triton.portable` for every primitive."""
    registrar.add(_offer(CACHE_WRITE, bind_cache_write))
    registrar.add(_offer(CONVERT_INDICES, bind_convert_indices))
    registrar.add(_offer(GATHER_UPCONVERT, bind_gather_upconvert))
    registrar.add(_offer(SPARSE_DECODE, bind_sparse_decode))
    registrar.add(_offer(SPARSE_PREFILL, bind_sparse_prefill))
    registrar.add(_offer(MERGE_STATES, bind_merge_states))
    registrar.add(_offer(QUANTIZE_PER_TENSOR, bind_quantize_per_tensor))
    registrar.add(_offer(INDEXER_CACHE_WRITE, bind_indexer_cache_write))
    registrar.add(_offer(INDEXER_LOGITS, bind_indexer_logits))
    registrar.add(_offer(INDEXER_LOGITS_RAGGED, bind_indexer_logits_ragged))
    registrar.add(_offer(INDEXER_LOGITS_BLOCKS, bind_indexer_logits_blocks))
    registrar.add(_offer(TOPK_SELECT, bind_topk_select))
    registrar.add(_offer(INDEXER_SELECT, bind_indexer_select))
    registrar.add(_offer(PACK_SELECTION, bind_pack_selection))
    registrar.add(_offer(CONCAT_MLA_K, bind_concat_mla_k))
    registrar.add(_offer(MASKED_PREFILL, bind_masked_prefill))
    registrar.add(_offer(NORM_ROPE_WRITE, bind_norm_rope_write))
    registrar.add(_offer(ROPE_QUANTIZE_QUERIES, bind_rope_quantize_queries))
    registrar.add_costs(resources.files(_PACKAGE) / "costs")
    registrar.add_tunables(_tunables)


def _tunables() -> list[Tunable]:
    """Both attention primitives: one kernel, whose tiles, warps and stages depend on the device."""
    return [Tunable(NAME, primitive, configurations) for primitive in (SPARSE_DECODE, SPARSE_PREFILL)]
