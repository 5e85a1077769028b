# SPDX-License-Identifier: Apache-2.0
"""DeviceFacts of the devices that torch itself names: read what torch says first, then interpret it as a pure function.

A vendor whose parts look like another's (same device type, same capability numbers) brings a detector in its plugin;
detectors are asked first and their answer is final. What torch reports as "cuda" is called "nvidia" only where the device's
name says so: capability numbers are shared between vendors.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final, cast

import torch

from mla_portable.accelerator import accelerator, device_count
from mla_portable.contracts import Detector, DeviceFacts, InvalidArgument
from mla_portable.contracts.values import check_type

HYGON_NAMES: Final = re.compile(r"\b(hygon|dcu|k100|bw\d|bw\b)", re.IGNORECASE)
HYGON_ARCHS: Final = ("gfx928", "gfx936", "gfx938")
"""Of Hygon's DCUs, which a torch built for HIP drives like AMD's parts."""
NVIDIA_NAMES: Final = ("nvidia", "tesla", "geforce", "quadro", "titan", "grid")
"""First words of an NVIDIA device's name; drivers of the V100 and T4 era leave the vendor out."""
_TYPE: Final = re.compile(r"([a-z_][a-z0-9_]*?)(:[0-9]+)?")
"""A text that names a device type, known to torch or not."""
_REGISTERS: Final = (
    "Install it, and import it before: torch does so for its entry point torch.backends, else the plugin has to."
)
LIBRARIES: Final = ("torch", "triton")
"""Distributions whose version decides what runs; the versions of CUDA or HIP are torch's own."""


@dataclass(frozen=True, slots=True)
class RawDevice:
    """What torch and the installed packages report about a device, not interpreted.

    Attributes:
        device_type: torch's. name: of the device, or of the machine for a CPU.
        capability: (major, minor), None where the device type has none.
        gcn_arch: AMD's architecture with its feature suffixes, "" elsewhere.
        num_sms, shared_memory (bytes, opted in), warp_size, memory_bytes: 0 where torch does not say.
        hip: torch was built for HIP. bf16: torch computes in bfloat16 there; of HIP devices, True where it was not asked.
        libraries: (name, version) pairs, sorted by name.
    """

    device_type: str
    name: str
    capability: tuple[int, int] | None = None
    gcn_arch: str = ""
    num_sms: int = 0
    shared_memory: int = 0
    warp_size: int = 0
    memory_bytes: int = 0
    hip: bool = False
    bf16: bool = True
    libraries: tuple[tuple[str, str], ...] = ()


def parse_device(device: torch.device | str) -> torch.device:
    """The device that a text names. Raises: InvalidArgument when it names no torch device, or `device` is no text."""
    expected = "a torch device such as 'cpu' or 'cuda:0'"
    check_type("facts", "device", device, (str, torch.device), expected)
    try:
        return torch.device(device)
    except RuntimeError as error:
        kind = _TYPE.fullmatch(str(device))
        remedy = (
            f"torch knows no device type {kind[1]!r} here: the vendor's package has to register it. {_REGISTERS}"
            if kind
            else ""
        )
        raise InvalidArgument("facts", "device", got=repr(device), expected=expected, remedy=remedy) from error


def resolve_device(device: torch.device | str) -> torch.device:
    """`device` with its index filled in: "cuda" means the current one.

    Raises: InvalidArgument when the text names no torch device, or torch finds no such device here.
    """
    found = parse_device(device)
    if found.type == "cpu":
        return found
    count = device_count(found.type)
    index = cast("int | None", found.index)  # None for a bare type, whatever torch's stub says
    if index is None:
        index = accelerator(found).current_index() if count else 0
    if index >= count:
        raise InvalidArgument(
            "facts",
            "device",
            got=f"{found.type}:{index}",
            expected=f"one of the {count} {found.type} devices here" if count else "a device that is here",
            remedy="" if count else f"No {found.type.upper()} device: {why_no_accelerator()}.",
        )
    return torch.device(found.type, index)


def why_no_accelerator() -> str:
    """Why none is here. torch names the accelerator that it was built for, whether one is there or not."""
    build = f"this torch ({torch.__version__})"
    if torch.accelerator.current_accelerator() is None:
        return f"{build} is a CPU build"
    return f"{build} finds none; `python -m torch.utils.collect_env` shows the driver"


