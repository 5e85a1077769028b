# SPDX-License-Identifier: Apache-2.0
"""Loading machine code and launching its kernels through the CUDA driver, with torch's current stream.

Arguments travel as one packed buffer in the layout that the kernel declares (CU_LAUNCH_PARAM_BUFFER_POINTER). What is the same
in every launch of one shape is packed when it is prepared, so a launch is one `struct.pack_into` of the rest and one call
into the driver.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import Any, Final, TypeVar

import torch

from mla_portable.contracts import DRIVER_FAULTS

__all__ = ["MAPS_SINCE", "DriverError", "Kernel", "Launch", "Launches", "Module", "driver_version", "tensor_map"]

_BUFFER_POINTER: Final = 1
_BUFFER_SIZE: Final = 2
_DYNAMIC_SHARED: Final = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_WIDE_CLUSTERS: Final = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_CLUSTER_DIMENSION: Final = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_PROGRAMMATIC_ORDER: Final = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_INVALID_CONTEXT: Final = 201  # CUDA_ERROR_INVALID_CONTEXT: the thread has no current context
_INVALID_CLUSTER_SIZE: Final = 912  # CUDA_ERROR_INVALID_CLUSTER_SIZE
_MAP_BYTES: Final = 128
_MAP_ALIGNMENT: Final = 64
_BFLOAT16_MAP, _SWIZZLE_128, _PROMOTE_128 = 9, 3, 2  # of CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion
MAPS_SINCE: Final = 12040
"""First CUDA version whose driver says where a kernel's parameters start (cuFuncGetParamInfo)."""


class DriverError(RuntimeError):
    """A call into the CUDA driver failed; the message has the call and the driver's own text.

    Attributes:
        code: the CUresult. fault: the device's context is lost. The message then contains "CUDA error: ", as torch's does;
            the message of a call that was refused does not.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code

    @property
    def fault(self) -> bool:
        return self.code in DRIVER_FAULTS


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code == 0:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(text))
    words = text.value.decode() if text.value else "unknown error"
    error = f"{what}: {'CUDA error: ' if code in DRIVER_FAULTS else ''}{words} (CUDA driver error {code})"
    if code == 2:
        raise torch.cuda.OutOfMemoryError(error)
    raise DriverError(error, code)


def driver_version() -> int:
    """CUDA version that the driver serves, 13000 for 13.0. Raises: OSError where there is no driver, DriverError."""
    version = ctypes.c_int()
    _check(_driver().cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
    return version.value


@functools.cache
def _context(device: int) -> ctypes.c_void_p:
    """The primary context of a device, which torch uses too; retained once a process."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), device), f"cuDeviceGet {device}")
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), f"cuDevicePrimaryCtxRetain of device {device}")
    return context


def _make_current(device: int) -> None:
    """Make the device's primary context current on this thread, as calls of the CUDA runtime do and the driver's do not."""
    _check(_driver().cuCtxSetCurrent(_context(device)), f"cuCtxSetCurrent for device {device}")


def tensor_map(x: torch.Tensor, rows: int) -> bytes:
    """A map of x [tokens, heads, columns] bf16, by which the copy engine fetches `rows` tokens of a head, 64 columns.

    These are rows of 128 bytes in shared memory, swizzled by 128 bytes; what lies beyond the tensor is fetched as zeros.
    Address and strides are multiples of 16 bytes. It takes no context. Raises: DriverError.
    """
    tokens, heads, columns = x.shape
    room = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    at = -(-ctypes.addressof(room) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
    sizes = (ctypes.c_uint64 * 3)(columns, heads, tokens)
    apart = [stride if size > 1 else columns for size, stride in ((heads, x.stride(1)), (tokens, x.stride(0)))]
    strides = (ctypes.c_uint64 * 2)(*(each * x.element_size() for each in apart))
    box, steps = (ctypes.c_uint32 * 3)(64, 1, rows), (ctypes.c_uint32 * 3)(1, 1, 1)
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        _BFLOAT16_MAP,
        3,
        ctypes.c_void_p(x.data_ptr()),
        sizes,
        strides,
        box,
        steps,
        0,
        _SWIZZLE_128,
        _PROMOTE_128,
        0,
    )
    _check(code, f"cuTensorMapEncodeTiled of {list(x.shape)}, strides {list(x.stride())}, boxes of {rows} rows")
    return ctypes.string_at(at, _MAP_BYTES)


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 3), ("rest", ctypes.c_char * 52)]


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


@functools.cache
def _attributes(cluster: int, starts_early: bool = False) -> tuple[Any, int]:
    """The attributes of a launch, and how many: clusters of 1 x `cluster` blocks; a start before the kernel in front ends."""
    listed = [_Attribute(id=_CLUSTER_DIMENSION, value=(1, cluster, 1))] if cluster > 1 else []
    if starts_early:
        listed.append(_Attribute(id=_PROGRAMMATIC_ORDER, value=(1, 0, 0)))
    return ((_Attribute * len(listed))(*listed) if listed else None), len(listed)


