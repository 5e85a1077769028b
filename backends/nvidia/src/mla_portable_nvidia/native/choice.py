# SPDX-License-Identifier: Apache-2.0
"""Which build of a native kernel serves a call, and into how many splits: a pure function of the call's shape and the device.

Timed on an H200 (132 multiprocessors), topk 2048: `docs/nvidia-kernels.md`. A block of many warps hides its own latency and has
a multiprocessor to itself; two small blocks on each serve more rows than there are multiprocessors, and very few rows. Blocks
of 64 heads read the cache least often, but have to be many to be worth it. Splits of a row are a cluster, so they must fit
the clusters that the device holds at once, or the last ones wait for the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from mla_portable.layouts import BF16, FP8_DS_MLA
from mla_portable_nvidia.native.sparse_decode import MAX_SPLITS, Build
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

SMALL: Final = Fp8Build(head_tiles=1, groups=1, stages=3, blocks_per_sm=2)
LARGE: Final = Fp8Build(head_tiles=1, groups=2, stages=4)
WIDE: Final = Fp8Build(head_tiles=2, groups=2, stages=3)
MANY: Final = WideBuild()
BF16_SMALL: Final = Bf16Build(head_tiles=1, groups=1, stages=2, blocks_per_sm=2)
BF16_LARGE: Final = Bf16Build(head_tiles=1, groups=2, stages=5)
BF16_WIDE: Final = Bf16Build(head_tiles=2, groups=2, stages=5)
BUILDS: Final[Mapping[str, tuple[Build, ...]]] = {
    FP8_DS_MLA.name: (SMALL, LARGE, WIDE, MANY),
    BF16.name: (BF16_SMALL, BF16_LARGE, BF16_WIDE),
}
"""kv_layout -> the builds that serve it."""
_SPLITS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)

Clusters = Callable[[Build, int], int]
"""(build, splits) -> clusters of so many blocks that the device holds at once."""


@dataclass(frozen=True, slots=True)
class Cut:
    """build, and how its blocks share a row: num_splits runs of split_len indices, a whole number of tiles each."""

    build: Build
    num_splits: int
    split_len: int


def builds(kv_layout: str, max_heads: int) -> tuple[Build, ...]:
    """All that `choose` may take for up to `max_heads` heads."""
    return tuple(build for build in BUILDS[kv_layout] if max_heads > FEW or build is not MANY)


def choose(kv_layout: str, *, rows: int, num_heads: int, topk: int, num_sms: int, clusters: Clusters) -> Cut:
    """The cut for `rows` query rows of `num_heads` heads and `topk` indices.

    Args:
        num_sms: multiprocessors. clusters: what the device holds, asked for at most once for each count of splits.
    """
    build = (_fp8_build if kv_layout == FP8_DS_MLA.name else _bf16_build)(rows, num_heads, num_sms)
    return _cut(build, rows * -(-num_heads // build.heads), topk, num_sms, clusters)


def _fp8_build(rows: int, num_heads: int, num_sms: int) -> Build:
    narrow = rows * -(-num_heads // SMALL.heads)  # blocks of 16 heads
    if num_heads > FEW and 16 * rows * -(-num_heads // MANY.heads) > num_sms:
        return MANY
    if num_heads > SMALL.heads and 2 * narrow > num_sms:
        return WIDE
    if 16 * narrow <= num_sms or narrow > num_sms or num_sms < 2 * narrow <= num_sms + num_sms // 2:
        return SMALL
    return LARGE


def _bf16_build(rows: int, num_heads: int, num_sms: int) -> Build:
    narrow = rows * -(-num_heads // BF16_SMALL.heads)
    if num_heads > BF16_SMALL.heads and 2 * narrow > num_sms:
        return BF16_WIDE
    return BF16_SMALL if 32 * narrow <= num_sms or narrow > num_sms else BF16_LARGE


def _cut(build: Build, blocks: int, topk: int, num_sms: int, clusters: Clusters) -> Cut:
    """The most splits that all run at once."""
    tiles = max(1, -(-topk // build.tile))
    wanted = 1
    for splits in _SPLITS:
        if splits > min(tiles, MAX_SPLITS) or blocks * splits > num_sms * build.blocks_per_sm:
            break
        if splits == 1 or clusters(build, splits) >= blocks:
            wanted = splits
    split_len = -(-tiles // wanted) * build.tile
    return Cut(build, -(-tiles * build.tile // split_len), split_len)
