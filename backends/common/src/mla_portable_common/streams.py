# SPDX-License-Identifier: Apache-2.0
"""The current stream of devices of any type, for memory that one stream may share with itself alone."""

from __future__ import annotations

import torch

from mla_portable.accelerator import accelerator


def stream_of(device: torch.device) -> tuple[object, bool]:
    """(the current stream of a tensor's device as a key, whether a graph is captured on it); a CPU has one and no graphs."""
    if device.type == "cpu":
        return 0, False
    own = accelerator(device)
    current = getattr(own.module, "current_stream", None)
    return (None if current is None else current(own.index)), own.is_capturing()
