# SPDX-License-Identifier: Apache-2.0
"""Compiled images kept on disk, one file for each build, so that a process compiles only what no process before it has.

A file is named by a hash of all that its contents follow from, and starts with a hash of the image: a damaged one is compiled
again. It is written under another name and then renamed, so that processes that start together read whole files or none; until
the first of them is done each compiles for itself. A folder that cannot be read or written means no cache, never an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from mla_portable.kit.whole_files import UNFINISHED, replace_file
from mla_portable_nvidia.native.runtime.nvrtc import compile_cubin, nvrtc_identity

__all__ = ["VARIABLE", "compile_kept", "folder"]

VARIABLE: Final = "MLA_PORTABLE_NVIDIA_CACHE"
"""The folder to keep images in, or `off`."""
_KEPT: Final = 512
"""Files of a folder; the oldest are removed. A version of this package has some 60 builds for a device, of about 100 KB."""
_MAGIC: Final = b"mla-portable image 1\n"
_DIGEST: Final = hashlib.sha256().digest_size


def folder(environ: Mapping[str, str]) -> Path | None:
    """Where images are kept; None where they are not."""
    given = environ.get(VARIABLE, "").strip()
    if given:
        return None if given.lower() == "off" else Path(given)
    caches = environ.get("XDG_CACHE_HOME", "").strip()
    try:
        return (Path(caches) if caches else Path.home() / ".cache") / "mla-portable" / "native"
    except RuntimeError:  # there is no home
        return None


def compile_kept(
    source: str,
    arch: str,
    defines: Sequence[tuple[str, int | str]],
    headers: Mapping[str, str] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    compiler: Callable[..., bytes] = compile_cubin,
) -> bytes:
    """As `compile_cubin`; the image comes from disk where one is kept. environ: see `VARIABLE`. Raises: as that does."""
    where = folder(environ)
    if where is None:
        return compiler(source, arch, defines, headers)
    known = repr((source, arch, list(defines), sorted((headers or {}).items()), nvrtc_identity()))
    path = where / f"{hashlib.sha256(known.encode()).hexdigest()}.image"
    image = _read(path)
    if image is None:
        image = compiler(source, arch, defines, headers)
        _write(path, image)
    return image


def _read(path: Path) -> bytes | None:
    """The image of a file that is whole, else None."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    start = len(_MAGIC) + _DIGEST
    image = data[start:]
    whole = data[:start] == _MAGIC + hashlib.sha256(image).digest()
    return image if whole else None


def _write(path: Path, image: bytes) -> None:
    """Keep an image, where that is possible."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, _MAGIC + hashlib.sha256(image).digest() + image)
        _prune(path.parent)


def _prune(where: Path) -> None:
    """Remove the oldest files but for _KEPT, and with them what a process that was ended has left."""
    aged: list[tuple[int, Path]] = []
    for path in (*where.glob("*.image"), *where.glob(f"*{UNFINISHED}")):
        with contextlib.suppress(FileNotFoundError):  # another process prunes, too
            aged.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(aged, reverse=True)[_KEPT:]:
        path.unlink(missing_ok=True)
