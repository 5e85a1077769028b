# SPDX-License-Identifier: Apache-2.0
"""Write the tolerance table of `mla_portable.judge.problems` into docs/dev/accuracy.md.

python ci/tolerance_table.py
"""

from __future__ import annotations

from pathlib import Path

from mla_portable.judge.conformance import tolerance_table_markdown

PAGE = Path(__file__).parents[1] / "docs" / "dev" / "accuracy.md"
BEGIN, END = "<!-- tolerances: begin -->\n", "<!-- tolerances: end -->"


def renewed(text: str) -> str:
    """The page with the current table between its two markers."""
    before, found, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found or not found_end:
        raise SystemExit(f"{PAGE}: expected the lines {BEGIN.strip()!r} and {END!r} around the table")
    return f"{before}{BEGIN}{tolerance_table_markdown()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
