# SPDX-License-Identifier: Apache-2.0
"""`mla-portable conform`: hold a backend against the conformance suite on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer
from rich.console import RenderableType

from mla_portable.cli.options import (
    CommitOption,
    DeviceOption,
    JsonOption,
    OutOption,
    WhoOption,
    check_name,
    primitive_named,
    resolve_device,
)
from mla_portable.cli.output import EXIT_FAILED, columns, command, hanging
from mla_portable.cli.process import undisturbed

if TYPE_CHECKING:
    from mla_portable.judge.conformance import CaseResult, Report
    from mla_portable.judge.conformance.report import Worst


def conform(
    name: Annotated[str, typer.Argument(help="A backend ('triton') or one implementation ('triton.portable').")],
    level: Annotated[
        Literal["smoke", "quick", "full"], typer.Option("--level", help="How many cases: smoke has one of each kind.")
    ] = "quick",
    device: DeviceOption = None,
    primitive: Annotated[
        list[str] | None, typer.Option("--primitive", metavar="PRIMITIVE", help="Only this one; may be repeated.")
    ] = None,
    match: Annotated[str, typer.Option("--match", metavar="TEXT", help="Only cases whose id contains this.")] = "",
    jobs: Annotated[
        int, typer.Option("--jobs", metavar="N", help="Worker processes on the device, each with a CPU core of its own.")
    ] = 1,
    out: OutOption = None,
    who: WhoOption = None,
    commit: CommitOption = None,
    every: Annotated[
        bool, typer.Option("--all", help="Show the largest error of every quantity, and every failing case.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the traceback of every exception that is shown.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare a backend with a float64 oracle, on cases that are generated from what it declares.

    Exit code 0 only when at least one case ran and every case passed.
    """
    with command(as_json=as_json) as output:
        check_name("backend", name, param_hint="NAME")
        only = [primitive_named(each, param_hint="--primitive") for each in primitive or ()] or None
        where = resolve_device(device)
        from mla_portable.cli.recording import case_of, recorder
        from mla_portable.dispatch import current_registry
        from mla_portable.judge.conformance import run_suite

        registry = current_registry()
        results: list[CaseResult] = []
        file = None if out is None else recorder(out, registry, where, backends=[name], who=who, commit=commit)
        with output.progress() as advance:

            def after(done: int, total: int, result: CaseResult) -> None:
                results.append(result)
                advance(str(result.case.primitive), done, total)
                if result.status != "passed":
                    output.note(f"{result.status} {result.case.id}")

            try:
                report = run_suite(
                    registry, name, device=where, level=level, primitives=only, match=match, jobs=jobs, progress=after
                )
            finally:  # what ran is kept, whatever ended the rest
                if file is not None and results:
                    with undisturbed():
                        file.add(level=level, cases=[case_of(each.as_dict()) for each in results])
                    output.note(f"{len(results)} cases added to {out}")
        if as_json:
            output.document({"command": "conform", **report.as_dict()})
        else:
            output.show(*_for_a_person(report, every=every, verbose=verbose))
        if not report.ok:
            raise typer.Exit(EXIT_FAILED)


_MOST_CASES: Final = 10
"""Failing cases that are shown without --all."""


def _for_a_person(report: Report, *, every: bool = False, verbose: bool = False) -> list[RenderableType]:
    from mla_portable.contracts import Verdict
    from mla_portable.contracts.decision import grouped

    worst = report.worst()
    closest: dict[tuple[str, str], Worst] = {}
    for row in worst:
        key = row.implementation, str(row.primitive)
        if key not in closest or row.share > closest[key].share:
            closest[key] = row
    all_passed = report.ok
    rows: list[list[str]] = []
    for (name, primitive), count in report.counts().items():
        numbers = [count["passed"]] if all_passed else [count["passed"], count["failed"], count["error"]]
        row = closest.get((name, str(primitive)))
        near = "exact" if row is None else f"{row.quantity} {row.share:.0%}"
        low = any(each.case.params.accuracy == "low" for each in report.results if each.case.implementation == name)
        rows.append([str(primitive), f"{name} (low accuracy)" if low else name, *map(str, numbers), near])
    shown: list[RenderableType] = [
        hanging("device", str(report.device)),
        hanging("suite", f"{report.backend}, level {report.level}"),
        "",
    ]
    ends = ["passed"] if all_passed else ["passed", "failed", "raised"]
    if rows:
        shown += [columns(["primitive", "implementation", *ends, "largest error, of its tolerance"], rows, numbers=ends), ""]
    if worst and every:
        headings = ["primitive", "implementation", "quantity", "largest error", "tolerance"]
        errors = [
            [str(row.primitive), row.implementation, row.quantity, f"{row.error:.1e}", f"{row.tolerance:.1e}"] for row in worst
        ]
        shown += [columns(headings, errors, numbers=headings[3:]), ""]
    left_out = [Verdict(f"{each.implementation} / {each.primitive}", each.reasons, 0) for each in report.unavailable]
    shown += [f"not run: {line}" for line in grouped(left_out)]
    bad = [result for result in report.results if result.status != "passed"]
    for result in bad if every else bad[:_MOST_CASES]:
        shown += [f"{result.status.upper()} {result.case.id}", *(f"    {line}" for line in result.message.splitlines())]
        shown += [f"    {line}" for line in result.traceback.splitlines() if verbose]
    if len(bad) > _MOST_CASES and not every:
        shown.append(f"{len(bad) - _MOST_CASES} more failing cases: --all shows them, --out keeps them in a file")
    shown += report.common()
    total = f"{len(report.results)} cases, {report.seconds:.1f} s of work: {report.passed} passed, {report.failed} failed."
    shown.append(total if report.results else f"{total} No test case applied to this device.")
    return shown
