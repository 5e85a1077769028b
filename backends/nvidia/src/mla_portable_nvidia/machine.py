# SPDX-License-Identifier: Apache-2.0
"""What every room asks this machine: which device some facts describe, and whether Triton is installed."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from mla_portable.contracts import DeviceFacts, Reason


def device_with(facts: DeviceFacts) -> torch.device | None:
    """A device of this machine that these facts describe, the current one if it does; None where there is none."""
    if facts.device_type != "cuda":
        return torch.device(facts.device_type)
    if not torch.cuda.is_available():
        return None
    current = torch.cuda.current_device()
    for index in (current, *(i for i in range(torch.cuda.device_count()) if i != current)):
        major, minor = torch.cuda.get_device_capability(index)
        if f"sm{major}{minor}" == facts.arch:
            return torch.device("cuda", index)
    return None


def triton_missing() -> tuple[Reason, ...]:
    """A reason where Triton is not installed: the passes around a vendor's kernel are written in it."""
    if find_spec("triton") is None:
        return (Reason("triton", "is not installed", "the passes around the kernel are written in it", "pip install triton"),)
    return ()
