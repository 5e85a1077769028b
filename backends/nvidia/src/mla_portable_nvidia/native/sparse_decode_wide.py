# SPDX-License-Identifier: Apache-2.0
"""The native sparse attention kernel for many heads on the FP8 cache: its one build."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from mla_portable.layouts import FP8_DS_MLA
from mla_portable_nvidia.native.sparse_decode import Build

__all__ = ["WideBuild"]


@dataclass(frozen=True, slots=True)
class WideBuild(Build):
    """64 heads of two warpgroups, which the source fixes itself; a stage holds 32 tokens, a step takes four of them."""

    kernel: ClassVar[str] = "sparse_decode_wide"
    tile: ClassVar[int] = 128
    copying_registers: ClassVar[int] = 24

    head_tiles: int = field(default=4, init=False)
    groups: int = field(default=2, init=False)
    stages: int = field(default=6, init=False)
    blocks_per_sm: int = field(default=1, init=False)

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """None: there is one build."""
        return ()

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as the source lays it out."""
        heads = self.heads
        operands = 9 * heads * 64 * 2 + self.tile * heads * 2  # q, probabilities
        tokens = self.stages * (32 * FP8_DS_MLA.row_bytes + 4)
        per_head = heads * 4 * (1 + 8 + 2 + 1)  # level, sums of eight warps, state, sink
        units = 2 * 4 * self.tile * 2
        small = operands + tokens + per_head + units + 8 + 8 * 8
        return -(-small // 8) * 8 + 2 * self.stages * 8 + 8
