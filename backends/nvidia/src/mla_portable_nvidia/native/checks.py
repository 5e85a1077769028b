# SPDX-License-Identifier: Apache-2.0
"""What compiling and launching a native kernel need of this machine."""

from __future__ import annotations

from collections.abc import Iterator

from mla_portable.contracts import DeviceFacts, Reason
from mla_portable_nvidia.discovery import device_with
from mla_portable_nvidia.native.driver import DriverError, driver_version
from mla_portable_nvidia.native.nvrtc import NvrtcNotFound, nvrtc_version

__all__ = ["check"]


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
