# SPDX-License-Identifier: Apache-2.0
"""An extension of griffe, for mkdocstrings: docstrings as this project writes them become Markdown.

A section is `Args:` or `Attributes:` with a line for each entry, or `Returns: words` and `Raises: words`. An entry may name
several arguments, and may be followed by others on its line.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Source):(?: (.*))?$")
_NAMES = r"(\*{0,2}[a-z_]\w*(?:, \*{0,2}[a-z_]\w*)*): "
_FIRST = re.compile(rf"(^|\. ){_NAMES}")
_LATER = re.compile(rf"(\. ){_NAMES}")  # of a line that continues an entry


def _entry(text: str, names: re.Pattern[str]) -> str:
    """A line of a section of arguments: its names become code."""
    return names.sub(lambda found: f"{found[1]}`{found[2]}`: ", text)


def as_markdown(docstring: str) -> str:
    """A docstring whose sections are paragraphs and lists. What is in no section stays as it is."""
    lines: list[str] = []
    entries = False  # inside of a section with a line for each entry
    for line in docstring.splitlines():
        section = _SECTION.match(line)
        if section:
            name, words = section.groups()
            entries = words is None
            lines += ["", f"**{name}**: {words or ''}".rstrip(), *([""] if entries else [])]
        elif not line.startswith("    "):
            entries = entries and not line
            lines += [line]
        elif not entries:
            lines += [line]
        elif line.startswith("        "):
            lines += [_entry(line[4:], _LATER)]
        else:
            lines += [f"- {_entry(line[4:], _FIRST)}"]
    return "\n".join(lines).strip("\n")


class Docstrings(griffe.Extension):
    """Rewrites the docstring of each object when it is loaded."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called by griffe."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
