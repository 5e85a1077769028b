# SPDX-License-Identifier: Apache-2.0
"""Names that have a meaning to the registry, and names that a user may have mistyped."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Final

from mla_portable.contracts import InvalidArgument

CORE_DISTRIBUTION: Final = "mla-portable"
CORE_MODULE: Final = "mla_portable.reference"
"""The core's own plugin: every other implementation is compared with it, so it cannot be left out."""
ADAPTERS: Final = ("flash_mla", "engines.vllm", "engines.sglang")
"""Packages of mla_portable whose module `registration` declares, by the hook of plugins, what they read and say."""
REFERENCE: Final = "reference.torch"
"""The implementation that probes compare with; it is checked, not probed."""
AUTO: Final = "auto"
"""What users write for "let the registry choose"; no backend may carry the name."""


def check_backend(backend: object, where: str = "registry") -> None:
    """Raise InvalidArgument unless `backend` is a name or None; whether anything carries the name is checked elsewhere."""
    if backend is not None and not isinstance(backend, str):
        expected = "the name of a backend or of one of its variants, such as 'triton' or 'triton.portable', or None"
        raise InvalidArgument(where, "backend", got=f"{backend!r} ({type(backend).__name__})", expected=expected)


def closest(name: str, known: Collection[str], *, prefix: str = "") -> str:
    """A question that offers the known name most like `name`, after `prefix`; "" when none is near."""
    match = get_close_matches(name, known, n=1)
    return f"Did you mean {prefix + match[0]!r}?" if match else ""
