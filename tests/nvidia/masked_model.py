# SPDX-License-Identifier: Apache-2.0
"""A CPU that stands in for masked_prefill: it takes what a launch packs by the names of the source's parameters.

It attends by the reference, or by the source itself: see masked_on_cpu.cpp, which needs g++.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_model import FUNCTION
from machines import H200
from native_model import Memory
from source_on_cpu import compiled
from torch import Tensor

from mla_portable.primitives import MASKED_PREFILL
from mla_portable_nvidia import native
from mla_portable_nvidia.native import masked_prefill as masked
from mla_portable_nvidia.native.runtime import driver

__all__ = ["COUNTER", "SOURCE", "EmulatedMasked", "MaskedModel", "stand_in_for_device"]

SOURCE = files(native).joinpath("masked_prefill.cu").read_text(encoding="utf-8")
COUNTER = torch.zeros(1, dtype=torch.int32)


def parameters() -> list[tuple[str, str]]:
    """(name, letters of `struct`) of the kernel's parameters behind the maps, in the order of the source."""
    listed = re.search(r" masked_prefill\(\n(.*?)\) \{", SOURCE, re.DOTALL)
    strides = re.search(r"struct Strides \{\s*i64 ([^;]+);", SOURCE)
    assert listed and strides
    found: list[tuple[str, str]] = []
    for declaration in listed[1].split(","):
        *kind, name = declaration.replace("__restrict__", "").split()
        if "TensorMap" in kind:
            found.append((name, "128s"))
        elif kind == ["Strides"]:
            found += [(each, "q") for each in strides[1].split(", ")]
        else:
            found.append((name, "P" if kind[-1].endswith("*") else {"float": "f", "int": "i"}[kind[-1]]))
    return found


class MapDriver:
    """What the CUDA driver says of maps of tensors; a map holds what it was made of."""

    def cuTensorMapEncodeTiled(self, at, kind, rank, address, sizes, strides, box, steps, *modes):  # noqa: N802
        assert (kind, rank, list(steps), modes) == (9, 3, [1, 1, 1], (0, 3, 2, 0))
        aligned = at.value % 64 == address.value % 16 == 0 and all(each % 16 == 0 for each in strides)
        if not aligned or max(strides) >= 1 << 40 or not all(sizes) or max(sizes) > 1 << 32 or not 0 < max(box) <= 256:
            return 1
        ctypes.memmove(at.value, struct.pack("6Q 3I 68x", address.value, *sizes, *strides, *box), 128)
        return 0

    def cuGetErrorString(self, code, text):  # noqa: N802
        text._obj.value = b"invalid argument"
        return 0


def stand_in_for_device(patch: pytest.MonkeyPatch) -> None:
    """What masked_prefill asks of a device beside launches: a counter, maps of tensors."""
    patch.setattr(masked, "index_of", lambda request: -1)
    patch.setattr(masked, "_counters", SimpleNamespace(take=lambda index: COUNTER))
    patch.setattr(driver, "_driver", MapDriver)


