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
    ProgramShape,
    Registrar,
    Request,
    Tunable,
    hookimpl,
    split_kv_kind,
)
from mla_portable.contracts.primitive import F
from mla_portable.primitives import (
    CACHE_WRITE,
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    INDEXER_LOGITS,
    MERGE_STATES,
    QUANTIZE_PER_TENSOR,
    SPARSE_DECODE,
    SPARSE_PREFILL,
    TOPK_SELECT,
    CacheWrite,
    ConvertIndices,
    GatherUpconvert,
    IndexerLogits,
    MergeStates,
    QuantizePerTensor,
    SparseDecode,
    SparsePrefill,
    TopkSelect,
)
from mla_portable_triton.support import SUPPORT, check

__all__ = ["NAME", "mla_portable_register", "mla_portable_register_tunables"]

NAME: Final = "triton.portable"
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


def _cache_write(request: Request) -> CacheWrite:
    from mla_portable_triton.bind_data import bind_cache_write

    return bind_cache_write(request)


def _convert_indices(request: Request) -> ConvertIndices:
    from mla_portable_triton.bind_data import bind_convert_indices

    return bind_convert_indices(request)


def _gather_upconvert(request: Request) -> GatherUpconvert:
    from mla_portable_triton.bind_data import bind_gather_upconvert

    return bind_gather_upconvert(request)


def _sparse_decode(request: Request) -> SparseDecode:
    from mla_portable_triton.bind_attention import bind_sparse_decode

    return bind_sparse_decode(request)


def _sparse_prefill(request: Request) -> SparsePrefill:
    from mla_portable_triton.bind_attention import bind_sparse_prefill

    return bind_sparse_prefill(request)


def _merge_states(request: Request) -> MergeStates:
    from mla_portable_triton.bind_attention import bind_merge_states

    return bind_merge_states(request)


def _quantize_per_tensor(request: Request) -> QuantizePerTensor:
    from mla_portable_triton.bind_data import bind_quantize_per_tensor

    return bind_quantize_per_tensor(request)


def _indexer_logits(request: Request) -> IndexerLogits:
    from mla_portable_triton.bind_indexer import bind_indexer_logits

    return bind_indexer_logits(request)


def _topk_select(request: Request) -> TopkSelect:
    from mla_portable_triton.bind_indexer import bind_topk_select

    return bind_topk_select(request)


def _program(request: Request) -> ProgramShape:
    from mla_portable_triton.attention_tuning import bound_config

    return bound_config(request).program


def _offer(primitive: Primitive[F], bind: Callable[[Request[F]], F], module: str, others: tuple[str, ...]) -> Implementation[F]:
    """`bind` takes its function from `module`; `others` are further modules whose text decides what it computes."""
    return Implementation(
        name=NAME,
        primitive=primitive,
        support=SUPPORT[primitive],
        bind=bind,
        check=check,
        preference=_PREFERENCE,
        schedule_kind=split_kv_kind(_program) if primitive == SPARSE_DECODE else None,
        sources=(f"{_PACKAGE}.{module}", "mla_portable.contracts.triton_launcher", *others),
    )


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    """Offer `triton.portable` for every primitive."""
    registrar.add(
        _offer(CACHE_WRITE, _cache_write, "bind_data", (f"{_KERNELS}.cache_write", f"{_KERNELS}.e4m3_encode", *_ROWS))
    )
    registrar.add(_offer(CONVERT_INDICES, _convert_indices, "bind_data", (f"{_KERNELS}.convert_indices",)))
    registrar.add(
        _offer(
            GATHER_UPCONVERT,
            _gather_upconvert,
            "bind_data",
            (f"{_KERNELS}.gather_upconvert", f"{_KERNELS}.e4m3_decode", *_ROWS),
        )
    )
    registrar.add(_offer(SPARSE_DECODE, _sparse_decode, "bind_attention", (*_ATTENTION, f"{_KERNELS}.merge_states")))
    registrar.add(_offer(SPARSE_PREFILL, _sparse_prefill, "bind_attention", _ATTENTION))
    registrar.add(
        _offer(
            MERGE_STATES,
            _merge_states,
            "bind_attention",
            (f"{_KERNELS}.merge_states", f"{_KERNELS}.strides", f"{_KERNELS}.bfloat16"),
        )
    )
    registrar.add(
        _offer(
            QUANTIZE_PER_TENSOR,
            _quantize_per_tensor,
            "bind_data",
            (f"{_KERNELS}.quantize_per_tensor", f"{_KERNELS}.e4m3_encode", f"{_KERNELS}.bfloat16"),
        )
    )
    registrar.add(
        _offer(INDEXER_LOGITS, _indexer_logits, "bind_indexer", (f"{_KERNELS}.indexer_logits", f"{_KERNELS}.bfloat16"))
    )
    registrar.add(_offer(TOPK_SELECT, _topk_select, "bind_indexer", (f"{_KERNELS}.topk_select",)))
    registrar.add_costs(resources.files(_PACKAGE).joinpath("costs.json").read_text(encoding="utf-8"))


@hookimpl
def mla_portable_register_tunables(registrar: Registrar) -> None:
    """Both attention primitives: one kernel, whose tiles, warps and stages depend on the device."""
    from mla_portable_triton.attention_tuning import configurations

    for primitive in (SPARSE_DECODE, SPARSE_PREFILL):
        registrar.add(Tunable(NAME, primitive, configurations))
