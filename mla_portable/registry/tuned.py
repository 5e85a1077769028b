# SPDX-License-Identifier: Apache-2.0
"""A user's tuning table: kernel configurations that `mla-portable tune` found fastest on a device.

The table is a JSON file. The registry reads it once, beside the policy, and gives an implementation its configuration when it
binds (`Request.configuration`).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

from mla_portable.contracts import Request
from mla_portable.contracts.whole_files import replace_file
from mla_portable.registry.settings import ENV_TUNED, path_of, read_text_file, value_of

_DEFAULT: Final = Path("mla-portable") / "tuned.json"
_SCHEMA: Final = 1
TABLE_REMEDY: Final = f"delete the file, or run `mla-portable tune` again; {ENV_TUNED} names another"
"""What to do about a table that is ignored."""

logger = logging.getLogger("mla_portable.registry")


@dataclass(frozen=True, slots=True)
class TunedEntry:
    """What was found fastest for one kind of request.

    Attributes:
        device: as its driver names it. implementation, primitive, layout, heads: what it holds for.
        configuration: names and values as the plugin defined them. us: rows -> median, of this configuration.
        recorded: when, UTC.
    """

    device: str
    implementation: str
    primitive: str
    layout: str | None
    heads: int | None
    configuration: Mapping[str, int]
    us: Mapping[str, float]
    recorded: str

    @property
    def key(self) -> tuple[str, str, str, str | None, int | None]:
        return self.device, self.implementation, self.primitive, self.layout, self.heads


def table_path(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where the table is, or would be: MLA_PORTABLE_TUNED, else mla-portable/tuned.json among the user's configuration.

    None where neither MLA_PORTABLE_TUNED, XDG_CONFIG_HOME nor HOME is set.
    """
    environ = os.environ if environ is None else environ
    named = path_of(environ, ENV_TUNED)
    if named is not None:
        return named
    folder, home = value_of(environ, "XDG_CONFIG_HOME"), value_of(environ, "HOME")
    if not folder and not home:
        return None
    return (Path(folder) if folder else Path(home) / ".config") / _DEFAULT


def read_table(path: Path) -> tuple[TunedEntry, ...]:
    """The entries of a table, () where there is no file.

    Raises: OSError where it cannot be read, ValueError where it is no table: cut short, empty, or of another schema.
    """
    try:
        document: dict[str, Any] = json.loads(read_text_file(path))
        if document["schema"] != _SCHEMA:
            raise ValueError(f"schema {document['schema']}")
        entries = tuple(TunedEntry(**entry) for entry in cast(list[dict[str, Any]], document["entries"]))
        if not all(type(value) is int for entry in entries for value in entry.configuration.values()):
            raise ValueError("a configuration whose values are not integers")
        {entry.key for entry in entries}  # unhashable where a field is a list or an object
    except FileNotFoundError:
        return ()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a table of schema {_SCHEMA} ({type(error).__name__}: {error})") from error
    return entries


def write_table(path: Path, entries: Iterable[TunedEntry]) -> Path | None:
    """Add entries to a table, each in the place of one for the same requests.

    Processes that write at the same time take turns, by a lock on a file beside the table, so that the entries of all are kept.
    Where the file is no table, a fresh one takes its place.
    Returns: where the file that is no table was kept, None where there was none. Raises: OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _beside(path, ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        except OSError as error:
            logger.warning("%s is written without a lock, which its file system does not have: %s", path, error)
        damaged, known = None, tuple[TunedEntry, ...]()
        try:
            known = read_table(path)
        except ValueError:
            damaged = path.replace(_beside(path, ".damaged"))
        kept = {entry.key: entry for entry in (*known, *entries)}
        document = {"schema": _SCHEMA, "entries": [asdict(entry) for entry in kept.values()]}
        replace_file(path, f"{json.dumps(document, indent=1)}\n".encode())
    return damaged


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


@dataclass(frozen=True, slots=True)
class TunedConfigurations:
    """The user's table as the registry uses it.

    Attributes:
        path: the file, None where there is none. problem: why the file is ignored, "" where it is not.
    """

    path: Path | None
    entries: Mapping[tuple[str, str, str, str | None, int | None], tuple[tuple[str, int], ...]]
    problem: str = ""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> TunedConfigurations:
        """The table that MLA_PORTABLE_TUNED names, else that at the default path.

        A table only makes kernels faster, so one that cannot be used is ignored, and `problem` says so. A default path that
        cannot be read (HOME of another user, no HOME) is no table, which is logged. A table that does not exist yet holds
        nothing: `mla-portable tune` creates it.
        """
        path, named = table_path(environ), bool(value_of(environ, ENV_TUNED))
        if path is None:
            return cls(None, {})
        try:
            entries = read_table(path)
            missing = not entries and not path.exists()
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and not named:
                logger.info("no tuning table: %s", error)
                return cls(None, {})
            return cls(path, {}, f"the tuning table {path} is ignored: {error}")
        if named and missing:
            logger.warning("%s names %s, which does not exist: no tuned configuration is in force", ENV_TUNED, path)
        return cls(path, {entry.key: tuple(entry.configuration.items()) for entry in entries})

    def of(self, implementation: str, request: Request) -> tuple[tuple[str, int], ...] | None:
        """The configuration of `implementation` ("<backend>.<variant>") for a request; None where the table has none."""
        wanted = (request.device.name, implementation, str(request.primitive), request.kv_layout, request.num_heads)
        return self.entries.get(wanted)
