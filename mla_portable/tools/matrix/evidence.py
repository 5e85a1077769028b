# SPDX-License-Identifier: Apache-2.0
"""Evidence: JSON lines, each something that was run and what came of it, held against a schema and the device profiles.

They are the index of the reports, which `derive.records_of` makes; the matrix reads them alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from mla_portable.contracts import Primitive
from mla_portable.tools.matrix.model import Count, Hash, Model, Moment, Positive, RecordError, Text, validation_problems
from mla_portable.tools.matrix.profiles import Profile

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
    """report: SHA-256 of what it is derived from. signer: who signed that. machine: as in the report."""

    version: Literal[1] = Field(alias="schema")
    report: Hash
    signer: Text | None = None
    machine: Text | None = None
    recorded: Moment
    implementation: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*$")]
    primitive: Text
    provider: _Provider
    versions: dict[str, str]
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None
    dirty: bool
    source_hash: Hash
    support: dict[str, Any]
    command: Text


class Engine(_Record):
    """The comparisons of one suite in one engine. engine: name and version."""

    kind: Literal["engine"]
    device: _Device
    driver: str | None
    engine: Text
    suite: Text
    cases: _Cases


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
    suite_hash: Hash
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
    bound: _Time
    baseline: _Time
    rows: Positive | None = None
    overlap: Annotated[int, Field(ge=0, le=100)] | None = None
    clocks: dict[str, float] | None = None


_SCHEMA: Final[TypeAdapter[Any]] = TypeAdapter(
    Annotated[Compiled | Conformance | Benchmark | Engine, Field(discriminator="kind")]
)
_RUN: Final = ("implementation", "primitive", "engine", "suite", "kind", "mode", "layout", "target", "level", "match")
_SERIES: Final = (*_RUN, "shape", "overlap")

_ONE_TIME: Final = {"passed": 1, "failed": 0, "skipped": 0}


@dataclass(frozen=True, slots=True)
class Evidence:
    """One line. where: file and number. data: the record, valid by the schema."""

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
        return self.data.get("cases", _ONE_TIME)["passed"]

    @property
    def failed(self) -> int:
        return self.data.get("cases", _ONE_TIME)["failed"]

    @property
    def skipped(self) -> int:
        return self.data.get("cases", _ONE_TIME)["skipped"]

    @property
    def report(self) -> str:
        """SHA-256 of the report that it is derived from."""
        return self.data["report"]

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
        _SCHEMA.validate_python(data)
    except ValidationError as error:
        return validation_problems(error)
    name = data.get("device", {}).get("name")
    profile = profiles.get(data["device"]["profile"]) if name else None
    target, known = data.get("target"), sorted({each.arch for each in profiles.values()})
    over = [kernel for kernel, use in data.get("kernels", {}).items() if use["shared"] > data["shared_memory_limit"]]
    unbound = data["commit"] is None and data["dirty"]
    times = data["kind"] == "benchmark" and not data["p10_us"] <= data["median_us"] <= data["p90_us"]
    checks = {
        f"primitive: {data['primitive']!r} is none of {', '.join(Primitive.all())}": data["kind"] != "engine"
        and data["primitive"] not in Primitive.all(),
        "versions: python is missing": "python" not in data["versions"],
        "command: names a folder of the machine that ran it": without_folders(data["command"]) != data["command"],
        f"device/profile: expected one of {', '.join(profiles)}": name and profile is None,
        f"device/name: {name!r} does not match the profile's pattern": profile and not profile.matches(name),
        "device/arch: not the profile's": profile and profile.arch != data["device"]["arch"],
        "commit: null, and not from an installed package; a run on a device is bound to a commit": unbound and is_native(data),
        "target: missing; mode ptx is a run of the code for another architecture": data.get("mode") == "ptx" and not target,
        f"target: {target!r} is no profile's architecture; expected one of {', '.join(known)}": target and target not in known,
        f"kernels: {', '.join(over)} above shared_memory_limit, yet failures is empty": over and not data["failures"],
        "median_us: not between p10_us and p90_us": times,
        "failures: says something else than cases/failed": bool(data.get("failures"))
        != bool(data["kind"] == "compiled" and data["cases"]["failed"]),
    }
    return [problem for problem, is_so in checks.items() if is_so]


def is_native(data: Mapping[str, Any]) -> bool:
    """The record is of a run on a device as it is, which has to be bound to a commit."""
    return data["kind"] in ("benchmark", "engine") or data.get("mode") in ("native", "ptx")


def series_of(record: Evidence) -> tuple[Any, ...]:
    """What was run, and how. The shape of a benchmark includes heads and top-k; those of a suite follow from its level."""
    data = record.data
    sizes = (str(data["heads"]), str(data["topk"])) if record.kind == "benchmark" else ()
    return (data["device"]["name"] if "device" in data else None, *(data.get(name) for name in _SERIES), *sizes)


def sources_in(record: Evidence) -> tuple[Any, ...]:
    """The hashes of the code and of the suite that a record is bound to."""
    return record.data["source_hash"], record.data.get("suite_hash")


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
