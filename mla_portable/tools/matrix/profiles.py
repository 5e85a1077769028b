# SPDX-License-Identifier: Apache-2.0
"""Device profiles: what is published of a device that need not be here, each fact with its source."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError, model_validator

from mla_portable.contracts import DeviceFacts
from mla_portable.tools.matrix.model import Count, Model, RecordError, Text, validation_problems

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]  installed with Python 3.10 only

_SUBJECTS: Final = {"shared_memory": "shared memory", "has_bf16": "bfloat16", "has_fp8_conversion": "e4m3 conversion"}
"""Fact -> the subject of the reason that a declaration gives when the fact is against it."""
_RATES: Final = ("memory_tb_per_s", "bf16_tflops", "clock_ghz")
"""No kernel is faster than the first two, and what is timed needs them; predicted times need all three."""
Rate = Annotated[float, Field(gt=0)]


class Facts(Model):
    """What is published of a device; None for what is not known. As in DeviceFacts, but for memory_gib and the peak rates:
    of memory, in 1e12 bytes per second; of dense bfloat16 products summed in float32, in 1e12 operations per second; of a
    multiprocessor, in 1e9 clocks per second."""

    num_sms: Count | None = None
    shared_memory: Count | None = None
    warp_size: Count | None = None
    memory_gib: Count | None = None
    has_bf16: bool | None = None
    has_fp8_conversion: bool | None = None
    has_fp64: bool | None = None
    graph_capture: bool | None = None
    memory_tb_per_s: Rate | None = None
    bf16_tflops: Rate | None = None
    clock_ghz: Rate | None = None

    def known(self) -> dict[str, Any]:
        """The facts that are published."""
        return self.model_dump(exclude_none=True)


class Profile(Model):
    """One device.

    Attributes:
        slug: the file's name. name: for readers. vendor, arch, device_type: as in DeviceFacts.
        pattern: regular expression for the whole name that the driver reports.
        sources: where each fact, and the architecture, comes from.
    """

    slug: Text
    name: Text
    vendor: Text
    arch: Text
    device_type: Text
    pattern: Text
    facts: Facts = Facts()
    sources: dict[str, Text]

    @model_validator(mode="after")
    def _check(self) -> Profile:
        facts = {"arch", *self.facts.known()}
        if facts != set(self.sources):
            one_sided = ", ".join(sorted(facts ^ set(self.sources)))
            raise ValueError(f"{one_sided}: each fact, and the arch, has a source in [sources], and each source a fact")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r}: {error}") from error
        return self

    @property
    def unknown_subjects(self) -> frozenset[str]:
        """Subjects of reasons that say nothing here, because the fact behind them is not known."""
        return frozenset(subject for fact, subject in _SUBJECTS.items() if getattr(self.facts, fact) is None)

    def matches(self, device_name: str) -> bool:
        """A driver that reports `device_name` drives this device."""
        return re.fullmatch(self.pattern, device_name) is not None

    def device_facts(self) -> DeviceFacts:
        """The device as the registry would see it; unknown facts take DeviceFacts' defaults."""
        known = self.facts.known()
        memory = known.pop("memory_gib", 0) << 30
        known = {name: value for name, value in known.items() if name not in _RATES}
        return DeviceFacts(
            vendor=self.vendor, name=self.name, arch=self.arch, device_type=self.device_type, memory_bytes=memory, **known
        )


def parse_profile(slug: str, table: Mapping[str, Any]) -> Profile:
    """A profile from a TOML table. Raises: RecordError for what is missing, unknown, of a wrong type or without a source."""
    try:
        return Profile.model_validate({"slug": slug, **table})
    except ValidationError as error:
        raise RecordError(f"profile {slug}", "; ".join(validation_problems(error))) from error


def read_toml(path: Path, where: str) -> dict[str, Any]:
    """The table in a file. Raises: RecordError, which names `where`, for a file that is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise RecordError(where, f"no TOML: {error}") from error


def load_profiles(folder: Path) -> dict[str, Profile]:
    """Every profile of a folder, by slug. Raises: RecordError for a malformed one, or where there is none."""
    found: dict[str, Profile] = {}
    for path in sorted(folder.glob("*.toml")):
        found[path.stem] = parse_profile(path.stem, read_toml(path, f"profile {path.stem}"))
    if not found:
        raise RecordError(str(folder), "no device profile; expected *.toml")
    return found


def profile_of(device_name: str, profiles: Mapping[str, Profile]) -> Profile:
    """The profile of a device by the name its driver reports. Raises: RecordError for a device without a profile."""
    found = [profile for profile in profiles.values() if profile.matches(device_name)]
    if len(found) != 1:
        which = f"{len(found)} profiles match: {', '.join(p.slug for p in found)}" if found else "no profile matches"
        raise RecordError(f"device {device_name!r}", f"{which}; add or correct one in capability/profiles (docs/matrix.md)")
    return found[0]


def shared_memory_limit(arch: str, profiles: Mapping[str, Profile]) -> int:
    """Bytes that every device of an architecture gives to a thread block. Raises: RecordError where no profile says."""
    known = [p.facts.shared_memory for p in profiles.values() if p.arch == arch and p.facts.shared_memory is not None]
    if not known:
        problem = "no profile says how much shared memory it has; add one to capability/profiles"
        raise RecordError(f"architecture {arch}", problem)
    return min(known)
