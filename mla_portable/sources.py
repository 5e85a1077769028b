# SPDX-License-Identifier: Apache-2.0
"""The hash of the sources that a result is bound to; modules are found and read, never imported. Needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

__all__ = ["SourceNotFound", "module_file", "source_hash"]


class SourceNotFound(ValueError):
    """A module or file is not installed here. `what` names it, `problem` says what was looked for."""

    def __init__(self, what: str, problem: str) -> None:
        self.what, self.problem = what, problem
        super().__init__(f"{what}: {problem}")


@lru_cache(maxsize=64)
def _top(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SourceNotFound(f"module {package}", "not installed here, so its sources cannot be hashed; install the plugin")
    return Path(spec.origin)


def module_file(module: str) -> Path:
    """The file of a module, or of "package:file" in it. Raises: SourceNotFound when it is not installed here, or not there."""
    module, _, data = module.partition(":")
    if data:
        path = module_file(module).with_name(data)
        if not path.is_file():
            raise SourceNotFound(f"file {data} of {module}", f"no such file: {path}")
        return path
    top, *rest = module.split(".")
    base = _top(top)
    if not rest:
        return base
    stem = base.parent.joinpath(*rest)
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.is_file():
            return path
    raise SourceNotFound(f"module {module}", f"no such file: {stem.with_suffix('.py')}")


def source_hash(modules: Iterable[str]) -> str:
    """SHA-256 over the names and the bytes of modules, whatever their order. Raises: SourceNotFound, OSError."""
    digest = hashlib.sha256()
    for module in sorted(set(modules)):
        content = module_file(module).read_bytes()
        digest.update(f"{module}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
