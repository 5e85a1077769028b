# SPDX-License-Identifier: Apache-2.0
"""Which build of a native kernel serves a call, and how its blocks share the rows: a pure function of the shape and the device.

Every cut that a build allows gets a predicted time, and the shortest is taken. Blocks run in waves of as many as the device
holds. A unit of work, a row's heads or one of their tiles, is whole or shared by the blocks of a cluster. Whole units come
first, in full waves; what would leave most of a last wave idle is shared, so that the time follows the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from mla_portable.layouts import BF16, BF16_NOPE, FP8_DS_MLA, FP8_NOPE, FP8_V4
from mla_portable_nvidia.native.sparse_decode import FP8_IDLE_ROPE, LIST_TILE, MAX_SPLITS, Build, Shape
from mla_portable_nvidia.native.sparse_decode_bf16 import Bf16Build
from mla_portable_nvidia.native.sparse_decode_fp8 import Fp8Build
from mla_portable_nvidia.native.sparse_decode_wide import WideBuild

__all__ = [
    "BF16_LARGE",
    "BF16_SMALL",
    "BF16_WIDE",
    "BUILDS",
    "FEW",
    "LARGE",
    "MANY",
    "SMALL",
    "WIDE",
    "Cut",
    "builds",
    "choose",
]

FEW: Final = 32
"""Heads for which `MANY` is never chosen."""

SMALL: Final = Fp8Build(FP8_DS_MLA.name, head_tiles=1, groups=1, stages=3, shared=75_008, blocks_per_sm=2)
LARGE: Final = Fp8Build(FP8_DS_MLA.name, head_tiles=1, groups=2, stages=4, shared=191_872)
WIDE: Final = Fp8Build(FP8_DS_MLA.name, head_tiles=2, groups=2, stages=3, shared=206_464)
MANY: Final = WideBuild(FP8_DS_MLA.name, stages=6, shared=221_920)
BF16_SMALL: Final = Bf16Build(BF16.name, head_tiles=1, groups=1, stages=2, shared=86_656, blocks_per_sm=2)
BF16_LARGE: Final = Bf16Build(BF16.name, head_tiles=1, groups=2, stages=5, shared=210_432)
BF16_WIDE: Final = Bf16Build(BF16.name, head_tiles=2, groups=2, stages=5, shared=210_432)


def _family(rows: str, builds: tuple[Build, ...], *shared: int) -> tuple[Build, ...]:
    """The same builds for other rows, with so many bytes of shared memory."""
    return tuple(replace(build, rows=rows, shared=size) for build, size in zip(builds, shared, strict=True))


_FP8: Final[tuple[Build, ...]] = (SMALL, LARGE, WIDE)
"""Of 16 and 32 heads."""


def _without_rope(rows: str) -> tuple[Build, ...]:
    """Of rows of which 528 bytes are copied."""
    return (*_family(rows, _FP8, 62_720, 159_104, 181_888), replace(MANY, rows=rows, stages=8, shared=222_984))


_BF16: Final[tuple[Build, ...]] = (BF16_SMALL, BF16_LARGE, BF16_WIDE)
BUILDS: Final[Mapping[str, tuple[Build, ...]]] = {
    FP8_DS_MLA.name: (*_FP8, MANY),
    FP8_IDLE_ROPE: _without_rope(FP8_IDLE_ROPE),
    FP8_NOPE.name: _without_rope(FP8_NOPE.name),
    FP8_V4.name: (
        *_family(FP8_V4.name, _FP8, 68_864, 175_488, 194_176),
        replace(MANY, rows=FP8_V4.name, stages=7, shared=222_456),
    ),
    BF16.name: _BF16,
    BF16_NOPE.name: _family(BF16_NOPE.name, _BF16, 78_464, 189_952, 189_952),
}
"""Rows that are read, by their layout or FP8_IDLE_ROPE -> the builds that serve them."""


@dataclass(frozen=True, slots=True)
class _Times:
    """Microseconds of a block among many: of a tile, of what it does beside its tiles, of merging with its cluster.

    alone: the share of it that a block takes that has a multiprocessor to itself.
    """

    tile: float
    start: float
    merge: float
    alone: float = 1.0


_TIMES: Final[Mapping[Shape, _Times]] = {
    SMALL.shape: _Times(1.37, 5.9, 2.6, alone=0.7),
    LARGE.shape: _Times(0.735, 5.1, 1.9),
    WIDE.shape: _Times(1.09, 8.5, 2.8),
    MANY.shape: _Times(4.30, 9.9, 1.9),
    BF16_SMALL.shape: _Times(1.62, 5.4, 1.5, alone=0.64),
    BF16_LARGE.shape: _Times(0.94, 3.2, 1.8),
    BF16_WIDE.shape: _Times(1.22, 7.9, 1.4),
}
"""Of an H200, by least regret over the cuts of 550 shapes; those of 64 heads were moved later, as its times were:
`docs/dev/nvidia/cuts.md`. Only the ratios matter, which are taken to be those of rows without rope and of two lists as
well."""
_SIZES: Final = (2, 3, 4, 5, 6, 7, 8, MAX_SPLITS)
"""Of clusters; those between 8 and 16 blocks leave too many multiprocessors idle."""

Clusters = Callable[[Build, int], int]
"""(build, size) -> clusters of so many blocks that the device holds at once; 0 where it cannot launch one."""


@dataclass(frozen=True, slots=True)
class Cut:
    """build, blocks of a cluster, and how many clusters take a unit for each block; those behind them share one."""

    build: Build
    cluster: int
    whole: int = 0


def builds(kv_rows: str, max_heads: int, lists: int = 1) -> tuple[Build, ...]:
    """All that `choose` may take for up to `max_heads` heads. kv_rows: that are read. lists: of a row's keys."""
    offered = (build for build in BUILDS[kv_rows] if max_heads > FEW or not isinstance(build, WideBuild))
    return tuple(replace(build, lists=lists) for build in offered)


