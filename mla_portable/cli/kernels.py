# SPDX-License-Identifier: Apache-2.0
"""`mla-portable bench kernels` and `mla-portable tune`: implementations, baselines and configurations on the same problems."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import RenderableType
from rich.text import Text

from mla_portable.cli.options import (
    CommitOption,
    DeviceOption,
    JsonOption,
    LayersOption,
    OutOption,
    SelectionsOption,
    WhoOption,
    check_known,
    check_writable,
    numbers,
    resolve_device,
    selected_layers,
    with_options,
)
from mla_portable.cli.output import EXIT_FAILED, Output, columns, command, digits, hanging
from mla_portable.cli.process import undisturbed

if TYPE_CHECKING:
    import torch

    from mla_portable.bench.kernels import CaseTimes, KernelReport, KernelTime
    from mla_portable.bench.tune import Attempt, TuneResult
    from mla_portable.contracts import Primitive

_DECODE_ROWS, _PREFILL_ROWS = (1, 16, 128), (1024,)
"""Sizes that count together in tuning where none are given: what a rank decodes at once, and a prefill."""


def _option(flag: str, metavar: str | None, text: str, *, of: Any = str) -> Any:
    return Annotated[of | None, typer.Option(flag, metavar=metavar, min=1 if of is int else None, help=text)]


_CASES = {
    "primitive": _option("--primitive", "NAME", "sparse_decode, sparse_prefill, ...; repeatable. Default: all.", of=list[str]),
    "heads": _option("--heads", "N,N", "Head counts of attention. Default: by primitive; 16 on a CPU."),
    "rows": _option(
        "--rows", "N,N", "Rows of a call: query tokens, or tokens written or gathered. Default: by primitive; few on a CPU."
    ),
    "layout": _option("--layout", "LAYOUT", "fp8_ds_mla or bf16; repeatable. Default: by primitive.", of=list[str]),
    "topk": _option("--topk", None, "Indices per row. Default: 2048; 64 on a CPU.", of=int),
    "backend": _option("--backend", "NAME", "Only this backend or implementation; repeatable. Default: all.", of=list[str]),
}
"""What is timed."""
CheckRowsOption = Annotated[
    int, typer.Option("--check-rows", min=1, help="Attention rows that are compared with the float64 oracle.")
]


def _primitives(options: dict[str, Any], among: Collection[Primitive]) -> list[Primitive]:
    """Those that `--primitive` names. Raises: typer.BadParameter for one that is not `among` these."""
    named = {str(each): each for each in among}
    for name in options.get("primitive", ()):
        check_known(name, named, param_hint="--primitive")
    return [named[name] for name in options.get("primitive", ())]


def _sizes(options: dict[str, Any], where: torch.device) -> dict[str, Any]:
    """Arguments of kernel_cases but rows. A CPU shows that the benchmark works, not what a kernel is worth."""
    cpu = where.type == "cpu"
    return {
        "heads": numbers(options.get("heads", "16" if cpu else None), "--heads"),
        "layouts": options.get("layout"),
        "topk": options.get("topk", 64 if cpu else 2048),
    }


@with_options(_CASES)
def kernels(
    *,
    options: dict[str, Any],
    device: DeviceOption = None,
    check_rows: CheckRowsOption = 4,
    as_json: JsonOption = False,
    width: Annotated[
        str | None,
        typer.Option(
            "--width",
            metavar="N,N",
            help="Tokens that rows choose from: of the cache, the workspace or a context. Default: by primitive; in "
            "sparse_decode no two rows share a token.",
        ),
    ] = None,
    overlap: Annotated[
        str, typer.Option("--overlap", metavar="P,P", help="Percent of a prefill token's indices that the next token has too.")
    ] = "0",
    scale_format: Annotated[Literal["pow2", "amax"], typer.Option("--scale-format", help="Kind of FP8 scales.")] = "pow2",
    selections: SelectionsOption = None,
    layers: LayersOption = None,
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines/--no-baselines", help="Also time the baselines: kernels of other projects that are installed."
        ),
    ] = True,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Timed runs of each.")] = 30,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed.")] = 0,
    out: OutOption = None,
    who: WhoOption = None,
    commit: CommitOption = None,
    every: Annotated[
        bool, typer.Option("--all", help="Show every candidate of each case, and why candidates were skipped.")
    ] = False,
) -> None:
    """Time every implementation of a primitive beside the baselines. A wrong result gets no time.

    Exit code 1 when a kernel of this project is wrong or fails, or nothing was timed.
    """
    with command(as_json=as_json) as output:
        where = resolve_device(device)
        from mla_portable.bench.kernel_records import kernel_lines, kernel_run, times_of
        from mla_portable.bench.kernels import time_kernels
        from mla_portable.choose.plugins import Brought
        from mla_portable.cli.recording import recorder
        from mla_portable.dispatch import current_registry
        from mla_portable.judge.problems.bench import kernel_cases, timed_primitives

        if out is not None and scale_format != "pow2":
            raise typer.BadParameter("must be pow2 beside --out: runs have no other times", param_hint="--scale-format")
        if out is not None:
            check_writable(out, param_hint="--out")
        selected, by_layers = selected_layers(selections, layers)
        overlaps, cpu = numbers(overlap, "--overlap") or (0,), where.type == "cpu"
        if selected is not None and any(overlaps):
            raise typer.BadParameter("must be 0 beside --selections, which say what tokens share", param_hint="--overlap")
        sizes = _sizes(options, where)
        if selected is not None:
            sizes["topk"] = options.get("topk", selected.topk)
        cases = kernel_cases(
            _primitives(options, timed_primitives()),
            rows=numbers(options.get("rows", "1,16" if cpu else None), "--rows"),
            widths=numbers(width, "--width") or ((1024,) if cpu and selected is None else None),
            overlaps=overlaps,
            scale_format=scale_format,
            selections=selected,
            selected_by=by_layers,
            **sizes,
        )
        if selected is not None:
            output.note(f"selections of {selected.model}: {selected.made}")
        registry, backends = current_registry(), options.get("backend", ())
        file = None if out is None else recorder(out, registry, where, backends=backends, who=who, commit=commit)
        brought = registry.baselines() if baselines else Brought(())
        for name, why in brought.failures:
            output.note(f"no baselines from the plugin {name}: {why}")
        timed: list[CaseTimes] = []
        with output.progress() as advance:
            try:
                report = time_kernels(
                    cases,
                    device=where,
                    registry=registry,
                    baselines=brought.found,
                    backends=backends,
                    repeat=repeat,
                    check_rows=check_rows,
                    seed=seed,
                    progress=advance,
                    after=timed.append,
                )
            finally:  # what was timed is kept, whatever ended the rest
                times = times_of(timed)
                if file is not None and times:
                    with undisturbed():
                        file.add(times=times)
                    output.note(f"{len(times)} times added to {out}")
        if as_json:
            found = {"run": kernel_run(report), "lines": kernel_lines(report), "refused": _refused(report)}
            output.document({"command": "bench kernels", "ok": report.ok, **found})
        else:
            _show(output, report, every=every)
        if not report.ok:
            raise typer.Exit(EXIT_FAILED)


@with_options(_CASES)
def tune(
    *,
    options: dict[str, Any],
    device: DeviceOption = None,
    check_rows: CheckRowsOption = 4,
    as_json: JsonOption = False,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Timed runs of each configuration and size.")] = 20,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="The file of times to add to. Default: one in your own folder, see docs/cli.md.",
        ),
    ] = None,
) -> None:
    """Find the fastest configuration of each tunable kernel on this device. One with a wrong result is never chosen.

    Exit code 1 when nothing could be tuned, or no configuration of a kernel gives right results.
    """
    with command(as_json=as_json) as output:
        where = resolve_device(device)
        from mla_portable.bench.tune import tune as run
        from mla_portable.choose.own_times import times_folder, tuned_file
        from mla_portable.contracts import InvalidArgument
        from mla_portable.dispatch import current_registry
        from mla_portable.judge.problems.bench import kernel_cases
        from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
        from mla_portable.times.adding import add_to_file, check_can_add

        registry, folder = current_registry(), times_folder()
        name = registry.facts(where).name
        path = out or (None if folder is None else tuned_file(folder, name))
        if path is None:
            expected = "a file to write to, for neither MLA_PORTABLE_TIMES, XDG_CONFIG_HOME nor HOME is set"
            raise InvalidArgument("tune", "out", got="none", expected=expected)
        check_writable(path, param_hint="--out")
        check_can_add("tune", path, name)
        brought = registry.tunables()
        for name, why in brought.failures:
            output.note(f"nothing to tune from the plugin {name}: {why}")
        tunable = {each.primitive for each in brought.found} or {SPARSE_DECODE, SPARSE_PREFILL}
        cpu, rows = where.type == "cpu", numbers(options.get("rows"), "--rows")
        cases = [
            case
            for each in _primitives(options, tunable) or (SPARSE_DECODE, SPARSE_PREFILL)
            for case in kernel_cases(
                [each],
                rows=rows or ((4,) if cpu else _DECODE_ROWS if each is SPARSE_DECODE else _PREFILL_ROWS),
                widths=(256,) if cpu else None,
                **_sizes(options, where),
            )
        ]
        with output.progress() as advance:
            results = run(
                cases,
                brought.found,
                device=where,
                registry=registry,
                backends=options.get("backend", ()),
                repeat=repeat,
                check_rows=check_rows,
                progress=advance,
            )
        found = [result for result in results if result.best is not None]
        if found:
            damaged = add_to_file(path, [time for result in found for time in result.times()])
            if damaged is not None:
                output.note(f"{path} could not be used as a whole; what it held is in {damaged}")
            output.note(f"{len(found)} configurations written to {path}")
        ok = bool(results) and len(found) == len(results)
        if as_json:
            entries = [_entry(result, best) for result in found if (best := result.best) is not None]
            output.document({"command": "tune", "ok": ok, "file": path, "entries": entries, "results": results})
        else:
            headings = ["kernel", "heads", "speed-up over default", "tried", "wrong", "fastest; us by rows"]
            if results:
                output.show(columns(headings, map(_tuned_row, results), numbers=headings[1:5]))
            for each in results:
                what = f"{each.implementation} / {each.primitive} {each.layout or ''} {each.heads or ''}"
                output.show(*(f"WRONG  {what} {_words(attempt)}: {attempt.why}" for attempt in each.attempts if attempt.why))
            if not results:
                output.show("no tunable kernel supports this device")
        if not ok:
            raise typer.Exit(EXIT_FAILED)


def _entry(result: TuneResult, best: Attempt) -> dict[str, Any]:
    """What was written of a result."""
    named = {name: getattr(result, name) for name in ("implementation", "primitive", "layout", "heads")}
    return {**named, "configuration": dict(best.configuration), "us": {str(rows): us for rows, us in sorted(best.us.items())}}


def _tuned_row(result: TuneResult) -> list[str]:
    best, gain = result.best, result.gain
    return [
        f"{result.implementation} / {result.primitive} {result.layout or ''}".strip(),
        str(result.heads or ""),
        "" if gain is None else f"{gain:.2f} x",
        str(len(result.attempts)),
        str(sum(bool(attempt.why) for attempt in result.attempts)),
        "none" if best is None else f"{_words(best)}; {_by_rows(best)}",
    ]


def _words(attempt: Attempt) -> str:
    return " ".join(f"{name}={value}" for name, value in attempt.configuration.items())


def _by_rows(attempt: Attempt) -> str:
    return ", ".join(f"{rows}: {digits(us)}" for rows, us in sorted(attempt.us.items()))


def _refused(report: KernelReport) -> dict[str, list[str]]:
    """What ran on no case of a primitive, implementation or baseline -> its reasons, each once."""
    ran = {f"{each.name} / {case.case.primitive}" for case in report.cases for each in case.times}
    found: dict[str, dict[str, None]] = {}
    for case in report.cases:
        for refusal in case.refused:
            name = f"{refusal.name} / {case.case.primitive}"
            if name not in ran:
                found.setdefault(name, {}).update(dict.fromkeys(map(str, refusal.reasons)))
    return {name: list(reasons) for name, reasons in found.items()}


def _show(output: Output, report: KernelReport, *, every: bool) -> None:
    copied, multiplied = report.ceilings.bytes_per_second / 1e12, report.ceilings.flops_per_second / 1e12
    clocks = ", ".join(f"{name} {value:g}" for name, value in report.machine.clocks.items())
    output.show(
        hanging("device", f"{report.facts}" + (f", driver {report.machine.driver}" if report.machine.driver else "")),
        hanging("clocks", clocks or "unknown"),
        hanging("limits", f"copy {copied:.3g} TB/s, bf16 product {multiplied:.3g} TFLOP/s, both measured here"),
    )
    groups: dict[str, list[CaseTimes]] = {}
    for each in report.cases:
        groups.setdefault(f"{each.case.primitive} {each.case.kv_layout or ''}".strip(), []).append(each)
    for title, cases in groups.items():
        times = _times(cases) if every else _fastest(cases)
        output.show("", Text(f"{title}: microseconds, speed-up over the best baseline", "bold"), times)
    skipped = _refused(report)
    if not every:
        names = dict.fromkeys(name.partition(" / ")[0] for name in skipped)
        output.show(*([hanging("skipped", f"{', '.join(names)}, for some primitives or all")] if names else []))
        output.show(Text("--all shows every candidate, and why others were skipped; --out keeps all times in a file", "dim"))
    output.show(*(hanging("skipped", f"{name}: {'; '.join(reasons)}") for name, reasons in skipped.items() if every))
    remarks = {each.name: each.remark for case in report.cases for each in case.times if each.remark}
    output.show(*(hanging("baseline", f"{name}: {remark}") for name, remark in remarks.items()))
    output.show(*(Text(f"WRONG     {line}", "bold red") for line in report.defects()))


def _fastest(cases: list[CaseTimes]) -> RenderableType:
    """A row for each case: the fastest of ours that is right."""
    rows: list[list[str]] = []
    for case in cases:
        ours = [each for each in case.times if each.implementation is not None]
        right = [each for each in ours if each.median_us is not None]
        best = min(right, key=lambda each: each.median_us or math.inf, default=None)
        if best is None:
            cells = ["none runs", "", ""] if not ours else [ours[0].name, _time(ours[0]), ""]
        else:
            cells = [best.name, _time(best), _lead(case.lead_of(best))]
        rows.append([case.case.shape, *cells, digits(case.bound_us)])
    headings = ["case", "the fastest", "us", "speed-up", "bound"]
    return columns(headings, rows, numbers=headings[2:])


def _times(cases: list[CaseTimes]) -> RenderableType:
    """A row for each candidate of each case, the fastest first; for ours the best baseline's time over its own."""
    rows: list[list[str]] = []
    for case in cases:
        rows.append([case.case.shape, "roofline bound", digits(case.bound_us), ""])
        times = sorted(case.times, key=lambda each: math.inf if each.median_us is None else each.median_us)
        rows += [["", each.name, _time(each), _lead(case.lead_of(each))] for each in times]
    return columns(["case", "", "us", "speed-up"], rows, numbers=["us", "speed-up"])


def _time(each: KernelTime) -> str:
    if each.median_us is None:
        return "failed" if each.failure else "wrong"
    return digits(each.median_us)


def _lead(lead: float | None) -> str:
    return "" if lead is None else f"{lead:.2f}"
