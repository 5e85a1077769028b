# SPDX-License-Identifier: Apache-2.0
"""The sources of the kernels of indexer_logits on a CPU, behind what a launch packs: see indexer_on_cpu.cpp. It needs g++."""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from attention_model import FUNCTION
from source_on_cpu import compiled

from mla_portable_nvidia import native
from mla_portable_nvidia.native.indexer_logits import IndexerBuild

__all__ = ["EmulatedScores"]


@functools.cache
def _library(build: IndexerBuild) -> ctypes.CDLL:
    header, source = (
        files(native).joinpath(name).read_text(encoding="utf-8") for name in ("indexer_logits.cuh", f"{build.kernel}.cu")
    )
    header = re.sub(r"^#define LIST16\(.*?(?=^// Weights of a token)", "", header, flags=re.DOTALL | re.MULTILINE)
    source = re.sub(r'^#include "[^"]*"\n', "", source, flags=re.MULTILINE)
    source = FUNCTION.sub(lambda found: "" if re.search(r"\basm\b", found[0]) else found[0], header + source)
    source = source.replace('asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");', "")
    source = re.sub(r"extern __shared__ .*? smem\[\];", "u8* smem = (u8*)memory.data();", source)
    defines = *build.defines, ("FUNCTION", build.kernel)
    return compiled(source, "indexer_on_cpu.cpp", defines, ctypes.c_char_p, *[ctypes.c_int] * 4)


class EmulatedScores:
    """The build, loaded. stride: how far the next thread is that gets its turn; grids: of its launches."""

    def __init__(self, build: IndexerBuild, stride: int = 77) -> None:
        self._build, self._stride, self.grids = build, stride, list[tuple[int, int]]()

    def prepare(self, grid: tuple[int, int], cluster: int, *fixed: Any) -> Callable[..., None]:
        assert grid[1] == cluster == 1

        def launch(*changing: Any) -> None:
            self.grids.append(grid)
            packed = struct.pack(f"{self._build.changing} {self._build.fixed}", *changing, *fixed)
            _library(self._build).launch(packed, grid[0], self._build.threads, self._build.shared_bytes, self._stride)

        return launch
