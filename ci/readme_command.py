# SPDX-License-Identifier: Apache-2.0
"""Print one of the README's commands, so that what CI runs is what the README says.

    python3 ci/readme_command.py tests | bash

A command is the fenced block that follows the HTML comment `<!-- command: NAME -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def command(name: str, text: str) -> str:
    """The body of the fenced block after the comment of that name."""
    found = re.search(rf"<!-- command: {re.escape(name)} -->\s*```\w*\n(.*?)```", text, flags=re.DOTALL)
    if not found:
        raise SystemExit(f"README.md has no command {name!r}: expected '<!-- command: {name} -->' before a fenced block")
    return found.group(1)


if __name__ == "__main__":
    print(command(sys.argv[1], README.read_text()), end="")
