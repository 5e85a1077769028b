# SPDX-License-Identifier: Apache-2.0
"""Let tests that name the device "cuda" run on a CPU: their tensors are the CPU's, and vLLM believes to be on CUDA.

Only for calls that end in this project's primitives or in Triton, which interprets kernels on a CPU: vLLM's compiled operators
are not there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

COMPILED: Final = (
    "vllm._C",
    "vllm._C_stable_libtorch",
    "vllm._moe_C",
    "vllm._moe_C_stable_libtorch",
    "vllm._flashmla_C",
    "vllm._flashmla_extension_C",
    "vllm._flashkda_C",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
"""Libraries that vLLM's platform imports."""
CPU: Final = torch.device("cpu")
NAME: Final = "a CPU in place of CUDA"


_OF_ACCELERATOR: Final = ("synchronize", "set_device_index", "empty_cache", "empty_host_cache")


class OnCPU(TorchFunctionMode):
    """While it is active, "cuda" in the arguments of torch's functions means the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "cuda":  # of a tensor
            return args[0]
        named = {name: _moved(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        if getattr(func, "__name__", "") == "to":
            args = [args[0], *map(_moved, args[1:])]
        return func(*args, **named)


def _moved(device: Any) -> Any:
    of_cuda = isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
    return CPU if of_cuda else device


def _answer(value: Any) -> Callable[..., Any]:
    """A function that returns `value`; another one in each call, for torch.compile knows functions by identity."""
    return lambda *_: value


class Generator(torch.Generator):
    """One of the CPU's, whichever device is named."""

    def __new__(cls, device: Any = CPU) -> Generator:
        return super().__new__(cls, _moved(device))


def install(capability: tuple[int, int]) -> None:
    """Call this before vLLM is imported."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in COMPILED:
        sys.modules[name] = ModuleType(name)
    _without_operators()
    cuda: Any = torch.cuda
    answers = {"is_available": True, "device_count": 1, "get_device_capability": capability}
    major, minor = capability
    answers["get_device_properties"] = SimpleNamespace(name=NAME, multi_processor_count=4, major=major, minor=minor)
    for name, value in answers.items():
        setattr(cuda, name, _answer(value))
    for module, names in ((cuda, ("synchronize", "set_device", "empty_cache")), (torch.accelerator, _OF_ACCELERATOR)):
        for name in names:
            setattr(module, name, _answer(None))
    set_default = torch.set_default_device
    torch.set_default_device = lambda device: set_default(_moved(device))
    torch.Generator = Generator  # pyright: ignore[reportAttributeAccessIssue]
    _be_cuda(capability)


def _without_operators() -> None:
    """Ignore descriptions of vLLM's compiled operators, which are not there; what asks for support is answered with no."""
    namespace: Any = type(torch.ops._C)
    found = namespace.__getattr__

    def answer_no(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if self.name.startswith(("_C", "_moe_C")) and "support" in name:
                return _answer(False)
            raise

    namespace.__getattr__ = answer_no
    describe = torch.library.register_fake

    def ignore_missing(operator: Any, function: Any = None, /, **options: Any) -> Any:
        def decorate(function: Any) -> Any:
            try:
                return describe(operator, **options)(function)
            except (AttributeError, RuntimeError):
                return function

        return decorate if function is None else decorate(function)

    torch.library.register_fake = ignore_missing


def _convert_fp8(output: torch.Tensor, input: torch.Tensor, scale: float = 1.0, kv_dtype: str = "fp8") -> None:
    """vLLM's operator that the tests' own references call: e4m3 from or to another dtype, bytes on either side."""
    assert kv_dtype == "fp8"
    if input.element_size() == 1:
        output.copy_(input.view(torch.float8_e4m3fn).float() * scale)
    else:
        output.view(torch.float8_e4m3fn).copy_(input.float() / scale)


def _be_cuda(capability: tuple[int, int]) -> None:
    """Make vLLM's platform one of CUDA whose tensors lie on the CPU."""
    platforms: Any = import_module("vllm.platforms")
    stock: Any = import_module("vllm.platforms.cuda").NonNvmlCudaPlatform
    version: Any = import_module("vllm.platforms.interface").DeviceCapability

    class Platform(stock):
        device_type, dispatch_key, dist_backend = "cpu", "CPU", "gloo"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return version(*capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return NAME

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 4

        @classmethod
        def set_device(cls, device: torch.device) -> None:
            pass

    platforms.current_platform = platforms._current_platform = Platform()
    import_module("vllm._custom_ops").convert_fp8 = _convert_fp8
