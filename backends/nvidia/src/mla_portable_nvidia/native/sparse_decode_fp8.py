# SPDX-License-Identifier: Apache-2.0
"""The native sparse attention kernel for few heads on the FP8 cache: its builds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mla_portable_nvidia.native.sparse_decode import Build

__all__ = ["Fp8Build"]


@dataclass(frozen=True, slots=True)
class Fp8Build(Build):
    """A build of 1 or 2 head tiles; stages are those of each group."""

    kernel: ClassVar[str] = "sparse_decode_fp8"
