# SPDX-License-Identifier: Apache-2.0
"""What is publicly known of each Iluvatar part, as data: its architecture and the memory that one thread block may use.

Names as the driver gives them, with or without "Iluvatar" in front; capability numbers are those that CoreX's torch
reports. (8, 0) is also an A100's, so a capability never tells the vendor: it is read once the vendor is known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

__all__ = ["Part", "arch_of_capability", "part_named", "shared_memory_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """A family of boards with one architecture. pattern: matches the whole device name, without the vendor's."""

    pattern: str
    arch: str


PARTS: Final = (
    Part(r"BI-V100[A-Z]*", "ivcore10"),
    Part(r"BI-V150[A-Z]*", "ivcore11"),
    Part(r"MR-V(100|50)[A-Z]*", "ivcore11"),
    Part(r"MR-50[A-Z]*", "ivcore11"),
    Part(r"TG-V200[A-Z]*", "ivcore20"),
    Part(r"TG-V300[A-Z]*", "ivcore30"),
)
_FORM_FACTOR: Final = r"([ -][\w-]+)?"
"""What follows a part's name: "OAM", "-72-A2"."""
_CAPABILITIES: Final = {(7, 0): "ivcore10", (7, 1): "ivcore11", (8, 0): "ivcore20"}
_SHARED_MEMORY: Final = {"ivcore10": 48 << 10, "ivcore11": 128 << 10, "ivcore30": 192 << 10}
_LEAST_SHARED_MEMORY: Final = 48 << 10
"""Bytes, of the smallest part: for parts of which nothing is published."""


def part_named(name: str) -> Part | None:
    """The part that a device name belongs to; None for any other name, other vendors' included."""
    bare = re.sub(r"^iluvatar\s+", "", name.strip(), flags=re.IGNORECASE)
    return next((p for p in PARTS if re.fullmatch(p.pattern + _FORM_FACTOR, bare, flags=re.IGNORECASE)), None)


def arch_of_capability(capability: tuple[int, int] | None) -> str | None:
    """The architecture of a device that is known to be Iluvatar's, None where its capability is none of theirs."""
    return None if capability is None else _CAPABILITIES.get(capability)


def shared_memory_of(arch: str) -> int:
    """Bytes that a thread block may use, where torch does not say."""
    return _SHARED_MEMORY.get(arch, _LEAST_SHARED_MEMORY)