class MaskedModel:
    """A build, loaded: it reads what a launch packs by the names of the source's parameters, and attends by the reference."""

    def __init__(self, build: Any, changing: str, fixed: str, threads: int, shared: int, wide: bool) -> None:
        self.build, self.fields, self.launches = build, f"{changing} {fixed}", []
        names = "".join(letter for _, letter in parameters())
        spelled = "".join(
            letter * int(count or 1) if letter != "s" else f"{count}s"
            for count, letter in re.findall(r"(\d*)(\w)", self.fields.replace(" ", ""))
        )
        assert spelled == names, "the launch and the source have the same parameters"
        assert (threads, shared, wide) == (384, build.shared_bytes, False)

    def prepare(self, grid: tuple[int, int], cluster: int, *fixed: Any) -> Any:
        assert cluster == grid[1] == 1 and grid[0] <= H200.num_sms
        return lambda *changing: self.run(grid[0], struct.pack(self.fields, *changing, *fixed))

    def run(self, blocks: int, packed: bytes) -> None:
        """What a kernel assumes is asserted, and that what it is passed lies in tensors."""
        values = struct.unpack(self.fields, packed)
        at, memory = dict(zip([name for name, _ in parameters()], values, strict=True)), Memory()
        self.launches.append({**at, "blocks": blocks})
        heads, requests, (qk, value) = at["num_heads"], at["num_requests"], (self.build.qk_head_dim, self.build.v_head_dim)
        starts = [memory(at[name], torch.int32, (requests + 1,), (1,)) for name in ("q_starts", "k_starts")]
        tokens, keys = (int(each[-1]) for each in starts)
        q, k, v, out = (
            memory(at[name], torch.bfloat16, (rows, heads, width), (at[f"{name}_{axis}"], at[f"{name}_h"], 1))
            for name, rows, width, axis in (
                ("q", tokens, qk, "t"), ("k", keys, qk, "n"), ("v", keys, value, "n"), ("out", tokens, value, "t")
            )
        )  # fmt: skip
        for each in (at["out"], at["q"], *((at["k"], at["v"]) if keys else ())):
            assert each % 16 == 0
        assert all(
            stride % 8 == 0 for x in (q, k, v, out) for size, stride in zip(x.shape, x.stride()[:2], strict=False) if size > 1
        )
        lse = memory(at["lse_out"], torch.float32, (tokens, heads), (at["lse_t"], at["lse_h"]))
        selection = None
        if at["selection"]:
            selection = memory(at["selection"], torch.int32, (tokens, at["words_in_row"]), (at["selection_t"], 1))
        assert starts[0].diff().max() <= 128 * at["query_tiles"] and 1 <= at["group_streams"] <= heads * requests
        mapped = [struct.unpack("6Q 3I 68x", at[name]) for name in ("q_map", "k_map", "v_map")]
        assert [each[0] for each in mapped] == [at["q"], at["k"], at["v"]] if keys else mapped[0][0] == at["q"]
        assert [each[6:] for each in mapped] == [(64, 1, rows) for rows in (masked.QUERIES, self.build.keys, self.build.keys)]
        assert at["counter"] == COUNTER.data_ptr()
        self.attend(at, packed, blocks, [q, k, v, *starts], selection, out, lse)

    def attend(
        self,
        at: dict[str, Any],
        packed: bytes,
        blocks: int,
        x: list[Tensor],
        selection: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        longest = [int(each.diff().max()) for each in x[3:]]
        MASKED_PREFILL.reference(
            *x, softmax_scale=at["scale_log2"] / masked._LOG2_E, max_query_len=longest[0], max_key_len=longest[1],
            causal=bool(at["causal"]), selection=selection, out=out, lse_out=lse,
        )  # fmt: skip


@functools.cache
def _library(defines: tuple[tuple[str, int], ...], chunks: int) -> ctypes.CDLL:
    header = files(native).joinpath("instructions.cuh").read_text(encoding="utf-8")
    assert SOURCE.count('#include "instructions.cuh"') == SOURCE.count("#define MOST_CHUNKS 1024") == 1
    source = SOURCE.replace('#include "instructions.cuh"', header)
    source = source.replace("#define MOST_CHUNKS 1024", f"#define MOST_CHUNKS {chunks}")
    source = FUNCTION.sub(lambda found: "" if re.search(r"\basm\b", found[0]) else found[0], source)
    source = re.sub(r"^.*\b(?:smem_u32\(const|typedef ).*\n", "", source, flags=re.MULTILINE)
    source = source.replace('asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");', "")
    source = re.sub(r"extern __shared__ .*? smem\[\];", "u8* smem = (u8*)shared_of(block());", source)
    return compiled(source, "masked_on_cpu.cpp", defines, ctypes.c_char_p, *[ctypes.c_int] * 4, ctypes.c_void_p, ctypes.c_int)


class EmulatedMasked(MaskedModel):
    """A build whose launches run the source: all blocks together, each launch in another order of threads and copies."""

    orders = ((0, True), (77, False), (-1, True), (0, False), (77, True), (-1, False))
    """How far the next thread is that gets its turn; whether tiles are copied when they are waited for."""
    chunks = 1024
    """Of 32 requests, whose pieces of work a block counts."""

    def attend(
        self, at: dict[str, Any], packed: bytes, blocks: int, x: list[Tensor], selection: Tensor | None, *_results: Tensor
    ) -> None:
        order = self.orders[len(self.launches) % len(self.orders)]
        loaded = [*x[3:], *([] if selection is None else [selection])]
        spans = [address for each in loaded for address in (each.data_ptr(), each[(-1,) * each.dim()].data_ptr() + 4)]
        ends = (ctypes.c_void_p * len(spans))(*spans)
        library = _library(self.build.defines, self.chunks)
        library.launch(packed, blocks, self.build.shared_bytes, *order, ends, len(spans) // 2)
        assert COUNTER.item() == 0, "ready for the next launch"
        tiles = -(-x[3].diff() // masked.QUERIES) if at["num_requests"] <= 32 * self.chunks else torch.tensor(at["query_tiles"])
        pieces = at["num_heads"] * int(tiles.expand(at["num_requests"]).sum())
        assert ctypes.c_int.in_dll(library, "taken").value == pieces + blocks, "no piece is taken twice"
