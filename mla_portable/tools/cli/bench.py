# SPDX-License-Identifier: Apache-2.0
"""`mla-portable bench kernels | dispatch | plot`: what kernels and dispatch cost on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mla_portable.tools.cli.kernels import kernels
from mla_portable.tools.cli.options import DeviceOption, JsonOption, check_name, numbers, resolve_device
from mla_portable.tools.cli.output import columns, command, hanging

bench = typer.Typer(no_args_is_help=True, help="Measure what kernels and dispatch cost on this machine.")
bench.command()(kernels)


@bench.command()
def dispatch(
    device: DeviceOption = None,
    batches: Annotated[int, typer.Option("--batches", min=1, help="Samples.")] = 201,
    calls: Annotated[int, typer.Option("--calls", min=1, help="Calls in a sample.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """Time the ways to reach a kernel that does nothing: directly, bound, by the convenience call, through a layer."""
    with command(as_json=as_json) as output:
        where = resolve_device(device)
        from mla_portable.tools.bench.dispatch import measure_dispatch

        output.busy("timing calls")
        rows = measure_dispatch(where, batches=batches, calls=calls)
        if as_json:
            output.document({"command": "bench dispatch", "ok": True, "device": where, "rows": rows})
            return
        adds = ["" if row.over_ns is None else f"{row.over_ns / 1e3:+.2f} over {row.over}" for row in rows]
        times = [_figures(row.median_ns / 1e3, row.p10_ns / 1e3, row.p90_ns / 1e3, digits=2) for row in rows]
        cells = [[row.call, *us, more] for row, us, more in zip(rows, times, adds, strict=True)]
        headings = ["call", "median us", "p10 us", "p90 us", "adds us"]
        output.show(
            hanging("device", str(where)),
            hanging("times", f"of one call on the host, {batches} samples of {calls} calls"),
            "",
            columns(headings, cells, numbers=headings[1:4]),
        )


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
            raise typer.BadParameter(f"no times of {primitive} on {device!r} are recorded", param_hint="--device")
        plot_lines(lines_of_records(found), out)
        if as_json:
            output.document({"command": "bench plot", "ok": True, "file": out, "records": len(found)})
        output.note(f"drawn: {out}")


def _figures(*values: float | None, digits: int = 1) -> list[str]:
    return ["" if value is None else f"{value:.{digits}f}" for value in values]
