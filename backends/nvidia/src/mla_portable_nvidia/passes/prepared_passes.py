# SPDX-License-Identifier: Apache-2.0
"""Launches of this plugin's Triton kernels, prepared once for each kind of call.

A launch through Triton takes the host longer than the pass takes the device, because every argument is inspected. Here the
first call of a kind goes through Triton, which compiles. After that, addresses are packed and the CUDA driver is called, as
for the native kernels. The driver is asked whether the kernel's parameters are what is packed. Where it cannot say, where
Triton wants scratch for a kernel, or without a GPU, every call goes through Triton.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from torch import Tensor

from mla_portable.kit.triton_launcher import OPTIONS, TritonLauncher, splits_by_alignment
from mla_portable_nvidia.native.runtime.driver import Kernel, Launch, Launches

_INTEGERS: Final = {"i32": "i", "i64": "q"}
"""Triton's types of integers -> their codes for `struct`."""
_SCRATCH: Final = "QQ"
"""What Triton adds to the parameters of every kernel: the addresses of its own scratch and of a profiler's."""
_PLAIN: Final = {
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
    "num_ctas": 1,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
}
"""What a kernel's metadata have to say, by their names in Triton 3.5 to 3.9."""
_WARP: Final = 32


class Arguments(NamedTuple):
    """What a kind of call decides.

    Attributes:
        grid: programs. integers: the parameters that follow the tensors and what changes from call to call. named: constants
            and Triton's options.
        starts_early: the kernel waits by itself for the one in front of it in the stream; see `early_start.can_wait`.
    """

    grid: tuple[int, int]
    integers: tuple[int, ...]
    named: dict[str, Any]
    starts_early: bool = False


class PreparedPass:
    """A Triton kernel as a callable whose launches are prepared. It skips Triton's launch hooks.

    Launches on the current stream of the tensors' device, which has to be the current one. Graph-safe once a call of the same
    kind was made.
    """

    def __init__(self, kernel: Any) -> None:
        """kernel: what `triton.jit` made; its parameters are pointers, integers, constants, in this order.

        Integers that change from call to call come first among them, and Triton must not specialise them.
        """
        self._kernel, self._through_triton = kernel, TritonLauncher(kernel)
        self._launches = Launches[Launch]()
        self._prepares = True
        params = getattr(kernel, "params", ())  # interpreted ones have none, and are not prepared
        self._aligned = [param.num for param in params if param.name.endswith("_ptr") and splits_by_alignment(param)]

    def __call__(
        self,
        kind: tuple[Any, ...],
        tensors: tuple[Tensor, ...],
        arguments: Callable[[], Arguments],
        changing: tuple[int, ...] = (),
    ) -> None:
        """Launch.

        Args:
            kind: all that `arguments` depends on, the types of the tensors apart, which are the same in all calls of a kind.
            tensors: for each pointer, on one device; any tensor for one that the constants leave unused.
            arguments: of this kind; called for the first launch of it.
            changing: integers that may differ between calls of a kind.
        """
        at = [tensor.data_ptr() for tensor in tensors]
        # Triton compiles for addresses that are multiples of 16, and for others
        key = (kind, tensors[0].get_device(), *[at[place] % 16 == 0 for place in self._aligned])
        launch = self._launches.get(key)
        if launch is not None:
            launch(*at, *changing)
            return
        grid, integers, named, starts_early = arguments()
        if not self._prepares or key[1] < 0:
            self._through_triton(grid, *tensors, *changing, *integers, **named)
            return
        compiled = self._kernel[grid](*tensors, *changing, *integers, **named, **OPTIONS)
        launch = prepared(compiled, grid, len(tensors), integers, key[1], changing=len(changing), starts_early=starts_early)
        if launch is None:
            self._prepares = False
        else:
            self._launches[key] = launch


def prepared(
    compiled: Any,
    grid: tuple[int, int],
    pointers: int,
    integers: tuple[int, ...],
    device: int,
    *,
    changing: int = 0,
    starts_early: bool = False,
) -> Launch | None:
    """Launches of what Triton compiled; None if that is not possible.

    Each is given addresses for the first `pointers` parameters, and the `changing` integers behind them. integers: the rest.
    """
    packed = layout(compiled, pointers, integers, changing)
    if packed is None:
        return None
    codes, values = packed
    function, metadata = ctypes.c_void_p(compiled.function), compiled.metadata
    if not _takes(function, codes):
        return None
    given, threads = pointers + changing, metadata.num_warps * _WARP
    kernel = Kernel(compiled, function, compiled.name, codes[:given], codes[given:], threads, metadata.shared, device)
    return kernel.prepare(grid, 1, *values, starts_early=starts_early)


def layout(compiled: Any, pointers: int, integers: tuple[int, ...], changing: int = 0) -> tuple[str, tuple[int, ...]] | None:
    """The parameters that a compiled kernel has, as codes for `struct`, and the values of those that do not change.

    None for what Triton did not compile (its interpreter), for a kernel that wants scratch, clusters or another launch, and
    where Triton made a constant of an integer that changes.
    """
    metadata = getattr(compiled, "metadata", None)
    if any(getattr(metadata, name, None) != value for name, value in _PLAIN.items()):
        return None
    types = list(compiled.src.signature.values())[pointers : pointers + changing + len(integers)]
    of_changing, types = types[:changing], types[changing:]
    # Triton makes a constant of an integer that is 1, which is no parameter then
    kept = [(kind, value) for kind, value in zip(types, integers, strict=True) if kind != "constexpr"]
    parameters = (*of_changing, *(kind for kind, _ in kept))
    if any(kind not in _INTEGERS for kind in parameters):
        return None
    return "Q" * pointers + "".join(_INTEGERS[kind] for kind in parameters) + _SCRATCH, (*(value for _, value in kept), 0, 0)


def _takes(function: ctypes.c_void_p, codes: str) -> bool:
    """The driver says that a kernel's parameters are these, by number, size and offset."""
    ask = _parameter_info()
    if ask is None:
        return False
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    for place, code in enumerate(codes):
        if ask(function, ctypes.c_size_t(place), ctypes.byref(offset), ctypes.byref(size)):
            return False
        if (offset.value, size.value) != (struct.calcsize(codes[: place + 1]) - struct.calcsize(code), struct.calcsize(code)):
            return False
    return ask(function, ctypes.c_size_t(len(codes)), ctypes.byref(offset), ctypes.byref(size)) != 0


def _parameter_info() -> Callable[..., int] | None:
    """cuFuncGetParamInfo; None without a driver, or with one that is older than CUDA 12.4."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuFuncGetParamInfo
    except (OSError, AttributeError):
        return None
