# SPDX-License-Identifier: Apache-2.0
"""What the gate scripts share: where the records are, what the base of a change is, how a gate ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from mla_portable.tools.matrix import Records, read_records

ROOT = Path(__file__).parents[2]
CAPABILITY = ROOT / "capability"


def finish(name: str, problems: list[str]) -> NoReturn:
    """Print the problems; exit status 1 when there is one."""
    for problem in problems:
        print(f"{name}: {problem}")
    plural = "" if len(problems) == 1 else "s"
    print(f"gate {name}: {f'{len(problems)} problem{plural}' if problems else 'passed'}")
    sys.exit(bool(problems))


def live_records() -> Records:
    """The records, with what the installed plugins declare now instead of what is recorded of it."""
    from mla_portable.registry import get_registry
    from mla_portable.tools.matrix.collect import collect_declarations
    from mla_portable.tools.matrix.profiles import load_profiles

    return read_records(CAPABILITY, collect_declarations(get_registry(), load_profiles(CAPABILITY / "profiles")))


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def base_commit() -> str | None:
    """The commit that a change starts from: where the branch left BASE, or on BASE itself the parent of HEAD."""
    for name in sys.argv[1:] or ("origin/main", "main"):
        try:
            base = git("merge-base", name, "HEAD")
        except (OSError, subprocess.CalledProcessError):
            continue
        if base != git("rev-parse", "HEAD"):
            return base
        parents = git("rev-list", "--parents", "-n", "1", "HEAD").split()[1:]
        return parents[0] if parents else base
    if len(sys.argv) > 1:
        sys.exit(f"no such reference: {sys.argv[1]}")
    return None


def base_files(folder: str, commit: str | None) -> dict[str, str]:
    """Path -> text of the files below a folder as they stand in a commit; {} where there is no commit."""
    if commit is None:
        return {}
    paths = git("ls-tree", "-r", "--name-only", commit, "--", folder).splitlines()
    show = ["git", "show"]
    return {
        path: subprocess.run([*show, f"{commit}:{path}"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for path in paths
        if path.endswith(".jsonl")
    }
