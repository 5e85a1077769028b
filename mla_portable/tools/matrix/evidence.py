# SPDX-License-Identifier: Apache-2.0
"""Evidence: JSON lines, each something that was run and what came of it, held against a schema and the device profiles."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from mla_portable.contracts import Primitive
from mla_portable.tools.matrix.model import Count, Model, Positive, RecordError, Text, validation_problems
from mla_portable.tools.matrix.profiles import Profile

__all__ = [
    "Benchmark",
    "Compiled",
    "Conformance",
    "Evidence",
    "append_evidence",
    "load_evidence",
    "parse_evidence",
    "problems_of",
    "record_line",
    "without_folders",
]

_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Figure = Annotated[float, Field(gt=0)]
_ABSOLUTE: Final = re.compile(r"(?<![^\s='\"])/(?:[^\s/]+/)*(?=[^\s/])")
"""The folders in front of a file of the recording machine, which say nothing elsewhere."""


class _Device(Model):
    profile: Text
    name: Text
    arch: Text


class _Provider(Model):
    distribution: str
    version: str


class _Cases(Model):
    passed: Count
    failed: Count
    skipped: Count


class _Usage(Model):
    variants: Positive
    shared: Count
    registers: Count | None
    spilled: Count | None


class _Error(Model):
    error: float | str
    tolerance: float | str
    case: str


class _Time(Model):
    name: Text
    median_us: _Figure


class _Record(Model):
    version: Literal[1] = Field(alias="schema")
    recorded: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z$")]
    implementation: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$")]
    primitive: Text
    provider: _Provider
    versions: dict[str, str]
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None
    dirty: bool
    source_hash: _Hash
    support: dict[str, Any]
    command: Text


class _OnDevice(_Record):
    layout: str | None
    device: _Device
    driver: str | None
    heads: list[Positive]
    topk: list[Positive]


class Compiled(_Record):
    """What a plugin's compiler made of the kernels of one implementation for one architecture, `target`."""

    kind: Literal["compiled"]
    target: Text
    shared_memory_limit: Count
    cases: _Cases
    kernels: Annotated[dict[str, _Usage], Field(min_length=1)]
    failures: list[str]


class Conformance(_OnDevice):
    """A run of the conformance suite. target: of mode "ptx", the architecture whose code ran."""

    kind: Literal["conformance"]
    mode: Literal["native", "interpreter", "stand_in", "ptx"]
    level: Literal["smoke", "quick", "full"]
    match: str
    suite_hash: _Hash
    cases: _Cases
    errors: dict[str, _Error]
    target: Text | None = None


class Benchmark(_OnDevice):
    """One time, with the roofline bound and the fastest baseline of the same run."""

    kind: Literal["benchmark"]
    shape: Text
    median_us: _Figure
    p10_us: _Figure
    p90_us: _Figure
    runs: Positive
    floor: _Time
    rival: _Time
    rows: Positive | None = None
    overlap: Annotated[int, Field(ge=0, le=100)] | None = None
    clocks: dict[str, float] | None = None


_AnyRecord = Annotated[Compiled | Conformance | Benchmark, Field(discriminator="kind")]


@lru_cache(maxsize=1)
def _schema() -> TypeAdapter[Any]:
    return TypeAdapter(_AnyRecord)


@dataclass(frozen=True, slots=True)
class Evidence:
    """One line.

    Attributes:
        where: file and line. data: the record, valid by the schema.
    """

    where: str
    data: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return self.data["kind"]

    @property
    def recorded(self) -> str:
        return self.data["recorded"]

    @property
    def passed(self) -> int:
        return self.data["cases"]["passed"] if "cases" in self.data else 1

    @property
    def failed(self) -> int:
        return self.data["cases"]["failed"] if "cases" in self.data else 0

    @property
    def skipped(self) -> int:
        return self.data["cases"]["skipped"] if "cases" in self.data else 0

    @property
    def profile(self) -> str | None:
        return self.data["device"]["profile"] if "device" in self.data else None

    @property
    def arch(self) -> str:
        """The architecture whose code ran or was compiled."""
        return self.data.get("target") or self.data["device"]["arch"]


