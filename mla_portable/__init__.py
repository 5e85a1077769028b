# SPDX-License-Identifier: Apache-2.0
"""mla_portable: sparse MLA attention (DeepSeek-V3.2 style DSA) on whatever its users deploy.

The primitives are functions of this module; `SparseMLAAttention` composes them for an engine's layer, `Planner` prepares a
step for all layers, `use` and `explain` steer and show which implementation serves. Names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "AttentionSpec": "mla_portable.attention",
    "Batch": "mla_portable.contracts",
    "Decision": "mla_portable.contracts",
    "DeviceFacts": "mla_portable.contracts",
    "Implementation": "mla_portable.contracts",
    "InvalidArgument": "mla_portable.contracts",
    "MLAPortableError": "mla_portable.contracts",
    "PlanMismatch": "mla_portable.contracts",
    "Planner": "mla_portable.planner",
    "PlannerConfig": "mla_portable.planner",
    "Primitive": "mla_portable.contracts",
    "Request": "mla_portable.contracts",
    "SparseMLAAttention": "mla_portable.attention",
    "StepPlan": "mla_portable.contracts",
    "Support": "mla_portable.contracts",
    "UnknownBackend": "mla_portable.contracts",
    "UnsupportedRequest": "mla_portable.contracts",
    "cache_write": "mla_portable.api",
    "convert_indices": "mla_portable.api",
    "explain": "mla_portable.api",
    "gather_upconvert": "mla_portable.api",
    "get_registry": "mla_portable.registry",
    "indexer_logits": "mla_portable.api",
    "merge_states": "mla_portable.api",
    "quantize_per_tensor": "mla_portable.api",
    "sparse_decode": "mla_portable.api",
    "sparse_prefill": "mla_portable.api",
    "use": "mla_portable.registry",
}

if TYPE_CHECKING:
    from mla_portable.api import (
        cache_write,
        convert_indices,
        explain,
        gather_upconvert,
        indexer_logits,
        merge_states,
        quantize_per_tensor,
        sparse_decode,
        sparse_prefill,
    )
    from mla_portable.attention import AttentionSpec, SparseMLAAttention
    from mla_portable.contracts import (
        Batch,
        Decision,
        DeviceFacts,
        Implementation,
        InvalidArgument,
        MLAPortableError,
        PlanMismatch,
        Primitive,
        Request,
        StepPlan,
        Support,
        UnknownBackend,
        UnsupportedRequest,
    )
    from mla_portable.planner import Planner, PlannerConfig
    from mla_portable.registry import get_registry, use

__all__ = [
    "AttentionSpec",
    "Batch",
    "Decision",
    "DeviceFacts",
    "Implementation",
    "InvalidArgument",
    "MLAPortableError",
    "PlanMismatch",
    "Planner",
    "PlannerConfig",
    "Primitive",
    "Request",
    "SparseMLAAttention",
    "StepPlan",
    "Support",
    "UnknownBackend",
    "UnsupportedRequest",
    "__version__",
    "cache_write",
    "convert_indices",
    "explain",
    "gather_upconvert",
    "get_registry",
    "indexer_logits",
    "merge_states",
    "quantize_per_tensor",
    "sparse_decode",
    "sparse_prefill",
    "use",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'mla_portable' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
