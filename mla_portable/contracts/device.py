# SPDX-License-Identifier: Apache-2.0
"""DeviceFacts: everything a choice may depend on, as one frozen value.

Whatever is decided from it is a pure function, so a machine that is not available can be simulated by its facts.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla_portable.contracts.values import check_fields, check_type
from mla_portable.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What is known about one device.

    Attributes:
        vendor: one word, lower case: "nvidia", "amd", "iluvatar", "cpu".
        name: as the driver reports it, e.g. "NVIDIA H200".
        arch: the name kernels are compiled for: "sm90", "gfx942", "ivcore11", "cpu".
        device_type: torch's device type, "cuda" for every GPU that torch drives through its CUDA interface.
        num_sms: streaming multiprocessors (compute units), 0 for a CPU.
        shared_memory: bytes one thread block may use after opting in, 0 for a CPU and where unknown.
        warp_size: threads per warp.
        memory_bytes: of device memory, 0 where unknown.
        has_bf16: bfloat16 matrix units or, on a CPU, arithmetic.
        has_fp8_conversion: e4m3 converts to a wider type in hardware; otherwise kernels decode the bits.
        has_fp64: float64 can be trusted on the device.
        graph_capture: CUDA graphs work; None if that was not tried.
        libraries: (name, version) pairs that matter here, sorted by name.
    """

    vendor: str
    name: str
    arch: str
    device_type: str = "cuda"
    num_sms: int = 0
    shared_memory: int = 0
    warp_size: int = 32
    memory_bytes: int = 0
    has_bf16: bool = True
    has_fp8_conversion: bool = False
    has_fp64: bool = True
    graph_capture: bool | None = None
    libraries: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        check_type("DeviceFacts", "libraries", self.libraries, tuple, "a tuple of (name, version) pairs")
        for field in ("vendor", "name", "arch", "device_type"):
            if not getattr(self, field):
                raise InvalidArgument("DeviceFacts", field, got="''", expected="a non-empty string")

    def __str__(self) -> str:
        return self.name if self.arch in ("cpu", self.name) else f"{self.name} ({self.arch})"
