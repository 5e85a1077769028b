# SPDX-License-Identifier: Apache-2.0
"""install, uninstall: this package as `flash_mla` in the process, for programs that import FlashMLA by that name."""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from mla_portable.errors import InvalidArgument

_THEIRS: Final = "flash_mla"
_OURS: Final = "mla_portable.flash_mla"
_SUBMODULES: Final = ("cuda", "flash_mla_interface", "fused_norm_rope_attn_rope_cast")
ON_PATH: Final = Path(__file__).parent / "on_path"
"""A folder whose `flash_mla` is this package: on PYTHONPATH, for processes in which nobody calls `install`."""

_replaced: dict[str, ModuleType] = {}
"""What `install(force=True)` took away."""
_lock: Final = threading.RLock()
"""Of threads that install and uninstall. Others import meanwhile, so `sys.modules` is copied before it is looked through."""


def is_installed() -> bool:
    """Whether `import flash_mla` gives this package in this process."""
    return sys.modules.get(_THEIRS) is sys.modules[_OURS]


def install(force: bool = False) -> None:
    """Let `import flash_mla`, and its submodules, give this package in this process. A second call changes nothing.

    Programs that imported FlashMLA's functions before keep them. Processes that are started later do not inherit it: call it
    there too, or run the program by `python -m mla_portable.flash_mla`, which also reaches its child processes.

    Args:
        force: also where another `flash_mla` can be imported. It is then hidden, also as a provider of kernels.
    Raises: InvalidArgument where another `flash_mla` can be imported, and not `force`.
    """
    with _lock:
        if is_installed():
            return
        found = _another()
        if found is not None and not force:
            raise InvalidArgument(
                "flash_mla.install",
                "force",
                got=f"False, where {_THEIRS} is {found}",
                expected=f"True, or an environment without another {_THEIRS}",
                remedy="FlashMLA may serve this device itself: hide it with force=True only where it does not.",
            )
        taken = [name for name in sys.modules.copy() if _is_theirs(name)]
        _replaced.update((name, sys.modules.pop(name)) for name in taken)
        sys.modules[_THEIRS] = sys.modules[_OURS]
        for name in _SUBMODULES:
            sys.modules[f"{_THEIRS}.{name}"] = import_module(f"{_OURS}.{name}")


def uninstall() -> None:
    """Undo `install`: the name is free again, or what was hidden is back. Does nothing where it was not called."""
    with _lock:
        if not is_installed():
            return
        for name in [name for name in sys.modules.copy() if _is_theirs(name)]:
            del sys.modules[name]
        sys.modules.update(_replaced)
        _replaced.clear()


def _is_theirs(name: str) -> bool:
    return name == _THEIRS or name.startswith(f"{_THEIRS}.")


def _another() -> str | None:
    """Where a `flash_mla` that is not this package is, None where there is none."""
    loaded: Any = sys.modules.get(_THEIRS)
    if loaded is not None:
        return f"loaded from {getattr(loaded, '__file__', None) or 'an unknown place'}"
    spec = find_spec(_THEIRS)
    if spec is None or (spec.origin is not None and Path(spec.origin).parent == ON_PATH):
        return None
    return f"installed at {spec.origin or list(spec.submodule_search_locations or ())}"
