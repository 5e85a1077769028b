# SPDX-License-Identifier: Apache-2.0
"""EngineStatus: what `doctor` says of the plugin in an engine, and what it looks at first in every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from mla_portable.contracts import InvalidArgument
from mla_portable.engine.deepseek import Choice


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The plugin in an engine, as `doctor` sees it without importing the engine.

    Attributes:
        version: of the engine, None where it is not installed. registered: the engine will load the plugin, and can use it.
        mode: as it takes effect. note: what stands in the way, or what the mode means here.
        choices: for each cache layout and heads of a rank. indexer: whose indexer, or whose scores, and what serves them.
        models: (model, whose attention serves it) of those that are chosen for in another way.
    """

    version: str | None
    registered: bool
    mode: str
    note: str
    choices: tuple[Choice, ...] = ()
    indexer: str = ""
    models: tuple[tuple[str, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "choices": [choice._asdict() for choice in self.choices]}


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
