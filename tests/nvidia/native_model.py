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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_reference as reference
from torch import Tensor

from mla_portable.layouts import LAYOUTS
from mla_portable_nvidia import native
from mla_portable_nvidia.native import checks, kernel_build
from mla_portable_nvidia.native.runtime.nvrtc import compile_cubin
from mla_portable_nvidia.native.sparse_decode import FP8_IDLE_ROPE, HEADERS, MAX_SPLITS, Build

_LETTERS = {"float": "f", "int": "i", "i64": "q"}
KERNELS = ("sparse_decode_fp8", "sparse_decode_wide", "sparse_decode_bf16", "sparse_decode_sm80")


def _text(name: str) -> str:
    return files(native).joinpath(name).read_text(encoding="utf-8")


def _whole(name: str) -> str:
    source = _text(name)
    for header in reversed(HEADERS):
        source = source.replace(f'#include "{header}"', _text(header))
    return source


SOURCES = {kernel: _whole(f"{kernel}.cu") for kernel in (*KERNELS, "merge_splits")}
"""kernel -> its source with what it includes but for LAYOUT, the header of a row."""


def parameters(kernel: str) -> list[tuple[str, str]]:
    """(name, letter of `struct`) of a kernel's parameters, in the order of its source."""
    listed = re.search(rf"{kernel}\(\n(.*?)\) \{{", SOURCES[kernel], re.DOTALL)
    assert listed
    struct_name = listed[1].split()[-2]
    body = re.search(rf"struct {struct_name} \{{(.*?)\}};", SOURCES[kernel], re.DOTALL)
    assert body
    strides = [name for line in re.findall(r"i64 ([^;]+);", body[1]) for name in line.split(", ")]
    found: list[tuple[str, str]] = []
    for declaration in listed[1].split(","):
        *kind, name = declaration.replace("__restrict__", "").split()
        if kind == [struct_name]:
            found += [(stride, "q") for stride in strides]
        else:
            found.append((name, "P" if kind[-1].endswith("*") else _LETTERS[kind[-1]]))
    return found


_EVEN = int(re.search(r"block_size == (\d)\) return \(i64\)slot \* PITCH", SOURCES["sparse_decode_fp8"])[1])
"""The block size that tells a kernel that all rows lie side by side."""


def check_laid_out(build: Any, arch: str, heads: str, tile: str) -> None:
    """The compiler finds in a build's source what Python says of it, and no other number. heads, tile: the source's macros."""
    source = SOURCES[build.kernel]
    known = {"BLOCK": build.threads, "SPLITS": MAX_SPLITS, "TILED": build.tile, "SERVED": build.heads, "GIVEN": build.shared}
    asked = f"THREADS == BLOCK && MAX_SPLITS == SPLITS && {tile} == TILED && {heads} == SERVED && SHARED_BYTES == GIVEN"
    others = [re.sub(rf"\b{name}\b", f"({name} + 8)", asked) for name in known]
    checks = [f'static_assert({asked}, "differs");', *(f'static_assert(!({other}), "{other}");' for other in others)]
    layout = "\n".join((source[: source.index('extern "C"')], *checks))
    compile_cubin(layout, arch, [*build.defines, *known.items()], {name: _text(name) for name in build.headers})


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


@contextmanager
def stand_ins(patch: pytest.MonkeyPatch, make: Callable[..., Any], *, arch: str = "") -> Iterator[dict[Any, Any]]:
    """Builds are loaded as what `make` gives for (build, changing, fixed, threads, shared, wide_clusters). Yields them.

    arch: what all have to be compiled for, whose machine code is the build itself.
    """
    found: dict[Any, Any] = {}

    class Module:
        def __init__(self, cubin: Any, device: Any) -> None:
            self.build = cubin

        def kernel(
            self, name: str, changing: str, fixed: str, *, threads: int, shared: int, wide_clusters: bool, tensor_maps: bool
        ) -> Any:
            assert name == self.build.kernel
            if self.build not in found:
                found[self.build] = make(self.build, changing, fixed, threads, shared, wide_clusters)
            return found[self.build]

    def compiled(build: Any, target: str, compiler: Any) -> Any:
        assert arch in ("", target)
        return build

    patch.setattr(kernel_build, "Module", Module)
    patch.setattr(kernel_build, "compile_build", compiled)
    patch.setattr(checks, "device_with", lambda facts: torch.device("cuda", 0))
    kernel_build.load.cache_clear()
    yield found
    kernel_build.load.cache_clear()


