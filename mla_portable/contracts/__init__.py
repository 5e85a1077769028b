# SPDX-License-Identifier: Apache-2.0
"""The language that core and plugins share: requests, support, plans, errors, the hook."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Final

from mla_portable.contracts.decision import Decision, UnsupportedRequest, Verdict
from mla_portable.contracts.device import DeviceFacts
from mla_portable.contracts.engine import Engine, EngineStatus
from mla_portable.contracts.plan import ROUTES, WORKSPACE_ROUTES, WORKSPACE_SEQUENCES, Batch, PrefillChunk, StepPlan
from mla_portable.contracts.plugin import (
    ENTRY_POINT_GROUP,
    PROJECT_NAME,
    BackendSpec,
    Baseline,
    BaselineCall,
    Detector,
    Implementation,
    Registrar,
    Tunable,
    Variable,
    hookimpl,
)
from mla_portable.contracts.primitive import Primitive
from mla_portable.contracts.request import Request
from mla_portable.contracts.schedule import (
    DEFAULT_SCRATCH_BYTES,
    DecodeSchedule,
    LengthsPlanner,
    ScheduleKind,
    ScheduleLimits,
    SchedulePlanner,
    StepLengths,
    refuse_schedule,
)
from mla_portable.contracts.share import ContextShare
from mla_portable.contracts.support import Reason, Support
from mla_portable.errors import (
    DRIVER_FAULTS,
    InvalidArgument,
    MLAPortableError,
    PlanMismatch,
    PluginError,
    UnknownBackend,
)
from mla_portable.features import Features, Promises

__all__ = [
    "DEFAULT_SCRATCH_BYTES",
    "DRIVER_FAULTS",
    "ENTRY_POINT_GROUP",
    "PROJECT_NAME",
    "ROUTES",
    "WORKSPACE_ROUTES",
    "WORKSPACE_SEQUENCES",
    "BackendSpec",
    "Baseline",
    "BaselineCall",
    "Batch",
    "ContextShare",
    "Decision",
    "DecodeSchedule",
    "Detector",
    "DeviceFacts",
    "Engine",
    "EngineStatus",
    "Features",
    "Implementation",
    "InvalidArgument",
    "LengthsPlanner",
    "MLAPortableError",
    "PlanMismatch",
    "PluginError",
    "PrefillChunk",
    "Primitive",
    "Promises",
    "Reason",
    "Registrar",
    "Request",
    "ScheduleKind",
    "ScheduleLimits",
    "SchedulePlanner",
    "StepLengths",
    "StepPlan",
    "Support",
    "Tunable",
    "UnknownBackend",
    "UnsupportedRequest",
    "Variable",
    "Verdict",
    "hookimpl",
    "refuse_schedule",
]

_MOVED: Final = {
    **dict.fromkeys(("SPLIT_KV", "ProgramShape", "SplitSchedule", "split_kv", "split_kv_kind"), "mla_portable.kit.split_kv"),
    **dict.fromkeys(("attention_results", "head_results"), "mla_portable.kit.results"),
    "neutral_defaults": "mla_portable.kit.defaults",
}
"""Names that were here in 0.2 -> where they are. They stay for one release."""


def __getattr__(name: str) -> object:
    module = _MOVED.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"import {name} from {module}, not from {__name__}", DeprecationWarning, stacklevel=2)
    return getattr(import_module(module), name)
