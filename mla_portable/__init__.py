# SPDX-License-Identifier: Apache-2.0
"""mla_portable: sparse MLA attention (DeepSeek-V3.2 style DSA) by vendors' and portable kernels.

The primitives are functions of this module; `SparseMLAAttention` composes them for an engine's layer, `Planner` prepares a
step for all layers, `use` forces a choice of implementation and `explain` shows it. Names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mla_portable._version import __version__ as __version__

if TYPE_CHECKING:
    from mla_portable.attention import AttentionSpec as AttentionSpec
    from mla_portable.attention import SparseMLAAttention as SparseMLAAttention
    from mla_portable.choose import get_registry as get_registry
    from mla_portable.choose import use as use
    from mla_portable.contracts import Batch as Batch
    from mla_portable.contracts import Decision as Decision
    from mla_portable.contracts import DeviceFacts as DeviceFacts
    from mla_portable.contracts import Implementation as Implementation
    from mla_portable.contracts import InvalidArgument as InvalidArgument
    from mla_portable.contracts import MLAPortableError as MLAPortableError
    from mla_portable.contracts import PlanMismatch as PlanMismatch
    from mla_portable.contracts import Primitive as Primitive
    from mla_portable.contracts import Request as Request
    from mla_portable.contracts import StepPlan as StepPlan
    from mla_portable.contracts import Support as Support
    from mla_portable.contracts import UnknownBackend as UnknownBackend
    from mla_portable.contracts import UnsupportedRequest as UnsupportedRequest
    from mla_portable.explaining import explain as explain
    from mla_portable.planner import Planner as Planner
    from mla_portable.planner import PlannerConfig as PlannerConfig
    from mla_portable.primitives import *

_PRIMITIVES = "mla_portable.primitives"
_HOME = {
    **dict.fromkeys(("AttentionSpec", "SparseMLAAttention"), "mla_portable.attention"),
    **dict.fromkeys(("Batch", "Decision", "DeviceFacts", "Implementation", "InvalidArgument"), "mla_portable.contracts"),
    **dict.fromkeys(("MLAPortableError", "PlanMismatch", "Primitive", "Request"), "mla_portable.contracts"),
    **dict.fromkeys(("StepPlan", "Support", "UnknownBackend", "UnsupportedRequest"), "mla_portable.contracts"),
    "explain": "mla_portable.explaining",
    **dict.fromkeys(("Planner", "PlannerConfig"), "mla_portable.planner"),
    **dict.fromkeys(("get_registry", "use"), "mla_portable.choose"),
}
"""Where names are that load on first use; all others are looked for among the primitives."""


def __getattr__(name: str) -> object:
    if name == "__all__":
        return __dir__()
    if not name.startswith("_"):
        value = getattr(import_module(_HOME.get(name, _PRIMITIVES)), name, None)
        if value is not None:
            globals()[name] = value
            return value
    raise AttributeError(f"module 'mla_portable' has no attribute {name!r}")


def __dir__() -> list[str]:
    exported = vars(import_module(_PRIMITIVES))
    return sorted([*_HOME, "__version__", *(name for name in exported if not name.startswith("_"))])
