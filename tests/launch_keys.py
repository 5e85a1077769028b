# SPDX-License-Identifier: Apache-2.0
"""What Triton would compile the launches of a test for: its own key of each, whether kernels are interpreted or compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, create_function_from_signature

from mla_portable.kit.triton_launcher import TritonLauncher

__all__ = ["LaunchKeys", "record_launches"]


@cache
def _binder(kernel: Any) -> tuple[Callable[..., Any], frozenset[str]]:
    """Triton's look at the arguments of a call, and the names of the kernel's parameters."""
    function = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
    backend = backends["nvidia"].compiler(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(function.signature, function.params, backend), frozenset(function.arg_names)


def launch_key(kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[str, str]:
    """The kernel's name, and all that Triton compiles apart: types, what it specialises, constants, options."""
    bind, names = _binder(kernel)
    constants = {name: value for name, value in named.items() if name in names}
    options = {name: value for name, value in named.items() if name not in names}
    return kernel.__name__, repr((bind(*arguments, **constants)[1], options))


class LaunchKeys:
    """keys: (kernel, key) of every launch so far, in their order, each once."""

    def __init__(self) -> None:
        self._keys: dict[tuple[str, str], None] = {}

    @property
    def keys(self) -> tuple[tuple[str, str], ...]:
        return tuple(self._keys)

    def by_kernel(self) -> dict[str, int]:
        """Kernel -> compilations."""
        found: dict[str, int] = {}
        for name, _ in self._keys:
            found[name] = found.get(name, 0) + 1
        return found

    def add(self, kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._keys.setdefault(launch_key(kernel, arguments, named))


def record_launches(monkeypatch: pytest.MonkeyPatch, *, runs: bool) -> LaunchKeys:
    """Record every launch through a TritonLauncher from now on. runs: kernels run as ever; with False none does."""
    seen, launch = LaunchKeys(), TritonLauncher.__call__

    def call(self: TritonLauncher, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        seen.add(self._kernel, arguments, named)
        if runs:
            launch(self, grid, *arguments, **named)

    monkeypatch.setattr(TritonLauncher, "__call__", call)
    return seen