class Model:
    """One build, loaded; remembers its launches."""

    clusters = True
    """May be larger than 8 blocks."""

    def __init__(self, build: Build, changing: str, fixed: str, threads: int, shared: int, wide_clusters: bool) -> None:
        self.build, self.fields = build, f"{changing} {fixed}"
        assert (threads, shared, wide_clusters) == (build.threads, build.shared_bytes, self.clusters)
        letters = re.sub(r"(\d+)(\w)", lambda each: each[2] * int(each[1]), self.fields).replace(" ", "")
        assert letters == "".join(letter for _, letter in parameters(build.kernel))
        self.launches: list[SimpleNamespace] = []
        self.started_early: list[bool] = []
        self.prepared = 0
        self.asked: list[int] = []

    def max_clusters(self, size: int) -> int:
        self.asked.append(size)
        return 132 * self.build.blocks_per_sm // size

    def prepare(self, grid: tuple[int, int], cluster: int, *fixed: Any, starts_early: bool = False) -> Callable[..., None]:
        self.prepared += 1
        self.started_early.append(starts_early)
        return lambda *changing: self.run(grid, cluster, *changing, *fixed)

    def run(self, grid: tuple[int, int], cluster: int, *arguments: Any) -> None:
        at = self.arguments(grid, *arguments)
        assert cluster == grid[1] <= 16
        assert 0 <= at.whole_clusters <= grid[0] and (cluster > 1 or at.whole_clusters == 0)
        keys = -(-at.topk // 32) * 32 + at.extra_topk if at.extra_topk else at.topk
        tiles = max(1, -(-keys // self.build.tile))
        assert (cluster - 1) * -(-tiles // cluster) < tiles, "a block without work"
        at.units = grid[0] + at.whole_clusters * (cluster - 1)
        memory, rows, lengths, sink = attended(at, self.build.heads)
        chosen = memory(at.indices, torch.int32, (*rows[:2], at.topk), (at.indices_b, at.indices_s, 1))
        kv = cache_of(self.build.kv_layout, at, memory)
        query = memory(at.q, torch.bfloat16, (*rows, query_width(self.build)), (at.q_b, at.q_s, at.q_h, 1))
        scale = at.scale_log2 * math.log(2.0)
        options = {"softmax_scale": scale, "lengths": lengths, "attn_sink": sink} | second_of(self.build, at, memory, rows)
        store(at, memory, rows, *reference.sparse_decode(query, kv, chosen, **options))

    def arguments(self, grid: tuple[int, int], *arguments: Any) -> SimpleNamespace:
        """By the names that the source has for them."""
        values = struct.unpack(self.fields, struct.pack(self.fields, *arguments))
        at = SimpleNamespace(**{name: value for (name, _), value in zip(parameters(self.build.kernel), values, strict=True)})
        at.grid, at.units = grid, grid[0]
        self.launches.append(at)
        return at


def attended(at: SimpleNamespace, heads: int) -> tuple[Memory, tuple[int, int, int], Tensor | None, Tensor | None]:
    """Memory, [B, S, H], lengths and sink of an attention launch whose blocks have so many heads; what copies need holds."""
    assert at.units % at.head_tiles == 0
    assert (at.head_tiles - 1) * heads < at.num_heads <= at.head_tiles * heads
    assert at.q % 16 == at.kv % 16 == at.out % 8 == 0
    assert not any(stride % 8 for stride in (at.q_b, at.q_s, at.q_h))
    assert not any(stride % 4 for stride in (at.out_b, at.out_s, at.out_h))
    memory = Memory()
    lead = (at.units // at.head_tiles // at.query_len, at.query_len)
    lengths = memory(at.lengths, torch.int32, lead, (at.lengths_b, at.lengths_s)) if at.lengths else None
    return memory, (*lead, at.num_heads), lengths, sink_of(at, memory)


def sink_of(at: SimpleNamespace, memory: Memory) -> Tensor | None:
    return memory(at.sink, torch.float32, (at.num_heads,), (1,)) if at.sink else None


def cache_of(kv_layout: str, at: SimpleNamespace, memory: Memory) -> Tensor:
    dtype, width = LAYOUTS[kv_layout].dtype, LAYOUTS[kv_layout].row_width
    if at.block_size == _EVEN:
        return memory(at.kv, dtype, (at.num_slots, 1, width), (width, width, 1))
    shape = (at.num_slots // at.block_size, at.block_size, width)
    assert at.block_stride % 16 == 0  # bytes
    if LAYOUTS[kv_layout].apart_bytes:  # a row has no place of its own
        whole = memory(at.kv, dtype, (shape[0], at.block_size * width), (at.block_stride, 1))
        return whole.as_strided(shape, (at.block_stride, width, 1))
    return memory(at.kv, dtype, shape, (at.block_stride // dtype.itemsize, width, 1))


def query_width(build: Any) -> int:
    return LAYOUTS[build.kv_layout].value_width if build.rows == FP8_IDLE_ROPE else LAYOUTS[build.kv_layout].key_width


def second_of(build: Any, at: SimpleNamespace, memory: Memory, rows: tuple[int, int, int]) -> dict[str, Tensor | None]:
    """The arguments of a second cache, of a build with two lists."""
    if build.lists == 1:
        assert at.extra_kv == at.extra_indices == at.extra_lengths == at.extra_topk == 0
        return {}
    assert at.extra_kv % 16 == 0 and at.extra_topk > 0
    pages = {
        "kv": "extra_kv",
        "num_slots": "extra_slots",
        "block_size": "extra_block_size",
        "block_stride": "extra_block_stride",
    }
    own = SimpleNamespace(**{name: getattr(at, of_second) for name, of_second in pages.items()})
    strides = (at.extra_lengths_b, at.extra_lengths_s)
    return {
        "extra_kv_cache": cache_of(build.kv_layout, own, memory),
        "extra_indices": memory(
            at.extra_indices, torch.int32, (*rows[:2], at.extra_topk), (at.extra_indices_b, at.extra_indices_s, 1)
        ),
        "extra_lengths": memory(at.extra_lengths, torch.int32, rows[:2], strides) if at.extra_lengths else None,
    }


def store(at: SimpleNamespace, memory: Memory, rows: tuple[int, int, int], out: Tensor, lse: Tensor) -> None:
    memory(at.out, torch.bfloat16, (*rows, 512), (at.out_b, at.out_s, at.out_h, 1)).copy_(out)
    memory(at.lse_out, torch.float32, rows, (at.lse_b, at.lse_s, at.lse_h)).copy_(lse)
