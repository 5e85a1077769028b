# SPDX-License-Identifier: Apache-2.0
"""The generated files: declarations from the registry; MATRIX.md, matrix.svg and the registry's costs from the records."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mla_portable.registry import Registry
from mla_portable.registry.costs import COSTS_FILE, costs_text
from mla_portable.tools.matrix.benchmarks import measured_times, timed_devices
from mla_portable.tools.matrix.collect import collect_declarations
from mla_portable.tools.matrix.profiles import load_profiles
from mla_portable.tools.matrix.records import DECLARATIONS, read_records
from mla_portable.tools.matrix.render import markdown
from mla_portable.tools.matrix.svg import svg
from mla_portable.tools.matrix.table import make_table

__all__ = ["MATRIX", "PICTURE", "differences", "generate"]

MATRIX: Final = "MATRIX.md"
PICTURE: Final = "matrix.svg"
_SHOWN: Final = 12
"""Lines of a difference that are shown."""


def generate(folder: Path, registry: Registry | None = None) -> dict[Path, str]:
    """Path -> what should stand there. registry: instead of a new one of everything that is installed.

    The registry's costs are among them where `folder` lies in a checkout, beside the package that they ship with.
    """
    declared = collect_declarations(registry or Registry(environ={}, probe=False), load_profiles(folder / "profiles"))
    records = read_records(folder, declared)
    table = make_table(records)
    files = {folder / DECLARATIONS: declared.text(), folder / MATRIX: markdown(table), folder / PICTURE: svg(table)}
    home = folder.resolve().parent / "mla_portable" / "registry"
    if home.is_dir():
        times = measured_times(records.evidence, records.hashes)
        files[home / COSTS_FILE] = costs_text(times, timed_devices(times, records.profiles.values()))
    return files


def differences(files: Mapping[Path, str]) -> list[str]:
    """A paragraph for each file that is not what it should be, with the first lines that differ."""
    found: list[str] = []
    for path, wanted in files.items():
        there = path.read_text(encoding="utf-8") if path.exists() else ""
        if there != wanted:
            lines = list(difflib.unified_diff(there.splitlines(), wanted.splitlines(), "there", "generated", lineterm="", n=0))
            shown = [line[:160] for line in lines[2 : 2 + _SHOWN]]
            found.append("\n".join([f"{path.name} is not what the records say; run ci/refresh_evidence", *shown]))
    return found
