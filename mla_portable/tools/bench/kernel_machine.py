# SPDX-License-Identifier: Apache-2.0
"""What a timing depends on beside the code: device, driver, clocks, versions, and where the sources of the kernels stand."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from mla_portable.accelerator import accelerator
from mla_portable.contracts import DeviceFacts

__all__ = ["MachineState", "driver_version", "machine_state"]

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
        driver: its version, None where no tool reports it. clocks: MHz and watts by the tool's names, {}
            where none reports any.
        versions: of Python, torch and the libraries that matter.
    """

    driver: str | None
    clocks: Mapping[str, float]
    versions: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        return {"driver": self.driver, "clocks": dict(self.clocks), "versions": dict(self.versions)}


def machine_state(device: torch.device, facts: DeviceFacts) -> MachineState:
    """The state now: ask while the device is warm, for an idle one lowers its clocks."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, **dict(facts.libraries)}
    reported = _nvidia_smi(device) if facts.vendor == "nvidia" else {}
    clocks: dict[str, float] = {}
    for name, value in reported.items():
        try:
            clocks[name] = float(value)
        except ValueError:  # "[N/A]" on devices that do not report it
            continue
    return MachineState(driver_version(device), clocks, versions)


def driver_version(device: torch.device) -> str | None:
    """The version of the device's driver; None for a CPU, and where no tool reports it."""
    if device.type == "cpu":
        return None
    for command in _DRIVERS:
        try:
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
            return done.stdout.splitlines()[0].strip()
        except (OSError, subprocess.SubprocessError, IndexError):
            continue
    return None


def _nvidia_smi(device: torch.device) -> dict[str, str]:
    """What nvidia-smi says of the device; {} where the tool is not there or refuses."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    uuid = getattr(accelerator(device).properties(), "uuid", None)
    which = [f"--id=GPU-{uuid}"] if uuid is not None else []
    command = [tool, f"--query-gpu={','.join(_QUERIES)}", "--format=csv,noheader,nounits", *which]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")] if done.stdout.strip() else []
    return dict(zip(_QUERIES, values, strict=False))
