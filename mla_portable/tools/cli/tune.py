# SPDX-License-Identifier: Apache-2.0
"""`mla-portable tune`: time the configurations of tunable kernels here, and keep the fastest in a table of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mla_portable.tools.cli.bench_kernels import numbers
from mla_portable.tools.cli.options import DeviceOption, JsonOption, primitive_named, resolve_device
from mla_portable.tools.cli.output import EXIT_FAILED, command, table

if TYPE_CHECKING:
    from mla_portable.tools.bench.tune import Attempt, TuneResult

__all__ = ["tune"]

_DECODE_ROWS, _PREFILL_ROWS = (1, 16, 128), (1024,)
"""Sizes that count together where none are given: what a rank decodes at once, and a prefill."""
_CPU_HEADS, _CPU_ROWS, _CPU_TOPK, _CPU_WIDTH = (16,), (4,), 64, 256


def tune(
    device: DeviceOption = None,
    primitive: Annotated[
        list[str] | None,
        typer.Option("--primitive", metavar="NAME", help="Repeatable. Default: sparse_decode, sparse_prefill."),
    ] = None,
    heads: Annotated[
        str | None, typer.Option("--heads", metavar="N,N", help="Head counts. Default: 16,32,64,128 to decode; 16 on a CPU.")
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option("--rows", metavar="N,N", help="Sizes that count together. Default: 1,16,128 to decode, 1024; 4 on a CPU."),
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option("--layout", metavar="LAYOUT", help="fp8_ds_mla or bf16; repeatable. Default: both.")
    ] = None,
    topk: Annotated[int | None, typer.Option("--topk", min=1, help="Indices per row. Default: 2048; 64 on a CPU.")] = None,
    backend: Annotated[
        list[str] | None, typer.Option("--backend", metavar="NAME", help="This backend or implementation only; repeatable.")
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Timed runs of each configuration and size.")] = 20,
    check_rows: Annotated[int, typer.Option("--check-rows", min=1, help="Attention rows that the oracle judges.")] = 4,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The table to add to. Default: the one that plugins read, see docs/cli.md."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest configuration of every tunable kernel here. A wrong one never wins.

    Exit code 1 when nothing could be tuned, or no configuration of something is right.
    """
    with command(as_json=as_json) as output:
        where = resolve_device(device)
        from mla_portable.api import current_registry
        from mla_portable.contracts import InvalidArgument
        from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
        from mla_portable.problems.bench import kernel_cases
        from mla_portable.registry.tuned import read_table, table_path, write_table
        from mla_portable.tools.bench.rivals import load_tunables
        from mla_portable.tools.bench.tune import tune as run

        cpu = where.type == "cpu"
        wanted = (
            [primitive_named(name, param_hint="--primitive") for name in primitive]
            if primitive
            else [SPARSE_DECODE, SPARSE_PREFILL]
        )
        path = out or table_path()
        if path is None:
            expected = "a file to write to, for neither XDG_CONFIG_HOME nor HOME is set"
            raise InvalidArgument("tune", "--out", got="none", expected=expected)
        read_table(path)  # a file that is no table is refused before the work, not after it
        cases = [
            case
            for each in wanted
            for case in kernel_cases(
                [each],
                heads=numbers(heads, "--heads") or (_CPU_HEADS if cpu else None),
                rows=numbers(rows, "--rows")
                or (_CPU_ROWS if cpu else _PREFILL_ROWS if each is not SPARSE_DECODE else _DECODE_ROWS),
                layouts=layout,
                topk=topk or (_CPU_TOPK if cpu else 2048),
                width=_CPU_WIDTH if cpu else None,
            )
        ]
        brought = load_tunables()
        for name, why in brought.failures:
            output.note(f"nothing to tune from the plugin {name}: {why}")
        with output.progress() as advance:
            results = run(
                cases,
                brought.found,
                device=where,
                registry=current_registry(),
                backends=backend or (),
                repeat=repeat,
                check_rows=check_rows,
                progress=advance,
            )
        entries = [entry for entry in (result.entry() for result in results) if entry is not None]
        if entries:
            write_table(path, entries)
            output.note(f"{len(entries)} entries written to {path}")
        ok = bool(results) and len(entries) == len(results)
        if as_json:
            output.document({"command": "tune", "ok": ok, "table": path, "entries": entries, "results": results})
        else:
            headings = ["what", "heads", "fastest", "us by rows", "over untuned", "tried", "wrong"]
            rows_shown = [_row(result) for result in results]
            output.show(table("", headings, rows_shown, numbers=["heads", "over untuned", "tried", "wrong"]))
            output.show(*(f"WRONG  {line}" for result in results for line in _wrong(result)))
            if not results:
                output.show("nothing here can be tuned: no plugin offers a kernel with configurations for this device")
        if not ok:
            raise typer.Exit(EXIT_FAILED)


def _row(result: TuneResult) -> list[str]:
    best, gain = result.best, result.gain
    return [
        f"{result.implementation} / {result.primitive} {result.layout or ''}".strip(),
        "" if result.heads is None else str(result.heads),
        "none" if best is None else _words(best),
        "" if best is None else ", ".join(f"{rows}: {us:.1f}" for rows, us in sorted(best.us.items())),
        "" if gain is None else f"{gain:.2f} x",
        str(len(result.attempts)),
        str(sum(bool(attempt.why) for attempt in result.attempts)),
    ]


def _words(attempt: Attempt) -> str:
    return " ".join(f"{name}={value}" for name, value in attempt.configuration.items())


def _wrong(result: TuneResult) -> list[str]:
    """A line on every configuration that is wrong or fails."""
    what = f"{result.implementation} / {result.primitive} {result.layout or ''} {result.heads or ''}"
    return [f"{what} {_words(attempt)}: {attempt.why}" for attempt in result.attempts if attempt.why]
