# SPDX-License-Identifier: Apache-2.0
"""Device profiles: what is published of a device that need not be here, each fact with its source."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mla_portable.tools.matrix.errors import RecordError

if TYPE_CHECKING:
    from mla_portable.contracts import DeviceFacts

__all__ = ["Profile", "load_profiles", "parse_profile"]

_FACTS: Final[dict[str, type]] = {
    "num_sms": int,
    "shared_memory": int,
    "warp_size": int,
    "memory_gib": int,
    "has_bf16": bool,
    "has_fp8_conversion": bool,
    "has_fp64": bool,
    "graph_capture": bool,
}
_SUBJECTS: Final = {"shared_memory": "shared memory", "has_bf16": "bfloat16", "has_fp8_conversion": "e4m3 conversion"}
"""Fact -> the subject of the reason that a declaration gives when the fact is against it."""
_WORDS: Final = ("name", "vendor", "arch", "device_type", "pattern")


@dataclass(frozen=True, slots=True)
class Profile:
    """One device.

    Attributes:
        slug: the file's name. name: for readers. vendor, arch, device_type: as in DeviceFacts.
        pattern: regular expression for the whole name that the driver reports.
        facts: what is published, a subset of _FACTS; what is absent is not known. sources: where each fact, and the
            architecture, comes from.
    """

    slug: str
    name: str
    vendor: str
    arch: str
    device_type: str
    pattern: str
    facts: Mapping[str, Any]
    sources: Mapping[str, str]

    @property
    def unknown_subjects(self) -> frozenset[str]:
        """Subjects of reasons that say nothing here, because the fact behind them is not known."""
        return frozenset(subject for fact, subject in _SUBJECTS.items() if fact not in self.facts)

    def matches(self, device_name: str) -> bool:
        """A driver that reports `device_name` drives this device."""
        return re.fullmatch(self.pattern, device_name) is not None

    def device_facts(self) -> DeviceFacts:
        """The device as the registry would see it; unknown facts take DeviceFacts' defaults."""
        from mla_portable.contracts import DeviceFacts

        known = dict(self.facts)
        memory = known.pop("memory_gib", 0) << 30
        return DeviceFacts(
            vendor=self.vendor, name=self.name, arch=self.arch, device_type=self.device_type, memory_bytes=memory, **known
        )


def parse_profile(slug: str, table: Mapping[str, Any]) -> Profile:
    """A profile from a TOML table. Raises: RecordError for what is missing, unknown, of a wrong type or without a source."""
    where = f"profile {slug}"
    for key in table:
        if key not in (*_WORDS, "facts", "sources"):
            raise RecordError(where, f"unknown key {key!r}; expected {', '.join((*_WORDS, 'facts', 'sources'))}")
    for key in _WORDS:
        if not isinstance(table.get(key), str) or not table[key]:
            raise RecordError(where, f"{key}: expected a non-empty string, got {table.get(key)!r}")
    facts: dict[str, Any] = dict(table.get("facts", {}))
    sources: dict[str, str] = dict(table.get("sources", {}))
    for fact, value in facts.items():
        if fact not in _FACTS:
            raise RecordError(where, f"unknown fact {fact!r}; expected one of {', '.join(_FACTS)}")
        if type(value) is not _FACTS[fact] or (type(value) is int and value < 0):
            raise RecordError(where, f"{fact}: expected {_FACTS[fact].__name__}, 0 or more, got {value!r}")
    for fact in ("arch", *facts):
        if not sources.get(fact):
            raise RecordError(where, f"{fact} has no source; say in [sources] where it is published")
    for fact in sources:
        if fact != "arch" and fact not in facts:
            raise RecordError(where, f"a source for {fact!r}, which is not among the facts")
    try:
        re.compile(table["pattern"])
    except re.error as error:
        raise RecordError(where, f"pattern {table['pattern']!r}: {error}") from error
    words = {key: str(table[key]) for key in _WORDS}
    return Profile(slug=slug, facts=facts, sources=sources, **words)


def load_profiles(folder: Path) -> dict[str, Profile]:
    """Every profile of a folder, by slug. Raises: RecordError for a malformed one, or where there is none."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pyright: ignore[reportMissingImports]  installed with Python 3.10 only

    found: dict[str, Profile] = {}
    for path in sorted(folder.glob("*.toml")):
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise RecordError(f"profile {path.stem}", f"no TOML: {error}") from error
        found[path.stem] = parse_profile(path.stem, table)
    if not found:
        raise RecordError(str(folder), "no device profile; expected capability/profiles/*.toml")
    return found
