# SPDX-License-Identifier: Apache-2.0
"""What every room asks: which device of this machine some facts describe, and which package the user names."""

from __future__ import annotations

from typing import Final

import torch

from mla_portable.contracts import DeviceFacts

PROVIDER_VARIABLE: Final = "MLA_PORTABLE_NVIDIA_PROVIDER"
"""Names the only package to ask for a kernel."""


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
