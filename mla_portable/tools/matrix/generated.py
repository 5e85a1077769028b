# SPDX-License-Identifier: Apache-2.0
"""The generated files: the index of the reports; from that and the registry the matrix (data, page, picture)."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

from mla_portable.registry import Registry
from mla_portable.tools.matrix.arrange import make_table
from mla_portable.tools.matrix.evidence import parse_evidence
from mla_portable.tools.matrix.records import index_of, read_records
from mla_portable.tools.matrix.render import markdown, svg
from mla_portable.tools.matrix.reports import REPORTS
from mla_portable.tools.matrix.table import TABLE, table_text

MATRIX: Final = "MATRIX.md"
PICTURE: Final = "matrix.svg"


def generate(folder: Path, registry: Registry | None = None) -> dict[Path, str]:
    """Path -> what should stand there. registry: instead of a new one of everything that is installed."""
    registry = registry or Registry(environ={}, probe=False)
    records = read_records(folder, registry)
    index: dict[Path, str] = {}
    if (folder / REPORTS).is_dir():
        index = index_of(folder, records.profiles)
        found = [each for path, text in sorted(index.items()) for each in parse_evidence(text, str(path), records.profiles)]
        records = replace(records, evidence=tuple(sorted(found, key=lambda each: each.recorded)))
    table = make_table(records)
    return index | {folder / TABLE: table_text(table), folder / MATRIX: markdown(table), folder / PICTURE: svg(table)}


def differences(files: Mapping[Path, str]) -> list[str]:
    """A paragraph for each file that is not what it should be, with the first lines that differ."""
    found: list[str] = []
    for path, wanted in files.items():
        there = path.read_text(encoding="utf-8") if path.exists() else ""
        if there != wanted:
            lines = difflib.unified_diff(there.splitlines(), wanted.splitlines(), lineterm="", n=0)
            shown = [line[:160] for line in islice(lines, 2, 14)]
            found.append("\n".join([f"{path.name} is not what the records say; run ci/refresh_evidence", *shown]))
    return found
