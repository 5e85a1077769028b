# SPDX-License-Identifier: Apache-2.0
"""A user's tuning table: kernel configurations that `mla-portable tune` found fastest on a device.

The table is a JSON file. The registry reads it once, beside the policy, and gives an implementation its configuration when it
binds (`Request.configuration`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

from mla_portable.contracts import InvalidArgument, Request
from mla_portable.registry.settings import ENV_TUNED, path_of, read_text_file, value_of

_DEFAULT: Final = Path("mla-portable") / "tuned.json"
_SCHEMA: Final = 1

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
    """The entries of a table, () where there is no file. Raises: InvalidArgument where it cannot be read or is no table."""
    try:
        return _entries(path)
    except OSError as error:
        raise _refused(path, f"{type(error).__name__}: {error}", "a file that can be read") from error


def _entries(path: Path) -> tuple[TunedEntry, ...]:
    """As `read_table`; raises OSError for a file that cannot be read."""
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
        raise _refused(path, f"{type(error).__name__}: {error}", f"a table of schema {_SCHEMA}") from error
    return entries


def write_table(path: Path, entries: Iterable[TunedEntry]) -> None:
    """Add entries to a table, each in the place of one for the same requests. Raises: as `read_table`."""
    kept = {entry.key: entry for entry in (*read_table(path), *entries)}
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"schema": _SCHEMA, "entries": [asdict(entry) for entry in kept.values()]}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class TunedConfigurations:
    """The user's table as the registry uses it. path: the file, None where there is none."""

    path: Path | None
    entries: Mapping[tuple[str, str, str, str | None, int | None], tuple[tuple[str, int], ...]]

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> TunedConfigurations:
        """The table that MLA_PORTABLE_TUNED names, else that at the default path.

        A default path that cannot be read (HOME of another user, no HOME) is no table, which is logged. A table that does not
        exist yet holds nothing: `mla-portable tune` creates it.
        Raises: InvalidArgument for a file that is no table, and for a named one that cannot be read.
        """
        path, named = table_path(environ), bool(value_of(environ, ENV_TUNED))
        if path is None:
            return cls(None, {})
        try:
            entries = read_table(path) if named else _entries(path)
            missing = not entries and not path.exists()
        except OSError as error:
            logger.info("no tuning table: %s", error)
            return cls(None, {})
        if named and missing:
            logger.warning("%s names %s, which does not exist: no tuned configuration is in force", ENV_TUNED, path)
        return cls(path, {entry.key: tuple(entry.configuration.items()) for entry in entries})

    def of(self, implementation: str, request: Request) -> tuple[tuple[str, int], ...] | None:
        """The configuration of `implementation` ("<backend>.<variant>") for a request; None where the table has none."""
        wanted = (request.device.name, implementation, str(request.primitive), request.kv_layout, request.num_heads)
        return self.entries.get(wanted)


def _refused(path: Path, got: str, expected: str) -> InvalidArgument:
    remedy = f"Delete the file, or run `mla-portable tune` again; {ENV_TUNED} names another."
    return InvalidArgument("tuning table", str(path), got=got, expected=expected, remedy=remedy)
