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

from mla_portable.layouts import BF16, BF16_NOPE, FP8_DS_MLA, FP8_NOPE, FP8_V4
from mla_portable_nvidia.native.kernel_build import KernelBuild
from mla_portable_nvidia.native.runtime.driver import Kernel, Launch

__all__ = [
    "ATTENTION_HEADERS",
    "FIXED",
    "FP8_IDLE_ROPE",
    "HEADERS",
    "LIST_TILE",
    "MAX_SPLITS",
    "ROW_HEADERS",
    "Build",
    "Shape",
    "Tensors",
    "arguments",
    "layout_name",
    "prepare",
    "row_defines",
    "rows_of",
    "two_lists",
]

FP8_IDLE_ROPE: Final = f"{FP8_DS_MLA.name}_nope"
"""Rows of fp8_ds_mla whose rotary part is not read, for queries that have none."""
ROW_HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        BF16.name: "layout_bf16.cuh",
        BF16_NOPE.name: "layout_nope.cuh",
        FP8_DS_MLA.name: "layout_v32.cuh",
        FP8_IDLE_ROPE: "layout_v32_nope.cuh",
        FP8_NOPE.name: "layout_fp8_nope.cuh",
        FP8_V4.name: "layout_v4.cuh",
    }
)
"""Rows, by their layout or FP8_IDLE_ROPE -> the header that says how they lie in memory."""
MAX_SPLITS: Final = 16
"""Blocks of a cluster: 8 on every device of compute capability 9.0, 16 where the device allows it."""
ATTENTION_HEADERS: Final = ("instructions.cuh", "attention.cuh")
HEADERS: Final = (*ATTENTION_HEADERS, "sparse_decode.cuh", *ROW_HEADERS.values())
"""What the kernels' sources share."""


def two_lists(lists: int) -> str:
    """The end of a label."""
    return "-two" if lists > 1 else ""


def rows_of(kv_layout: str, *, nope: bool = False) -> str:
    """The name of what kernels read of a cache. nope: its rotary part is not read."""
    return FP8_IDLE_ROPE if nope and kv_layout == FP8_DS_MLA.name else kv_layout


def layout_name(rows: str) -> str:
    """The layout of the cache that has these rows, one of ROW_HEADERS."""
    return FP8_DS_MLA.name if rows == FP8_IDLE_ROPE else rows


def row_defines(rows: str, lists: int, shared: int) -> tuple[tuple[str, int | str], ...]:
    """The macros of every attention kernel.

    Args:
        rows: one of ROW_HEADERS. lists: of keys. shared: bytes of shared memory that it is launched with.
    """
    return (("LAYOUT", f'"{ROW_HEADERS[rows]}"'), ("LISTS", lists), ("SHARED", shared))


Shape = tuple[str, int, int, int]
LIST_TILE: Final = 32
"""Tokens of a tile, which is of one list."""
FIXED: Final = "10i 19q"
"""What shapes and strides say to an attention kernel."""


@dataclass(frozen=True, slots=True)
class Build(KernelBuild):
    """What one compilation of a kernel fixes; the kernel is the class.

    Attributes:
        tile: tokens that it takes at once; a split is a whole number of them.
        copying_registers: of a thread of the four warps that copy. rows: that it reads, one of ROW_HEADERS.
        head_tiles: 16-head tiles of a block. groups: four-warp groups of a block beside those warps. stages: tiles in shared
            memory at once. shared: bytes of dynamic shared memory of a block; the source does not compile with another number
            than what it lays out. blocks_per_sm: that the registers are to allow. lists: of a row's keys, each with its cache.
    """

    headers: ClassVar[tuple[str, ...]] = HEADERS
    changing: ClassVar[str] = "10P f"  # addresses, the scale
    fixed: ClassVar[str] = FIXED
    archs: ClassVar[Mapping[str, str]] = MappingProxyType({"sm90": "sm_90a"})
    tile: ClassVar[int] = 32
    copying_registers: ClassVar[int] = 32

    rows: str
    head_tiles: int
    groups: int
    stages: int
    shared: int
    blocks_per_sm: int = 1
    lists: int = 1

    @property
    def label(self) -> str:
        return f"{self.kernel}-{self.rows}-h{self.heads}-g{self.groups}-s{self.stages}{two_lists(self.lists)}"

    @property
    def shape(self) -> Shape:
        """What all builds have in common that differ in what they read alone."""
        return self.kernel, self.head_tiles, self.groups, self.blocks_per_sm

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
    def kv_layout(self) -> str:
        """Of the cache that it reads."""
        return layout_name(self.rows)

    @property
    def defines(self) -> tuple[tuple[str, int | str], ...]:
        """The source's macros."""
        return (
            *row_defines(self.rows, self.lists, self.shared),
            ("MT", self.head_tiles),
            ("GROUPS", self.groups),
            ("STAGES", self.stages),
            ("BLOCKS_PER_SM", self.blocks_per_sm),
            ("CONSUMER_REGISTERS", self.consumer_registers),
        )


