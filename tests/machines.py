# SPDX-License-Identifier: Apache-2.0
"""Invented machines: facts and times as gathered on them, so that choices for any device are tested on a laptop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mla_portable.contracts import DeviceFacts, Implementation, Request
from mla_portable.registry.costs import MeasuredCosts, MeasuredTime

GIB = 1 << 30

H200 = DeviceFacts(
    vendor="nvidia",
    name="NVIDIA H200",
    arch="sm90",
    num_sms=132,
    shared_memory=232_448,
    memory_bytes=141 * GIB,
    has_fp8_conversion=True,
)
B200 = DeviceFacts(
    vendor="nvidia",
    name="NVIDIA B200",
    arch="sm100",
    num_sms=148,
    shared_memory=232_448,
    memory_bytes=180 * GIB,
    has_fp8_conversion=True,
)
A100 = DeviceFacts(
    vendor="nvidia",
    name="NVIDIA A100-SXM4-80GB",
    arch="sm80",
    num_sms=108,
    shared_memory=166_912,
    memory_bytes=80 * GIB,
)
RTX_4090 = DeviceFacts(
    vendor="nvidia",
    name="NVIDIA GeForce RTX 4090",
    arch="sm89",
    num_sms=128,
    shared_memory=101_376,
    memory_bytes=24 * GIB,
    has_fp8_conversion=True,
)
RTX_5090 = DeviceFacts(
    vendor="nvidia",
    name="NVIDIA GeForce RTX 5090",
    arch="sm120",
    num_sms=170,
    shared_memory=101_376,
    memory_bytes=32 * GIB,
    has_fp8_conversion=True,
)
MI300X = DeviceFacts(
    vendor="amd",
    name="AMD Instinct MI300X",
    arch="gfx942",
    num_sms=304,
    shared_memory=65_536,
    warp_size=64,
    memory_bytes=192 * GIB,
)
BI_V150 = DeviceFacts(
    vendor="iluvatar",
    name="Iluvatar BI-V150",
    arch="ivcore11",
    num_sms=16,
    shared_memory=131_072,
    warp_size=64,
    memory_bytes=16 * GIB,
    has_fp64=False,
    graph_capture=False,
)
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
    """Times of implementations, whatever their sources are."""
    times = [
        MeasuredTime(
            device=device,
            primitive=primitive,
            layout=layout,
            heads=heads if primitive.startswith("sparse") else None,
            topk=topk if primitive.startswith("sparse") else None,
            rows=rows,
            implementation=implementation,
            us=each,
            recorded="2026-11-23",
            source_hash="",
        )
        for implementation, sizes in us.items()
        for (primitive, layout), by_rows in sizes.items()
        for rows, each in by_rows.items()
    ]
    return MeasuredCosts(times, hash_of=lambda sources, arch: "")
