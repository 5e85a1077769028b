# SPDX-License-Identifier: Apache-2.0
"""How a plugin's code runs before it serves: torch's own defaults, no gradients, its device, limited time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from mla_portable.contracts import neutral_defaults
from mla_portable.registry.limits import limited

__all__ = ["isolated"]

T = TypeVar("T")


def isolated(what: str, device: torch.device | None, seconds: float, work: Callable[[], T]) -> T:
    """Run `work` under neutral defaults and a time limit; given a GPU, on that and the caller's current stream of it.

    Raises: PluginTimeout; whatever `work` raises.
    """
    stream = torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None

    def run() -> T:  # in a thread that has no current device or stream yet
        with torch.no_grad():
            if stream is None:
                return work()
            with torch.cuda.device(device), torch.cuda.stream(stream):
                torch.cuda.is_current_stream_capturing()  # the first CUDA call of a thread binds the device's context to it
                return work()

    with neutral_defaults():  # here, so that the default dtype of the process is restored even after a timeout
        return limited(what, seconds, run)
