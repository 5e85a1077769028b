# SPDX-License-Identifier: Apache-2.0
"""Launches of this plugin's Triton kernels, prepared once for each kind of call.

A launch through Triton takes the host longer than the pass takes the device, because every argument is inspected. Here the first
call of a kind goes through Triton, which compiles; from then on, addresses are packed and the CUDA driver is called, as for
the native kernels. The driver is asked whether the kernel's parameters are what is packed. Where it cannot say, where Triton
wants scratch for a kernel, or without a GPU, every call goes through Triton.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from torch import Tensor

from mla_portable.contracts.triton_launcher import TritonLauncher
from mla_portable_nvidia.native.driver import Kernel, Launch, Launches

_INTEGERS: Final = {"i32": "i", "i64": "q"}
"""Triton's types of integers -> their codes for `struct`."""


class Arguments(NamedTuple):
    """What a kind of call decides: the grid; the integers, which follow the tensors; constants and Triton's options."""

    grid: tuple[int, int]
    integers: tuple[int, ...]
    named: dict[str, Any]


class PreparedPass:
    """A Triton kernel as a callable whose launches are prepared. It skips Triton's launch hooks.

    Launches on the current stream of the tensors' device, which has to be the current one. Graph-safe once a call like it was made.
    """

    def __init__(self, kernel: Any) -> None:
        """kernel: what `triton.jit` made; its parameters are pointers, integers, constants, in this order."""
        self._kernel, self._through_triton = kernel, TritonLauncher(kernel)
        self._launches = Launches[Launch]()
        self._prepares = True

    def __call__(self, kind: tuple[Any, ...], tensors: tuple[Tensor, ...], arguments: Callable[[], Arguments]) -> None:
        """Launch.

        Args:
            kind: all that `arguments` depends on, the types of the tensors apart, which are the same in all calls of a kind.
            tensors: for each pointer, on one device; any tensor for one that the constants leave unused.
            arguments: of this kind; called for the first launch of it.
        """
        at = [tensor.data_ptr() for tensor in tensors]
        # Triton compiles for addresses that are multiples of 16, and for others
        key = (kind, tensors[0].get_device(), *[address % 16 == 0 for address in at])
        launch = self._launches.get(key)
        if launch is not None:
            launch(*at)
            return
        grid, integers, named = arguments()
        if not self._prepares or key[1] < 0:
            self._through_triton(grid, *tensors, *integers, **named)
            return
        compiled = self._kernel[grid](*tensors, *integers, **named)
        launch = prepared(compiled, grid, len(tensors), integers, key[1])
        if launch is None:
            self._prepares = False
        else:
            self._launches[key] = launch


def prepared(compiled: Any, grid: tuple[int, int], pointers: int, integers: tuple[int, ...], device: int) -> Launch | None:
    """Launches of what Triton compiled, given addresses for its first `pointers` parameters; None where that is not possible."""
    metadata, kinds = getattr(compiled, "metadata", None), list(getattr(getattr(compiled, "src", None), "signature", {}).values())
    scratch = ("global_scratch_size", "profile_scratch_size")
    if metadata is None or metadata.num_ctas != 1 or any(getattr(metadata, name, 1) for name in scratch):
        return None
    types = kinds[pointers : pointers + len(integers)]
    # Triton makes a constant of an integer that is 1, which is no parameter then
    kept = [(kind, value) for kind, value in zip(types, integers, strict=True) if kind != "constexpr"]
    if any(kind not in _INTEGERS for kind, _ in kept):
        return None
    changing, fixed = "Q" * pointers, "".join(_INTEGERS[kind] for kind, _ in kept) + "QQ"  # two addresses of scratch
    function = ctypes.c_void_p(compiled.function)
    if not _takes(function, changing + fixed):
        return None
    threads = metadata.num_warps * 32
    kernel = Kernel(compiled, function, compiled.name, changing, fixed, threads, metadata.shared, device)
    return kernel.prepare(grid, 1, *(value for _, value in kept), 0, 0)


def _takes(function: ctypes.c_void_p, codes: str) -> bool:
    """The driver says that a kernel's parameters are these, by number, size and offset."""
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuFuncGetParamInfo
    except (OSError, AttributeError):  # no driver, or one older than CUDA 12.4
        return False
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    for place, code in enumerate(codes):
        if ask(function, ctypes.c_size_t(place), ctypes.byref(offset), ctypes.byref(size)):
            return False
        if (offset.value, size.value) != (struct.calcsize(codes[: place + 1]) - struct.calcsize(code), struct.calcsize(code)):
            return False
    return ask(function, ctypes.c_size_t(len(codes)), ctypes.byref(offset), ctypes.byref(size)) != 0
