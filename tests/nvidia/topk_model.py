# SPDX-License-Identifier: Apache-2.0
"""The source of the native topk_select on a CPU, behind what a launch packs for it: see cuda_on_cpu.cpp. It needs g++."""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import torch
from native_model import Memory
from source_on_cpu import compiled

from mla_portable_nvidia import native
from mla_portable_nvidia.native.topk_select import TopkBuild

__all__ = ["SOURCE", "Model", "parameters", "shared_size"]

SOURCE = files(native).joinpath("topk_select.cu").read_text(encoding="utf-8")
_LETTERS = {"int": "i", "i64": "q"}
_ASSEMBLY = (
    (r'asm volatile\("prefetch\.global\.L2 \[%0\];" ::"l"\(line\)\);', ""),
    (r'asm volatile\("griddepcontrol\.wait;" ::: "memory"\);', ""),
    (r'asm volatile\("barrier\.cluster\.arrive\.release;" ::: "memory"\);', "emulated_arrive();"),
    (r'asm volatile\("barrier\.cluster\.wait\.acquire;" ::: "memory"\);', "emulated_wait();"),
    (r'asm\("mapa\.u64 %0, %1, 0;" : "=l"\(theirs\) : "l"\(mine\)\);', "theirs = emulated_first(mine);"),
    (r"extern __shared__ __align__\(16\) u8 smem\[\];", "u8* smem = (u8*)&memory[block() * shared_bytes];"),
)


def parameters() -> list[tuple[str, str]]:
    """(name, letter of `struct`) of the kernel's parameters, in the order of its source."""
    listed = re.search(r" topk_select\(\n(.*?)\) \{", SOURCE, re.DOTALL)
    assert listed
    found: list[tuple[str, str]] = []
    for declaration in listed[1].split(","):
        *kind, name = declaration.replace("__restrict__", "").split()
        found.append((name, "P" if kind[-1].endswith("*") else _LETTERS[kind[-1]]))
    return found


@functools.cache
def _library(build: TopkBuild) -> ctypes.CDLL:
    source = SOURCE
    for pattern, replacement in _ASSEMBLY:
        source, count = re.subn(pattern, replacement, source)
        assert count == 1, pattern
    assert "asm" not in source
    pointer, integer, wide = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
    arguments = [*[pointer] * 4, *[integer] * 2, *[wide] * 2, *[integer] * 3, *[pointer] * 2]
    return compiled(source, "cuda_on_cpu.cpp", build.defines, *arguments)


def shared_size(build: TopkBuild) -> int:
    """Bytes of the source's shared memory."""
    return int(_library(build).shared_size())


class Model:
    """One build, loaded; remembers its launches as (rows, blocks of a row)."""

    strides = (1, 77, 1023)
    """How far the next thread is that gets its turn; each launch takes another."""

    def __init__(self, build: TopkBuild, changing: str, fixed: str, threads: int, shared: int, wide: bool) -> None:
        self.build, self.fields, self.wide = build, f"{changing} {fixed}", wide
        assert (threads, shared) == (build.threads, build.shared_bytes)
        self.launches: list[tuple[int, int]] = []
        self.prepared = 0
        self.held: Callable[[int], int] = lambda size: 132 // size

    def max_clusters(self, size: int) -> int:
        return self.held(size)

    def prepare(self, grid: tuple[int, int], cluster: int, *fixed: Any, starts_early: bool = False) -> Callable[..., None]:
        self.prepared += 1
        assert cluster == grid[1]
        return lambda *changing: self.run(grid, *changing, *fixed)

    def run(self, grid: tuple[int, int], *arguments: Any) -> None:
        values = struct.unpack(self.fields, struct.pack(self.fields, *arguments))
        at = dict(zip([name for name, _ in parameters()], values, strict=True))
        rows, blocks = grid
        memory = Memory()
        logits = memory(at["logits"], torch.float32, (rows, at["num_logits"]), (at["logits_stride"], 1))
        memory(at["out"], torch.int32, (rows, at["topk"]), (at["out_stride"], 1))
        for name in ("starts", "ends"):
            memory(at[name], torch.int32, (rows,), (1,))
        size = ((rows - 1) * at["logits_stride"] + at["num_logits"]) * 4 if logits.numel() else 0
        stride = self.strides[len(self.launches) % len(self.strides)]
        _library(self.build).launch(*values, rows, blocks, stride, at["logits"], at["logits"] + size)
        self.launches.append(grid)
