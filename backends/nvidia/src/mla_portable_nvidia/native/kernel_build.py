# SPDX-License-Identifier: Apache-2.0
"""A build, one compilation of a native kernel: compiled for an architecture, loaded on a device."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import ClassVar, Final

from mla_portable_nvidia.native.runtime.driver import Kernel, Module
from mla_portable_nvidia.native.runtime.images import compile_kept
from mla_portable_nvidia.native.runtime.nvrtc import compile_cubin

__all__ = ["BLOCK_RESERVE", "SM_SHARED_MEMORY", "KernelBuild", "compile_build", "load"]

SM_SHARED_MEMORY: Final[Mapping[str, int]] = MappingProxyType(
    dict.fromkeys(("sm86", "sm89", "sm120", "sm121"), 100 << 10)
    | {"sm80": 164 << 10}
    | dict.fromkeys(("sm90", "sm100", "sm103"), 228 << 10)
)
"""DeviceFacts.arch -> bytes of shared memory of a multiprocessor. CUDA C++ Programming Guide, "Compute Capabilities"."""
BLOCK_RESERVE: Final = 1024
"""Bytes of shared memory that the driver keeps of each block; what one block may ask for is a multiprocessor's less these."""


class KernelBuild(ABC):
    """What one compilation of a kernel fixes; a subclass is a frozen, hashable value.

    Attributes:
        kernel: its name, and that of its source. headers: what the source includes. changing, fixed: its parameters as
            `struct` spells them, those of each launch and those of a shape. archs: DeviceFacts.arch -> what NVRTC compiles for.
        tensor_maps: its first parameters are maps of tensors.
    """

    kernel: ClassVar[str]
    headers: ClassVar[tuple[str, ...]] = ()
    changing: ClassVar[str]
    fixed: ClassVar[str]
    archs: ClassVar[Mapping[str, str]]
    tensor_maps: ClassVar[bool] = False

    @property
    @abstractmethod
    def label(self) -> str:
        """A name that differs from those of the kernel's other builds."""

    @property
    @abstractmethod
    def threads(self) -> int:
        """Of a block."""

    @property
    @abstractmethod
    def defines(self) -> tuple[tuple[str, int | str], ...]:
        """The source's macros."""

    @property
    @abstractmethod
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as the source lays it out."""

    @property
    def wide_clusters(self) -> bool:
        """It may be launched in clusters of more than 8 blocks."""
        return True


def compile_build(build: KernelBuild, arch: str, compiler: Callable[..., bytes] = compile_cubin) -> bytes:
    """Machine code of a build for `arch` ("sm_90a"). Raises: NvrtcNotFound, CompilationFailed."""
    folder = files(__package__)
    source, *headers = (folder.joinpath(name).read_text(encoding="utf-8") for name in (f"{build.kernel}.cu", *build.headers))
    return compiler(source, arch, build.defines, dict(zip(build.headers, headers, strict=True)))


@functools.cache
def load(build: KernelBuild, arch: str, device: int) -> Kernel:
    """A build on a device, loaded once; its image may come from disk. Raises: NvrtcNotFound, CompilationFailed, DriverError."""
    module = Module(compile_build(build, arch, compile_kept), device)
    return module.kernel(
        build.kernel,
        build.changing,
        build.fixed,
        threads=build.threads,
        shared=build.shared_bytes,
        wide_clusters=build.wide_clusters,
        tensor_maps=build.tensor_maps,
    )