def collect(device: torch.device) -> RawDevice:
    """Read what torch says about one device of this machine. Initialises the type's runtime.

    Raises: InvalidArgument when torch finds no such device here.
    """
    device = resolve_device(device)
    where = accelerator(device)
    properties: Any = where.properties()  # types and builds of torch differ in the fields: read them all by name
    if properties is None:
        name = f"CPU {platform.machine()}".strip() if where.is_host else device.type
        return RawDevice(device_type=device.type, name=name, libraries=library_versions())
    major, minor = (getattr(properties, part, None) for part in ("major", "minor"))
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or getattr(properties, "shared_memory_per_block", 0)
    return RawDevice(
        device_type=device.type,
        name=str(getattr(properties, "name", device.type)),
        capability=None if major is None or minor is None else (int(major), int(minor)),
        gcn_arch=str(getattr(properties, "gcnArchName", "")) if torch.version.hip else "",
        num_sms=int(getattr(properties, "multi_processor_count", 0)),
        shared_memory=int(shared),
        warp_size=int(getattr(properties, "warp_size", 0)),
        memory_bytes=int(getattr(properties, "total_memory", 0)),
        hip=torch.version.hip is not None,
        bf16=torch.version.hip is None or where.computes_bf16(),
        libraries=library_versions(),
    )


def library_versions() -> tuple[tuple[str, str], ...]:
    """Versions of what matters to a kernel, sorted by name; absent ones are left out, nothing is imported.

    The installed distribution is asked before `torch.__version__`: vendor builds keep their tag ("+corex...") there only.
    """
    found: dict[str, str] = {"torch": str(torch.__version__)}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    for name, version in (("cuda", torch.version.cuda), ("hip", torch.version.hip)):
        if version:
            found[name] = str(version)
    return tuple(sorted(found.items()))


def interpret(raw: RawDevice) -> DeviceFacts:
    """Name vendor, architecture and abilities: a pure function of what was read.

    A "cuda" device whose name is no NVIDIA name gets an arch that no declaration lists, so only kernels that declare every
    device are considered. bfloat16 is assumed there because nothing here works without it; the probe will tell.
    """
    major, minor = raw.capability or (0, 0)
    found: dict[str, Any] = {"vendor": raw.device_type, "arch": raw.device_type}
    if raw.device_type == "cpu":
        found.update(warp_size=1, graph_capture=False)
    elif raw.hip and raw.gcn_arch:
        found = _hip(raw)
    elif raw.device_type == "cuda" and raw.capability is not None:
        found = {"vendor": "unknown", "arch": f"cc{major}{minor}", "has_fp64": False}
        if raw.name.lower().startswith(NVIDIA_NAMES):
            found = {"vendor": "nvidia", "arch": f"sm{major}{minor}"}
            found["has_bf16"] = raw.capability >= (8, 0)  # PTX ISA: bf16 mma from sm_80
            found["has_fp8_conversion"] = raw.capability >= (8, 9)  # PTX ISA: cvt with e4m3x2 from sm_89
    if raw.warp_size:
        found["warp_size"] = raw.warp_size
    shared = {name: getattr(raw, name) for name in ("device_type", "num_sms", "shared_memory", "memory_bytes", "libraries")}
    return DeviceFacts(name=raw.name or "unnamed device", **shared, **found)


def _hip(raw: RawDevice) -> dict[str, Any]:
    arch = raw.gcn_arch.partition(":")[0]  # "gfx942:sramecc+:xnack-" -> "gfx942"
    return {
        "vendor": "hygon" if arch in HYGON_ARCHS or HYGON_NAMES.search(raw.name) else "amd",
        "arch": arch,
        # Wavefronts have 64 lanes on GCN and CDNA (gfx9...) and 32 on RDNA, whose kernels torch builds that way.
        "warp_size": 64 if arch.startswith("gfx9") else 32,
        "has_bf16": raw.bf16,
        # Up to gfx942 the hardware's e4m3 is the FNUZ format, whose bytes mean half of what the cache's bytes mean;
        # OCP e4m3 is native on CDNA4 (gfx950) and RDNA4 (gfx12).
        "has_fp8_conversion": arch == "gfx950" or arch.startswith("gfx12"),
    }


def ask_detector(detector: Detector, device: torch.device) -> DeviceFacts | None:
    """What one detector says of a device.

    Raises: InvalidArgument when it answers with something else than DeviceFacts, or for another device type.
    """
    answer: object = detector(device)
    if answer is None:
        return None
    name = getattr(detector, "__qualname__", repr(detector))
    if not isinstance(answer, DeviceFacts):
        raise InvalidArgument("facts", f"detector {name}", got=type(answer).__name__, expected="DeviceFacts or None")
    if answer.device_type != device.type:
        got = f"device_type {answer.device_type!r} for {device}"
        raise InvalidArgument("facts", f"detector {name}", got=got, expected=f"device_type {device.type!r}")
    return answer
