# SPDX-License-Identifier: Apache-2.0
"""AttentionConfig: how the sparse attention kernels are cut into programs on each architecture, as data.

Read when a primitive is bound, never per call. The rows of sm90 and sm80 are the fastest of sweeps on an H200, of sm80 those
of its code on that chip (2026-11-23: decode of 1 to 128 rows, prefill of 1,024). Rows for 99 KiB are what fits of them; sm100
has those of sm90, but for a tile of 64 heads, which takes more tensor memory over bf16 rows than there is. AMD's were chosen
from what Triton 3.7.1 compiles them to (`mla_portable_triton.aot`): tiles that spill nothing or little. On gfx1100 every tile
spills.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from mla_portable.contracts import DeviceFacts
from mla_portable.kit.split_kv import ProgramShape
from mla_portable.layouts import BF16, BF16_128_32, BF16_NOPE, FP8_DS_MLA, FP8_NOPE, FP8_V4, LAYOUTS

_SYSTEM_BYTES: Final = 1 << 10
"""Shared memory of each thread block that the system takes."""


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


Rows = tuple[tuple[int, AttentionConfig], ...]
"""(greatest number of heads, configuration), ascending; the last row serves every larger count by several tiles."""

_FP8_16 = AttentionConfig(block_h=16, block_n=32, num_warps=4, num_stages=3)
_FP8_32 = AttentionConfig(block_h=32, block_n=32, num_warps=4, num_stages=3)
_FP8_16_SMALL = AttentionConfig(block_h=16, block_n=32, num_warps=4, num_stages=2)
_FP8_32_SMALL = AttentionConfig(block_h=32, block_n=64, num_warps=8, num_stages=2)
_V4_32_SMALL = AttentionConfig(block_h=32, block_n=32, num_warps=8, num_stages=2)  # 64 tokens spill up to 344 bytes
_BF16_16 = AttentionConfig(block_h=16, block_n=64, num_warps=4, num_stages=2)
_BF16_32 = AttentionConfig(block_h=32, block_n=32, num_warps=4, num_stages=3)
_BF16_64 = AttentionConfig(block_h=64, block_n=64, num_warps=8, num_stages=2)
_BF16_16_SMALL = AttentionConfig(block_h=16, block_n=32, num_warps=4, num_stages=2)
_BF16_16_ALONE = AttentionConfig(block_h=16, block_n=64, num_warps=8, num_stages=2)  # 99 KiB do not hold two programs of 55 KiB
_BF16_32_SMALL = AttentionConfig(block_h=32, block_n=32, num_warps=4, num_stages=2)
_SMALL = AttentionConfig(block_h=16, block_n=16, num_warps=4, num_stages=1)
_CDNA_16 = AttentionConfig(block_h=16, block_n=16, num_warps=4, num_stages=2)
_CDNA_FP8_32 = AttentionConfig(block_h=32, block_n=16, num_warps=4, num_stages=2)
_CDNA_32 = AttentionConfig(block_h=32, block_n=16, num_warps=4, num_stages=1)
_CDNA_64 = AttentionConfig(block_h=64, block_n=16, num_warps=8, num_stages=1)
_RDNA = AttentionConfig(block_h=16, block_n=16, num_warps=8, num_stages=1)
_INTERPRETED_16 = AttentionConfig(block_h=16, block_n=128, num_warps=1, num_stages=1)
_INTERPRETED_64 = AttentionConfig(block_h=64, block_n=128, num_warps=1, num_stages=1)
_FP8: Rows = ((16, _FP8_16), (32, _FP8_32))
_CDNA_FP8: Rows = ((16, _CDNA_16), (32, _CDNA_FP8_32))  # a tile of 64 heads spills 140 bytes a thread
_CDNA: Rows = ((16, _CDNA_16), (32, _CDNA_32), (64, _CDNA_64))
_CDNA_V4: Rows = ((16, _CDNA_16),)  # a tile of 32 heads spills 1,072 to 1,372 bytes a thread


def _layouts(fp8: Rows, bf16: Rows, v4: Rows | None = None) -> Mapping[str, Rows]:
    """Rows without a rotary part are cut like those with one, and those of V4 like other FP8 rows where `v4` is None.

    Narrow BF16 rows are cut like wide ones, of which they take a part of the memory: untuned.
    """
    coded = {FP8_DS_MLA.name: fp8, FP8_NOPE.name: fp8, FP8_V4.name: v4 or fp8}
    return {**coded, BF16.name: bf16, BF16_NOPE.name: bf16, BF16_128_32.name: bf16}


_99_KIB: Final = _layouts(
    ((16, _FP8_16_SMALL), (32, _FP8_32_SMALL)),
    ((16, _BF16_16_ALONE), (32, _BF16_32_SMALL)),
    ((16, _FP8_16_SMALL), (32, _V4_32_SMALL)),
)
_INTERPRETED: Rows = ((16, _INTERPRETED_16), (64, _INTERPRETED_64))

CONFIGS: Final[Mapping[str, Mapping[str, Rows]]] = {
    # fits 48 KiB, the least that any target is known to have
    "default": _layouts(((16, _SMALL),), ((16, _SMALL),)),
    "sm80": _layouts(_FP8, ((16, _BF16_16_SMALL), (32, _BF16_32_SMALL))),
    "sm86": _99_KIB,
    "sm89": _99_KIB,
    "sm90": _layouts(_FP8, ((16, _BF16_16), (32, _BF16_32), (64, _BF16_64))),
    "sm100": _layouts(_FP8, ((16, _BF16_16), (32, _BF16_32))),
    "sm120": _99_KIB,
    "gfx942": _layouts(_CDNA_FP8, _CDNA, _CDNA_V4),
    "gfx950": _layouts(_CDNA_FP8, _CDNA, _CDNA_V4),
    "gfx1100": _layouts(((16, _RDNA),), ((16, _RDNA),)),
    # Triton's interpreter: large tiles, because its cost is per operation
    "cpu": _layouts(_INTERPRETED, _INTERPRETED),
}
"""DeviceFacts.arch -> cache layout -> rows."""


def attention_config(arch: str, kv_layout: str | None, num_heads: int | None) -> AttentionConfig:
    """The configuration for a device, a layout and a head count; the small one where any of them is not known."""
    if kv_layout is None:
        arch, kv_layout = "default", BF16.name
    rows = CONFIGS.get(arch, CONFIGS["default"])[kv_layout]
    for max_heads, config in rows:
        if (num_heads or 1) <= max_heads:
            return config
    return rows[-1][1]


def shared_memory(config: AttentionConfig, kv_layout: str, arch: str) -> int:
    """Bytes that a program takes at most; an estimate from what Triton 3.7.1 compiles, its remainders rounded up."""
    layout = LAYOUTS[kv_layout]
    ahead = config.num_stages - 1
    if arch.startswith("gfx"):  # queries stay in registers, and codes on their way do; probabilities and bf16 rows do not
        if layout.is_quantized:
            return 512 * max(config.block_h, config.block_n)
        return max(256 * max(config.block_h, config.block_n), ahead * config.block_n * layout.row_bytes)
    # a group of warps that multiplies as one reads a copy of the rows that nothing is written into
    grouped = config.block_h >= 64 and arch in ("sm90", "sm100")
    row = (ahead + (grouped or not ahead)) * layout.row_bytes + 2 * config.block_h
    return config.block_h * layout.workspace.row_bytes + config.block_n * row


def program_shape(config: AttentionConfig, kv_layout: str | None, device: DeviceFacts) -> ProgramShape:
    """What a program does, and how many of them a multiprocessor runs at once.

    8 warps fill it: they take up to 255 registers a thread of the 65,536 that an SM of NVIDIA has. On an H200
    64 heads over bf16 rows, 8 warps, 16 tokens, take 42 us with 128 programs and 53 with 256; 16 heads over FP8 rows, 4 warps,
    64 tokens, 56 us with 256 and 80 with 128.
    """
    per_sm = max(1, 8 // config.num_warps)
    if device.shared_memory:
        block = shared_memory(config, kv_layout or BF16.name, device.arch) + _SYSTEM_BYTES
        per_sm = max(1, min(per_sm, (device.shared_memory + _SYSTEM_BYTES) // block))
    return ProgramShape(config.block_h, config.block_n, per_sm)
