# SPDX-License-Identifier: Apache-2.0
"""Hashes of the sources that evidence is bound to; modules are found and read, never imported."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from mla_portable.matrix.errors import RecordError

__all__ = ["module_file", "source_hash", "suite_hash", "tree_hash"]


@lru_cache(maxsize=64)
def _top(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise RecordError(f"module {package}", "not installed here, so its sources cannot be hashed; install the plugin")
    return Path(spec.origin)


def module_file(module: str) -> Path:
    """The file of a module, or of "package:file" in it. Raises: RecordError when it is not installed here, or not there."""
    module, _, data = module.partition(":")
    if data:
        path = module_file(module).with_name(data)
        if not path.is_file():
            raise RecordError(f"file {data} of {module}", f"no such file: {path}")
        return path
    top, *rest = module.split(".")
    base = _top(top)
    if not rest:
        return base
    stem = base.parent.joinpath(*rest)
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.is_file():
            return path
    raise RecordError(f"module {module}", f"no such file: {stem.with_suffix('.py')}")


def source_hash(modules: Iterable[str]) -> str:
    """SHA-256 over the names and the bytes of modules, whatever their order."""
    digest = hashlib.sha256()
    for module in sorted(set(modules)):
        content = module_file(module).read_bytes()
        digest.update(f"{module}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


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
    parts = tree_hash("mla_portable.conformance") + source_hash(["mla_portable.reference.oracle"])
    return hashlib.sha256(parts.encode()).hexdigest()
