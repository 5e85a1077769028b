# SPDX-License-Identifier: Apache-2.0
"""Which build of the native kernel serves a call, and into how many splits: a pure function of the call's shape and the device.

Timed on an H200 (132 multiprocessors), topk 2048: `docs/nvidia.md`. A block of many warps hides its own latency and has a
multiprocessor to itself; two small blocks on each serve more rows than there are multiprocessors, and very few rows. Splits
of a row are a cluster, so they must fit the clusters that the device holds at once, or the last ones wait for the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mla_portable_nvidia.native.sparse_decode import MAX_SPLITS, TILE, Build

__all__ = ["BUILDS", "LARGE", "SMALL", "WIDE", "Cut", "choose"]

SMALL: Final = Build(head_tiles=1, groups=1, stages=3, blocks_per_sm=2)
LARGE: Final = Build(head_tiles=1, groups=2, stages=4)
WIDE: Final = Build(head_tiles=2, groups=2, stages=3)
BUILDS: Final = (SMALL, LARGE, WIDE)
_SPLITS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)

Clusters = Callable[[Build, int], int]
"""(build, splits) -> clusters of so many blocks that the device holds at once."""


@dataclass(frozen=True, slots=True)
class Cut:
    """build, and how its blocks share a row: num_splits runs of split_len indices, a whole number of tiles each."""

    build: Build
    num_splits: int
    split_len: int


def choose(*, rows: int, num_heads: int, topk: int, num_sms: int, clusters: Clusters) -> Cut:
    """The cut for `rows` query rows of `num_heads` heads and `topk` indices.

    Args:
        num_sms: multiprocessors. clusters: what the device holds, asked for at most once for each count of splits.
    """
    narrow = rows * -(-num_heads // SMALL.heads)  # blocks of 16 heads
    if num_heads > SMALL.heads and 2 * narrow > num_sms:
        blocks = rows * -(-num_heads // WIDE.heads)
        return _cut(WIDE, blocks, topk, num_sms, clusters)
    if 16 * narrow <= num_sms or narrow > num_sms or num_sms < 2 * narrow <= num_sms + num_sms // 2:
        return _cut(SMALL, narrow, topk, num_sms, clusters)
    return _cut(LARGE, narrow, topk, num_sms, clusters)


def _cut(build: Build, blocks: int, topk: int, num_sms: int, clusters: Clusters) -> Cut:
    """The most splits that all run at once."""
    tiles = max(1, -(-topk // TILE))
    wanted = 1
    for splits in _SPLITS:
        if splits > min(tiles, MAX_SPLITS) or blocks * splits > num_sms * build.blocks_per_sm:
            break
        if splits == 1 or clusters(build, splits) >= blocks:
            wanted = splits
    split_len = -(-tiles // wanted) * TILE
    return Cut(build, -(-tiles * TILE // split_len), split_len)
