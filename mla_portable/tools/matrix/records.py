# SPDX-License-Identifier: Apache-2.0
"""All records of a checkout, read together: profiles, declarations, evidence, and the hashes of today's sources."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mla_portable
from mla_portable.tools.matrix.claims import Declarations, load_declarations
from mla_portable.tools.matrix.errors import RecordError
from mla_portable.tools.matrix.evidence import Evidence, load_evidence
from mla_portable.tools.matrix.hashes import source_hash, suite_hash
from mla_portable.tools.matrix.levels import Cell, Hashes, evaluate
from mla_portable.tools.matrix.profiles import Profile, load_profiles

__all__ = ["DECLARATIONS", "EVIDENCE", "Records", "find_records", "hashes_of", "read_records"]

DECLARATIONS = "declarations.json"
EVIDENCE = "evidence"
_PROFILES = "profiles"


@dataclass(frozen=True, slots=True)
class Records:
    """What `capability/` holds.

    Attributes:
        folder: where. profiles: by slug. declarations, evidence: as recorded. hashes: of the sources as they are now.
    """

    folder: Path
    profiles: dict[str, Profile]
    declarations: Declarations
    evidence: tuple[Evidence, ...]
    hashes: Hashes

    def cells(self) -> tuple[Cell, ...]:
        """Every claim on every device."""
        return evaluate(self.declarations.claims, self.evidence, self.hashes, self.profiles)


def find_records(given: Path | None = None) -> Path:
    """The folder of records: the one that is given, `capability` here or above, or that of an editable installation.

    Raises: RecordError when there is none.
    """
    if given is not None:
        candidates = [given]
    else:
        here = Path.cwd()
        homes = [here, *here.parents, Path(mla_portable.__file__).parents[1]]
        candidates = [home / "capability" for home in homes]
    for folder in candidates:
        if (folder / _PROFILES).is_dir():
            return folder
    remedy = "records are part of the repository, not of an installed wheel: run it in a checkout, or give --records"
    raise RecordError(str(candidates[0]), f"no folder with {_PROFILES}/; {remedy}")


def hashes_of(declarations: Declarations) -> Hashes:
    """Today's hashes of everything that is declared."""
    return Hashes({(c.implementation, c.primitive): source_hash(c.sources) for c in declarations.claims}, suite_hash())


def read_records(folder: Path, declarations: Declarations | None = None) -> Records:
    """Read a folder of records; `declarations` instead of the recorded ones. Raises: RecordError."""
    profiles = load_profiles(folder / _PROFILES)
    declared = load_declarations(folder / DECLARATIONS) if declarations is None else declarations
    evidence = load_evidence(folder / EVIDENCE, profiles)
    return Records(folder, profiles, declared, tuple(evidence), hashes_of(declared))