class Tensors(NamedTuple):
    """A call's tensors, as decode has them: strides are free but the last one, and the rows of a block are side by side.

    Attributes:
        q: [B, S, H, key width] bf16. kv_cache: [blocks, block_size, row width] of the layout that the build reads. Both start
            and step by 16 bytes.
        indices: [B, S, K] int32. out: [B, S, H, 512] bf16; starts and steps by 8 bytes. lse_out: [B, S, H] float32, natural.
        lengths: [B, S] int32. extra_kv_cache, extra_indices, extra_lengths: likewise, of a build with two lists.
    """

    q: Tensor
    kv_cache: Tensor
    indices: Tensor
    out: Tensor
    lse_out: Tensor
    lengths: Tensor | None
    extra_kv_cache: Tensor | None = None
    extra_indices: Tensor | None = None
    extra_lengths: Tensor | None = None


def prepare(kernel: Kernel, build: Build, of: Tensors, *, cluster: int, whole: int = 0, starts_early: bool = False) -> Launch:
    """Launches for tensors of these shapes and strides, B * S at least 1.

    Clusters have `cluster` blocks. A unit of work is what one block can have to itself: a row's heads, or one of their tiles.
    Each block of the first `whole` clusters takes a unit; the blocks of each later cluster share one.

    A launch is given addresses and scale: out, lse_out, q, kv_cache, indices, lengths, attn_sink [H] float32, extra_kv_cache,
    extra_indices and extra_lengths (0 for none), softmax_scale * log2(e).

    starts_early: before the kernel in front has ended, by the rule at `early_start.can_wait`; every thread waits for it.
    The kernel lets nothing start early itself: its blocks fill the multiprocessors, so what is behind would find no room.
    """
    batch, query_len, num_heads, _ = of.q.shape
    head_tiles = -(-num_heads // build.heads)
    clusters = batch * query_len * head_tiles - whole * (cluster - 1)
    fixed = arguments(of, whole, head_tiles)
    return kernel.prepare((clusters, cluster), cluster, *fixed, starts_early=starts_early)


def arguments(of: Tensors, cut: int, head_tiles: int) -> tuple[int, ...]:
    """What shapes and strides say to a kernel, in the order of its parameters.

    Args:
        cut: how rows are cut, as the kernel's second integer says it. head_tiles: blocks that share a row's heads.
    """
    _, query_len, num_heads, _ = of.q.shape
    num_slots, block_size, block_stride = _pages(of.kv_cache)
    extra_slots, extra_block_size, extra_block_stride = (0, 0, 0) if of.extra_kv_cache is None else _pages(of.extra_kv_cache)
    return (
        of.indices.shape[2],
        cut,
        num_slots,
        num_heads,
        head_tiles,
        query_len,
        block_size,
        0 if of.extra_indices is None else of.extra_indices.shape[2],
        extra_slots,
        extra_block_size,
        block_stride,
        extra_block_stride,
        *of.q.stride()[:3],
        *of.indices.stride()[:2],
        *((0, 0) if of.lengths is None else of.lengths.stride()),
        *((0, 0) if of.extra_indices is None else of.extra_indices.stride()[:2]),
        *((0, 0) if of.extra_lengths is None else of.extra_lengths.stride()),
        *of.out.stride()[:3],
        *of.lse_out.stride(),
    )


def _pages(cache: Tensor) -> tuple[int, int, int]:
    """(slots, block size, bytes between blocks) as kernels take them; block size 0: there is nothing to divide by."""
    num_blocks, block_size, row_width = cache.shape
    block_stride, apart = cache.stride(0), (cache.dtype, row_width) == (FP8_V4.dtype, FP8_V4.row_width)
    evenly = not apart and (num_blocks <= 1 or block_stride == block_size * row_width)
    # an int; the index 2^31 - 1 is absent in any cache (1.4 TB would have it)
    num_slots = min(num_blocks * block_size, 2**31 - 1)
    return num_slots, 0 if evenly else block_size, block_stride * cache.element_size()
