# SPDX-License-Identifier: Apache-2.0
"""Machines that are not here: their profiles as facts, and invented times, so that choices for any are tested on a laptop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mla_portable.capability.profiles import load_profiles
from mla_portable.contracts import DeviceFacts, Implementation, Request
from mla_portable.times.measured import MeasuredCosts
from mla_portable.times.records import MeasuredTime, Measurement

PROFILES: Final = load_profiles(Path(__file__).parents[1] / "capability" / "profiles")
H200, B200, RTX_4090, RTX_5090, MI300X = (
    PROFILES[slug].device_facts() for slug in ("h200", "b200", "rtx4090", "rtx5090", "mi300x")
)
A100 = replace(PROFILES["a100-80g"].device_facts(), name="NVIDIA A100-SXM4-80GB")  # as its driver says
BI_V150 = replace(PROFILES["bi-v150"].device_facts(), memory_bytes=16 << 30, graph_capture=False)  # not published
CPU = DeviceFacts(vendor="cpu", name="CPU", arch="cpu", device_type="cpu", warp_size=1, graph_capture=False)

MACHINES = {
    "H200": H200,
    "B200": B200,
    "A100": A100,
    "RTX 4090": RTX_4090,
    "RTX 5090": RTX_5090,
    "MI300X": MI300X,
    "BI-V150": BI_V150,
    "CPU": CPU,
}


Sizes = Mapping[tuple[str, str], Mapping[int, float]]
"""(primitive, layout) -> rows -> microseconds."""


@dataclass(frozen=True)
class Costs:
    """A CostTable of the costs that a function gives, without times."""

    of: Callable[[Implementation, Request], tuple[float, str] | None]

    def __call__(self, implementation: Implementation, request: Request) -> tuple[float, str] | None:
        return self.of(implementation, request)

    def times(self, implementation: Implementation, request: Request) -> dict[int, float]:
        return {}


def costs_of(us: Mapping[str, Sizes], device: str, heads: int, topk: int) -> MeasuredCosts:
    """Invented times of implementations."""
    measurement = Measurement(device, recorded="2026-11-23")
    return MeasuredCosts(
        MeasuredTime(
            implementation=implementation,
            primitive=primitive,
            layout=layout,
            heads=heads if primitive.startswith("sparse") else None,
            topk=topk if primitive.startswith("sparse") else None,
            rows=rows,
            us=each,
            measurement=measurement,
        )
        for implementation, sizes in us.items()
        for (primitive, layout), by_rows in sizes.items()
        for rows, each in by_rows.items()
    )
