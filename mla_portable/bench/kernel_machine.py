# SPDX-License-Identifier: Apache-2.0
"""What a timing depends on beside the code: device, driver, clocks, versions, and where the sources of the kernels stand."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch

from mla_portable.accelerator import accelerator
from mla_portable.contracts import DeviceFacts

_QUERIES: Final = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit")
_DRIVERS: Final = (
    ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    ("cat", "/sys/module/amdgpu/version"),
    ("ixsmi", "--query-gpu=driver_version", "--format=csv,noheader"),
)
_SECONDS: Final = 10


@dataclass(frozen=True, slots=True)
class MachineState:
    """A device as it was during a run.

    Attributes:
        driver: its version, None where no tool reports it. clocks: MHz and watts by nvidia-smi's names, {} where it reports
            none. versions: of Python, torch and the libraries that matter.
    """

    driver: str | None
    clocks: Mapping[str, float]
    versions: Mapping[str, str]


def machine_state(device: torch.device, facts: DeviceFacts) -> MachineState:
    """The state now: ask while the device is warm, for an idle one lowers its clocks."""
    clocks: dict[str, float] = {}
    if facts.vendor == "nvidia":
        uuid = getattr(accelerator(device).properties(), "uuid", None)
        which = () if uuid is None else (f"--id=GPU-{uuid}",)
        line = _first_line("nvidia-smi", f"--query-gpu={','.join(_QUERIES)}", "--format=csv,noheader,nounits", *which)
        for name, value in zip(_QUERIES, line.split(","), strict=False):
            with suppress(ValueError):  # "[N/A]" on devices that do not report it
                clocks[name] = float(value)
    versions = {"python": platform.python_version(), "torch": torch.__version__, **dict(facts.libraries)}
    return MachineState(driver_version(device), clocks, versions)


def driver_version(device: torch.device) -> str | None:
    """The version of the device's driver; None for a CPU, and where no tool reports it."""
    if device.type == "cpu":
        return None
    return next(filter(None, (_first_line(*command) for command in _DRIVERS)), None)


def _first_line(*command: str) -> str:
    """What a tool prints; "" where it is not there, fails or prints nothing."""
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0].strip()
