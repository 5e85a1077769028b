# SPDX-License-Identifier: Apache-2.0
"""How a plugin's code runs before it serves: torch's own defaults, no gradients, its device, limited time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch

from mla_portable.accelerator import accelerator
from mla_portable.contracts import neutral_defaults
from mla_portable.registry.limits import limited

__all__ = ["isolated"]

T = TypeVar("T")


def isolated(what: str, device: torch.device | None, seconds: float, work: Callable[[], T]) -> T:
    """Run `work` under neutral defaults and a time limit; given a device, on that and the caller's current stream of it.

    Raises: PluginTimeout; whatever `work` raises.
    """
    carried = nullcontext() if device is None else accelerator(device).carried()

    def run() -> T:  # in a thread that has no current device or stream yet
        with torch.no_grad(), carried:
            return work()

    with neutral_defaults():  # here, so that the default dtype of the process is restored even after a timeout
        return limited(what, seconds, run)
