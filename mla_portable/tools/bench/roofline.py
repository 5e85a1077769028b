# SPDX-License-Identifier: Apache-2.0
"""Roofline bound: no kernel is faster than this machine moves its bytes or multiplies its numbers, both measured here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from mla_portable.tools.bench.timing import measure

__all__ = ["Ceilings", "measure_ceilings"]

_COPY_BYTES: Final = {"cpu": 32 << 20}
_SIDE: Final = {"cpu": 512}
"""By device type, for devices that need less work than a GPU to be measured well."""
_RUNS: Final = 20


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this machine reaches in the two simplest tasks.

    Attributes:
        bytes_per_second: read plus written, of a device-to-device copy of `copy_bytes`.
        flops_per_second: of a bfloat16 matrix product of `side` x `side`.
    """

    bytes_per_second: float
    flops_per_second: float
    copy_bytes: int
    side: int

    def bound_us(self, bytes_moved: int, flops: int) -> float:
        """The least time for both, overlapped wholly."""
        return 1e6 * max(bytes_moved / self.bytes_per_second, flops / self.flops_per_second)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_ceilings(device: torch.device) -> Ceilings:
    """Medians of a large copy and a large matrix product; takes about 2 GiB of a GPU's memory, for a moment."""
    copy_bytes, side = _COPY_BYTES.get(device.type, 1 << 30), _SIDE.get(device.type, 8192)
    return Ceilings(_copy_speed(device, copy_bytes), _product_speed(device, side), copy_bytes, side)


def _copy_speed(device: torch.device, count: int) -> float:
    source = torch.zeros(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = measure(lambda: target.copy_(source), device=device, repeat=_RUNS, warmup=3, flush_l2=False)
    return 2 * count / (1e-3 * timing.median_ms)


def _product_speed(device: torch.device, side: int) -> float:
    left = torch.randn((side, side), dtype=torch.bfloat16, device=device)
    product = torch.empty_like(left)
    timing = measure(lambda: torch.mm(left, left, out=product), device=device, repeat=_RUNS, warmup=3, flush_l2=False)
    return 2 * side**3 / (1e-3 * timing.median_ms)
