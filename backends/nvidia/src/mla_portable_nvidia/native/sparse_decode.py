# SPDX-License-Identifier: Apache-2.0
"""The native sparse attention kernels: what a build of any of them is, and its launch.

A build is one compilation. The splits of a row are the blocks of a cluster, which merge through each other's shared
memory: no scratch, no second kernel. In one launch some clusters may share a row and others have a row for each block. All
kernels take the same parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple

from torch import Tensor

from mla_portable.layouts import BF16, FP8_DS_MLA
from mla_portable_nvidia.native.build import KernelBuild
from mla_portable_nvidia.native.driver import Kernel, Launch

__all__ = [
    "ATTENTION_HEADERS",
    "HEADERS",
    "MAX_SPLITS",
    "ROW_HEADERS",
    "Build",
    "Tensors",
    "arguments",
    "prepare",
    "row_defines",
]

ROW_HEADERS: Final[Mapping[str, str]] = MappingProxyType({BF16.name: "layout_bf16.cuh", FP8_DS_MLA.name: "layout_v32.cuh"})
"""kv_layout -> the header that says how its rows lie in memory."""
MAX_SPLITS: Final = 16
"""Blocks of a cluster: 8 on every device of compute capability 9.0, 16 where the device allows it."""
ATTENTION_HEADERS: Final = ("instructions.cuh", "attention.cuh")
HEADERS: Final = (*ATTENTION_HEADERS, "sparse_decode.cuh", *ROW_HEADERS.values())
"""What the kernels' sources share."""


def row_defines(kv_layout: str, shared: int) -> tuple[tuple[str, int | str], ...]:
    """The macros of every attention kernel: the header of its rows, and the bytes of shared memory that it is launched with."""
    return (("LAYOUT", f'"{ROW_HEADERS[kv_layout]}"'), ("SHARED", shared))


@dataclass(frozen=True, slots=True)
class Build(KernelBuild):
    """What one compilation of a kernel fixes; the kernel is the class.

    Attributes:
        tile: tokens that it takes at once; a split is a whole number of them.
        copying_registers: of a thread of the four warps that copy. kv_layout: of the rows that it reads.
        head_tiles: 16-head tiles of a block. groups: four-warp groups of a block beside those warps. stages: tiles in shared
            memory at once. shared: bytes of dynamic shared memory of a block; the source does not compile with another number
            than what it lays out. blocks_per_sm: that the registers are to allow.
    """

    headers: ClassVar[tuple[str, ...]] = HEADERS
    changing: ClassVar[str] = "7P f"  # addresses, the scale
    fixed: ClassVar[str] = "7i 14q"  # what shapes and strides say
    archs: ClassVar[Mapping[str, str]] = MappingProxyType({"sm90": "sm_90a"})
    tile: ClassVar[int] = 32
    copying_registers: ClassVar[int] = 32

    kv_layout: str
    head_tiles: int
    groups: int
    stages: int
    shared: int
    blocks_per_sm: int = 1

    @property
    def label(self) -> str:
        return f"{self.kernel}-h{self.heads}-g{self.groups}-s{self.stages}"

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
    def shared_bytes(self) -> int:
        return self.shared

    @property
    def defines(self) -> tuple[tuple[str, int | str], ...]:
        """The source's macros."""
        return (
            *row_defines(self.kv_layout, self.shared),
            ("MT", self.head_tiles),
            ("GROUPS", self.groups),
            ("STAGES", self.stages),
            ("BLOCKS_PER_SM", self.blocks_per_sm),
            ("CONSUMER_REGISTERS", self.consumer_registers),
        )


class Tensors(NamedTuple):
    """A call's tensors, as decode has them: strides are free but the last one, and the rows of a block are side by side.

    Attributes:
        q: [B, S, H, 576] bf16. kv_cache: [blocks, block_size, 576] bf16 or [.., 656] uint8, whichever the build reads. Both
            start and step by 16 bytes.
        indices: [B, S, K] int32. out: [B, S, H, 512] bf16; starts and steps by 8 bytes. lse_out: [B, S, H] float32, natural.
        lengths: [B, S] int32.
    """

    q: Tensor
    kv_cache: Tensor
    indices: Tensor
    out: Tensor
    lse_out: Tensor
    lengths: Tensor | None


def prepare(kernel: Kernel, build: Build, of: Tensors, *, cluster: int, whole: int = 0) -> Launch:
    """Launches for tensors of these shapes and strides, B * S at least 1.

    Clusters have `cluster` blocks. A unit of work is what one block can have to itself: a row's heads, or one of their tiles.
    Each block of the first `whole` clusters takes a unit; the blocks of each later cluster share one.

    A launch is given addresses and scale: out, lse_out, q, kv_cache, indices, lengths and attn_sink [H] float32 (0 for none),
    softmax_scale * log2(e).
    """
    batch, query_len, num_heads, _ = of.q.shape
    head_tiles = -(-num_heads // build.heads)
    clusters = batch * query_len * head_tiles - whole * (cluster - 1)
    return kernel.prepare((clusters, cluster), cluster, *arguments(of, whole, head_tiles))


def arguments(of: Tensors, cut: int, head_tiles: int) -> tuple[int, ...]:
    """What shapes and strides say to a kernel, in the order of its parameters.

    Args:
        cut: how rows are cut, as the kernel's second integer says it. head_tiles: blocks that share a row's heads.
    """
    _, query_len, num_heads, _ = of.q.shape
    num_blocks, block_size, row_width = of.kv_cache.shape
    block_stride = of.kv_cache.stride(0)
    evenly = num_blocks <= 1 or block_stride == block_size * row_width
    return (
        of.indices.shape[2],
        cut,
        min(num_blocks * block_size, 2**31 - 1),  # an int; the index 2^31 - 1 is absent in any cache (1.4 TB would have it)
        num_heads,
        head_tiles,
        query_len,
        0 if evenly else block_size,  # 0: nothing to divide by
        block_stride * of.kv_cache.element_size(),
        *of.q.stride()[:3],
        *of.indices.stride()[:2],
        *((0, 0) if of.lengths is None else of.lengths.stride()),
        *of.out.stride()[:3],
        *of.lse_out.stride(),
    )
