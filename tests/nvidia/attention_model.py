# SPDX-License-Identifier: Apache-2.0
"""The sources of the SM80 attention kernels on a CPU, behind what a launch packs for them: see attention_on_cpu.cpp."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import struct
from collections.abc import Callable
from typing import Any

from native_model import SOURCES
from source_on_cpu import compiled

from mla_portable_nvidia.native.kernel_build import KernelBuild

__all__ = ["FUNCTION", "Emulated"]

FUNCTION = re.compile(r"(?:^template <[^\n]*\n)?^__device__ __forceinline__ (?:[^\n]*\}\n|.*?^\}\n)", re.DOTALL | re.MULTILINE)
_ELSEWHERE = re.compile(r"\b(asm|barrier_arrive|cluster_publish|copy_rows|prefetch|remote2|remote4|sum_shares)\b")
"""In functions that are emulated, or that only kernels of compute capability 9.0 call."""


@functools.cache
def _library(build: KernelBuild) -> ctypes.CDLL:
    source = FUNCTION.sub(lambda found: "" if _ELSEWHERE.search(found[0]) else found[0], SOURCES[build.kernel])
    source = re.sub(r"^template <[^\n]*\nstruct Merge \{.*?^\};\n", "", source, flags=re.DOTALL | re.MULTILINE)
    source = re.sub(r"extern __shared__ .*? smem\[\];", "u8* smem = (u8*)memory.data();", source)
    defines = (*build.defines, ("NAME", build.kernel))
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    return compiled(source, "attention_on_cpu.cpp", defines, ctypes.c_char_p, *[integer] * 4, pointer, integer)


class Emulated:
    """One build, loaded. caches: the bytes that its copies may read, as addresses."""

    strides = (0, 77)
    """How far the next thread is that gets its turn; each launch takes another."""
    caches: tuple[tuple[int, int], ...] = ()

    def __init__(self, build: KernelBuild, changing: str, fixed: str, threads: int, shared: int, wide_clusters: bool) -> None:
        self.build, self.fields = build, f"{changing} {fixed}"
        assert (threads, shared) == (build.threads, build.shared_bytes)
        self.launches = 0

    def prepare(self, grid: tuple[int, int], cluster: int, *fixed: Any) -> Callable[..., None]:
        assert cluster == 1
        return lambda *changing: self.run(grid, *changing, *fixed)

    def run(self, grid: tuple[int, int], *arguments: Any) -> None:
        packed = struct.pack(self.fields, *arguments)
        stride = self.strides[self.launches % len(self.strides)]
        ends = (ctypes.c_void_p * (2 * len(self.caches)))(*itertools.chain(*self.caches))
        _library(self.build).launch(packed, *grid, max(self.build.shared_bytes, 16), stride, ends, len(self.caches))
        self.launches += 1
