# SPDX-License-Identifier: Apache-2.0
"""The registry of this process."""

from __future__ import annotations

import os
import threading

from mla_portable.contracts import PluginError
from mla_portable.registry.limits import running
from mla_portable.registry.registry import Registry

__all__ = ["get_registry", "reset_registry"]

_registry: Registry | None = None
_building = False
_registry_lock = threading.RLock()


def get_registry() -> Registry:
    """The registry of this process, built at the first call: loads the installed plugins, reads environment and file.

    It ranks by the times that were measured on the device, where plugins bring any.

    Raises: PluginError when a plugin asks for it while registering.
    """
    global _registry, _building
    registry = _registry
    if registry is not None:
        return registry
    if _building and running():  # in the thread of a plugin's import, while another one builds and waits for it
        raise PluginError("the registry was asked for while it is being built: a plugin's hook may only register")
    with _registry_lock:
        if _registry is None:
            if _building:
                raise PluginError("the registry was asked for while it is being built: a plugin's hook may only register")
            _building = True
            try:
                _registry = Registry(costs="measured")
            finally:
                _building = False
        return _registry


def reset_registry() -> None:
    """Drop the registry of this process, with all that it chose and bound; the next `get_registry()` builds another. For tests.

    What callers keep (layers, bound callables) goes on to work.
    """
    global _registry
    with _registry_lock:
        _registry = None


def _after_fork() -> None:
    global _registry_lock, _building
    _registry_lock, _building = threading.RLock(), False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
