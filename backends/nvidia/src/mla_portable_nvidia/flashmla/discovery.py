# SPDX-License-Identifier: Apache-2.0
"""Discovery: which package on this machine brings FlashMLA's kernels, in which order they are asked, why not the others.

A provider is a way to reach kernels, recognised by the symbols that it has. Order: the library that
`MLA_PORTABLE_NVIDIA_LIBRARY` names, `flash_mla`, vLLM, `sgl_kernel`, sgl-flash-mla's legacy library. The first whose kernel
also passes `calibration` on the device serves; `MLA_PORTABLE_NVIDIA_PROVIDER` names the only one to ask.

Libraries of operators are loaded by themselves where their package allows it: neither vLLM nor sgl_kernel is imported for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from mla_portable.contracts import DeviceFacts, Primitive, Reason
from mla_portable.layouts import FP8_DS_MLA, CacheLayout
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_common.flash_mla.binding import Found
from mla_portable_common.flash_mla.calibration import calibrate_decode, calibrate_prefill
from mla_portable_common.flash_mla.decode_conventions import OperatorDecode
from mla_portable_common.flash_mla.discovery import kernel_of_module
from mla_portable_common.flash_mla.prefill_conventions import OperatorPrefill
from mla_portable_common.libraries import NotThisConvention, load_from, load_library, operator_of
from mla_portable_nvidia.machine import PROVIDER_VARIABLE, device_with

LIBRARY_VARIABLE: Final = "MLA_PORTABLE_NVIDIA_LIBRARY"
PREFILL_HEADS: Final = (64, 128, 8, 16, 32)
"""Head counts to try on a prefill kernel; the small ones exist in some builds for SM90."""
_LIBRARIES: Final = ("_flashmla_C", "sgl_kernel", "flash_mla_legacy", "flash_mla")
"""Operator libraries that FlashMLA is known to register."""


@dataclass(frozen=True, slots=True)
class _Source:
    """find: load what is needed and return the adapter of a primitive. remedy: the versions whose convention is known."""

    find: Callable[[Primitive], Any]
    remedy: str


_OPERATORS: Final[dict[Primitive, tuple[str, Callable[[Any], Any]]]] = {
    SPARSE_DECODE: ("sparse_decode_fwd", OperatorDecode),
    SPARSE_PREFILL: ("sparse_prefill_fwd", OperatorPrefill),
}
"""primitive -> the name of FlashMLA's operator, and its adapter."""


def _operator_source(library: str, package: str, pattern: str, module: str | None, remedy: str) -> _Source:
    """A package with a library of operators; `module` holds the older generation, where there was one."""

    def find(primitive: Primitive) -> Any:
        name, adapter = _OPERATORS[primitive]
        try:
            if operator_of(library, name) is None:
                load_from(package, pattern)
            operator = operator_of(library, name)
            if operator is None:
                raise NotThisConvention(f"torch.ops.{library} has no {name}")
            return adapter(operator)
        except NotThisConvention as failure:
            if module is None:
                raise
            try:
                return kernel_of_module(module, primitive)
            except NotThisConvention as older:
                raise NotThisConvention(f"{failure}; {older}") from older

    return _Source(find, remedy)


def _library_source(path: str) -> _Source:
    """A library of operators named by its path: whichever of the known libraries appears when it is loaded."""

    def find(primitive: Primitive) -> Any:
        if not Path(path).is_file():
            raise NotThisConvention(f"{path} is no file")
        load_library(Path(path))
        name, adapter = _OPERATORS[primitive]
        for library in _LIBRARIES:
            operator = operator_of(library, name)
            if operator is not None:
                return adapter(operator)
        raise NotThisConvention(f"{path} registers {name} under none of {', '.join(_LIBRARIES)}")

    return _Source(find, f"set {LIBRARY_VARIABLE} to a library of FlashMLA that fits this torch")


_SOURCES: Final[dict[str, _Source]] = {
    "flash_mla": _Source(
        partial(kernel_of_module, "flash_mla"),
        "install FlashMLA of October 2025 to August 2026 from source; later ones lack SM90",
    ),
    "vllm": _operator_source(
        "_flashmla_C", "vllm", "_flashmla_C*.so", "vllm.third_party.flashmla.flash_mla_interface", "install vLLM 0.24 to 0.33"
    ),
    "sgl_kernel": _operator_source(
        "sgl_kernel", "sgl_kernel", "flashmla_ops*.so", None, "install sglang-kernel 0.4.3 to 0.4.5"
    ),
    "sgl_flash_mla": _operator_source("flash_mla_legacy", "flash_mla", "_C_legacy*.so", None, "install sgl-flash-mla 1.0"),
}
PROVIDERS: Final = ("library", *_SOURCES)
"""The names that `MLA_PORTABLE_NVIDIA_PROVIDER` may take, in the order of asking."""


_lock = threading.Lock()
_known: dict[tuple[object, ...], Found] = {}


def find_kernel(
    primitive: Primitive,
    facts: DeviceFacts,
    environ: Mapping[str, str] | None = None,
    *,
    layout: CacheLayout = FP8_DS_MLA,
) -> Found:
    """The provider of sparse_decode or sparse_prefill on a device; found once for each device and choice of provider.

    layout: of the cache that decode reads, or of the rows that its workspace has; not every provider reads every layout.

    Loads libraries and, the first time, runs a few tiny calls on the device and waits for them.
    """
    environ = os.environ if environ is None else environ
    choice = (environ.get(PROVIDER_VARIABLE, ""), environ.get(LIBRARY_VARIABLE, ""))
    key = (primitive, facts, choice, layout.name)
    with _lock:
        if key not in _known:
            _known[key] = _find(primitive, facts, environ, layout)
        return _known[key]


def forget() -> None:
    """Look for providers afresh at the next call."""
    with _lock:
        _known.clear()


def _find(primitive: Primitive, facts: DeviceFacts, environ: Mapping[str, str], layout: CacheLayout) -> Found:
    device = device_with(facts)
    if device is None:
        return Found(None, None, None, (Reason("device", str(facts), "not on this machine"),))
    forced = environ.get(PROVIDER_VARIABLE, "").strip()
    if forced and forced not in PROVIDERS:
        limit = f"{PROVIDER_VARIABLE} may be {', '.join(PROVIDERS)}"
        return Found(None, None, None, (Reason("provider", forced, limit, f"correct {PROVIDER_VARIABLE} or unset it"),))
    reasons: list[Reason] = []
    path = environ.get(LIBRARY_VARIABLE, "").strip()
    sources = ({"library": _library_source(path)} if path or forced == "library" else {}) | _SOURCES
    for name, source in sources.items():
        if forced not in ("", name):
            continue
        try:
            kernel = source.find(primitive)
            if primitive is SPARSE_DECODE:
                traits = calibrate_decode(kernel, device, layout)
            else:
                traits = calibrate_prefill(kernel, device, PREFILL_HEADS, layout.workspace)
        except NotThisConvention as failure:
            remedy = source.remedy if not forced else f"{source.remedy}, or unset {PROVIDER_VARIABLE}"
            reasons.append(Reason(f"provider {name}", "not usable:", str(failure), remedy))
        else:
            return Found(name, kernel, traits, tuple(reasons))
    return Found(None, None, None, tuple(reasons))
