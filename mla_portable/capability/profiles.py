# SPDX-License-Identifier: Apache-2.0
"""Device profiles: what is published of a device that need not be here, each fact with its source."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError, model_validator

from mla_portable.capability.matrix import records_folder
from mla_portable.capability.model import Count, Model, RecordError, Text, validation_problems
from mla_portable.contracts import DeviceFacts

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]  installed with Python 3.10 only

_PROFILES: Final = "profiles"
_DECIDING: Final = ("shared_memory", "has_bf16", "has_fp8_conversion")
_RATES: Final = ("memory_tb_per_s", "bf16_tflops", "clock_ghz")
"""Facts that DeviceFacts has not."""
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
    def unknown_facts(self) -> tuple[str, ...]:
        """The facts that may decide what runs, and that are not published."""
        return tuple(fact for fact in _DECIDING if getattr(self.facts, fact) is None)

    @property
    def short_name(self) -> str:
        """Without the vendor and the size of the memory, e.g. "H200"."""
        words = [word for word in self.name.split() if not word.endswith("GB") and word not in ("NVIDIA", "SXM")]
        return " ".join(words)

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


def all_profiles(records: Path | None = None) -> dict[str, Profile]:
    """Those of this installation, and of a folder of records in addition. Raises: RecordError."""
    found = load_profiles(records_folder() / _PROFILES)
    own = records and records / _PROFILES
    return found | (load_profiles(own) if own and own.is_dir() else {})


def profile_named(name: str, profiles: Mapping[str, Profile]) -> Profile:
    """The profile with that slug, the only one whose slug starts so, or that of the device that drivers call so.

    Raises: RecordError with the nearest ones.
    """
    slug = name.lower()
    starting = [each for each in profiles if each.startswith(slug)]
    if slug in profiles or len(starting) == 1:
        return profiles[slug if slug in profiles else starting[0]]
    reported = next((each for each in profiles.values() if each.matches(name)), None)
    if reported is not None:
        return reported
    near = starting or get_close_matches(slug, profiles, n=3)
    question = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(profiles)}"
    raise RecordError(f"device {name!r}", f"no profile of that name; {question}")


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
        remedy = "add or correct one in capability/profiles (docs/dev/evidence.md)"
        raise RecordError(f"device {device_name!r}", f"{which}; {remedy}")
    return found[0]