class Module:
    """Machine code loaded into the context of `device`; lives as long as the object."""

    def __init__(self, cubin: bytes, device: int) -> None:
        torch.cuda.init()
        self._handle = ctypes.c_void_p()
        self._device = device
        with torch.cuda.device(device):
            _make_current(device)
            _check(_driver().cuModuleLoadData(ctypes.byref(self._handle), cubin), "cuModuleLoadData")

    def kernel(
        self,
        name: str,
        changing: str,
        fixed: str,
        *,
        threads: int,
        shared: int,
        wide_clusters: bool = False,
        tensor_maps: bool = False,
    ) -> Kernel:
        """The kernel `name`; threads and bytes of shared memory of a block.

        Args:
            changing, fixed: its parameters for `struct`; those that each launch is given, and after them those that a
                prepared one keeps.
            wide_clusters: it may be launched in clusters of more than 8 blocks.
            tensor_maps: its first parameters are maps of tensors, whose alignment moves all parameters. It takes a driver of
                MAPS_SINCE.
        """
        driver, function = _driver(), ctypes.c_void_p()
        with torch.cuda.device(self._device):
            _make_current(self._device)
            _check(
                driver.cuModuleGetFunction(ctypes.byref(function), self._handle, name.encode()), f"cuModuleGetFunction {name}"
            )
            if shared > 48 << 10:
                code = driver.cuFuncSetAttribute(function, _DYNAMIC_SHARED, shared)
                _check(code, f"{shared} bytes of shared memory for {name}")
            if wide_clusters:
                _check(driver.cuFuncSetAttribute(function, _WIDE_CLUSTERS, 1), f"clusters of 16 blocks for {name}")
            if tensor_maps:
                begin, size = ctypes.c_size_t(), ctypes.c_size_t()
                code = driver.cuFuncGetParamInfo(function, ctypes.c_size_t(0), ctypes.byref(begin), ctypes.byref(size))
                _check(code, f"cuFuncGetParamInfo of {name}")
                changing = f"{begin.value}x {changing}"
        return Kernel(self, function, name, changing, fixed, threads, shared, self._device)


class Kernel:
    """One kernel, to be prepared for its launches."""

    def __init__(
        self,
        module: Module,
        function: ctypes.c_void_p,
        name: str,
        changing: str,
        fixed: str,
        threads: int,
        shared: int,
        device: int,
    ) -> None:
        self._module, self.function, self.name, self.device = module, function, name, device
        self.changing, self._all = struct.Struct(changing), struct.Struct(f"{changing} {fixed}")
        self._blank = self.changing.unpack(bytes(self.changing.size))
        self._threads, self._shared = threads, shared

    def max_clusters(self, size: int) -> int:
        """How many clusters of `size` blocks the device can hold at once; 0 where it cannot launch one."""
        count = ctypes.c_int()
        config = _Config(1, size, 1, self._threads, 1, 1, self._shared, None, *_attributes(size))
        with torch.cuda.device(self.device):
            _make_current(self.device)
            code = _driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), self.function, ctypes.byref(config))
        if code == _INVALID_CLUSTER_SIZE:
            return 0
        _check(code, f"cuOccupancyMaxActiveClusters for {size} blocks of {self.name}")
        return count.value

    def prepare(self, grid: tuple[int, int], cluster: int, *fixed: Any, starts_early: bool = False) -> Launch:
        """Launches of `grid` blocks, `cluster` of them along y in a cluster; fixed: as declared, in order.

        starts_early: the kernel waits by itself (griddepcontrol.wait) for the one in front of it in the stream.
        """
        config = _Config(grid[0], grid[1], 1, self._threads, 1, 1, self._shared, None, *_attributes(cluster, starts_early))
        return Launch(self, config, self._all.pack(*self._blank, *fixed))


class Launch:
    """A kernel with its grid and most of its arguments; launched by calling it. Graph-safe, allocates nothing on the device."""

    def __init__(self, kernel: Kernel, config: _Config, packed: bytes) -> None:
        self._kernel, self._config, self._device = kernel, config, kernel.device
        self._arguments, self._size = ctypes.create_string_buffer(packed, len(packed)), ctypes.c_size_t(len(packed))
        self._extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER, ctypes.addressof(self._arguments), _BUFFER_SIZE, ctypes.addressof(self._size), None
        )
        self._config_at, self._function = ctypes.byref(config), kernel.function
        self._pack_into, self._launch = kernel.changing.pack_into, _driver().cuLaunchKernelEx
        self._lock = threading.Lock()  # the driver is called without Python's own

    def __call__(self, *changing: Any) -> None:
        """Launch on the current stream of the device; changing: as declared, in order."""
        with self._lock:
            self._pack_into(self._arguments, 0, *changing)
            self._config.stream = torch._C._cuda_getCurrentRawStream(self._device)
            code = self._launch(self._config_at, self._function, None, self._extra)
            if code == _INVALID_CONTEXT:  # nothing was launched: this thread has made no call of the CUDA runtime yet
                _make_current(self._device)
                code = self._launch(self._config_at, self._function, None, self._extra)
        if code:
            _check(code, f"launch of {self._kernel.name}, {self._config.grid_x} x {self._config.grid_y} blocks")


L = TypeVar("L")


class Launches(dict[tuple[Any, ...], L]):
    """Prepared launches by the shapes and strides that they are for; beyond `most` all are prepared again as needed."""

    most = 1024

    def __setitem__(self, key: tuple[Any, ...], launch: L) -> None:
        if len(self) >= self.most:
            self.clear()
        super().__setitem__(key, launch)
