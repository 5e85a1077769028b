# SPDX-License-Identifier: Apache-2.0
"""Which rows of the tile tables a device runs. Tables are keyed by architecture; a row fits that architecture's shared memory.

A device is judged by the shared memory that it reports: one of the same architecture with less of it, or of a later one without
rows of its own, has the rows of a neighbour that fit, instead of the small tiles of `default`.
"""

from __future__ import annotations

from typing import Final

from mla_portable.contracts import DeviceFacts

SHARED_MEMORY: Final[dict[str, int]] = {
    "sm80": 163 << 10,
    "sm86": 99 << 10,
    "sm89": 99 << 10,
    "sm90": 227 << 10,
    "sm100": 227 << 10,
    "sm120": 99 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
    "gfx1100": 64 << 10,
}
"""DeviceFacts.arch -> bytes one thread block may use, and rows for it keep within. Sources: CUDA C++ Programming Guide, table
"Technical Specifications per Compute Capability"; AMD CDNA3, CDNA4 and RDNA3 instruction set guides (LDS)."""


def tile_arch(device: DeviceFacts) -> str:
    """The architecture whose rows `device` runs; "default" where none fits.

    Its own where that has rows which fit. Else, among NVIDIA's of the same major version, the one with the most shared memory
    that the device has too: SM87 runs SM80's, SM121 SM120's, and a device as SM80 with 99 KiB SM86's. An architecture of
    another vendor is its own, with rows or without.
    """
    arch, available = device.arch, device.shared_memory
    needed = SHARED_MEMORY.get(arch)
    if needed is not None and (not available or needed <= available):
        return arch
    if not arch.startswith("sm"):
        return arch if needed is None else "default"
    fitting = [name for name in SHARED_MEMORY if _major(name) == _major(arch) and SHARED_MEMORY[name] <= available]
    return max(fitting, key=SHARED_MEMORY.__getitem__, default="default")


def _major(arch: str) -> str:
    """Of an NVIDIA architecture, and what no other has of other names."""
    return arch[:-1] if arch.startswith("sm") else arch
