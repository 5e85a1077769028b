# SPDX-License-Identifier: Apache-2.0
"""The language that core and plugins share: requests, support, plans, errors, the hook."""

from mla_portable.contracts.decision import Decision, UnsupportedRequest, Verdict
from mla_portable.contracts.defaults import neutral_defaults
from mla_portable.contracts.device import DeviceFacts
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
from mla_portable.contracts.results import attention_results, head_results
from mla_portable.contracts.schedule import (
    DEFAULT_SCRATCH_BYTES,
    DecodeSchedule,
    ScheduleKind,
    ScheduleLimits,
    SchedulePlanner,
    refuse_schedule,
)
from mla_portable.contracts.share import ContextShare
from mla_portable.contracts.split_kv import SPLIT_KV, ProgramShape, SplitSchedule, split_kv, split_kv_kind
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
    "SPLIT_KV",
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
    "Features",
    "Implementation",
    "InvalidArgument",
    "MLAPortableError",
    "PlanMismatch",
    "PluginError",
    "PrefillChunk",
    "Primitive",
    "ProgramShape",
    "Promises",
    "Reason",
    "Registrar",
    "Request",
    "ScheduleKind",
    "ScheduleLimits",
    "SchedulePlanner",
    "SplitSchedule",
    "StepPlan",
    "Support",
    "Tunable",
    "UnknownBackend",
    "UnsupportedRequest",
    "Variable",
    "Verdict",
    "attention_results",
    "head_results",
    "hookimpl",
    "neutral_defaults",
    "refuse_schedule",
    "split_kv",
    "split_kv_kind",
]
