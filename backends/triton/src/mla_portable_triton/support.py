# SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels can run, as data, and whether Triton can run here at all.

The kernels are declared for every device type: Triton has a driver for each type that its vendor wrote one for. `check` asks
Triton whether the installed one drives the device's type. Triton's interpreter runs any kernel on a CPU, slowly and with the
same results: it is how the kernels are tested where there is no GPU. There `check` says whether the interpreter is on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from mla_portable.accelerator import is_device_error
from mla_portable.contracts import DeviceFacts, Primitive, Reason, Support
from mla_portable.layouts import BF16, BF16_128_32, BF16_NOPE, FP8_DS_MLA, FP8_NOPE, FP8_V4, INDEX_BF16, INDEX_FP8
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
from mla_portable_triton.index_forms import FP8_WORDS, form_of_request

NAME: Final = "triton.portable"
_OWN: Final = "cuda"
"""The device type that Triton itself has drivers for: NVIDIA's and AMD's. Others come with vendors' Tritons."""
_LEAST_TRITON: Final = (2, 1)
"""A vendor still ships it, and the kernels keep to its language; what a probe computes decides for every version."""
_LEAST_INTERPRETER: Final = (3, 5)
"""Of the interpreter: 3.1's takes a constexpr whose annotation is a string for a value."""
_ATTENTION_SHARED_MEMORY: Final = 48 << 10
"""Bytes: what the smallest attention configuration (`attention_configs`) and the indexer's tile keep within."""


_LAYOUTS: Final = (BF16.name, FP8_DS_MLA.name, BF16_NOPE.name, FP8_NOPE.name, FP8_V4.name, BF16_128_32.name)
_INDEX: Final = (INDEX_BF16.name, INDEX_FP8.name)


def _support(kernel: str, **limits: Any) -> Support:
    declared = {"device_types": None, "kv_layouts": _LAYOUTS, **limits}
    return Support(source=f"mla_portable_triton.kernels.{kernel}", **declared)


_ATTENTION: Final[dict[str, Any]] = {
    "max_heads": 128,
    "extra_cache": True,
    "nope": True,
    "min_shared_memory": _ATTENTION_SHARED_MEMORY,
    "batch_invariant": True,
}
_SCORES: Final[dict[str, Any]] = {
    "kv_layouts": _INDEX,
    "max_heads": 128,
    "min_shared_memory": _ATTENTION_SHARED_MEMORY,
    "nan_keys": lambda request: form_of_request(request) != FP8_WORDS,  # which are decoded without a look at NaN codes
}
SUPPORT: Final[dict[Primitive, Support]] = {
    CACHE_WRITE: _support("cache_write"),
    CONVERT_INDICES: _support("convert_indices", needs_bf16=False, seq_lens=True, context_parallel=True, ends_in_order=True),
    GATHER_UPCONVERT: _support("gather_upconvert"),
    SPARSE_DECODE: _support("sparse_attention", **_ATTENTION),
    SPARSE_PREFILL: _support("sparse_attention", **_ATTENTION),
    PACK_SELECTION: _support("pack_selection", kv_layouts=(), needs_bf16=False),
    CONCAT_MLA_K: _support("concat_mla_k", kv_layouts=()),
    MASKED_PREFILL: _support(
        "masked_prefill",
        kv_layouts=(),
        max_heads=128,
        head_dims=((192, 128), (256, 256)),
        min_shared_memory=_ATTENTION_SHARED_MEMORY,
    ),
    MERGE_STATES: _support("merge_states", kv_layouts=()),
    QUANTIZE_PER_TENSOR: _support("quantize_per_tensor", kv_layouts=(), needs_bf16=False),
    TOPK_SELECT: _support("topk_select", kv_layouts=(), needs_bf16=False),
    INDEXER_CACHE_WRITE: _support("indexer_cache_write", kv_layouts=_INDEX),
    INDEXER_LOGITS: _support("indexer_logits", **_SCORES),
    INDEXER_LOGITS_RAGGED: _support("indexer_logits_ragged", **_SCORES),
    INDEXER_LOGITS_BLOCKS: _support(
        "indexer_logits_blocks", kv_layouts=(), max_heads=128, min_shared_memory=_ATTENTION_SHARED_MEMORY
    ),
    INDEXER_SELECT: _support("indexer_select", **_SCORES, context_parallel=True),
    NORM_ROPE_WRITE: _support("norm_rope_write", kv_layouts=(*_LAYOUTS, *_INDEX), ends_in_order=True),
    ROPE_QUANTIZE_QUERIES: _support("rope_quantize_queries", kv_layouts=(), ends_in_order=True),
}


