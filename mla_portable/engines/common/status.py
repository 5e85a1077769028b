# SPDX-License-Identifier: Apache-2.0
"""What `doctor` shows of the plugin in every engine: version and mode, why it is not loaded, what would serve DeepSeek-V3.2."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import metadata
from itertools import product
from typing import Final

from mla_portable.attention import AttentionSpec, RouteDecision
from mla_portable.contracts import EngineStatus, InvalidArgument
from mla_portable.contracts.engine import Choice
from mla_portable.engines.common.asked import layer_spec
from mla_portable.engines.common.routing import served_by
from mla_portable.models import DEEPSEEK_V32

ENTRY_POINT: Final = "mla_portable"
"""The name of this project's entry point in every engine's group."""


def version_and_mode(
    package: str,
    name: str,
    environ: Mapping[str, str],
    *,
    mode: Callable[[Mapping[str, str]], str],
    check: Callable[[Mapping[str, str]], object],
) -> tuple[str, str] | EngineStatus:
    """The engine's version and the plugin's mode, or the status where there is no engine or a variable is wrong.

    Args:
        package, name: of the engine, for the package index and for people. mode, check: of the plugin's settings.
    """
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return EngineStatus(None, False, "off", f"{name} is not installed")
    try:
        found = mode(environ)
        if found != "off":
            check(environ)
    except InvalidArgument as error:
        return EngineStatus(version, False, "off", str(error))
    return version, found


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


def choices(
    decide: Callable[[AttentionSpec], RouteDecision], named: Callable[[RouteDecision], str] = served_by
) -> tuple[Choice, ...]:
    """One for each cache layout and heads of a rank. decide: the engine's way to a route. named: what serves it, in words."""
    found: list[Choice] = []
    model = DEEPSEEK_V32
    for layout, heads in product(model.layouts, model.rank_heads):
        decision = decide(layer_spec(model, layout, heads))
        found.append(Choice(layout, heads, decision.chosen, named(decision)))
    return tuple(found)
