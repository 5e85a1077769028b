# SPDX-License-Identifier: Apache-2.0
"""Which module on this machine has DeepGEMM's scores, tried once per device; why the others do not serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any

from mla_portable.contracts import DeviceFacts, MLAPortableError, Primitive, Reason
from mla_portable_common.deep_gemm.conventions import DeepGemm, Scores, try_scores
from mla_portable_common.libraries import Library, NotThisConvention

Convention = Callable[[Any, int], Scores]
"""(module, multiprocessors of the device) -> its functions; raises NotThisConvention."""


def deepgemm_itself(module: Any, num_sms: int) -> Scores:
    """DeepGEMM's own names and no other vendor's. Raises: NotThisConvention."""
    return DeepGemm(module)


def load_scores(modules: tuple[str, ...], convention: Convention, num_sms: int) -> Scores:
    """The first module that can be imported and whose convention is known. Raises: NotThisConvention, why each is not."""
    failures: list[str] = []
    for name in modules:
        try:
            return convention(import_module(name), num_sms)
        except NotThisConvention as failure:
            failures.append(str(failure))
        except Exception as error:  # its import fails in many ways: no CUDA_HOME, no compiler, another torch
            failures.append(f"import {name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    raise NotThisConvention("; ".join(failures))


@cache
def _tried(library: Library, convention: Convention, primitive: Primitive[Any], facts: DeviceFacts) -> Scores | str:
    device = library.device_with(facts)
    if device is None:
        return f"{facts} is not on this machine"
    try:
        kernel = load_scores(library.modules, convention, max(facts.num_sms, 1))  # 0 where the device does not say
        try_scores(primitive, kernel, device)
    except NotThisConvention as failure:
        return str(failure)
    return kernel


forget_deepgemm = _tried.cache_clear
"""Look for DeepGEMM afresh at the next call."""


def find_scores(library: Library, convention: Convention, primitive: Primitive[Any], facts: DeviceFacts) -> Scores:
    """DeepGEMM as it serves a primitive on a device, tried on a tiny problem once a process.

    That compiles kernels the first time (seconds, kept in DG_JIT_CACHE_DIR) and waits for the device.
    Raises: MLAPortableError where it is not here or does something else.
    """
    found = _tried(library, convention, primitive, facts)
    if isinstance(found, str):
        raise MLAPortableError(f"{primitive}: DeepGEMM cannot serve here: {found}")
    return found


def scores_reasons(library: Library, convention: Convention, primitive: Primitive[Any], facts: DeviceFacts) -> Iterator[Reason]:
    """Why DeepGEMM cannot serve, if it cannot."""
    found = _tried(library, convention, primitive, facts)
    if isinstance(found, str):
        yield Reason("DeepGEMM", "not usable:", found, library.remedy)
