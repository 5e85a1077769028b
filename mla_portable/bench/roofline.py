# SPDX-License-Identifier: Apache-2.0
"""Roofline bound: no kernel is faster than this machine moves its bytes or multiplies its numbers, both measured here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mla_portable.bench.timing import measure


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


def measure_ceilings(device: torch.device) -> Ceilings:
    """Medians of a large copy and a large matrix product; takes about 2 GiB of a GPU's memory, for a moment."""
    copy_bytes, side = (32 << 20, 512) if device.type == "cpu" else (1 << 30, 8192)
    source = torch.zeros(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = _seconds(lambda: target.copy_(source), device)
    left = torch.randn((side, side), dtype=torch.bfloat16, device=device)
    product = torch.empty_like(left)
    multiplied = _seconds(lambda: torch.mm(left, left, out=product), device)
    return Ceilings(2 * copy_bytes / copied, 2 * side**3 / multiplied, copy_bytes, side)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    return 1e-3 * measure(call, device=device, repeat=20, warmup=3, flush_l2=False).median_ms
