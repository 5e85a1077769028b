# SPDX-License-Identifier: Apache-2.0
"""Which Ascend device this is, by the name and the number of its SoC.

Device type "npu" exists where torch_npu is installed, which torch loads when it is imported. The architecture is the name that
the vendor compiles operations for. Where neither name nor number is known, it is the device's own name, for which no
implementation is declared; `MLA_PORTABLE_ASCEND` then says which it is.
"""

from __future__ import annotations

import os
import re
from importlib import metadata
from typing import Any, Final, cast

import torch

from mla_portable.contracts import DeviceFacts

OVERRIDE: Final = "MLA_PORTABLE_ASCEND"
A2, A3, A5 = "ascend910b", "ascend910_93", "ascend950"
ARCHS: Final = (A2, A3, A5)
_SOCS: Final = (
    (re.compile(r"ascend910b\d", re.IGNORECASE), range(220, 226), A2),
    (re.compile(r"ascend910_93\d\d", re.IGNORECASE), range(250, 256), A3),
    (re.compile(r"ascend950", re.IGNORECASE), range(260, 261), A5),
)
"""(start of the SoC's name, its numbers, architecture). "Ascend910B" without a digit is a part of the first generation."""
_OFF: Final = "off"
_DISTRIBUTIONS: Final = ("torch", "torch-npu", "triton-ascend", "vllm", "vllm-ascend")


def is_override(value: str) -> bool:
    """Whether the value of MLA_PORTABLE_ASCEND has a meaning."""
    return value in (_OFF, *ARCHS)


def arch_of(name: str, soc: int | None) -> str:
    """The architecture of a SoC.

    Args:
        name: as the runtime reports it, "Ascend910B3". soc: its number (`torch_npu.npu.get_soc_version()`), None where unknown.
    """
    by_name = next((arch for pattern, _, arch in _SOCS if pattern.match(name)), None)
    by_number = next((arch for _, numbers, arch in _SOCS if soc in numbers), None)
    return by_name or by_number or name or "npu"


def detect(device: torch.device) -> DeviceFacts | None:
    """The facts of an "npu" device; None for every other one, and where MLA_PORTABLE_ASCEND is "off"."""
    override = os.environ.get(OVERRIDE, "")
    if device.type != "npu" or override == _OFF:
        return None
    module: Any = torch.get_device_module(device)
    given = cast("int | None", device.index)  # None for a bare type, whatever torch's stub says
    index = module.current_device() if given is None else given
    name, properties = str(_asked(module, "get_device_name", index) or ""), _asked(module, "get_device_properties", index)
    soc = _asked(module, "get_soc_version")
    arch = override or arch_of(name, None if soc is None else int(soc))
    return DeviceFacts(
        vendor="ascend",
        name=name or "unnamed Ascend device",
        arch=arch,
        device_type=device.type,
        num_sms=int(getattr(properties, "cube_core_num", 0)),
        memory_bytes=int(getattr(properties, "total_memory", 0)),
        has_bf16=arch in ARCHS,
        has_fp8_conversion=arch == A5,
        has_fp64=False,  # torch_npu computes in float32 where float64 is asked for, and says so in a warning
        libraries=_libraries(),
    )


def _asked(module: Any, function: str, *arguments: int) -> Any:
    """What a function of torch's module of the type returns; None where this version has none."""
    found = getattr(module, function, None)
    return None if found is None else found(*arguments)


def _libraries() -> tuple[tuple[str, str], ...]:
    """Versions of the distributions that matter here, sorted by name; nothing is imported."""
    found: dict[str, str] = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return tuple(sorted(found.items()))
