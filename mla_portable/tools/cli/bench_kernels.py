# SPDX-License-Identifier: Apache-2.0
"""`mla-portable bench kernels`: every implementation of a primitive beside its rivals, on the same problems, in turns."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mla_portable.tools.cli.options import DeviceOption, JsonOption, primitive_named, resolve_device
from mla_portable.tools.cli.output import EXIT_FAILED, Output, command, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from mla_portable.tools.bench.kernels import CaseTimes, KernelReport, KernelTime

__all__ = ["kernels", "numbers"]

_CPU_HEADS, _CPU_ROWS, _CPU_TOPK, _CPU_WIDTH = "16", "1,16", 64, 1024
"""Where the option is not given: a CPU shows that the benchmark works, not what a kernel is worth."""


def kernels(
    device: DeviceOption = None,
    primitive: Annotated[
        list[str] | None,
        typer.Option("--primitive", metavar="NAME", help="sparse_decode, sparse_prefill, ...; repeatable. Default: all timed."),
    ] = None,
    heads: Annotated[
        str | None, typer.Option("--heads", metavar="N,N", help="Head counts of attention. Default: 16,32,64,128; 16 on a CPU.")
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option("--rows", metavar="N,N", help="Batch rows, tokens, workspace rows. Default: by primitive; 1,16 on a CPU."),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option("--layout", metavar="LAYOUT", help="fp8_ds_mla or bf16; repeatable. Default: by primitive."),
    ] = None,
    topk: Annotated[int | None, typer.Option("--topk", min=1, help="Indices per row. Default: 2048; 64 on a CPU.")] = None,
    width: Annotated[
        int | None,
        typer.Option(
            "--width", min=1, help="Tokens of the cache, rows of the workspace. Default: a decode row shares none with another."
        ),
    ] = None,
    overlap: Annotated[
        str, typer.Option("--overlap", metavar="P,P", help="Percent of a prefill token's indices that its neighbour has too.")
    ] = "0",
    scale_format: Annotated[
        str, typer.Option("--scale-format", metavar="FORMAT", help="Of FP8 rows, read or written: pow2 or amax.")
    ] = "pow2",
    backend: Annotated[
        list[str] | None,
        typer.Option("--backend", metavar="NAME", help="Time this backend or implementation only; repeatable. Default: all."),
    ] = None,
    rivals: Annotated[bool, typer.Option("--rivals/--no-rivals", help="Time what plugins bring as rivals, too.")] = True,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Timed runs of each.")] = 30,
    check_rows: Annotated[int, typer.Option("--check-rows", min=1, help="Attention rows that the oracle judges.")] = 4,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of everything random.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Append a JSON line for each time.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw time over rows, as SVG.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Time kernels and their rivals. A wrong result gets no time; exit code 1 when one of ours is wrong or fails."""
    with command(as_json=as_json) as output:
        where = resolve_device(device)
        from mla_portable.api import current_registry
        from mla_portable.problems.bench import kernel_cases
        from mla_portable.tools.bench.kernel_records import append_lines, kernel_lines
        from mla_portable.tools.bench.kernels import time_kernels
        from mla_portable.tools.bench.rivals import Brought, load_rivals

        cpu = where.type == "cpu"
        cases = kernel_cases(
            [primitive_named(name, param_hint="--primitive") for name in primitive] if primitive else (),
            heads=numbers(heads or (_CPU_HEADS if cpu else None), "--heads"),
            rows=numbers(rows or (_CPU_ROWS if cpu else None), "--rows"),
            layouts=layout,
            topk=topk or (_CPU_TOPK if cpu else 2048),
            width=width or (_CPU_WIDTH if cpu else None),
            overlaps=numbers(overlap, "--overlap") or (0,),
            scale_format=scale_format,
        )
        brought = load_rivals() if rivals else Brought(())
        for name, why in brought.failures:
            output.note(f"no rivals from the plugin {name}: {why}")
        with output.progress() as advance:
            report = time_kernels(
                cases,
                device=where,
                registry=current_registry(),
                rivals=brought.found,
                backends=backend or (),
                repeat=repeat,
                check_rows=check_rows,
                seed=seed,
                progress=advance,
            )
        lines = kernel_lines(report, shlex.join(["mla-portable", *sys.argv[1:]]))
        if out is not None:
            append_lines(out, lines)
            output.note(f"{len(lines)} lines appended to {out}")
        if plot is not None:
            from mla_portable.tools.bench.plot import plot_lines

            plot.parent.mkdir(parents=True, exist_ok=True)
            plot.write_text(plot_lines(lines), encoding="utf-8")
            output.note(f"drawn: {plot}")
        if as_json:
            output.document({"command": "bench kernels", "ok": report.ok, "lines": lines, "refused": _refused(report)})
        else:
            _show(output, report)
        if not report.ok:
            raise typer.Exit(EXIT_FAILED)


def numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    """'16,32' as numbers. Raises: typer.BadParameter."""
    if text is None:
        return None
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"got {text!r}, expected numbers such as 16,32", param_hint=option) from error


def _refused(report: KernelReport) -> dict[str, list[str]]:
    """What ran on no case of a primitive, implementation or rival -> its reasons, each once."""
    ran = {f"{each.name} / {case.case.primitive}" for case in report.cases for each in case.times}
    found: dict[str, dict[str, None]] = {}
    for case in report.cases:
        for refusal in case.refused:
            name = f"{refusal.name} / {case.case.primitive}"
            if name not in ran:
                found.setdefault(name, {}).update(dict.fromkeys(map(str, refusal.reasons)))
    return {name: list(reasons) for name, reasons in found.items()}


def _show(output: Output, report: KernelReport) -> None:
    copied, multiplied = report.ceilings.bytes_per_second / 1e12, report.ceilings.flops_per_second / 1e12
    clocks = ", ".join(f"{name} {value:g}" for name, value in report.machine.clocks.items())
    output.show(
        f"device    {report.facts}" + (f", driver {report.machine.driver}" if report.machine.driver else ""),
        f"clocks    {clocks}" if clocks else "clocks    unknown",
        f"ceilings  copy {copied:.3g} TB/s, bf16 product {multiplied:.3g} TFLOP/s",
    )
    groups: dict[tuple[str, str], list[CaseTimes]] = {}
    for each in report.cases:
        groups.setdefault((str(each.case.primitive), each.case.kv_layout or ""), []).append(each)
    for (primitive, layout), cases in groups.items():
        output.show(_table(f"{primitive} {layout}".strip(), cases))
    output.show(*(f"not here  {name}: {'; '.join(reasons)}" for name, reasons in _refused(report).items()))
    remarks = {each.name: each.remark for case in report.cases for each in case.times if each.remark}
    output.show(*(f"rival     {name}: {remark}" for name, remark in remarks.items()))
    output.show(*(f"WRONG     {line}" for line in report.defects()))


def _table(title: str, cases: Sequence[CaseTimes]) -> Table:
    """Microseconds; ours first, with the best rival's time over theirs in brackets, then rivals."""
    columns = {each.name: each.implementation is None for case in cases for each in case.times}
    names = sorted(columns, key=lambda name: columns[name])
    rows: list[list[str]] = []
    for case in cases:
        cells = {each.name: _cell(case, each) for each in case.times}
        rows.append([case.case.shape, f"{case.floor_us:.1f}", *(cells.get(name, "") for name in names)])
    headings = ["us (best rival / this)", "floor", *names]
    return table(title, headings, rows, numbers=headings[1:])


def _cell(case: CaseTimes, each: KernelTime) -> str:
    if each.median_us is None:
        return "failed" if each.failure else "wrong"
    lead = case.lead_of(each)
    return f"{each.median_us:.1f}" + ("" if lead is None else f" ({lead:.2f})")
