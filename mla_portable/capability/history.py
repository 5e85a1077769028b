# SPDX-License-Identifier: Apache-2.0
"""What git knows of the code that ran, and of what changed since."""

from __future__ import annotations

import getpass
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import mla_portable

_CORE: Final = ("layouts", "contracts", "kit", "primitives", "judge/problems", "accelerator.py", "models.py")
CORE: Final = tuple(f"mla_portable/{name}" for name in _CORE)
"""Of a checkout of mla_portable: what results of every plugin depend on."""


@dataclass(frozen=True, slots=True)
class Code:
    """Code in a checkout.

    Attributes:
        root: of the checkout. paths: the plugins' packages and, where it lies there, the core; relative to `root`.
    """

    root: Path
    paths: tuple[str, ...]

    def commit(self) -> str | None:
        """HEAD; None where git cannot say."""
        text = _git(self.root, "rev-parse", "HEAD")
        return None if text is None else text.strip()

    def dirty(self) -> list[str] | None:
        """The paths with uncommitted changes; None where git cannot say."""
        text = _git(self.root, "status", "--porcelain", "--untracked-files=all", "--no-renames", "--", *self.paths)
        return None if text is None else sorted(line[3:].strip('"') for line in text.splitlines())

    def changed_since(self, commit: str) -> int | None:
        """How many files differ from a commit, uncommitted changes among them; None where git does not know it."""
        text = _git(self.root, "diff", "--name-only", commit, "--", *self.paths)
        return None if text is None else len(text.splitlines())


def code_of(plugins: Iterable[Path]) -> Code | None:
    """The code of plugins' packages, which are files or folders, in the checkout of the first one that git tracks.

    None where git tracks none of them: they were installed, or git is not there.
    """
    core = Path(mla_portable.__file__).parent
    plugins = [path.resolve() for path in plugins]
    root = next(filter(None, map(_checkout, plugins)), None)
    if root is None:
        return None
    inside = [path.relative_to(root).as_posix() for path in plugins if path.is_relative_to(root)]
    inside += [name for name in CORE if core.is_relative_to(root) and (root / name).exists()]
    return Code(root, tuple(dict.fromkeys(inside)))


def user_name() -> str:
    """git's, else the login."""
    named = (_git(Path.cwd(), "config", "user.name") or "").strip()
    try:
        return named or getpass.getuser()
    except (OSError, KeyError):  # a user without an entry
        return "unknown"


def _checkout(path: Path) -> Path | None:
    """The root of the checkout that tracks a file or a folder."""
    folder = path if path.is_dir() else path.parent
    tracked = _git(folder, "ls-files", "--", str(path))
    root = _git(folder, "rev-parse", "--show-toplevel") if tracked else None
    return Path(root.strip()) if root else None


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails or is not there."""
    try:
        return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
