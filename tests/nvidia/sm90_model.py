# SPDX-License-Identifier: Apache-2.0
"""The sources of the FP8 attention kernels of SM90 on a CPU, behind what a launch packs for them: see sm90_on_cpu.cpp."""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Callable
from typing import Any

from attention_model import FUNCTION
from native_model import SOURCES
from source_on_cpu import compiled

from mla_portable_nvidia.native.sparse_decode import Build

__all__ = ["EmulatedSm90"]


_ENDED = ctypes.CFUNCTYPE(None)


@functools.cache
def _library(build: Build) -> ctypes.CDLL:
    source = re.sub(r"^#define WGMMA\(.*?\n(?=// the thread)", "", SOURCES[build.kernel], flags=re.DOTALL | re.MULTILINE)
    source = re.sub(r"#else\n    if \(lane == 0\).*?#endif\n#endif", "#endif", source, flags=re.DOTALL)  # bulk copies
    registers = "cluster = ::cluster, block = ::block(), blocks = cluster_blocks;"
    source, replaced = re.subn(r"asm volatile\([^;]*ctaid.*?\);", registers, source, flags=re.DOTALL)
    assert replaced == 1
    source = FUNCTION.sub(lambda found: "" if re.search(r"\basm\b|add_nothing", found[0]) else found[0], source)
    source = re.sub(r"^.*\b(?:smem_u32\(const|typedef ).*\n", "", source, flags=re.MULTILINE)
    source = source.replace('asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");', "")
    source = re.sub(r"extern __shared__ .*? smem\[\];", "u8* smem = (u8*)shared_of(block());", source)
    defines = (*build.defines, ("NAME", build.kernel))
    return compiled(source, "sm90_on_cpu.cpp", defines, ctypes.c_char_p, *[ctypes.c_int] * 4, _ENDED)


class EmulatedSm90:
    """A build, loaded.

    stride: how far the next thread is that gets its turn. in_front: the kernel in front of each launch, which ends once all
    threads of the first cluster wait for it.
    """

    def __init__(self, stride: int, build: Build, in_front: Callable[[], None] = lambda: None) -> None:
        self._stride, self._build, self._in_front = stride, build, in_front

    def prepare(self, grid: tuple[int, int], cluster: int, *fixed: Any, starts_early: bool = False) -> Callable[..., None]:
        assert grid[1] == cluster

        def launch(*changing: Any) -> None:
            packed = struct.pack(f"{self._build.changing} {self._build.fixed}", *changing, *fixed)
            _library(self._build).launch(packed, *grid, self._build.shared_bytes, self._stride, _ENDED(self._in_front))

        return launch
