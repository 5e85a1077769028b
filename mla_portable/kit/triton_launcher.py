# SPDX-License-Identifier: Apache-2.0
"""Cache compiled Triton kernels by launch signature; this halves the host time of a repeated launch.

At each launch Triton inspects every argument to find the compilation that the call needs. Here it is asked at the first two
calls of each key, which holds what Triton distinguishes calls by (`triton.runtime.jit` of 3.5 to 3.9): the
device; the values of options and constants; of a pointer its type, and whether it is a multiple of 16 unless the kernel takes
it `at_any_address`; the value of any other argument that is specialised. One that is not has to be an integer of 32 bits;
Triton takes a larger one as 64.

1, 1.0 and True are equal, and three compilations to Triton. So a call goes through Triton where its types, or the names of its
options, differ from those of the call that the key was kept for.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final

import torch

from mla_portable.accelerator import accelerator, default_device
from mla_portable.kit.interpreted_masks import cast_masks

_LIMIT: Final = 1 << 31
_KEPT: Final = 1024
_SINCE: Final = (3, 5)
_UNTIL: Final = (3, 10)
"""First version whose `triton.runtime.jit` and `CompiledKernel` have not been compared with what this module assumes."""
OPTIONS: Final = {"enable_fp_fusion": True}
"""Options that every kernel is compiled with. Products and sums become one instruction, as the kernels' times and errors were
measured; Triton's own default changes with 3.10."""
_log: Final = logging.getLogger(__name__)


def at_any_address(*pointers: str) -> dict[str, list[str]]:
    """Options of `triton.jit`: one compilation serves these pointers, whether or not they are multiples of 16.

    For tensors that may be slices of a batch's, which begin anywhere: lengths, tables, ids, slots. Their loads are then no
    wider than an element. Triton before 3.2 has no such option and compiles apart.
    """
    import triton

    known = "do_not_specialize_on_alignment" in inspect.signature(triton.jit).parameters
    return {"do_not_specialize_on_alignment": list(pointers)} if known else {}


def splits_by_alignment(param: Any) -> bool:
    """A parameter of a Triton kernel, of a pointer: Triton compiles apart for multiples of 16."""
    return not (param.do_not_specialize or getattr(param, "do_not_specialize_on_alignment", False))


@functools.cache
def _machine_code(device_type: str) -> type | None:
    """The class of what a launch returns, where it can be launched by itself; None where Triton has to launch it."""
    import triton

    return triton.compiler.CompiledKernel if why_through_triton(device_type) is None else None


def _version() -> tuple[int, ...]:
    """Of the installed Triton: major, minor."""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


def why_through_triton(device_type: str) -> str | None:
    """Why Triton itself launches every call on a device type; None where repeated calls skip its look at the arguments."""
    import triton

    if device_type != "cuda":
        return f"by what Triton distinguishes calls on device type {device_type} is not known"
    if torch.version.hip is not None:
        return "on ROCm Triton distinguishes calls by the size of a tensor's memory too"
    if not _SINCE <= _version() < _UNTIL:
        since, last = ".".join(map(str, _SINCE)), f"{_UNTIL[0]}.{_UNTIL[1] - 1}"
        return f"the launch path of Triton {triton.__version__} is not known; those of {since} to {last} are"
    return None


class TritonLauncher:
    """A kernel as a callable: `launcher(grid, *arguments, num_warps=..., CONSTANT=...)` for `kernel[grid](...)`.

    Pointers are the parameters whose names end with `_ptr`. All constants are given, by name, and all else by position.
    Launches on the current device and its current stream, as Triton does; graph-safe once a call like it was made.
    The second call of a key goes through Triton too, and must get the same compilation; otherwise every later call does.
    """

    __slots__ = (
        *("_anywhere", "_current_index", "_device_type", "_exact", "_free", "_kernel", "_known", "_met", "_names"),
        "_pointers",
    )

    def __init__(self, kernel: Any) -> None:
        """kernel: what `triton.jit` made; interpreted ones are called as they are."""
        self._kernel = kernel
        self._current_index: Callable[[], int] | None = None
        self._device_type = "cuda"  # until the first call
        self._known: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], list[Any]]] | None = None
        self._met: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}  # keys of one call so far
        params = [param for param in getattr(kernel, "params", ()) if not param.is_constexpr]
        if params:
            self._known = {}
        elif _version() >= (3, 9):
            cast_masks()
        self._names = tuple(param.name for param in getattr(kernel, "params", ()) if param.is_constexpr)
        pointers = [param for param in params if param.name.endswith("_ptr")]
        self._pointers = _picker([param.num for param in pointers if splits_by_alignment(param)])
        self._anywhere = _picker([param.num for param in pointers if not splits_by_alignment(param)])
        plain = [param for param in params if not param.name.endswith("_ptr")]
        self._free = _picker([param.num for param in plain if param.do_not_specialize])
        self._exact = _picker([param.num for param in plain if not param.do_not_specialize])

    def __call__(self, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        """Launch. named: the constants and Triton's options."""
        known, bits = self._known, 0
        try:
            for value in self._free(arguments):
                bits |= value if value >= 0 else ~value
        except TypeError:  # no integer
            bits = _LIMIT
        if known is None or bits >= _LIMIT:
            self._kernel[grid](*arguments, **named, **OPTIONS)
            return
        pointers = [t if t is None else (t.dtype, not t.data_ptr() & 15) for t in self._pointers(arguments)]
        constants = named.values()
        current_index = self._current_index or self._find_current_index(arguments)
        anywhere = [t if t is None else t.dtype for t in self._anywhere(arguments)]
        key = (current_index(), *pointers, *anywhere, *self._exact(arguments), *constants)
        kinds = [*map(type, arguments), *map(type, constants), *named]
        found = known.get(key)
        if found is None:
            self._remember(key, self._kernel[grid](*arguments, **named, **OPTIONS), named, kinds)
        elif found[2] == kinds:
            found[0][(*grid, 1, 1)](*arguments, *found[1])
        else:
            self._kernel[grid](*arguments, **named, **OPTIONS)

    def _find_current_index(self, arguments: tuple[Any, ...]) -> Callable[[], int]:
        """How to ask for the current device, of the type that the first call's tensors are on."""
        pointers = (*self._pointers(arguments), *self._anywhere(arguments))
        device = next((t.device for t in pointers if t is not None), None)
        device = default_device() if device is None else device
        self._current_index, self._device_type = accelerator(device).current_index, device.type
        return self._current_index

    def _remember(self, key: tuple[Any, ...], compiled: Any, named: dict[str, Any], kinds: list[Any]) -> None:
        """Keep what Triton launched for this key, once it was the same at two calls."""
        known, kind = self._known, _machine_code(self._device_type)
        if known is None or kind is None:
            self._known = None
        elif isinstance(compiled, kind):
            first = self._met.pop(key, None)
            if first is None or first[1] != kinds:
                if len(self._met) >= _KEPT:
                    self._met.clear()
                self._met[key] = compiled, kinds
            elif first[0] is compiled:
                if len(known) >= _KEPT:
                    known.clear()
                known[key] = compiled, tuple(named[name] for name in self._names), kinds
            else:
                self._known = None
                _log.warning(
                    "Triton compiled %s twice for calls that look alike; every launch goes through Triton", self._kernel
                )


def _picker(positions: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What is at these positions, as a tuple."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return (lambda arguments: (arguments[positions[0]],)) if positions else (lambda _: ())
