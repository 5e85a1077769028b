# SPDX-License-Identifier: Apache-2.0
"""The plugin's environment variables: checked when vLLM loads the plugin, read when they are needed."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Final

from mla_portable.contracts import ROUTES, InvalidArgument
from mla_portable.layouts import SCALE_FORMATS

__all__ = [
    "ENV_MODE",
    "ENV_ROUTE",
    "ENV_SCALES",
    "ENV_SHADOW",
    "ENV_SHADOW_FILE",
    "ENV_WRITER",
    "MODES",
    "STOCK_BACKEND",
    "WRITERS",
    "cache_writer",
    "check",
    "logger",
    "mode",
    "route",
    "scale_format",
    "shadow_backend",
    "shadow_file",
]

logger = logging.getLogger("vllm.mla_portable")
"""Below vLLM's own logger, so that what the plugin says is seen where vLLM's lines are."""

ENV_MODE: Final = "MLA_PORTABLE_VLLM"
ENV_ROUTE: Final = "MLA_PORTABLE_VLLM_ROUTE"
ENV_SCALES: Final = "MLA_PORTABLE_VLLM_CACHE_SCALES"
ENV_SHADOW: Final = "MLA_PORTABLE_VLLM_SHADOW"
ENV_SHADOW_FILE: Final = "MLA_PORTABLE_VLLM_SHADOW_FILE"
ENV_WRITER: Final = "MLA_PORTABLE_VLLM_CACHE_WRITER"

MODES: Final = ("auto", "custom", "override", "off")
"""auto: register, and replace stock's sparse-MLA classes where they do not serve the device or the configuration. custom:
register only. override: replace FLASHMLA_SPARSE, unless only the stock class serves the model. off: do nothing."""
WRITERS: Final = ("auto", "vllm", "mla_portable")
"""Who writes the cache. auto: vLLM's own operator where it works, else the cache_write primitive."""
STOCK_BACKEND: Final = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"


def _choice(name: str, allowed: tuple[str, ...], environ: Mapping[str, str] | None) -> str:
    value = (os.environ if environ is None else environ).get(name, "").strip().lower() or allowed[0]
    if value not in allowed:
        remedy = f"Unset {name}, or set it to one of these."
        raise InvalidArgument("environment", name, got=repr(value), expected=f"one of {', '.join(allowed)}", remedy=remedy)
    return value


def check(environ: Mapping[str, str] | None = None) -> None:
    """Raise InvalidArgument unless every variable of the plugin has an allowed value."""
    mode(environ)
    cache_writer(environ)
    scale_format(environ)
    route(environ)
    shadow_backend(environ)


def mode(environ: Mapping[str, str] | None = None) -> str:
    """One of MODES. Raises: InvalidArgument."""
    return _choice(ENV_MODE, MODES, environ)


def cache_writer(environ: Mapping[str, str] | None = None) -> str:
    """One of WRITERS. Raises: InvalidArgument."""
    return _choice(ENV_WRITER, WRITERS, environ)


def scale_format(environ: Mapping[str, str] | None = None) -> str | None:
    """The format of every scale in the FP8 cache as the user states it, None where it is inferred. Raises: InvalidArgument."""
    value = _choice(ENV_SCALES, ("auto", *SCALE_FORMATS), environ)
    return None if value == "auto" else value


def route(environ: Mapping[str, str] | None = None) -> str:
    """ "auto" or one of `mla_portable.contracts.ROUTES`, forced for every layer. Raises: InvalidArgument."""
    return _choice(ENV_ROUTE, ("auto", *ROUTES), environ)


def shadow_backend(environ: Mapping[str, str] | None = None) -> str | None:
    """Path of the backend class to run beside ours: STOCK_BACKEND for "1", None for "0" or nothing, else as given.

    Raises: InvalidArgument for a value that is neither a switch nor a dotted path.
    """
    value = (os.environ if environ is None else environ).get(ENV_SHADOW, "").strip()
    if value in ("", "0"):
        return None
    if value == "1":
        return STOCK_BACKEND
    if "." not in value:
        expected = "1, 0, or the path of a vLLM backend class, 'package.module.Class'"
        raise InvalidArgument("environment", ENV_SHADOW, got=repr(value), expected=expected)
    return value


def shadow_file(environ: Mapping[str, str] | None = None) -> str | None:
    """Where shadow mode appends its records, one JSON object a line; None sends them to the log."""
    return (os.environ if environ is None else environ).get(ENV_SHADOW_FILE, "").strip() or None
