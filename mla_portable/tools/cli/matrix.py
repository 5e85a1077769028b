# SPDX-License-Identifier: Apache-2.0
"""`mla-portable matrix`: what runs where and how far it is proven, drawn from the records and from what the plugins declare."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mla_portable.tools.cli.output import EXIT_FAILED, EXIT_USAGE, Output, command

if TYPE_CHECKING:
    from mla_portable.tools.matrix import Records

__all__ = ["matrix"]

_TERMINAL = "terminal"


def matrix(
    form: Annotated[str, typer.Option("--format", metavar="FORMAT", help="terminal (default), md or json.")] = _TERMINAL,
    vendor: Annotated[str | None, typer.Option("--vendor", metavar="VENDOR", help="Only this vendor's devices.")] = None,
    device: Annotated[str | None, typer.Option("--device", metavar="PROFILE", help="Only this device.")] = None,
    records: Annotated[
        Path | None,
        typer.Option("--records", metavar="DIR", help="Evidence in DIR, instead of what ships with mla-portable."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare every generated file with the plugins and records; write nothing.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Write every generated file from the plugins and records.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Show which primitive runs on which device through which implementation, and how far that is proven.

    Exit code 1 when a record cannot be believed or, under --check, a generated file is not what the records say.
    """
    from mla_portable.tools.matrix import find_records, make_table, read_records
    from mla_portable.tools.matrix.render import FORMATS, terminal

    form = "json" if as_json else form
    if check and write:
        raise typer.BadParameter("--check and --write exclude each other", param_hint="--check")
    if form != _TERMINAL and form not in FORMATS:
        raise typer.BadParameter(f"got {form!r}, expected {', '.join((_TERMINAL, *FORMATS))}", param_hint="--format")
    with command(as_json=form == "json") as output:
        folder = find_records(records)
        if check or write:
            _generated(output, folder, write=write)
        else:
            drawn = make_table(_only(read_records(folder), vendor, device))
            if form == _TERMINAL:
                for each in terminal(drawn):
                    output.stdout.print(each)
            else:
                output.text(FORMATS[form](drawn))


def _only(found: Records, vendor: str | None, device: str | None) -> Records:
    """The records with some profiles left out. Raises: typer.Exit for a name that no profile carries."""
    chosen = {
        slug: profile for slug, profile in found.profiles.items() if vendor in (None, profile.vendor) and device in (None, slug)
    }
    if not chosen:
        vendors = sorted({profile.vendor for profile in found.profiles.values()})
        asked = " and ".join(f"{name} {value!r}" for name, value in (("--vendor", vendor), ("--device", device)) if value)
        known = f"vendors are {', '.join(vendors)}; devices are {', '.join(found.profiles)}"
        sys.stderr.write(f"no profile for {asked}; {known}\n")
        raise typer.Exit(EXIT_USAGE)
    return replace(found, profiles=chosen)


def _generated(output: Output, folder: Path, *, write: bool) -> None:
    """Write or compare MATRIX.md and the costs. Raises: typer.Exit where one is not what it should be."""
    from mla_portable.tools.matrix.generated import differences, generate

    files = generate(folder)
    names = [path.name for path in files]
    problems = [] if write else differences(files)
    if write:
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    for line in problems or [f"{'written' if write else 'current'}: {', '.join(names)}"]:
        output.note(line)
    if output.as_json:
        output.document(
            {"command": "matrix", "ok": not problems, "files": names, "written": names if write else [], "problems": problems}
        )
    if problems:
        raise typer.Exit(EXIT_FAILED)
