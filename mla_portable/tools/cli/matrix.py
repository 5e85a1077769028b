# SPDX-License-Identifier: Apache-2.0
"""`mla-portable matrix`: what runs where and how far it is proven, drawn from the records and from what the plugins declare."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mla_portable.tools.cli.options import check_known
from mla_portable.tools.cli.output import EXIT_FAILED, Output, command

if TYPE_CHECKING:
    from mla_portable.tools.matrix.table import Table


def matrix(
    form: Annotated[
        Literal["terminal", "md", "html", "svg", "json"], typer.Option("--format", help="How to draw it.")
    ] = "terminal",
    vendor: Annotated[str | None, typer.Option("--vendor", metavar="VENDOR", help="Only this vendor's devices.")] = None,
    device: Annotated[str | None, typer.Option("--device", metavar="PROFILE", help="Only this device.")] = None,
    every: Annotated[bool, typer.Option("--all", help="A row for each implementation.")] = False,
    evidence: Annotated[
        bool, typer.Option("--evidence", help="What the states mean, notes, and the runs that the table rests on.")
    ] = False,
    records: Annotated[
        Path | None,
        typer.Option("--records", metavar="DIR", help="Compute the table from the evidence in DIR and today's sources."),
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
    form = "json" if as_json else form
    if check and write:
        raise typer.BadParameter("excludes --write", param_hint="--check")
    with command(as_json=form == "json", doing="reading records") as output:
        if check or write:
            _generated(output, records, write=write)
            return
        whole = read_table(records)
        table = whole.only(vendor, device)
        if not table.devices:
            if vendor is not None:
                check_known(vendor, {each.vendor for each in whole.devices}, param_hint="--vendor")
            if device is not None:
                check_known(device, {each.slug for each in whole.devices}, param_hint="--device")
            raise typer.BadParameter(f"is no device of the vendor {vendor!r} (got {device!r})", param_hint="--device")
        if form == "terminal":
            from mla_portable.tools.matrix import terminal

            if every or not evidence:
                output.show(*(terminal.rows if every else terminal.grid)(table))
            if evidence:
                output.show(*terminal.evidence(table))
        else:
            from mla_portable.tools.matrix.render import FORMATS

            output.text(FORMATS[form](table))


def read_table(records: Path | None) -> Table:
    """As it was generated, where that is of the installed plugins; else made of the records. Raises: RecordError."""
    from mla_portable.tools.matrix.table import find_records, installed_table

    table = installed_table() if records is None else None
    if table is None:
        from mla_portable.tools.matrix.arrange import make_table
        from mla_portable.tools.matrix.records import read_records

        table = make_table(read_records(find_records(records)))
    return table


def _generated(output: Output, records: Path | None, *, write: bool) -> None:
    """Write or compare the generated files. Raises: typer.Exit where one is not what it should be."""
    from mla_portable.tools.matrix.generated import differences, generate
    from mla_portable.tools.matrix.table import find_records

    files = generate(find_records(records))
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
