# SPDX-License-Identifier: Apache-2.0
"""The language that core and plugins share: layouts, requests, support, plans, signatures, errors, the hook.

Imports nothing else of mla_portable; plugins import nothing but this package.
"""

from mla_portable.contracts.decision import Decision, Verdict
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
from mla_portable.contracts.results import attention_results
from mla_portable.contracts.schedule import (
    DEFAULT_SCRATCH_BYTES,
    DecodeSchedule,
    ScheduleKind,
    ScheduleLimits,
    SchedulePlanner,
    refuse_schedule,
)
from mla_portable.contracts.split_kv import SPLIT_KV, ProgramShape, SplitSchedule, split_kv, split_kv_kind
from mla_portable.contracts.support import Reason, Support
from mla_portable.errors import (
    DRIVER_FAULTS,
    InvalidArgument,
    MLAPortableError,
    PlanMismatch,
    PluginError,
    UnknownBackend,
    UnsupportedRequest,
)
from mla_portable.layouts import (
    BF16,
    E4M3_MAX,
    FP8_DS_MLA,
    HEAD_SIZE,
    INDEX_HEAD_SIZE,
    KV_LORA_RANK,
    LAYOUTS,
    QK_ROPE_HEAD_DIM,
    SCALE_FORMATS,
    SCALE_GROUP,
    CacheLayout,
    layout_of,
    tile_scales,
)

pack_fp8, unpack_fp8 = FP8_DS_MLA.pack, FP8_DS_MLA.unpack

__all__ = [
    "BF16",
    "DEFAULT_SCRATCH_BYTES",
    "DRIVER_FAULTS",
    "E4M3_MAX",
    "ENTRY_POINT_GROUP",
    "FP8_DS_MLA",
    "HEAD_SIZE",
    "INDEX_HEAD_SIZE",
    "KV_LORA_RANK",
    "LAYOUTS",
    "PROJECT_NAME",
    "QK_ROPE_HEAD_DIM",
    "ROUTES",
    "SCALE_FORMATS",
    "SCALE_GROUP",
    "SPLIT_KV",
    "WORKSPACE_ROUTES",
    "WORKSPACE_SEQUENCES",
    "BackendSpec",
    "Baseline",
    "BaselineCall",
    "Batch",
    "CacheLayout",
    "Decision",
    "DecodeSchedule",
    "Detector",
    "DeviceFacts",
    "Implementation",
    "InvalidArgument",
    "MLAPortableError",
    "PlanMismatch",
    "PluginError",
    "PrefillChunk",
    "Primitive",
    "ProgramShape",
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
    "hookimpl",
    "layout_of",
    "neutral_defaults",
    "pack_fp8",
    "refuse_schedule",
    "split_kv",
    "split_kv_kind",
    "tile_scales",
    "unpack_fp8",
]
