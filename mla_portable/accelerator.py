# SPDX-License-Identifier: Apache-2.0
"""Devices of any type behind one interface: the only module that knows what torch's device types are.

A device type is whatever torch has a module for: `torch.cuda` (NVIDIA, and every vendor that imitates it), `torch.xpu`, or
one that a vendor's package registers, such as `torch.musa` or `torch.npu`. These functions of the module are needed:
`is_available`, `device_count`, `current_device`, `set_device`, `device` (a context manager that takes an index) and
`synchronize`. These are used where it has them: `get_device_properties`, `is_bf16_supported`, `is_current_stream_capturing`,
`current_stream`, `stream`, `Stream`, `Event`, `empty_cache`, and for graphs `graph` with the class `<TYPE>Graph` (`CUDAGraph`,
`NPUGraph`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, cast

import torch

_HOST: Final = "cpu"
_ERROR_WORDS: Final[dict[str, tuple[str, ...]]] = {"cuda": ("CUDA error", "HIP error")}
"""What a RuntimeError of a device of this type says. For other types "<TYPE> error", in upper case; see `add_error_words`."""


class Accelerator:
    """One device. The CPU is one too: it has no current device, guard, streams or graphs, and nothing to wait for.

    Attributes:
        device: with its index, None for the CPU. module: torch's module for the type, None for the CPU.
        index: -1 for the CPU, as `Tensor.get_device` says.
        current_index: () -> index of the current device of the type. is_capturing: () -> the current stream is captured in a
            graph; False where the type has no graphs. Both are looked up once, here, because hot paths call them.
    """

    __slots__ = ("current_index", "device", "index", "is_capturing", "module")

    def __init__(self, device: torch.device) -> None:
        """Touches no device unless `device` has no index, which means the current one."""
        self.current_index: Callable[[], int] = _no_index
        self.is_capturing: Callable[[], bool] = _never
        self.module: Any = None
        self.device, self.index = torch.device(_HOST), -1
        if device.type == _HOST:
            return
        self.module = torch.get_device_module(device)
        # torch's function makes fewer Python calls than the module's, and needs what only a backend in C++ registers
        known = torch.accelerator.current_accelerator()
        registered: str = torch._C._get_privateuse1_backend_name()  # pyright: ignore[reportPrivateUsage]
        own = known is not None and known.type == device.type != registered
        self.current_index = torch.accelerator.current_device_index if own else self.module.current_device
        self.is_capturing = getattr(self.module, "is_current_stream_capturing", _never)
        index = cast("int | None", device.index)  # None for a bare type, whatever torch's stub says
        self.index = self.current_index() if index is None else index
        self.device = torch.device(device.type, self.index)

    @property
    def is_host(self) -> bool:
        """The CPU: work is done when a call returns, in the host's own memory."""
        return self.index < 0

    def is_current(self) -> bool:
        """This is the current device of its type, on which kernels are launched; a CPU always is."""
        return self.index < 0 or self.current_index() == self.index

    def guard(self) -> AbstractContextManager[object]:
        """Makes this the current device of its type in a `with` block: kernels are launched on the current device."""
        return nullcontext() if self.is_host else self.module.device(self.index)

    def make_current(self) -> None:
        """Make this the current device of its type from now on, in this thread."""
        if not self.is_host:
            self.module.set_device(self.index)

    def synchronize(self) -> None:
        """Wait for all work of the device; a fault of a kernel surfaces here."""
        if not self.is_host:
            self.module.synchronize(self.index)

    def empty_cache(self) -> None:
        """Give unused memory of torch's allocator back to the device."""
        empty = getattr(self.module, "empty_cache", None)
        if empty is not None:
            empty()

    def properties(self) -> Any:
        """What the type's module reports about the device; names of fields depend on the type; None if it reports nothing."""
        read = getattr(self.module, "get_device_properties", None)
        return None if read is None else read(self.index)

    def computes_bf16(self) -> bool:
        """Whether this device computes in bfloat16 without emulation, by the type's module; True where that does not say."""
        asks = getattr(self.module, "is_bf16_supported", None)
        if asks is None:
            return True
        with self.guard():  # it asks about the current device
            try:
                return bool(asks(including_emulation=False))
            except TypeError:  # older ones, and other types', take no such argument
                return bool(asks())

    def carried(self) -> AbstractContextManager[object]:
        """This device and the caller's current stream of it, to be entered in another thread."""
        current = getattr(self.module, "current_stream", None)
        return self._enter(None if current is None else current(self.index))

    @contextmanager
    def _enter(self, stream: Any) -> Generator[None, None, None]:
        with self.guard(), nullcontext() if stream is None else self.module.stream(stream):
            self.is_capturing()  # the first call of a thread binds the device's context to it
            yield

    def graph(self) -> Any:
        """A new, empty graph, with the methods of `torch.cuda.CUDAGraph`."""
        return getattr(self.module, f"{self.device.type.upper()}Graph")()

    def capture(self, graph: Any) -> AbstractContextManager[object]:
        """Captures the block's work in `graph` instead of running it. Raises: what the type's module raises."""
        return self.module.graph(graph)

    @contextmanager
    def side_stream(self) -> Generator[None, None, None]:
        """A stream for the block: it waits for the current stream's work, and the current stream then waits for it."""
        side, current = self.module.Stream(self.index), self.module.current_stream(self.index)
        side.wait_stream(current)
        with self.module.stream(side):
            yield
        current.wait_stream(side)

    def event(self, *, timing: bool = False) -> Any:
        """An event, with the methods of `torch.Event`."""
        return self.module.Event(enable_timing=True) if timing else self.module.Event()

    def can_pin(self) -> bool:
        """Whether host memory can be pinned and copied from asynchronously, with events that tell when a copy is done."""
        if self.is_host or not (hasattr(self.module, "Event") and hasattr(self.module, "current_stream")):
            return False
        try:
            torch.empty(1, dtype=torch.uint8, device=_HOST, pin_memory=True)
        except RuntimeError:  # the type's allocator pins no memory
            return False
        return True


