# SPDX-License-Identifier: Apache-2.0
"""Is this device Iluvatar's, and what can it do? A pure function of signals; reading them is another file's work.

CoreX imitates CUDA: device type "cuda", a CUDA version, capability numbers of other vendors' parts. In this order, the first
that speaks decides:

1. override       MLA_PORTABLE_ILUVATAR: "off", or an architecture such as "ivcore11", or "on"
2. another name   the device's own name is another vendor's: never ours, whatever is installed or set beside it
3. torch.corex    True in CoreX's builds of torch, which drive no other vendor's device
4. +corex tag     in the version of the installed torch distribution, or in torch.__version__
5. device name    one of the vendor's parts, or "Iluvatar" in it
6. environment    COREX_HOME and the like, and only for a device whose name says nothing and whose torch was built for
                  CoreX's CUDA 10.2: such variables survive in containers on other machines

The capability numbers decide nothing: a TG-V200 and an A100 both report (8, 0).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from mla_portable.contracts import DeviceFacts

OVERRIDE: Final = "MLA_PORTABLE_ILUVATAR"
COREX_VARIABLES: Final = ("COREX_HOME", "COREX_PATH", "COREX_VERSION")
COREX_CUDA: Final = "10.2"
"""The CUDA version that CoreX's torch claims; no torch for NVIDIA devices has been built for it since 1.12."""
_OFF: Final = ("0", "off", "no", "false")
_ON: Final = ("1", "on", "yes", "true")
_OTHER_VENDORS: Final = re.compile(
    r"nvidia|geforce|tesla|quadro|titan|amd|radeon|instinct|intel|moore threads|metax|hygon|ascend|cambricon", re.IGNORECASE
)
_ARCH: Final = re.compile(r"ivcore\d+")
_PARTS: Final = (
    (r"BI-V100[A-Z]*", "ivcore10"),
    (r"BI-V150[A-Z]*", "ivcore11"),
    (r"MR-(V100|V50|50)[A-Z]*", "ivcore11"),
    (r"TG-V200[A-Z]*", "ivcore20"),
    (r"TG-V300[A-Z]*", "ivcore30"),
)
"""(pattern of the whole name without the vendor's, architecture)."""
_FORM_FACTOR: Final = r"([ -][\w-]+)?"
"""What follows a part's name: "OAM", "-72-A2"."""
_CAPABILITIES: Final = {(7, 0): "ivcore10", (7, 1): "ivcore11", (8, 0): "ivcore20"}
_SHARED_MEMORY: Final = {"ivcore10": 48 << 10, "ivcore11": 128 << 10, "ivcore30": 192 << 10}
"""Bytes that a thread block may use, where torch does not say; 48 KiB, as the smallest part, where nothing is published."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What torch, the installed packages and the environment say of one device, not interpreted.

    Attributes:
        device_type, name, capability, num_sms, shared_memory (bytes), memory_bytes: as torch reports them; 0 or None
            where it does not.
        torch_corex: `torch.corex is True`. torch_versions: torch.__version__ and that of the installed distribution.
        cuda, hip: versions that torch was built for. override: the value of MLA_PORTABLE_ILUVATAR, "" where it is not set.
        corex_variables: (name, value) of COREX_VARIABLES that are set. libraries: (name, version), sorted by name.
    """

    device_type: str
    name: str
    capability: tuple[int, int] | None = None
    num_sms: int = 0
    shared_memory: int = 0
    memory_bytes: int = 0
    torch_corex: bool = False
    torch_versions: tuple[str, ...] = ()
    cuda: str | None = None
    hip: str | None = None
    override: str = ""
    corex_variables: tuple[tuple[str, str], ...] = ()
    libraries: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why a device counts as Iluvatar's. rule: which of the module's rules spoke. arch: what an override names, or None."""

    rule: str
    arch: str | None = None


def is_override(value: str) -> bool:
    """Whether the value of MLA_PORTABLE_ILUVATAR has a meaning."""
    value = value.strip().lower()
    return value in _OFF + _ON or _ARCH.fullmatch(value) is not None


def arch_named(name: str) -> str | None:
    """The architecture of the part that a device name belongs to; None for any other name, other vendors' included."""
    bare = re.sub(r"^iluvatar\s+", "", name.strip(), flags=re.IGNORECASE)
    return next((arch for pattern, arch in _PARTS if re.fullmatch(pattern + _FORM_FACTOR, bare, flags=re.IGNORECASE)), None)


def recognise(signals: Signals) -> Evidence | None:
    """Why the device is Iluvatar's; None when it is not."""
    override = signals.override.strip().lower()
    if override in _OFF or signals.device_type != "cuda":
        return None
    if _ARCH.fullmatch(override):
        return Evidence("override", override)
    if override in _ON:
        return Evidence("override")
    if signals.hip or _OTHER_VENDORS.search(signals.name):
        return None
    if signals.torch_corex:
        return Evidence("torch.corex")
    if any("+corex" in version for version in signals.torch_versions):
        return Evidence("+corex tag")
    if arch_named(signals.name) or "iluvatar" in signals.name.lower():
        return Evidence("device name")
    if signals.corex_variables and signals.cuda == COREX_CUDA:
        return Evidence("environment")
    return None


def characterise(signals: Signals, evidence: Evidence, *, graph_capture: bool | None, has_bf16: bool = True) -> DeviceFacts:
    """The facts of a device that was recognised.

    Args:
        graph_capture: what capturing a trivial graph gave; None where it was not tried.
        has_bf16: what a small product gave.
    The architecture comes from the override, the name, then the capability. Warps have 64 threads, e4m3 is not converted
    in hardware and float64 is not to be trusted (copies to the device are reported to arrive as zeros) on all parts known.
    """
    reported = _CAPABILITIES.get(signals.capability) if signals.capability else None
    arch = evidence.arch or arch_named(signals.name) or reported or "ivcore"
    return DeviceFacts(
        vendor="iluvatar",
        name=signals.name or "unnamed CoreX device",
        arch=arch,
        device_type=signals.device_type,
        num_sms=signals.num_sms,
        shared_memory=signals.shared_memory or _SHARED_MEMORY.get(arch, 48 << 10),
        warp_size=64,
        memory_bytes=signals.memory_bytes,
        has_bf16=has_bf16,
        has_fp8_conversion=False,
        has_fp64=False,
        graph_capture=graph_capture,
        libraries=signals.libraries,
    )
