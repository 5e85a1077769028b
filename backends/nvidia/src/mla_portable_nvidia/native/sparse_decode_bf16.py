# SPDX-License-Identifier: Apache-2.0
"""The native sparse attention kernel for few heads on BF16 rows: its builds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mla_portable_nvidia.native.sparse_decode import Build

__all__ = ["Bf16Build"]


@dataclass(frozen=True, slots=True)
class Bf16Build(Build):
    """A build whose groups are a multiple of its head tiles: a group has one of them, and groups with the same take turns.

    Stages are the block's, at least as many as there are turns.
    """

    kernel: ClassVar[str] = "sparse_decode_bf16"
