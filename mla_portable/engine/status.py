# SPDX-License-Identifier: Apache-2.0
"""What `doctor` looks at first in every engine: its version, and the mode of the plugin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata

from mla_portable.contracts import EngineStatus, InvalidArgument


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
