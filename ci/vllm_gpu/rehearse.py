# SPDX-License-Identifier: Apache-2.0
"""Make this process run as it would on an older NVIDIA GPU, or without some of the packages that are installed.

As on the older GPU are
- its name, compute capability and shared memory, as torch and NVML report them, and with them all that torch, Triton, vLLM and
  mla_portable conclude;
- every Triton kernel, vLLM's own included, and every native kernel of mla_portable_nvidia: they are compiled for that
  architecture, and only their PTX for the chip (`older_ptx`);
- packages: a hidden one cannot be imported or loaded, one that refuses can be imported and its kernels raise.

As on the GPU that is there are its memory, number of SMs and speed, and code that was compiled ahead: torch, cuBLAS and vLLM's
operators run what they hold for the chip.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import torch


@dataclass(frozen=True)
class OlderGPU:
    """What a GPU reports. shared_memory: bytes, for a block that opts in, and for an SM."""

    name: str
    capability: tuple[int, int]
    shared_memory: tuple[int, int]


GPUS: Final = {
    "sm80": OlderGPU("NVIDIA A100-SXM4-80GB", (8, 0), (163 << 10, 164 << 10)),
    "sm89": OlderGPU("NVIDIA L40S", (8, 9), (99 << 10, 100 << 10)),
}
"""Their profiles say the same (capability/profiles)."""

PACKAGES: Final = {
    "deep_gemm": ("deep_gemm", "vllm.third_party.deep_gemm"),
    "flashmla": ("flash_mla", "vllm._flashmla_C", "vllm._flashmla_extension_C"),
    "flash_attention_3": ("vllm.vllm_flash_attn._vllm_fa3_C",),
}
"""The modules of what can be hidden; `torch.ops.load_library` does not find files with their names either."""

_KERNELS: Final = ("gemm", "logits", "einsum")
"""Parts of the names of DeepGEMM's functions that run kernels."""


def install(loaded: Path, *, arch: str = "", hidden: Sequence[str] = (), refusing: Sequence[str] = ()) -> None:
    """Call this before anything asks torch for the device, and before vLLM is imported.

    Args:
        loaded: the file that gets the name of each Triton kernel.
        arch: a key of GPUS; "" for the GPU that is there. hidden: keys of PACKAGES. refusing: likewise, "deep_gemm" alone.
    Raises: RuntimeError where vLLM or mla_portable is imported already.
    """
    late = [name for name in ("vllm", "mla_portable") if name in sys.modules]
    if late:
        raise RuntimeError(f"{', '.join(late)} imported before the rehearsal of {arch or hidden or refusing}: install it first")
    hide([module for package in hidden for module in PACKAGES[package]])
    if arch:
        report(GPUS[arch])
        compile_for(GPUS[arch], loaded)
    for package in refusing:
        for module in PACKAGES[package]:
            refuse(module, arch or "this device")


def report(gpu: OlderGPU) -> None:
    """torch and vLLM's NVML report what `gpu` does."""
    report_to_torch(gpu)
    nvml = import_module("vllm.third_party.pynvml")
    nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: list(gpu.capability)
    nvml.nvmlDeviceGetName = lambda handle: gpu.name


def report_to_torch(gpu: OlderGPU) -> None:
    """torch reports what `gpu` does."""
    read = torch.cuda.get_device_properties
    block, multiprocessor = gpu.shared_memory
    older: dict[str, Any] = {"name": gpu.name, "major": gpu.capability[0], "minor": gpu.capability[1]}
    older |= {"shared_memory_per_block_optin": block, "shared_memory_per_multiprocessor": multiprocessor}

    def properties(device: Any = None) -> SimpleNamespace:
        found = read(device)
        return SimpleNamespace(**{name: getattr(found, name) for name in dir(found) if not name.startswith("_")} | older)

    torch.cuda.get_device_properties = properties  # torch.cuda.get_device_capability and get_device_name ask it


def compile_for(gpu: OlderGPU, loaded: Path) -> None:
    """Triton and the native kernels compile for `gpu`, and Triton allows a kernel no more shared memory than it has."""
    import older_ptx

    major, minor = gpu.capability
    older_ptx.load_ptx_instead(10 * major + minor, loaded)
    older_ptx.load_native_ptx_instead(10 * major + minor, loaded)
    utils = older_ptx.triton_driver.active.utils
    read: Callable[[int], dict[str, int]] = utils.get_device_properties
    utils.get_device_properties = lambda device: {**read(device), "max_shared_mem": gpu.shared_memory[0]}


class _Without:
    """A finder of `sys.meta_path` that does not find some modules."""

    def __init__(self, finder: Any, modules: Collection[str]) -> None:
        self._finder, self._modules = finder, frozenset(modules)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        parts = name.split(".")
        if any(".".join(parts[:end]) in self._modules for end in range(1, len(parts) + 1)):
            return None
        return self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


def hide(modules: Collection[str]) -> None:
    """`modules` and what is inside of them cannot be found any more, nor libraries of operators with their names loaded."""
    if not modules:
        return
    sys.meta_path[:] = [_Without(finder, modules) for finder in sys.meta_path]
    stems, load = {module.rpartition(".")[2] for module in modules}, torch.ops.load_library

    def load_library(path: str | os.PathLike[str]) -> Any:
        if Path(path).name.partition(".")[0] in stems:
            raise OSError(f"{path}: hidden by the rehearsal")
        return load(path)

    torch.ops.load_library = load_library


def refuse(module: str, device: str) -> None:
    """The functions of `module` that run kernels raise what DeepGEMM raises on a GPU that it has no kernels for."""
    try:
        found = import_module(module)
    except ModuleNotFoundError:
        return
    for name in dir(found):
        if any(part in name for part in _KERNELS) and callable(getattr(found, name)) and not name.startswith("_"):
            setattr(found, name, partial(_unsupported, name, device))


def _unsupported(name: str, device: str, *arguments: Any, **named: Any) -> NoReturn:
    raise RuntimeError(f"Assertion error (csrc/apis/attention.hpp): Unsupported architecture ({name}, rehearsed {device})")


def environ(arch: str, caches: Path) -> dict[str, str]:
    """Variables of a process that rehearses `arch`: caches of its own, kernels compiled in the process and loaded by Triton."""
    if not arch:
        return {}
    mine = {
        name: str(caches / arch / name.lower()) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")
    }
    return {**mine, "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0"}


def state(loaded: Path) -> dict[str, Any]:
    """What this process takes its device for, to be judged.

    archs: by who reports it. kernels: those that Triton loaded as PTX. foreign: implementations for other architectures alone.
    """
    from triton.runtime import driver
    from vllm.platforms import current_platform

    from mla_portable.choose import get_registry

    registry = get_registry()
    facts = registry.facts("cuda")
    found = {
        "torch": "sm{}{}".format(*torch.cuda.get_device_capability()),
        "vllm": f"sm{current_platform.get_device_capability().to_int()}",
        "triton": f"sm{driver.active.get_current_target().arch}",
        "mla_portable": facts.arch,
    }
    implementations = list(registry.implementations())
    native = {one.name for one in implementations if one.support.archs is None or facts.arch in one.support.archs}
    kernels = loaded.read_text(encoding="utf-8").split("\n")[:-1] if loaded.exists() else []
    return {"archs": found, "kernels": len(kernels), "foreign": sorted({one.name for one in implementations} - native)}
