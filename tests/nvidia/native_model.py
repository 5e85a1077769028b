# SPDX-License-Identifier: Apache-2.0
"""A CPU that stands in for the native kernels: it takes the packed arguments by the names of the source's parameters.

Addresses and strides are followed as the kernel follows them, and what it assumes of them is asserted. The arithmetic is the
reference's: what is tested is that a launch says what was meant.
"""

from __future__ import annotations

import ctypes
import gc
import math
import re
import struct
from collections.abc import Callable
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import torch
import torch_reference as reference
from torch import Tensor

from mla_portable_nvidia import native
from mla_portable_nvidia.native.sparse_decode import HEADERS, Build

_LETTERS = {"float": "f", "int": "i", "i64": "q"}
_ROWS = {
    "sparse_decode_fp8": (torch.uint8, 656),
    "sparse_decode_wide": (torch.uint8, 656),
    "sparse_decode_bf16": (torch.bfloat16, 576),
}
"""kernel -> what a row of its cache is."""


def _text(name: str) -> str:
    return files(native).joinpath(name).read_text(encoding="utf-8")


def _whole(name: str) -> str:
    source = _text(name)
    for header in reversed(HEADERS):
        source = source.replace(f'#include "{header}"', _text(header))
    return source


SOURCES = {kernel: _whole(f"{kernel}.cu") for kernel in _ROWS}
"""kernel -> its source with what it includes."""


def parameters(kernel: str) -> list[tuple[str, str]]:
    """(name, letter of `struct`) of a kernel's parameters, in the order of its source."""
    body = re.search(r"struct Strides \{(.*?)\};", SOURCES[kernel], re.DOTALL)
    listed = re.search(rf"{kernel}\(\n(.*?)\) \{{", SOURCES[kernel], re.DOTALL)
    assert body and listed
    strides = [name for line in re.findall(r"i64 ([^;]+);", body[1]) for name in line.split(", ")]
    found: list[tuple[str, str]] = []
    for declaration in listed[1].split(","):
        *kind, name = declaration.replace("__restrict__", "").split()
        if kind == ["Strides"]:
            found += [(stride, "q") for stride in strides]
        else:
            found.append((name, "P" if kind[-1].endswith("*") else _LETTERS[kind[-1]]))
    return found


_EVEN = {kernel: int(re.search(r"block_size == (\d) \? \(i64\)slot \* ROW", text)[1]) for kernel, text in SOURCES.items()}
"""The block size that tells a kernel that all rows lie side by side."""


class Memory:
    """All that lives in tensors now; what lies elsewhere is not read but refused."""

    def __init__(self) -> None:
        tensors = [each for each in gc.get_objects() if type(each) is Tensor and each.device.type == "cpu"]
        storages = [each.untyped_storage() for each in tensors if each.layout is torch.strided]
        self._owned = {(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages}

    def __call__(self, address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        """The tensor that lies at an address."""
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        assert min(strides) >= 0
        span = (1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))) * dtype.itemsize
        inside = any(begin <= address and address + span <= end for begin, end in self._owned)
        assert inside, f"{shape} with strides {strides} at {address:#x} lies in no tensor"
        return torch.frombuffer((ctypes.c_char * span).from_address(address), dtype=dtype).as_strided(shape, strides)


class Model:
    """One build, loaded; remembers its launches."""

    def __init__(self, build: Build, changing: str, fixed: str, threads: int, shared: int) -> None:
        self.build, self.fields = build, f"{changing} {fixed}"
        assert (threads, shared) == (build.threads, build.shared_bytes)
        self.launches: list[SimpleNamespace] = []
        self.prepared = 0
        self.asked: list[int] = []

    def max_clusters(self, size: int) -> int:
        self.asked.append(size)
        return 132 * self.build.blocks_per_sm // size

    def prepare(self, grid: tuple[int, int], cluster: int, *fixed: Any) -> Callable[..., None]:
        self.prepared += 1
        return lambda *changing: self.run(grid, cluster, *changing, *fixed)

    def run(self, grid: tuple[int, int], cluster: int, *arguments: Any) -> None:
        values = struct.unpack(self.fields, struct.pack(self.fields, *arguments))
        at = SimpleNamespace(**{name: value for (name, _), value in zip(parameters(self.build.kernel), values, strict=True)})
        at.grid = grid
        self.launches.append(at)
        assert cluster == grid[1] <= 16 and grid[0] % at.head_tiles == 0
        assert (at.head_tiles - 1) * self.build.heads < at.num_heads <= at.head_tiles * self.build.heads
        assert at.q % 16 == at.kv % 16 == at.out % 8 == 0
        assert not any(stride % 8 for stride in (at.q_b, at.q_s, at.q_h))
        assert not any(stride % 4 for stride in (at.out_b, at.out_s, at.out_h))
        memory = Memory()
        lead = (grid[0] // at.head_tiles // at.query_len, at.query_len)
        rows = (*lead, at.num_heads)
        listed = memory(at.indices, torch.int32, (*lead, at.topk), (at.indices_b, at.indices_s, 1))
        chosen = torch.full_like(listed, -1)
        for split in range(grid[1]):
            begin, end = split * at.split_len, min((split + 1) * at.split_len, at.topk)
            assert begin < end or (split == 0 and at.topk == 0), "a block without work"
            assert at.split_len % self.build.tile == 0
            chosen[..., begin:end] = listed[..., begin:end]
        out, lse = reference.sparse_decode(
            memory(at.q, torch.bfloat16, (*rows, 576), (at.q_b, at.q_s, at.q_h, 1)),
            self._cache(at, memory),
            chosen,
            softmax_scale=at.scale_log2 * math.log(2.0),
            lengths=memory(at.lengths, torch.int32, lead, (at.lengths_b, at.lengths_s)) if at.lengths else None,
            attn_sink=memory(at.sink, torch.float32, (at.num_heads,), (1,)) if at.sink else None,
        )
        memory(at.out, torch.bfloat16, (*rows, 512), (at.out_b, at.out_s, at.out_h, 1)).copy_(out)
        memory(at.lse_out, torch.float32, rows, (at.lse_b, at.lse_s, at.lse_h)).copy_(lse)

    def _cache(self, at: SimpleNamespace, memory: Memory) -> Tensor:
        dtype, width = _ROWS[self.build.kernel]
        if at.block_size == _EVEN[self.build.kernel]:
            return memory(at.kv, dtype, (at.num_slots, 1, width), (width, width, 1))
        shape = (at.num_slots // at.block_size, at.block_size, width)
        assert at.block_stride % 16 == 0  # bytes
        return memory(at.kv, dtype, shape, (at.block_stride // dtype.itemsize, width, 1))
