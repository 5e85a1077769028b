# SPDX-License-Identifier: Apache-2.0
"""`mla-portable bench kernels | plot`: what kernels take on this machine, and what was recorded, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mla_portable.tools.cli.failures import Commands
from mla_portable.tools.cli.kernels import kernels
from mla_portable.tools.cli.options import JsonOption, check_name, check_writable, numbers
from mla_portable.tools.cli.output import command

bench = typer.Typer(cls=Commands, help="Time kernels on this machine, or draw recorded times.")
bench.command()(kernels)


@bench.command()
def plot(
    out: Annotated[Path, typer.Argument(help="The picture: .svg, .png or .pdf.", dir_okay=False)],
    device: Annotated[str, typer.Option("--device", metavar="PROFILE", help="Of this device, by its profile, such as h200.")],
    primitive: Annotated[str, typer.Option("--primitive", metavar="PRIMITIVE", help="Of this primitive.")] = "sparse_decode",
    heads: Annotated[str | None, typer.Option("--heads", metavar="N,N", help="Of these head counts. Default: all.")] = None,
    records: Annotated[
        Path | None, typer.Option("--records", metavar="DIR", help="Evidence in DIR, instead of what ships with mla-portable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw recorded times over rows: the fastest implementation, Triton alone, the fastest baseline and the roofline bound."""
    with command(as_json=as_json, doing="reading records") as output:
        wanted = numbers(heads, "--heads")
        check_name("primitive", primitive, param_hint="--primitive")
        from mla_portable.tools.bench.plot import lines_of_records, plot_lines
        from mla_portable.tools.matrix.evidence import load_evidence
        from mla_portable.tools.matrix.records import read_profiles
        from mla_portable.tools.matrix.table import find_records

        folder = find_records(records)
        found = [each.data for each in load_evidence(folder, read_profiles(folder)) if each.kind == "benchmark"]
        found = [each for each in found if (each["device"]["profile"], each["primitive"]) == (device, primitive)]
        found = [each for each in found if wanted is None or next(iter(each["heads"]), 0) in wanted]
        if not found:
            expected = f"a profile of which times of {primitive} are recorded"
            raise typer.BadParameter(f"must be {expected} (got {device!r})", param_hint="--device")
        check_writable(out, param_hint="OUT")
        plot_lines(lines_of_records(found), out)
        if as_json:
            output.document({"command": "bench plot", "ok": True, "file": out, "records": len(found)})
        output.note(f"drawn: {out}")
