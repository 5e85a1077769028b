# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/deploy.md that start an engine, for tests that hold them against that engine's sources."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["recipes", "unknown_options", "values"]

_PAGE = Path(__file__).parents[1] / "docs/deploy.md"


def recipes(start: str) -> list[str]:
    """What follows `start` in each line of a code block that has it."""
    lines = _PAGE.read_text().splitlines()
    return [line.partition(start)[2].strip() for line in lines if start in line and "`" not in line]


def values(commands: Iterable[str], option: str) -> set[str]:
    """The values that commands give an option."""
    return {found for command in commands for found in re.findall(rf"--{option} (\S+)", command)}


def unknown_options(commands: Iterable[str], sources: Iterable[Path], *, least: int) -> set[str]:
    """Options of commands that no source names, neither as an option nor as a field; there are at least `least` options."""
    text = "\n".join(path.read_text() for path in sources)
    options = {found for command in commands for found in re.findall(r"--([a-z-]+)", command)}
    assert len(options) >= least
    return {each for each in options if f"--{each}" not in text and each.replace("-", "_") not in text}
