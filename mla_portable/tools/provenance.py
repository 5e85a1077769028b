# SPDX-License-Identifier: Apache-2.0
"""Where and from which code something ran: the time, the machine, the commit, and every file of code that differs from it.

Without git (a copy of a checkout on the device's machine) all files of code are listed instead. A machine that was sent a
newer tree than its own git knows says what differs. Whoever has the commits finds the one that ran: `settled`. Files are
named by git's hash of their contents, which needs no git to compute.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import torch

import mla_portable
from mla_portable.accelerator import accelerator
from mla_portable.registry.facts import resolve_device

_CODE: Final = (".py", ".cu", ".cuh", ".h", ".toml", ".cfg")
_NO_CODE: Final = ("capability", "docs", "tests")
_FOLDERS: Final = ("mla_portable", "backends", "examples", "ci")
"""Of this repository, where code is looked for without git."""
_GONE: Final = ""
_RECENT: Final = 50
"""Commits that a run is looked for in."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where something ran.

    Attributes:
        recorded: UTC. command: what was typed. machine: a hash that tells machines, or their devices, apart.
        commit: None outside git, or where the files were not compared with one.
        changed: path -> hash of the files of code that differ from the commit, "" for one that is gone.
        files: path -> hash of all files of code, where there is no git; None where `changed` says it.
    """

    recorded: str
    command: str
    machine: str
    commit: str | None = None
    changed: Mapping[str, str] | None = None
    files: Mapping[str, str] | None = None


def provenance_of(root: Path | None, command: str, device: torch.device) -> Provenance:
    """Of a run here and now, of the code at `root`; None for code that was installed, whose distributions say what it is."""
    recorded = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    made = Provenance(recorded, command, machine_id(device), changed={})
    if root is None:
        return made
    try:
        return replace(made, commit=git(root, "rev-parse", "HEAD").strip(), changed=_changed(root))
    except (OSError, subprocess.CalledProcessError):
        return replace(made, changed=None, files=_files(root))


def settled(run: Provenance, root: Path) -> Provenance:
    """The same run, of the newest commit before it in the checkout at `root` that holds exactly the files that ran.

    Where none does, it differs from the commit that it names, or from HEAD if it names none.
    """
    if run.files is None and (not run.changed or run.commit is None):
        return run
    folders = _FOLDERS if run.files is not None else ("",)
    named = run.commit or "HEAD"
    beside = {path: blob for path, blob in (run.changed or {}).items() if _is_code(path)}
    ran = run.files or {**_tracked(root, named, folders), **beside}
    for commit in git(root, "rev-list", "-n", str(_RECENT), f"--before={run.recorded}", "HEAD").split():
        if not _difference(ran, _tracked(root, commit, folders)):
            return replace(run, commit=commit, changed={}, files=None)
    commit = git(root, "rev-parse", named).strip()
    return replace(run, commit=commit, changed=_difference(ran, _tracked(root, commit, folders)), files=None)


def _tracked(root: Path, commit: str, folders: tuple[str, ...]) -> dict[str, str]:
    """path -> hash of the files of code that a commit holds. Raises: CalledProcessError."""
    listed = (line.split("\t") for line in git(root, "ls-tree", "-r", commit).splitlines())
    return {path: words.split()[2] for words, path in listed if _is_code(path) and path.startswith(folders)}


def _difference(ran: Mapping[str, str], tracked: Mapping[str, str]) -> dict[str, str]:
    return {path: ran.get(path, _GONE) for path in {*ran} | {*tracked} if ran.get(path, _GONE) != tracked.get(path, _GONE)}


def git(root: Path, *arguments: str) -> str:
    """What git prints. Raises: OSError, CalledProcessError."""
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def code_root() -> Path | None:
    """The checkout that this package lies in; None where it was installed."""
    root = Path(mla_portable.__file__).parents[1]
    return root if (root / "capability").is_dir() else None


def checkout_of(files: Iterable[Path]) -> Path | None:
    """The root of the checkout that the first tracked one of some files lies in; None where none is tracked."""
    for path in files:
        try:
            if git(path.parent, "ls-files", path.name).strip():
                return Path(git(path.parent, "rev-parse", "--show-toplevel").strip())
        except (OSError, subprocess.CalledProcessError):
            continue
    return None


def machine_id(device: torch.device) -> str:
    """16 hexadecimal digits: of the device's own number if its driver reports one, else of the host."""
    own: Any = None if device.type == "cpu" else getattr(accelerator(resolve_device(device)).properties(), "uuid", None)
    host = Path("/etc/machine-id")
    seed = str(own) if own else f"{platform.node()} {host.read_text().strip() if host.is_file() else ''}"
    return hashlib.sha256(seed.encode()).hexdigest()[:16]


def _is_code(path: str) -> bool:
    return path.endswith(_CODE) and path.partition("/")[0] not in _NO_CODE and not path.startswith(".")


def _changed(root: Path) -> dict[str, str]:
    lines = git(root, "status", "--porcelain", "--untracked-files=all", "--no-renames").splitlines()
    return {path: _blob(root / path) for path in (line[3:].strip('"') for line in lines) if _is_code(path)}


def _files(root: Path) -> dict[str, str]:
    found = (path for folder in _FOLDERS for path in (root / folder).rglob("*") if path.suffix in _CODE)
    return {path.relative_to(root).as_posix(): _blob(path) for path in sorted(found) if "build" not in path.parts}


def _blob(path: Path) -> str:
    """Git's hash of a file's contents."""
    if not path.is_file():
        return _GONE
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
