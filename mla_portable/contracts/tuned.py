# SPDX-License-Identifier: Apache-2.0
"""A user's tuning table: kernel configurations that `mla-portable tune` found fastest on a device, for plugins to bind with.

The table is a JSON file of the user's, not of this package: what ships is chosen in review. A plugin asks for it when it binds,
never per call.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

from mla_portable.contracts.errors import InvalidArgument
from mla_portable.contracts.request import Request

__all__ = ["TABLE_VARIABLE", "TunedEntry", "read_table", "table_path", "tuned_configuration", "write_table"]

TABLE_VARIABLE: Final = "MLA_PORTABLE_TUNED"
_DEFAULT: Final = Path("mla-portable") / "tuned.json"
_SCHEMA: Final = 1


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


def table_path(environ: Mapping[str, str] | None = None) -> Path:
    """Where the table is, or would be: MLA_PORTABLE_TUNED, else mla-portable/tuned.json among the user's configuration."""
    environ = os.environ if environ is None else environ
    named = environ.get(TABLE_VARIABLE, "").strip()
    if named:
        return Path(named)
    home = environ.get("XDG_CONFIG_HOME", "").strip()
    return (Path(home) if home else Path.home() / ".config") / _DEFAULT


def read_table(path: Path) -> tuple[TunedEntry, ...]:
    """The entries of a table, () where there is no file. Raises: InvalidArgument for a file that is no table."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    try:
        document: dict[str, Any] = json.loads(text)
        if document["schema"] != _SCHEMA:
            raise ValueError(f"schema {document['schema']}")
        entries = tuple(TunedEntry(**entry) for entry in cast(list[dict[str, Any]], document["entries"]))
        if not all(type(value) is int for entry in entries for value in entry.configuration.values()):
            raise ValueError("a configuration whose values are no integers")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(
            "tuning table",
            str(path),
            got=f"{type(error).__name__}: {error}",
            expected=f"a table of schema {_SCHEMA}",
            remedy=f"Delete the file, or run `mla-portable tune` again; {TABLE_VARIABLE} names another.",
        ) from error
    return entries


def write_table(path: Path, entries: Iterable[TunedEntry]) -> None:
    """Add entries to a table, each in the place of one for the same requests. Raises: as `read_table`."""
    kept = {entry.key: entry for entry in (*read_table(path), *entries)}
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"schema": _SCHEMA, "entries": [asdict(entry) for entry in kept.values()]}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def tuned_configuration(implementation: str, request: Request, path: Path | None = None) -> Mapping[str, int] | None:
    """The configuration for a request, None where the user's table has none: the plugin's own holds then.

    Args:
        implementation: "<backend>.<variant>". path: instead of `table_path()`.
    Raises: InvalidArgument for a file that is no table.
    """
    wanted = (request.device.name, implementation, str(request.primitive), request.kv_layout, request.num_heads)
    for entry in read_table(table_path() if path is None else path):
        if entry.key == wanted:
            return entry.configuration
    return None