def choose(
    kv_rows: str,
    *,
    rows: int,
    num_heads: int,
    topk: int,
    extra_topk: int = 0,
    clusters: Clusters,
    uniform: bool = False,
) -> Cut:
    """The cut for `rows` query rows of `num_heads` heads and `topk` indices, and `extra_topk` of a second list.

    Args:
        kv_rows: that are read. clusters: what the device holds. uniform: all rows are cut alike.
    """
    lists = 2 if extra_topk else 1
    keys = -(-topk // LIST_TILE) * LIST_TILE + extra_topk if extra_topk else topk
    found = (
        (_time(cut, units, tiles, clusters), cut)
        for build in builds(kv_rows, num_heads, lists)
        for units, tiles in [(rows * -(-num_heads // build.heads), max(1, -(-keys // build.tile)))]
        for cut in _cuts(build, units, tiles, clusters, uniform)
    )
    return min(found, key=lambda each: each[0])[1]


def _cuts(build: Build, units: int, tiles: int, clusters: Clusters, uniform: bool) -> Iterator[Cut]:
    """Those that leave no block of a cluster without a tile."""
    yield Cut(build, 1)
    for size in _SIZES:
        held = clusters(build, size)
        if held == 0 or (size - 1) * -(-tiles // size) >= tiles:
            continue
        yield Cut(build, size)
        waves = units // (size * held)
        if not uniform and waves and units % (size * held):
            yield Cut(build, size, waves * held)


def _time(cut: Cut, units: int, tiles: int, clusters: Clusters) -> float:
    """Predicted, without the launch."""
    own, held = _TIMES[cut.build.shape], clusters(cut.build, cut.cluster)
    shared = units - cut.whole * cut.cluster
    each = own.start + -(-tiles // cut.cluster) * own.tile + (own.merge if cut.cluster > 1 else 0)
    time = -(-cut.whole // held) * (own.start + tiles * own.tile) + -(-shared // held) * each
    alone = cut.whole == 0 and shared <= clusters(_one_per_sm(cut.build), cut.cluster)
    return time * own.alone if alone else time


def _one_per_sm(build: Build) -> Build:
    """One of so many heads with a block on a multiprocessor: a device spreads as many clusters as it holds of that."""
    if build.blocks_per_sm == 1:
        return build
    alike = (each for each in BUILDS[build.rows] if each.heads == build.heads and each.blocks_per_sm == 1)
    return replace(next(alike), lists=build.lists)
