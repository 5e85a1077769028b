# SPDX-License-Identifier: Apache-2.0
"""Portable Triton kernels for mla_portable: the plugin.

Importing this module and registering bring in neither triton nor a kernel; `check` and `bind` do, when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, resources
from typing import Final

from mla_portable.contracts import (
    BoundPrimitive,
    Implementation,
    Primitive,
    ProgramShape,
    Registrar,
    Request,
    Tunable,
    TunableRegistrar,
    hookimpl,
    split_kv_kind,
)
from mla_portable.primitives import (
    CACHE_WRITE,
    CONVERT_INDICES,
    GATHER_UPCONVERT,
    INDEXER_LOGITS,
    MERGE_STATES,
    QUANTIZE_PER_TENSOR,
    SPARSE_DECODE,
    SPARSE_PREFILL,
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
# primitive -> the module with its bind_<primitive>, and the other modules whose text decides what it computes
_PRIMITIVES: Final[dict[Primitive, tuple[str, tuple[str, ...]]]] = {
    CACHE_WRITE: ("bind_data", (f"{_KERNELS}.cache_write", f"{_KERNELS}.e4m3_encode", *_ROWS)),
    CONVERT_INDICES: ("bind_data", (f"{_KERNELS}.convert_indices",)),
    GATHER_UPCONVERT: ("bind_data", (f"{_KERNELS}.gather_upconvert", f"{_KERNELS}.e4m3_decode", *_ROWS)),
    SPARSE_DECODE: ("bind_attention", (*_ATTENTION, f"{_KERNELS}.merge_states")),
    SPARSE_PREFILL: ("bind_attention", _ATTENTION),
    MERGE_STATES: (
        "bind_attention",
        (f"{_KERNELS}.merge_states", f"{_KERNELS}.strides", f"{_KERNELS}.bfloat16"),
    ),
    QUANTIZE_PER_TENSOR: (
        "bind_data",
        (f"{_KERNELS}.quantize_per_tensor", f"{_KERNELS}.e4m3_encode", f"{_KERNELS}.bfloat16"),
    ),
    INDEXER_LOGITS: ("bind_indexer", (f"{_KERNELS}.indexer_logits", f"{_KERNELS}.bfloat16")),
}


def _late_bind(module: str, primitive: Primitive) -> Callable[..., BoundPrimitive]:
    """`bind_<primitive>` of a module that is imported when it is first called for."""

    def bind(request: Request) -> BoundPrimitive:
        return getattr(import_module(f"{_PACKAGE}.{module}"), f"bind_{primitive}")(request)

    return bind


def _program(request: Request) -> ProgramShape:
    from mla_portable_triton.attention_tuning import bound_config

    return bound_config(request).program


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    """Offer `triton.portable` for every primitive."""
    for primitive, (module, others) in _PRIMITIVES.items():
        registrar.add(
            Implementation(
                name=NAME,
                primitive=primitive,
                support=SUPPORT[primitive],
                bind=_late_bind(module, primitive),
                check=check,
                preference=_PREFERENCE,
                schedule_kind=split_kv_kind(_program) if primitive is SPARSE_DECODE else None,
                sources=(f"{_PACKAGE}.{module}", "mla_portable.contracts.triton_launcher", *others),
            )
        )
    registrar.add_costs(resources.files(_PACKAGE).joinpath("costs.json").read_text(encoding="utf-8"))


@hookimpl
def mla_portable_register_tunables(registrar: TunableRegistrar) -> None:
    """Both attention primitives: one kernel, whose tiles, warps and stages depend on the device."""
    from mla_portable_triton.attention_tuning import configurations

    for primitive in (SPARSE_DECODE, SPARSE_PREFILL):
        registrar.add(Tunable(NAME, primitive, configurations))
