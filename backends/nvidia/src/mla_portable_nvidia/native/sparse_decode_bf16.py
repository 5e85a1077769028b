# SPDX-License-Identifier: Apache-2.0
"""The native sparse attention kernel for few heads on BF16 rows: its builds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from mla_portable.layouts import BF16
from mla_portable_nvidia.native.sparse_decode import Build

__all__ = ["Bf16Build"]

_PADDING: Final = 16
"""Bytes between rows in shared memory, so that eight of them meet every bank once."""


@dataclass(frozen=True, slots=True)
class Bf16Build(Build):
    """A build whose groups are a multiple of its head tiles: a group has one of them, and groups with the same take turns.

    Stages are the block's, at least as many as there are turns.
    """

    kernel: ClassVar[str] = "sparse_decode_bf16"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as the source lays it out."""
        turns = self.groups // self.head_tiles
        barriers, stages = (turns + 1) * self.stages * 8, self.stages * (self.tile * (BF16.row_bytes + _PADDING) + 4)
        scores, probabilities, decays = 4 * 16 * 40 * 4, 16 * 40 * 2, 16 * 4
        barriers, stages, group = (-(-size // 128) * 128 for size in (barriers, stages, scores + probabilities + decays))
        return barriers + max(stages + self.groups * group, self.merged_bytes(turns, 520))
