# SPDX-License-Identifier: Apache-2.0
"""Hashes of the sources that evidence is bound to; what cannot be hashed is a RecordError."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from mla_portable import sources
from mla_portable.tools.matrix.errors import RecordError

__all__ = ["module_file", "source_hash", "suite_hash", "tree_hash"]


def module_file(module: str) -> Path:
    """As `sources.module_file`. Raises: RecordError when the module is not installed here, or the file not there."""
    try:
        return sources.module_file(module)
    except sources.SourceNotFound as error:
        raise RecordError(error.what, error.problem) from None


def source_hash(modules: Iterable[str]) -> str:
    """As `sources.source_hash`. Raises: RecordError, as `module_file`."""
    try:
        return sources.source_hash(modules)
    except sources.SourceNotFound as error:
        raise RecordError(error.what, error.problem) from None


def tree_hash(package: str) -> str:
    """SHA-256 over every Python file of a package."""
    folder = module_file(package).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def suite_hash() -> str:
    """The conformance suite with the oracle that judges for it: a result is worth what its judge was."""
    parts = tree_hash("mla_portable.tools.conformance") + source_hash(["mla_portable.reference.oracle"])
    return hashlib.sha256(parts.encode()).hexdigest()
