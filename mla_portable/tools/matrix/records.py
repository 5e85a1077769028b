# SPDX-License-Identifier: Apache-2.0
"""All records, read together: profiles, evidence, what the installed plugins declare, and the hashes of today's sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mla_portable.contracts import Primitive
from mla_portable.registry import Registry
from mla_portable.sources import ARCH, imported, modules_hash, modules_of, source_hash
from mla_portable.tools.matrix.claims import Declarations, collect_declarations
from mla_portable.tools.matrix.derive import records_of
from mla_portable.tools.matrix.evidence import Evidence, load_evidence, record_line
from mla_portable.tools.matrix.levels import Cell, Hashes, evaluate
from mla_portable.tools.matrix.predicted import Timed, read_timed
from mla_portable.tools.matrix.profiles import Profile, load_profiles
from mla_portable.tools.matrix.reports import ENGINE, read_reports, signed_by
from mla_portable.tools.matrix.table import find_records

EVIDENCE = "evidence"
_PROFILES = "profiles"
_SUITE: Final = "mla_portable.tools.conformance"
_JUDGES: Final = (_SUITE, "mla_portable.problems")
"""Packages that make and judge the suite's cases: a result is worth what they are."""
_ADAPTER: Final = ENGINE[0]
_BELOW: Final = (_ADAPTER, "mla_portable.attention", "mla_portable.planner")


@dataclass(frozen=True, slots=True)
class Records:
    """What `capability/` holds, and what is installed.

    Attributes:
        folder: where. profiles: by slug. declarations: of the installed plugins. evidence: as recorded.
        hashes: of the sources as they are now. timed: what times of other devices are predicted from, None without it.
    """

    folder: Path
    profiles: dict[str, Profile]
    declarations: Declarations
    evidence: tuple[Evidence, ...]
    hashes: Hashes
    timed: Timed | None = None

    def cells(self) -> tuple[Cell, ...]:
        """Every claim on every device."""
        return evaluate(self.declarations.claims, self.evidence, self.hashes, self.profiles)


def suite_hash(primitive: Primitive) -> str:
    """Of the conformance suite, with the primitive's problems, its oracle, and what these import."""
    own = [primitive.problems_module] if primitive.problems_module else []
    return modules_hash(imported([*own, *modules_of(_SUITE)], _JUDGES))


def engine_hash() -> str:
    """Of the adapter of the engine, and of what it imports of the attention layer and the planner."""
    return modules_hash(imported(modules_of(_ADAPTER), _BELOW))


def hashes_of(declarations: Declarations, archs: Iterable[str]) -> Hashes:
    """Today's hashes of everything that is declared."""
    archs, engine = set(archs), engine_hash()
    found: dict[tuple[str, str, str], str] = {(*ENGINE, arch): engine for arch in archs}
    for claim in declarations.claims:
        fixed = None if any(ARCH in source for source in claim.sources) else source_hash(claim.sources)
        for arch in archs:
            found[claim.implementation, claim.primitive, arch] = fixed or source_hash(claim.sources, arch)
    return Hashes(found, {str(each): suite_hash(each) for each in Primitive.all()})


def read_profiles(folder: Path) -> dict[str, Profile]:
    """The profiles of this installation, and those of a folder of records beside or instead of them. Raises: RecordError."""
    own = folder / _PROFILES
    return load_profiles(find_records() / _PROFILES) | (load_profiles(own) if own.is_dir() else {})


def read_records(folder: Path, registry: Registry | None = None) -> Records:
    """Read a folder of records: every *.jsonl in it is evidence.

    Args:
        registry: whose declarations to hold them against; a new one of everything that is installed where it is None.
    Raises: RecordError.
    """
    profiles = read_profiles(folder)
    declared = collect_declarations(registry or Registry(environ={}, probe=False), profiles)
    evidence = load_evidence(folder, profiles)
    hashes = hashes_of(declared, [profile.arch for profile in profiles.values()])
    return Records(folder, profiles, declared, tuple(evidence), hashes, read_timed(folder))


def index_of(folder: Path, profiles: Mapping[str, Profile]) -> dict[Path, str]:
    """File of evidence -> what should stand in it: the records of every report, by device and backend, in order of time.

    Raises: RecordError for a report that is malformed or of a device without a profile.
    """
    reports = read_reports(folder)
    signers = signed_by(folder, reports)
    lines: dict[Path, list[str]] = {path: [] for path in sorted((folder / EVIDENCE).rglob("*.jsonl"))}
    for sha, report in sorted(reports.items(), key=lambda each: (each[1].recorded, each[0])):
        signer = {"signer": signers[sha]} if sha in signers else {}
        for record in records_of(report, sha, profiles):
            where = record["device"]["profile"] if "device" in record else "compiled"
            path = folder / EVIDENCE / where / f"{record['implementation'].partition('.')[0]}.jsonl"
            lines.setdefault(path, []).append(record_line(record | signer))
    return {path: "".join(each) for path, each in lines.items()}
