# SPDX-License-Identifier: Apache-2.0
"""What compiling and launching a native kernel need of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mla_portable.contracts import DeviceFacts, MLAPortableError, Reason, Request
from mla_portable_nvidia.machine import device_with
from mla_portable_nvidia.native.runtime.driver import DriverError, driver_version
from mla_portable_nvidia.native.runtime.nvrtc import NvrtcNotFound, nvrtc_version

__all__ = ["check", "index_of"]


def check(device: DeviceFacts) -> Iterator[Reason]:
    """The reasons against it."""
    if device_with(device) is None:
        yield Reason("device", str(device), "not on this machine")
        return
    try:
        nvrtc_version()
    except NvrtcNotFound as error:
        yield Reason("NVRTC", "not found", str(error), "install the package nvidia-cuda-nvrtc of torch's CUDA version")
    try:
        driver_version()
    except (OSError, DriverError) as error:
        yield Reason("CUDA driver", "not usable", str(error), "install the NVIDIA driver")


def index_of(request: Request[Any]) -> int:
    """The CUDA index of the device that a request is bound for. Raises: MLAPortableError where it is not here."""
    device = device_with(request.device)
    if device is None or device.type != "cuda":
        raise MLAPortableError(f"{request.primitive}: no CUDA device of this machine is {request.device}")
    return device.index