def without_folders(command: str) -> str:
    """A command with the files that it names, without the folders of the machine that ran it."""
    return _ABSOLUTE.sub("", command)


def problems_of(data: Any, profiles: Mapping[str, Profile]) -> list[str]:
    """What is wrong with a record: the schema first, then what no schema can say."""
    try:
        _schema().validate_python(data)
    except ValidationError as error:
        return validation_problems(error)
    found: list[str] = []
    if data["primitive"] not in Primitive.all():
        found.append(f"primitive: {data['primitive']!r} is none of {', '.join(Primitive.all())}")
    if "python" not in data["versions"]:
        found.append("versions: python is missing")
    if without_folders(data["command"]) != data["command"]:
        found.append(f"command: names a folder of the machine that ran it: {data['command']!r}")
    device = data.get("device")
    if device is not None:
        profile = profiles.get(device["profile"])
        if profile is None:
            found.append(f"device/profile: unknown device {device['profile']!r}; expected one of {', '.join(profiles)}")
        elif not profile.matches(device["name"]):
            found.append(f"device/name: {device['name']!r} is no {profile.slug} (its pattern is {profile.pattern!r})")
        elif profile.arch != device["arch"]:
            found.append(f"device/arch: {device['arch']!r}, but {profile.slug} is {profile.arch!r}")
    native = data["kind"] == "benchmark" or data.get("mode") in ("native", "ptx")
    if native and data["commit"] is None and data["dirty"]:
        found.append("commit: null, and not from an installed package; a run on a device is bound to a commit")
    known = sorted({profile.arch for profile in profiles.values()})
    if data.get("mode") == "ptx" and "target" not in data:
        found.append("target: missing; mode ptx is a run of the code for another architecture")
    if "target" in data and data["target"] not in known:
        found.append(f"target: no profile has the architecture {data['target']!r}; expected one of {', '.join(known)}")
    if data["kind"] == "compiled":
        over = [name for name, use in data["kernels"].items() if use["shared"] > data["shared_memory_limit"]]
        if over and not data["failures"]:
            found.append(f"kernels: {', '.join(over)} above shared_memory_limit, yet failures is empty")
        if bool(data["failures"]) != bool(data["cases"]["failed"]):
            found.append("failures: says something else than cases/failed")
    return found


def parse_evidence(text: str, where: str, profiles: Mapping[str, Profile]) -> list[Evidence]:
    """The lines of one file. Raises: RecordError with the first bad line and everything that is wrong with it."""
    found: list[Evidence] = []
    for number, line in enumerate(text.splitlines(), start=1):
        here = f"{where}:{number}"
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise RecordError(here, f"no JSON document: {error}") from error
        problems = problems_of(data, profiles)
        if problems:
            raise RecordError(here, "; ".join(problems))
        found.append(Evidence(here, data))
    return found


def load_evidence(folder: Path, profiles: Mapping[str, Profile]) -> list[Evidence]:
    """Every record below a folder, by time. Raises: RecordError."""
    found: list[Evidence] = []
    for path in sorted(folder.rglob("*.jsonl")):
        found += parse_evidence(path.read_text(encoding="utf-8"), str(path.relative_to(folder)), profiles)
    return sorted(found, key=lambda e: e.recorded)  # stable: lines of one second stay in their order


def record_line(record: Mapping[str, Any]) -> str:
    """A record as a line of a file."""
    return json.dumps(record, sort_keys=True, allow_nan=False) + "\n"


def append_evidence(path: Path, records: Iterable[Mapping[str, Any]], profiles: Mapping[str, Profile]) -> int:
    """Add records to the end of a file; all are valid, or nothing is written. Returns: how many. Raises: RecordError."""
    lines: list[str] = []
    for record in records:
        problems = problems_of(record, profiles)
        if problems:
            raise RecordError(f"new record for {path.name}", "; ".join(problems))
        lines.append(record_line(record))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(lines)
    return len(lines)
