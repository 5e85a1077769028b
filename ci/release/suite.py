# SPDX-License-Identifier: Apache-2.0
"""Which cases the conformance suite has: those of a release, as a list in its folder, or those of today's declarations.

A claim is its cases: what an implementation declares on a device decides which ids the suite has for it there. The list of a
release says the same of that release, without its code: `<release>/cases.tsv.gz`, written when the release is cut.

    levels <tab> architectures <tab> layout <tab> id                each of the first two separated by commas
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Final, Protocol

from mla_portable.capability.model import RecordError
from mla_portable.capability.profiles import Profile
from mla_portable.capability.run import name_of, unpacked
from mla_portable.contracts import DeviceFacts, Implementation
from mla_portable.judge.problems import cases_for

LIST: Final = "cases.tsv.gz"
LEVELS: Final = ("full", "quick")
"""Levels that prove something, the larger one first; "smoke" is for a first look."""
Key = tuple[str, str, str, str]
"""(primitive, implementation, architecture, level)."""


class Suite(Protocol):
    """The cases of the suite."""

    def cases(self, primitive: str, implementation: str, arch: str, level: str) -> Mapping[str, str]:
        """id -> cache layout, "" where none plays a part; {} for what is not claimed."""
        ...


class TodaysSuite:
    """Of what is declared now; made when it is asked for, which takes seconds for an architecture."""

    def __init__(self, implementations: Iterable[Implementation], profiles: Mapping[str, Profile]) -> None:
        self._implementations = {(str(each.primitive), each.name): each for each in implementations}
        self._facts: dict[str, DeviceFacts] = {each.arch: each.device_facts() for each in profiles.values()}
        self._made: dict[Key, dict[str, str]] = {}

    def cases(self, primitive: str, implementation: str, arch: str, level: str) -> Mapping[str, str]:
        """As of `Suite`."""
        key = primitive, implementation, arch, level
        if key not in self._made:
            offered, facts = self._implementations.get((primitive, implementation)), self._facts.get(arch)
            found = () if offered is None or facts is None else cases_for(offered, facts, level)
            has_cache = offered is not None and offered.primitive.cache
            self._made[key] = {case.id: (case.request.kv_layout or "") if has_cache else "" for case in found}
        return self._made[key]

    def text(self) -> str:
        """All of it, as the list of a release."""
        places: dict[tuple[str, str, str], list[str]] = {}
        for primitive, implementation in self._implementations:
            for arch in sorted(self._facts):
                levels: dict[tuple[str, str], list[str]] = {}
                for level in LEVELS:
                    for case, layout in self.cases(primitive, implementation, arch, level).items():
                        levels.setdefault((case, layout), []).append(level)
                for (case, layout), found in levels.items():
                    places.setdefault((case, layout, ",".join(found)), []).append(arch)
        lines = [f"{levels}\t{','.join(archs)}\t{layout}\t{case}\n" for (case, layout, levels), archs in sorted(places.items())]
        return "".join(lines)


class ListedSuite:
    """Of a release, by its list."""

    def __init__(self, path: Path) -> None:
        """Raises: RecordError for a file that is no such list."""
        self._cases: dict[Key, dict[str, str]] = {}
        for number, line in enumerate(unpacked(path).splitlines(), start=1):
            words = line.split("\t")
            if len(words) != 4:
                raise RecordError(f"{path.parent.name}/{path.name}:{number}", "expected levels, architectures, layout and id")
            levels, archs, layout, case = words
            primitive, implementation = name_of(case)
            for level in levels.split(","):
                for arch in archs.split(","):
                    self._cases.setdefault((primitive, implementation, arch, level), {})[case] = layout

    def cases(self, primitive: str, implementation: str, arch: str, level: str) -> Mapping[str, str]:
        """As of `Suite`."""
        return self._cases.get((primitive, implementation, arch, level), {})

    @cached_property
    def ids(self) -> frozenset[str]:
        """Of every case."""
        return frozenset(case for cases in self._cases.values() for case in cases)


def suite_of_release(folder: Path, today: Suite) -> Suite:
    """By the list in the folder of a release; `today`, where it has none, as that of a release in the making."""
    return ListedSuite(folder / LIST) if (folder / LIST).exists() else today


def write_list(folder: Path, today: TodaysSuite) -> Path:
    """Write the list of a release."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LIST).write_bytes(gzip.compress(today.text().encode(), 9, mtime=0))
    return folder / LIST
