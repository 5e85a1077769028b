# SPDX-License-Identifier: Apache-2.0
"""AttentionConfig: how the sparse attention kernel is cut into programs on each architecture, as data.

Read when a primitive is bound, never per call. No row has been timed: each was chosen from what Triton 3.7.1 compiles it to
for that architecture (`mla_portable_triton.aot`), a wide tile whose shared memory fits and which spills at most a few
registers. On gfx1100 no tile is without heavy spills. On sm100 a tile of 64 heads over bf16 rows would need more tensor
memory than there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mla_portable.contracts import ProgramShape
from mla_portable.layouts import BF16, BF16_NOPE, FP8_DS_MLA

__all__ = ["CONFIGS", "AttentionConfig", "attention_config", "fp8_tile"]


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """One cut of the kernel.

    Attributes:
        block_h: query heads a program serves. block_n: tokens of an inner step. Both powers of two, at least 16.
        num_warps: of a program. num_stages: depth of the software pipeline; shared memory grows with it.
    """

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def program(self) -> ProgramShape:
        """8 warps fill a multiprocessor: they take up to 255 registers a thread of the 65,536 that an SM of NVIDIA has.

        On an H200 64 heads, 8 warps, 16 rows take 59.5 us with 132 programs and 71.4 with 264; 16 heads, 4 warps, 64 rows 102
        with 264 and 144 with 132.
        """
        return ProgramShape(self.block_h, self.block_n, per_sm=max(1, 8 // self.num_warps))


Rows = tuple[tuple[int, AttentionConfig], ...]
"""(greatest number of heads, configuration), ascending; the last row serves every larger count by several tiles."""

_16 = AttentionConfig(block_h=16, block_n=32, num_warps=4, num_stages=3)
_32 = AttentionConfig(block_h=32, block_n=32, num_warps=4, num_stages=3)
_64 = AttentionConfig(block_h=64, block_n=64, num_warps=8, num_stages=3)
_64_WHOLE = AttentionConfig(block_h=64, block_n=64, num_warps=8, num_stages=2)
_16_SMALL = AttentionConfig(block_h=16, block_n=32, num_warps=4, num_stages=2)
_32_SMALL = AttentionConfig(block_h=32, block_n=64, num_warps=8, num_stages=2)
_32_SHORT = AttentionConfig(block_h=32, block_n=32, num_warps=8, num_stages=2)
_64_SHORT = AttentionConfig(block_h=64, block_n=32, num_warps=8, num_stages=2)
_SMALL = AttentionConfig(block_h=16, block_n=16, num_warps=4, num_stages=1)
_CDNA_16 = AttentionConfig(block_h=16, block_n=16, num_warps=4, num_stages=2)
_CDNA_32 = AttentionConfig(block_h=32, block_n=16, num_warps=4, num_stages=1)
_CDNA_64 = AttentionConfig(block_h=64, block_n=16, num_warps=8, num_stages=1)
_RDNA = AttentionConfig(block_h=16, block_n=16, num_warps=8, num_stages=1)
_INTERPRETED_16 = AttentionConfig(block_h=16, block_n=128, num_warps=1, num_stages=1)
_INTERPRETED_64 = AttentionConfig(block_h=64, block_n=128, num_warps=1, num_stages=1)
_CDNA: Rows = ((16, _CDNA_16), (32, _CDNA_32), (64, _CDNA_64))


def _layouts(fp8: Rows, bf16: Rows) -> Mapping[str, Rows]:
    """BF16 rows without a rotary part are cut like those with one."""
    return {FP8_DS_MLA.name: fp8, BF16.name: bf16, BF16_NOPE.name: bf16}


_FP8: Rows = ((16, _16), (32, _32), (64, _64))
_99_KIB: Final = _layouts(((16, _16_SMALL), (32, _32_SMALL), (64, _64_SHORT)), ((16, _16_SMALL), (32, _32_SHORT)))
_INTERPRETED: Rows = ((16, _INTERPRETED_16), (64, _INTERPRETED_64))

CONFIGS: Final[Mapping[str, Mapping[str, Rows]]] = {
    # fits 48 KiB, the least that any target is known to have
    "default": _layouts(((16, _SMALL),), ((16, _SMALL),)),
    "sm80": _layouts(_FP8, ((16, _16), (32, _32))),
    "sm86": _99_KIB,
    "sm89": _99_KIB,
    "sm90": _layouts(_FP8, ((16, _16), (32, _32), (64, _64_WHOLE))),
    "sm100": _layouts(_FP8, ((16, _16), (32, _32))),
    "sm120": _99_KIB,
    "gfx942": _layouts(_CDNA, _CDNA),
    "gfx950": _layouts(_CDNA, _CDNA),
    "gfx1100": _layouts(((16, _RDNA),), ((16, _RDNA),)),
    # Triton's interpreter: large tiles, because its cost is per operation
    "cpu": _layouts(_INTERPRETED, _INTERPRETED),
}
"""DeviceFacts.arch -> cache layout -> rows."""


def fp8_tile(arch: str) -> int:
    """Heads of a tile of the FP8 kernel at most: `sparse_attention_fp8` says why."""
    return 64 if arch.startswith("gfx") else 32


def attention_config(arch: str, kv_layout: str | None, num_heads: int | None) -> AttentionConfig:
    """The configuration for a device, a layout and a head count; the small one where any of them is not known."""
    if kv_layout is None:
        arch, kv_layout = "default", BF16.name
    rows = CONFIGS.get(arch, CONFIGS["default"])[kv_layout]
    for max_heads, config in rows:
        if (num_heads or 1) <= max_heads:
            return config
    return rows[-1][1]
