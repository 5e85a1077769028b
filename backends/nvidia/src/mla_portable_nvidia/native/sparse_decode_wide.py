# SPDX-License-Identifier: Apache-2.0
"""The native sparse attention kernel for many heads on the FP8 cache: one build of each kind of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from mla_portable_nvidia.native.sparse_decode import Build, row_defines

__all__ = ["WideBuild"]


@dataclass(frozen=True, slots=True)
class WideBuild(Build):
    """64 heads of two warpgroups, which the source fixes itself.

    A stage holds 32 tokens and a step takes four stages. There are as many stages as fit.
    """

    kernel: ClassVar[str] = "sparse_decode_wide"
    tile: ClassVar[int] = 128
    copying_registers: ClassVar[int] = 24

    head_tiles: int = field(default=4, init=False)
    groups: int = field(default=2, init=False)
    blocks_per_sm: int = field(default=1, init=False)

    @property
    def defines(self) -> tuple[tuple[str, int | str], ...]:
        return (*row_defines(self.rows, self.lists, self.shared), ("STAGES", self.stages))
