# SPDX-License-Identifier: Apache-2.0
"""The native sparse attention kernels: what a build of any of them is, and its launch.

A build is one compilation. The splits of a row are the blocks of a cluster, which merge through each other's shared
memory: no scratch, no second kernel. All kernels take the same parameters.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.resources import files
from typing import ClassVar, Final

from torch import Tensor

from mla_portable_nvidia.native.driver import Kernel, Module
from mla_portable_nvidia.native.nvrtc import compile_cubin

__all__ = ["HEADER", "MAX_SPLITS", "Build", "compile_build", "launch", "load"]

MAX_SPLITS: Final = 16
"""Blocks of a cluster: 8 on every device of compute capability 9.0, 16 where the device allows it."""
HEADER: Final = "sparse_decode.cuh"
"""What the kernels' sources share."""
_LOG2_E: Final = 1.4426950408889634
_FIELDS: Final = "7P f 7i 14q"
"""The parameters of a kernel as `struct` spells them."""


@dataclass(frozen=True, slots=True)
class Build(ABC):
    """What one compilation of a kernel fixes; the kernel is the class.

    Attributes:
        kernel: its name, and that of its source. tile: tokens that it takes at once; a split is a whole number of them.
        copying_registers: of a thread of the four warps that copy. head_tiles: 16-head tiles of a block. groups: four-warp
            groups of a block beside those warps. stages: tiles in shared memory at once. blocks_per_sm: that the registers
            are to allow.
    """

    kernel: ClassVar[str]
    tile: ClassVar[int] = 32
    copying_registers: ClassVar[int] = 32

    head_tiles: int
    groups: int
    stages: int
    blocks_per_sm: int = 1

    @property
    def heads(self) -> int:
        """Heads that a block serves."""
        return 16 * self.head_tiles

    @property
    def threads(self) -> int:
        """Of a block: its groups and the warps that copy."""
        return 128 * (self.groups + 1)

    @property
    def consumer_registers(self) -> int:
        """Registers of a thread of a group: what the copying warps leave of the block's share of 65,536, in steps of 8."""
        block = 65_536 // (self.blocks_per_sm * self.threads) // 8 * 8 * self.threads
        return min((block - 128 * self.copying_registers) // (128 * self.groups) // 8 * 8, 240)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """The source's macros."""
        return (
            ("MT", self.head_tiles),
            ("GROUPS", self.groups),
            ("STAGES", self.stages),
            ("BLOCKS_PER_SM", self.blocks_per_sm),
            ("CONSUMER_REGISTERS", self.consumer_registers),
        )

    @property
    @abstractmethod
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as the source lays it out."""

    def merged_bytes(self, outputs: int, stride: int) -> int:
        """Shared memory of the end of a row: states and outputs of so many groups, `stride` floats a head, and weights."""
        return self.heads * ((outputs + 1) * 8 + outputs * stride * 4 + MAX_SPLITS * 4)


def compile_build(build: Build, arch: str) -> bytes:
    """Machine code of a build for `arch` ("sm_90a"). Raises: NvrtcNotFound, CompilationFailed."""
    source, header = (files(__package__).joinpath(name).read_text(encoding="utf-8") for name in (f"{build.kernel}.cu", HEADER))
    return compile_cubin(source, arch, build.defines, {HEADER: header})


@functools.cache
def load(build: Build, arch: str, device: int) -> Kernel:
    """A build on a device, compiled and loaded once. Raises: NvrtcNotFound, CompilationFailed, DriverError."""
    module = Module(compile_build(build, arch), device)
    return module.kernel(build.kernel, _FIELDS, threads=build.threads, shared=build.shared_bytes, wide_clusters=True)


def launch(
    kernel: Kernel,
    build: Build,
    out: Tensor,
    lse_out: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    *,
    softmax_scale: float,
    lengths: Tensor | None,
    attn_sink: Tensor | None,
    num_splits: int,
    split_len: int,
) -> None:
    """Attend; write `out` [B, S, H, 512] bf16 and `lse_out` [B, S, H] float32, natural. Graph-safe, allocates nothing.

    q [B, S, H, 576] bf16, kv_cache [blocks, block_size, 576] bf16 or [.., 656] uint8, whichever the build reads, indices
    [B, S, K] int32, lengths [B, S] int32, attn_sink [H] float32: leading strides are free, but the rows of a block are side by
    side. q and the cache start and step by 16 bytes, out by 8.
    """
    batch, query_len, num_heads, _ = q.shape
    rows = batch * query_len
    if rows == 0:
        return
    num_blocks, block_size, row_width = kv_cache.shape
    block_stride = kv_cache.stride(0)
    evenly = num_blocks <= 1 or block_stride == block_size * row_width
    head_tiles = -(-num_heads // build.heads)
    kernel(
        (rows * head_tiles, num_splits),
        num_splits,
        q.device.index,
        out.data_ptr(),
        lse_out.data_ptr(),
        q.data_ptr(),
        kv_cache.data_ptr(),
        indices.data_ptr(),
        0 if lengths is None else lengths.data_ptr(),
        0 if attn_sink is None else attn_sink.data_ptr(),
        softmax_scale * _LOG2_E,
        indices.shape[2],
        split_len,
        min(num_blocks * block_size, 2**31 - 1),  # no index can name a slot past it
        num_heads,
        head_tiles,
        query_len,
        0 if evenly else block_size,  # 0: nothing to divide by
        block_stride * kv_cache.element_size(),
        *q.stride()[:3],
        *indices.stride()[:2],
        *((0, 0) if lengths is None else lengths.stride()),
        *out.stride()[:3],
        *lse_out.stride(),
    )
