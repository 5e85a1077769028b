# SPDX-License-Identifier: Apache-2.0
"""Launching a Triton kernel again for half of what Triton takes of the host.

To launch, Triton looks at every argument to find out which of its compilations the call needs. Here that is asked once for each
key, made of all that Triton tells calls apart by (`triton.runtime.jit`, as of 3.5 to 3.7, for CUDA devices): the device, the
options and constants, of a pointer the type and whether it is a multiple of 16, of an integer that is specialised its value.
An integer that is not specialised only has to fit 32 bits, beyond which Triton would take it as 64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final

import torch

__all__ = ["TritonLauncher"]

_LIMIT: Final = 1 << 31
_KEPT: Final = 1024
_SINCE: Final = (3, 5)


@functools.cache
def _machine_code() -> type | None:
    """The class of what a launch returns where it can be launched by itself; None where nothing is known of this Triton.

    That is so for Triton before 3.5 and for ROCm, where calls are told apart by the size of a tensor's memory as well.
    """
    import triton

    if torch.version.hip is not None or tuple(int(part) for part in triton.__version__.split(".")[:2]) < _SINCE:
        return None
    return triton.compiler.CompiledKernel


class TritonLauncher:
    """A kernel as a callable: `launcher(grid, *arguments, num_warps=..., CONSTANT=...)` for `kernel[grid](...)`.

    Pointers are the parameters whose names end with `_ptr`. All constants are given, by name, and all else by position.
    Launches on the current device and its current stream, as Triton does; graph-safe once a call like it was made.
    """

    __slots__ = ("_exact", "_free", "_kernel", "_known", "_names", "_pointers")

    def __init__(self, kernel: Any) -> None:
        """kernel: what `triton.jit` made; interpreted ones are called as ever."""
        self._kernel = kernel
        self._known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] | None = None
        params = [param for param in getattr(kernel, "params", ()) if not param.is_constexpr]
        if params:
            self._known = {}
        self._names = tuple(param.name for param in getattr(kernel, "params", ()) if param.is_constexpr)
        self._pointers = _picker([param.num for param in params if param.name.endswith("_ptr")])
        integers = [param for param in params if not param.name.endswith("_ptr")]
        self._free = _picker([param.num for param in integers if param.do_not_specialize])
        self._exact = _picker([param.num for param in integers if not param.do_not_specialize])

    def __call__(self, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        """Launch. named: the constants and Triton's options, in the same order at every call."""
        known, bits = self._known, 0
        for value in self._free(arguments):
            bits |= value if value >= 0 else ~value
        if known is None or bits >= _LIMIT:
            self._kernel[grid](*arguments, **named)
            return
        pointers = [t if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in self._pointers(arguments)]
        key = (torch.cuda.current_device(), *pointers, *self._exact(arguments), *named.values())
        found = known.get(key)
        if found is not None:
            found[0][(*grid, 1, 1)](*arguments, *found[1])
            return
        compiled = self._kernel[grid](*arguments, **named)
        if (kind := _machine_code()) is None:
            self._known = None
        elif isinstance(compiled, kind):
            if len(known) >= _KEPT:
                known.clear()
            known[key] = compiled, tuple(named[name] for name in self._names)


def _picker(positions: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What is at these positions, as a tuple."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return (lambda arguments: (arguments[positions[0]],)) if positions else (lambda _: ())
