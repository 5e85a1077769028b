# SPDX-License-Identifier: Apache-2.0
"""The native sparse attention kernel without what compute capability 9.0 brought: its builds and its launch.

It runs from compute capability 8.0 on. The splits of a row leave float32 partial results in a schedule's scratch, and a second
kernel merges them. Rows of the FP8 cache and BF16 rows go through the same source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Final

import torch

from mla_portable.kit.split_kv import ProgramShape
from mla_portable.layouts import BF16, BF16_NOPE, FP8_DS_MLA, FP8_NOPE, FP8_V4, KV_LORA_RANK, LAYOUTS
from mla_portable_nvidia.native.kernel_build import BLOCK_RESERVE, SM_SHARED_MEMORY, KernelBuild
from mla_portable_nvidia.native.runtime.driver import Kernel, Launch
from mla_portable_nvidia.native.sparse_decode import (
    ATTENTION_HEADERS,
    FIXED,
    FP8_IDLE_ROPE,
    HEADERS,
    Tensors,
    arguments,
    layout_name,
    row_defines,
    two_lists,
)

__all__ = [
    "BUILDS",
    "MERGES",
    "SHARED_MEMORY",
    "LargeSm80Build",
    "MergeBuild",
    "PairSm80Build",
    "Sm80Build",
    "Sm100Build",
    "builds",
    "merge_of",
    "prepare",
]

_ARCHS: Final = MappingProxyType(
    {f"sm{version}": f"sm_{version}" for version in (80, 86, 89, 100, 120, 121)} | {"sm103": "sm_100"}
)  # code for 10.0 runs on 10.3
SHARED_MEMORY: Final = 99 << 10
"""Bytes of a thread block that builds for all of these architectures keep within: what the least of them allows."""
_LEAST: Final = 64
"""Keys of a split, where a row has as many."""


@dataclass(frozen=True, slots=True)
class Sm80Build(KernelBuild):
    """One build.

    Attributes:
        rows: that it reads, one of ROW_HEADERS. head_tiles: 16-head tiles of a group of four warps.
        groups: of a block; each has other heads. tile: tokens that it takes at once.
        stages: tiles on their way or, of BF16 rows, in use. shared: bytes of dynamic shared memory of a block, which the source
            holds against what it lays out. blocks_per_sm: that the registers are to allow. lists: of a row's keys.
    """

    kernel: ClassVar[str] = "sparse_decode_sm80"
    headers: ClassVar[tuple[str, ...]] = HEADERS
    changing: ClassVar[str] = "12P f"  # addresses, the scale
    fixed: ClassVar[str] = FIXED
    archs: ClassVar[Mapping[str, str]] = _ARCHS

    rows: str
    head_tiles: int
    groups: int
    tile: int
    stages: int
    shared: int
    blocks_per_sm: int = 1
    lists: int = 1

    @property
    def label(self) -> str:
        sizes = f"h{self.heads}-g{self.groups}-t{self.tile}-s{self.stages}"
        return f"{self.kernel}-{self.rows}-{sizes}{two_lists(self.lists)}"

    @property
    def heads(self) -> int:
        """Heads that a block serves."""
        return 16 * self.head_tiles * self.groups

    def program(self, arch: str) -> ProgramShape:
        """What the planner of splits has to know."""
        held = SM_SHARED_MEMORY[arch] // (self.shared_bytes + BLOCK_RESERVE)
        return ProgramShape(self.heads, max(self.tile, _LEAST), max(1, min(self.blocks_per_sm, held)))

    @property
    def threads(self) -> int:
        return 128 * self.groups

    @property
    def defines(self) -> tuple[tuple[str, int | str], ...]:
        return (
            *row_defines(self.rows, self.lists, self.shared),
            ("MT", self.head_tiles),
            ("GROUPS", self.groups),
            ("TILE", self.tile),
            ("STAGES", self.stages),
            ("BLOCKS_PER_SM", self.blocks_per_sm),
        )

    @property
    def shared_bytes(self) -> int:
        return self.shared

    @property
    def kv_layout(self) -> str:
        """Of the cache that it reads."""
        return layout_name(self.rows)

    @property
    def wide_clusters(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class LargeSm80Build(Sm80Build):
    """A build for SM80, which allows a block 163 KiB of shared memory. Code for SM100 would spill."""

    archs: ClassVar[Mapping[str, str]] = MappingProxyType({"sm80": _ARCHS["sm80"]})


@dataclass(frozen=True, slots=True)
class PairSm80Build(Sm80Build):
    """A build of which a multiprocessor holds two blocks of 81 KiB: not those with 100 KiB."""

    archs: ClassVar[Mapping[str, str]] = MappingProxyType({arch: _ARCHS[arch] for arch in ("sm80", "sm100", "sm103")})


@dataclass(frozen=True, slots=True)
class Sm100Build(Sm80Build):
    """A build of which a multiprocessor holds two blocks of 113 KiB."""

    archs: ClassVar[Mapping[str, str]] = MappingProxyType({arch: _ARCHS[arch] for arch in ("sm100", "sm103")})


@dataclass(frozen=True, slots=True)
class MergeBuild(KernelBuild):
    """The merge of splits. heads: of a block."""

    kernel: ClassVar[str] = "merge_splits"
    headers: ClassVar[tuple[str, ...]] = ATTENTION_HEADERS
    changing: ClassVar[str] = "5P"  # out, lse, partial out and lse, sink
    fixed: ClassVar[str] = "4i 6q"  # splits, heads of all rows and of one, query length, strides of out and lse
    archs: ClassVar[Mapping[str, str]] = _ARCHS

    heads: int

    @property
    def label(self) -> str:
        return f"{self.kernel}-h{self.heads}"

    @property
    def threads(self) -> int:
        return 128

    @property
    def defines(self) -> tuple[tuple[str, int | str], ...]:
        return (("MERGED", self.heads),)

    @property
    def shared_bytes(self) -> int:
        return 0

    @property
    def wide_clusters(self) -> bool:
        return False


MERGES: Final = (MergeBuild(1), MergeBuild(4))
_FEW_SPLITS: Final = 4
"""Up to here a block of the merge has four heads. H200, 128 rows of 16 heads in 2 splits: 3.6 us instead of 5.0; 16 rows in 16
splits: 5.3 instead of 3.8."""
_Shape = tuple[type[Sm80Build], int, int, int, int, int]
"""(class, head tiles, groups, tile, stages, blocks of a multiprocessor), those first that are preferred."""
_CONVERTED: Final[tuple[_Shape, ...]] = (
    (PairSm80Build, 1, 1, 32, 1, 2),
    (Sm80Build, 1, 1, 16, 2, 2),
    (LargeSm80Build, 2, 1, 32, 1, 2),
    (Sm80Build, 1, 2, 32, 1, 1),
    (LargeSm80Build, 2, 2, 32, 1, 1),
    (Sm80Build, 2, 2, 16, 2, 1),
)
"""Of FP8 rows, which become bfloat16 beside the ring."""
_SMALLER: Final = (*_CONVERTED[:-2], _CONVERTED[-1])
"""Of those of which 528 bytes are copied; the other would spill."""
_PLAIN: Final[tuple[_Shape, ...]] = (
    (LargeSm80Build, 1, 1, 16, 3, 2),
    (Sm100Build, 1, 1, 32, 2, 2),
    (Sm80Build, 1, 1, 16, 2, 3),
    (Sm80Build, 1, 2, 32, 2, 1),
    (LargeSm80Build, 2, 2, 32, 2, 1),
    (Sm80Build, 2, 2, 16, 3, 1),
)
"""Of BF16 rows, which are multiplied where they arrive."""
_FEW_WHOLE: Final = 2
"""Of BF16 rows, the build for few heads where rows are not split."""


def _family(rows: str, shapes: tuple[_Shape, ...], *shared: int) -> tuple[Sm80Build, ...]:
    """The builds of these shapes with so many bytes of shared memory."""
    return tuple(
        made(rows, head_tiles=head_tiles, groups=groups, tile=tile, stages=stages, shared=size, blocks_per_sm=blocks)
        for (made, head_tiles, groups, tile, stages, blocks), size in zip(shapes, shared, strict=True)
    )


BUILDS: Final[Mapping[str, tuple[Sm80Build, ...]]] = {
    each[0].rows: each
    for each in (
        _family(FP8_DS_MLA.name, _CONVERTED, 70_208, 46_848, 81_792, 81_792, 113_152, 75_968),
        *(_family(rows, _SMALLER, 62_016, 40_704, 77_696, 73_600, 69_824) for rows in (FP8_IDLE_ROPE, FP8_NOPE.name)),
        _family(FP8_V4.name, _CONVERTED, 64_064, 42_752, 79_744, 75_648, 107_008, 71_872),
        _family(BF16.name, _PLAIN, 63_296, 86_720, 44_544, 98_304, 129_664, 92_416),
        _family(BF16_NOPE.name, _PLAIN, 57_152, 78_528, 40_448, 90_112, 121_472, 86_272),
    )
}
"""Rows that are read -> the builds that serve them, by heads, those first that are preferred where an architecture has them."""


def builds(
    arch: str, rows: str, num_heads: int | None, *, whole: bool = False, lists: int = 1, shared_memory: int = 0
) -> tuple[Sm80Build, ...]:
    """The build for so many heads, by itself; all that there are where the heads are not known.

    More heads than a block has are served by several. shared_memory: bytes a block may use, where the device reports less
    than its architecture has; 0: it does not say. whole: rows are not split. There three blocks of two stages beat two of
    three: 1,024 tokens of 16 heads on BF16 rows took 532 us instead of 551 (code for SM80 on an H200).
    """
    fitting = [each for each in BUILDS[rows] if arch in each.archs and each.shared <= (shared_memory or each.shared)]
    offered = {build.heads: replace(build, lists=lists) for build in reversed(fitting)}
    if whole and not LAYOUTS[layout_name(rows)].is_quantized and arch in LargeSm80Build.archs:
        few = BUILDS[rows][_FEW_WHOLE]
        offered[few.heads] = replace(few, lists=lists)
    if num_heads is None:
        return tuple(offered.values())
    return (offered[min((heads for heads in offered if num_heads <= heads), default=max(offered))],)


def merge_of(num_splits: int) -> MergeBuild:
    """What merges so many splits."""
    return MERGES[num_splits <= _FEW_SPLITS]


def prepare(
    kernel: Kernel,
    merge: Callable[[MergeBuild], Kernel],
    build: Sm80Build,
    of: Tensors,
    num_splits: int,
    partial_out: int = 0,
    partial_lse: int = 0,
) -> Callable[..., None]:
    """Launches for tensors of these shapes and strides, B * S at least 1. merge: loads the kernel that merges the splits.

    A launch is given what `sparse_decode.prepare` says. partial_out, partial_lse: addresses of float32 scratch,
    [num_splits, B * S, H, 512] and [num_splits, B * S, H]; 0: a launch that needs it allocates it.
    """
    batch, query_len, num_heads, _ = of.q.shape
    rows, head_tiles = batch * query_len, -(-num_heads // build.heads)
    attend = kernel.prepare((rows * head_tiles, num_splits), 1, *arguments(of, num_splits, head_tiles))
    if num_splits == 1:
        return _Whole(attend)
    strides = *of.out.stride()[:3], *of.lse_out.stride()
    all_heads, finishing = rows * num_heads, merge_of(num_splits)
    grid = -(-all_heads // finishing.heads), 1
    finish = merge(finishing).prepare(grid, 1, num_splits, all_heads, num_heads, query_len, *strides)
    if partial_out:
        return _Split(attend, finish, partial_out, partial_lse)
    entries, device = num_splits * all_heads, of.q.device

    def allocate_and_split(*addresses: Any) -> None:
        scratch = torch.empty(entries * (KV_LORA_RANK + 1), dtype=torch.float32, device=device)
        at = scratch.data_ptr()
        _Split(attend, finish, at, at + 4 * entries * KV_LORA_RANK)(*addresses)

    return allocate_and_split


@dataclass(frozen=True, slots=True)
class _Whole:
    """The launch of a call whose rows are whole."""

    attend: Launch

    def __call__(self, *given: Any) -> None:
        *addresses, scale_log2 = given
        self.attend(*addresses, 0, 0, scale_log2)


@dataclass(frozen=True, slots=True)
class _Split:
    """The two launches of a call whose rows are split, over one place of scratch."""

    attend: Launch
    finish: Launch
    partial_out: int
    partial_lse: int

    def __call__(self, out: int, lse: int, *given: Any) -> None:
        *addresses, scale_log2 = given  # q, kv, indices, lengths, sink and what a second cache has
        partial = (self.partial_out, self.partial_lse)
        self.attend(out, lse, *addresses, *partial, scale_log2)
        self.finish(out, lse, *partial, addresses[4])
