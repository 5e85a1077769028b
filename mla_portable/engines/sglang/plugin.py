# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""The entry point of the group `sglang.srt.plugins`: registers the hooks with SGLang.

SGLang calls it once in each of its processes, and only logs what a plugin raises: stock SGLang would then run silently. So an
error is logged here first, with what to do, and `mla-portable doctor` finds its causes without starting SGLang.
"""

from __future__ import annotations

import inspect
from pkgutil import resolve_name
from typing import Any

from mla_portable.contracts import MLAPortableError
from mla_portable.engines.sglang import seams, settings


class ChangedSGLang(MLAPortableError):
    """This version of SGLang has other functions than the plugin knows."""


def register() -> None:
    """Register the hooks, unless MLA_PORTABLE_SGLANG is off; implementations are chosen later, when a model is built.

    Raises: InvalidArgument for a variable of the plugin with a value that is not allowed; ChangedSGLang with every seam that
        is missing or has parameters that are not known. Nothing is registered then.
    """
    try:
        registered = _register()
    except Exception as error:
        settings.logger.error(
            "mla_portable is NOT in use, SGLang runs without it: %s. `mla-portable doctor` examines it; %s=off turns it off.",
            error,
            settings.ENV_MODE,
        )
        raise
    if registered:
        settings.logger.info("mla_portable hooks %s", ", ".join(registered))


def _register() -> list[str]:
    settings.check()
    if settings.mode() == "off":
        return []
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from mla_portable.engines.sglang import hooks, indexer

    found = list(seams.objections(_parameters))
    if found:
        raise ChangedSGLang(f"this SGLang is not one that it knows: {'; '.join(found)}")
    names: list[str] = []
    for seam in seams.SEAMS:
        if seam in (*seams.INDEXER, seams.POOLED_SCHEDULE) and settings.indexer() == "off":
            continue
        if seam.optional and _resolve(seam.target) is None:
            continue
        HookRegistry.register(seam.target, hooks.hook_of(seam), HookType[seam.kind])
        names.append(seam.target.removeprefix("sglang.srt.layers.attention."))
    if settings.indexer() == "off":
        return names
    if not any(seam.name in name for seam in seams.INDEXER for name in names):
        indexer.replace_modules(seams.DEEP_GEMM_USERS)
        names.append("DeepGEMM's module")
    elif _resolve(seams.POOLED_INDEXER) is not None:
        indexer.replace_modules((seams.POOLED_INDEXER,))
    return names


def _resolve(target: str) -> Any | None:
    """The object at a dotted path of which the module can be imported, None where it is not there."""
    try:
        return resolve_name(target)
    except (AttributeError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("sglang"):
            raise
        return None


def _parameters(target: str) -> tuple[str, ...] | None:
    found = _resolve(target)
    if found is None:
        return None
    names = getattr(found, "arg_names", None)  # a Triton kernel's
    return tuple(inspect.signature(found).parameters if names is None else names)


def is_applied(seam: seams.Seam) -> bool:
    """SGLang has put the hook of a seam in force in this process."""
    found = _resolve(seam.target)
    return inspect.isfunction(found) and getattr(found, "__wrapped__", None) is not None
