# SPDX-License-Identifier: Apache-2.0
"""Evidence: append-only JSON lines, held against a schema and against the device profiles when they are read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from mla_portable.tools.matrix.errors import RecordError
from mla_portable.tools.matrix.profiles import Profile

__all__ = ["Evidence", "append_evidence", "load_evidence", "parse_evidence", "problems_of", "validator"]


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
        return self.data["cases"]["passed"]

    @property
    def failed(self) -> int:
        return self.data["cases"]["failed"]

    @property
    def skipped(self) -> int:
        return self.data["cases"]["skipped"]

    @property
    def profile(self) -> str | None:
        return self.data["device"]["profile"] if "device" in self.data else None


@lru_cache(maxsize=1)
def validator() -> Any:
    """A jsonschema validator of one record, made once."""
    from jsonschema import Draft202012Validator

    schema = json.loads(
        resources.files("mla_portable.tools.matrix").joinpath("evidence.schema.json").read_text(encoding="utf-8")
    )
    return Draft202012Validator(_without_references(schema, schema.pop("$defs")))


def _without_references(part: Any, definitions: Mapping[str, Any]) -> Any:
    """The same schema; to follow a reference costs the validator more than to check what it names, and records are many."""
    if isinstance(part, Mapping):
        if "$ref" in part:
            return _without_references(definitions[part["$ref"].removeprefix("#/$defs/")], definitions)
        return {key: _without_references(value, definitions) for key, value in part.items()}
    return [_without_references(value, definitions) for value in part] if isinstance(part, list) else part


def problems_of(data: Any, profiles: Mapping[str, Profile]) -> list[str]:
    """What is wrong with a record: the schema first, then what no schema can say."""
    found = [f"{'/'.join(map(str, e.absolute_path)) or 'record'}: {e.message}" for e in validator().iter_errors(data)]
    if found:
        return found
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
    if native and data["commit"] is None:
        found.append("commit: null; a run on a device is bound to a commit")
    known = sorted({profile.arch for profile in profiles.values()})
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


def append_evidence(path: Path, records: Iterable[Mapping[str, Any]], profiles: Mapping[str, Profile]) -> int:
    """Add records to the end of a file; all are valid, or nothing is written. Returns: how many. Raises: RecordError."""
    lines: list[str] = []
    for record in records:
        problems = problems_of(record, profiles)
        if problems:
            raise RecordError(f"new record for {path.name}", "; ".join(problems))
        lines.append(json.dumps(record, sort_keys=True, allow_nan=False) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(lines)
    return len(lines)
