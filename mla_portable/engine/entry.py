# SPDX-License-Identifier: Apache-2.0
"""Engines find their plugins by entry points, and may be given a list of those to load."""

from __future__ import annotations

from collections.abc import Collection
from importlib import metadata
from typing import Final

ENTRY_POINT: Final = "mla_portable"
"""The name of this project's entry point in every engine's group."""


def obstacle(group: str, variable: str, allowed: Collection[str] | None) -> str:
    """Why an engine does not load the plugin, "" where it does.

    Args:
        group: of entry points. variable: lists the plugins to load. allowed: what it lists, as the engine reads it; None where
            the engine loads all.
    """
    if not any(point.name == ENTRY_POINT for point in metadata.entry_points(group=group)):
        return f"no entry point {ENTRY_POINT!r} in the group {group}: install mla-portable again"
    if allowed is not None and ENTRY_POINT not in allowed:
        return f"{variable}={','.join(allowed)} leaves {ENTRY_POINT!r} out"
    return ""
