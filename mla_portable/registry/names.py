# SPDX-License-Identifier: Apache-2.0
"""Names that a user may have mistyped."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

__all__ = ["closest"]


def closest(name: str, known: Collection[str], *, prefix: str = "") -> str:
    """A question that offers the known name most like `name`, after `prefix`; "" when none is near."""
    match = get_close_matches(name, known, n=1)
    return f"Did you mean {prefix + match[0]!r}?" if match else ""
