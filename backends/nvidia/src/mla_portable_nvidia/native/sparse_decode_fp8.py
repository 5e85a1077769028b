# SPDX-License-Identifier: Apache-2.0
"""The native sparse attention kernel for few heads on the FP8 cache: its builds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mla_portable.layouts import FP8_DS_MLA
from mla_portable_nvidia.native.sparse_decode import Build

__all__ = ["Fp8Build"]


@dataclass(frozen=True, slots=True)
class Fp8Build(Build):
    """A build of 1 or 2 head tiles; stages are those of each group."""

    kernel: ClassVar[str] = "sparse_decode_fp8"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as the source lays it out."""
        heads = self.heads
        query = 4 * self.head_tiles * 8 * 32 * 16 if self.head_tiles > 1 else 0
        scores, probabilities, decays, tops = 4 * heads * 40 * 4, heads * 40 * 2, heads * 4, 4 * heads * 4
        group = self.stages * (self.tile * FP8_DS_MLA.row_bytes + 4) + scores + probabilities + decays + tops
        barriers, group = (-(-size // 128) * 128 for size in (16 * self.groups * self.stages, group))
        return barriers + max(query + self.groups * group, self.merged_bytes(self.groups, 528))
