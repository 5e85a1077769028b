# SPDX-License-Identifier: Apache-2.0
"""Portable Triton kernels for mla_portable: the plugin.

Importing this module and registering bring in neither triton nor a kernel; `check` and `bind` do, when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Final

from mla_portable.contracts import Implementation, Primitive, ProgramShape, Registrar, Request, Tunable, hookimpl, split_kv_kind
from mla_portable.contracts.primitive import F
from mla_portable.primitives import (
    CACHE_WRITE,
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    INDEXER_CACHE_WRITE,
    INDEXER_LOGITS,
    INDEXER_LOGITS_RAGGED,
    INDEXER_SELECT,
    MERGE_STATES,
    QUANTIZE_PER_TENSOR,
    SPARSE_DECODE,
    SPARSE_PREFILL,
    TOPK_SELECT,
)
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
    bind_indexer_logits_ragged,
    bind_indexer_select,
    bind_topk_select,
)
from mla_portable_triton.support import NAME, SUPPORT, check, check_triton_3

__all__ = ["NAME", "mla_portable_register", "mla_portable_register_tunables"]

_PREFERENCE: Final = 50.0
_PACKAGE: Final = "mla_portable_triton"

_KERNELS: Final = f"{_PACKAGE}.kernels"
_LAYOUTS: Final = ("mla_portable.layouts.bf16", "mla_portable.layouts.fp8_ds_mla")
_ROWS: Final = (f"{_KERNELS}.bfloat16", f"{_KERNELS}.row_layout", *_LAYOUTS)
_ATTENTION: Final = (
    f"{_PACKAGE}.attention_configs::CONFIGS[{{arch}}]",
    f"{_PACKAGE}.attention_configs::attention_config",
    f"{_PACKAGE}.attention_tuning",
    f"{_KERNELS}.sparse_attention",
    f"{_KERNELS}.strides",
    f"{_KERNELS}.e4m3_decode",
    *_ROWS,
)


_TRITON_3: Final = (INDEXER_LOGITS, INDEXER_LOGITS_RAGGED, TOPK_SELECT, INDEXER_SELECT)
"""Primitives whose kernels are pipelined by `tl.range`, or have tensors without an axis."""


def _program(request: Request) -> ProgramShape:
    return bound_config(request).program


def _offer(primitive: Primitive[F], bind: Callable[[Request[F]], F], *others: str) -> Implementation[F]:
    """others: the modules, beside that of `bind`, whose text decides what it computes."""
    return Implementation(
        name=NAME,
        primitive=primitive,
        support=SUPPORT[primitive],
        bind=bind,
        check=check_triton_3 if primitive in _TRITON_3 else check,
        preference=_PREFERENCE,
        schedule_kind=split_kv_kind(_program) if primitive == SPARSE_DECODE else None,
        sources=(bind.__module__, "mla_portable.contracts.triton_launcher", *others),
    )


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    """Offer `triton.portable` for every primitive."""
    encoded, decoded, rounded = (f"{_KERNELS}.{name}" for name in ("e4m3_encode", "e4m3_decode", "bfloat16"))
    merge, strides, index = (f"{_KERNELS}.{name}" for name in ("merge_states", "strides", "convert_indices"))
    registrar.add(_offer(CACHE_WRITE, bind_cache_write, f"{_KERNELS}.cache_write", encoded, *_ROWS))
    registrar.add(_offer(CONVERT_INDICES, bind_convert_indices, index))
    registrar.add(_offer(GATHER_UPCONVERT, bind_gather_upconvert, f"{_KERNELS}.gather_upconvert", decoded, *_ROWS))
    registrar.add(_offer(SPARSE_DECODE, bind_sparse_decode, *_ATTENTION, merge))
    registrar.add(_offer(SPARSE_PREFILL, bind_sparse_prefill, *_ATTENTION))
    registrar.add(_offer(MERGE_STATES, bind_merge_states, merge, strides, rounded))
    registrar.add(_offer(QUANTIZE_PER_TENSOR, bind_quantize_per_tensor, f"{_KERNELS}.quantize_per_tensor", encoded, rounded))
    scores = (f"{_KERNELS}.indexer_logits", f"{_KERNELS}.index_keys", decoded, rounded, "mla_portable.layouts.index")
    topk = f"{_KERNELS}.topk_select"
    shared = (f"{_KERNELS}.cache_write::{name}" for name in ("scaled_tile", "in_whole_vectors"))
    written = (f"{_KERNELS}.indexer_cache_write", *shared, encoded, rounded, scores[-1])
    registrar.add(_offer(INDEXER_CACHE_WRITE, bind_indexer_cache_write, *written))
    registrar.add(_offer(INDEXER_LOGITS, bind_indexer_logits, *scores))
    registrar.add(_offer(INDEXER_LOGITS_RAGGED, bind_indexer_logits_ragged, f"{_KERNELS}.indexer_logits_ragged", *scores))
    registrar.add(_offer(TOPK_SELECT, bind_topk_select, topk))
    parts = "mla_portable.primitives._select_in_parts", f"{_KERNELS}.chosen_scores"
    registrar.add(_offer(INDEXER_SELECT, bind_indexer_select, *parts, *scores, topk))
    registrar.add_costs(resources.files(_PACKAGE).joinpath("costs.json").read_text(encoding="utf-8"))


@hookimpl
def mla_portable_register_tunables(registrar: Registrar) -> None:
    """Both attention primitives: one kernel, whose tiles, warps and stages depend on the device."""
    for primitive in (SPARSE_DECODE, SPARSE_PREFILL):
        registrar.add(Tunable(NAME, primitive, configurations))