def interpreter_is_on() -> bool:
    """Triton runs kernels in its interpreter. It settles that for a kernel when the kernel's file is imported."""
    knobs = getattr(import_module("triton"), "knobs", None)
    if knobs is not None:
        return bool(knobs.runtime.interpret)
    # older Tritons read the variable like this; 2.1 does not look at it and has no such module
    return os.environ.get("TRITON_INTERPRET", "0") == "1" and find_spec("triton.runtime.interpreter") is not None


def check(device: DeviceFacts, least: tuple[int, int] = _LEAST_TRITON) -> Iterator[Reason]:
    """Triton is importable, new enough, and can run on a device of this type.

    On a type that Triton has no driver of its own for, each reason is one against the type: plain torch serves there.
    """
    needs = f"needs {least[0]}.{least[1]} or newer"
    others = device.device_type not in (_OWN, "cpu")
    try:
        triton = import_module("triton")
    except ImportError as error:
        missing = f"cannot be imported: {error}"
        if others:
            limit = f"triton {missing}; {needs}"
            yield Reason("device type", device.device_type, limit, _vendors_triton(device))
        else:
            yield Reason("triton", missing, needs, "pip install triton")
        return
    version = str(getattr(triton, "__version__", "of unknown version"))
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if numbers < least and others:
        yield Reason("device type", device.device_type, f"triton {version}; {needs}", _vendors_triton(device))
    elif numbers < least:
        yield Reason("triton", version, needs, "pip install --upgrade triton")
    elif interpreter_is_on():
        if numbers < _LEAST_INTERPRETER:
            limit = f"needs {_LEAST_INTERPRETER[0]}.{_LEAST_INTERPRETER[1]} or newer"
            yield Reason("triton's interpreter", version, limit, "unset TRITON_INTERPRET on a GPU; elsewhere upgrade triton")
    elif device.device_type == "cpu":
        limit = "triton runs on a CPU only in its interpreter"
        remedy = "to try its kernels without a GPU, slowly, set TRITON_INTERPRET=1 before Python starts"
        yield Reason("device type", "cpu", limit, remedy)
    elif others:
        why = _why_not_driven(device.device_type)
        if why:
            remedy = f"{_vendors_triton(device)}, in place of this one"
            yield Reason("device type", device.device_type, f"triton {version} {why}", remedy)


def _vendors_triton(device: DeviceFacts) -> str:
    """What to do where Triton does not run on a type of device that it has no driver of its own for."""
    return f"install the Triton that the vendor of {device.device_type} devices ships"


def _why_not_driven(device_type: str) -> str:
    """Why the installed Triton launches no kernel on devices of a type that is not torch's "cuda"; "" where it may.

    A driver of an older Triton may not say which type it is for. What a probe computes decides then.
    Raises: a fault of the device, unchanged.
    """
    drivers: Any = import_module("triton.runtime").driver
    try:
        driver = getattr(drivers, "active", None)  # may be a proxy, which makes the driver when it is first used
        says = getattr(driver, "get_active_torch_device", None)
    except RuntimeError as error:  # there is none, or more than one
        if is_device_error(error, device_type):
            raise
        return f"has no driver for it: {error}"
    if driver is None:
        return f"has drivers for device type {_OWN} alone; 3.0 and newer take others"
    driven = device_type if says is None else says().type
    return "" if driven == device_type else f"drives device type {driven}"


def check_triton_3(device: DeviceFacts) -> Iterator[Reason]:
    """`check`, with a Triton that has `tl.range` and tensors without an axis."""
    return check(device, (3, 0))