@functools.cache
def accelerator(device: torch.device) -> Accelerator:
    """The accelerator that `device` names; the same object at each call. For a device with its index (the CPU has none).

    Raises: RuntimeError for a device type without a module in torch.
    """
    return Accelerator(device)


def _no_index() -> int:
    return -1


def _never() -> bool:
    return False


def device_count(device_type: str) -> int:
    """Devices of a type that torch can use here: 1 for "cpu", 0 for a type that torch does not know."""
    if device_type == _HOST:
        return 1
    module: Any = getattr(torch, device_type, None)
    available = getattr(module, "is_available", _never)
    return int(getattr(module, "device_count", int)()) if available() else 0


def device_names(device_type: str) -> list[str]:
    """The devices of a type by torch's names: "cpu", or "cuda:0", "cuda:1", ..."""
    return [_HOST] if device_type == _HOST else [f"{device_type}:{index}" for index in range(device_count(device_type))]


def known_types(named: Iterable[str] = ()) -> list[str]:
    """Device types to look for, each once: torch's accelerator, CUDA, those of `named`, and last "cpu"."""
    found = torch.accelerator.current_accelerator()
    own = [] if found is None else [found.type]
    return [*dict.fromkeys(each for each in (*own, "cuda", *named) if each != _HOST), _HOST]


def default_device(named: Iterable[str] = ()) -> torch.device:
    """The first device of the first accelerator that is here, of torch's own or of the types in `named`; else the CPU."""
    return next(torch.device(name) for each in known_types(named) for name in device_names(each)[:1])


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Turns autocast off for a device type, in a `with` block. Nothing is done for types without autocast."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def add_error_words(device_type: str, *words: str) -> None:
    """Declare texts that a RuntimeError of such a device contains; for a plugin to call on import.

    Not needed where torch raises `torch.AcceleratorError`, or the text says "<TYPE> error" with the type in upper case.
    """
    _ERROR_WORDS[device_type] = tuple(dict.fromkeys((*_error_words(device_type), *words)))


def is_device_error(error: BaseException, device_type: str) -> bool:
    """Whether the runtime of a device raised this. On a CPU the text of an error does not show it."""
    if isinstance(error, getattr(torch, "AcceleratorError", ())):
        return True
    if device_type == _HOST or not isinstance(error, RuntimeError):
        return False
    return re.search(rf"({'|'.join(map(re.escape, _error_words(device_type)))})\b", str(error)) is not None


def _error_words(device_type: str) -> tuple[str, ...]:
    return _ERROR_WORDS.get(device_type, (f"{device_type.upper()} error",))
