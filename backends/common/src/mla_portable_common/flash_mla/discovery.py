# SPDX-License-Identifier: Apache-2.0
"""Which module on this machine has FlashMLA's functions and computes what they say, found once per device."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any, Final

from mla_portable.contracts import DeviceFacts, Primitive, Reason
from mla_portable.layouts import CacheLayout
from mla_portable.primitives import SPARSE_DECODE
from mla_portable_common.flash_mla.binding import Found, Limits
from mla_portable_common.flash_mla.calibration import calibrate_decode, calibrate_prefill
from mla_portable_common.flash_mla.decode_conventions import decode_of_module
from mla_portable_common.flash_mla.prefill_conventions import prefill_of_module
from mla_portable_common.libraries import Library, NotThisConvention

_DECLARED: Final = "kv_layouts, padded_heads or num_heads, lse of the Support; topk_multiple of decode or prefill"
"""What the tiny calls depend on."""
_lock = threading.Lock()


def kernel_of_module(name: str, primitive: Primitive[Any], *, fp8: bool = True, has_lse: bool = True) -> Any:
    """The adapter of a Python module; whatever keeps it from being imported is a reason against the provider.

    fp8: of decode, caches of bytes. has_lse: an lse is returned.
    Raises: NotThisConvention.
    """
    try:
        module = import_module(name)
    except Exception as error:
        raise NotThisConvention(f"import {name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
    if module.__name__.startswith("mla_portable"):
        raise NotThisConvention(f"{name} is this project's own stand-in for FlashMLA")
    if primitive is SPARSE_DECODE:
        return decode_of_module(module, fp8=fp8, has_lse=has_lse)
    return prefill_of_module(module, has_lse=has_lse)


def find_copy(
    library: Library, primitive: Primitive[Any], facts: DeviceFacts, layout: CacheLayout, limits: Limits, has_lse: bool
) -> Found:
    """The first of the library's modules that serves a primitive on a device; found once for each device and layout.

    Imports modules and, the first time, runs a few tiny calls on the device and waits for them.
    """
    with _lock:
        return _found(library, primitive, facts, layout, limits, has_lse)


@cache
def _found(
    library: Library, primitive: Primitive[Any], facts: DeviceFacts, layout: CacheLayout, limits: Limits, has_lse: bool
) -> Found:
    device = library.device_with(facts)
    if device is None:
        return Found(None, None, None, (Reason("device", str(facts), "not on this machine"),))
    heads, multiple = limits.heads, limits.topk_multiple
    reasons: list[Reason] = []
    refusing: list[Reason] = []
    for name in library.modules:
        try:
            kernel = kernel_of_module(name, primitive, fp8=layout.is_quantized, has_lse=has_lse)
        except NotThisConvention as failure:
            reasons.append(Reason(f"module {name}", "not usable:", str(failure), library.remedy))
            continue
        try:
            if primitive is SPARSE_DECODE:
                traits = calibrate_decode(kernel, device, layout, heads=heads, topk_multiple=multiple, with_plan=False)
            else:
                traits = calibrate_prefill(kernel, device, heads, layout, full_heads=heads, topk_multiple=multiple)
        except NotThisConvention as failure:
            remedy = f"correct the declaration ({_DECLARED}), or take another version of {name}"
            refusing.append(Reason(f"module {name}", "refuses what is declared:", str(failure), remedy))
        else:
            return Found(name, kernel, traits, (*refusing, *reasons))
    # where a copy is there, to install one is no remedy
    return Found(None, None, None, (*refusing, *(replace(each, remedy="") if refusing else each for each in reasons)))


forget_copies = _found.cache_clear
"""Look for modules afresh at the next call."""
