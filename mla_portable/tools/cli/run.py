# SPDX-License-Identifier: Apache-2.0
"""`mla-portable run`: the main job on this machine, a seeded step from cache write to output, checked and timed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from mla_portable.tools.cli.options import DeviceOption, JsonOption
from mla_portable.tools.cli.output import EXIT_FAILED, command, table
from mla_portable.tools.cli.step_options import (
    BlockSizeOption,
    CheckRowsOption,
    ContextOption,
    DecodeQueryLenOption,
    DecodesOption,
    DemandOption,
    HeadsOption,
    KvLayoutOption,
    PrefillsOption,
    PrefillTokensOption,
    RouteOption,
    ScaleFormatOption,
    SeedOption,
    TopkOption,
    chosen_step,
)
from mla_portable.tools.cli.words import describe_findings, describe_time, step_headlines, why, why_not_another

if TYPE_CHECKING:
    from mla_portable.tools.bench.step import StepReport

__all__ = ["run"]

_MAX_SECONDS = 2.0
"""Bound on the timed runs of one part: plain torch on a CPU would take minutes otherwise."""


def run(
    device: DeviceOption = None,
    backend: DemandOption = None,
    route: RouteOption = "auto",
    heads: HeadsOption = None,
    topk: TopkOption = None,
    decodes: DecodesOption = None,
    query_len: DecodeQueryLenOption = None,
    prefills: PrefillsOption = None,
    prefill_tokens: PrefillTokensOption = None,
    context: ContextOption = None,
    block_size: BlockSizeOption = None,
    kv_layout: KvLayoutOption = None,
    scale_format: ScaleFormatOption = None,
    seed: SeedOption = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Timed runs of each part (stops after two seconds).")] = 5,
    check_rows: CheckRowsOption = 64,
    as_json: JsonOption = False,
) -> None:
    """Run a DeepSeek-V3.2-shaped step (mixed prefill and decode, paged cache) on the best implementations found here.

    Every primitive from cache write on is checked against a float64 oracle and timed, those that the chosen route does
    without included.
    Exit code 1 when an error is beyond its tolerance or nothing can serve the step.
    """
    with command(as_json=as_json) as output:
        report = chosen_step(
            output,
            device=device,
            backend=backend,
            route=route,
            repeat=repeat,
            check_rows=check_rows,
            max_seconds=_MAX_SECONDS,
            num_heads=heads,
            topk=topk,
            decodes=decodes,
            decode_query_len=query_len,
            prefills=prefills,
            prefill_tokens=prefill_tokens,
            context=context,
            block_size=block_size,
            kv_layout=kv_layout,
            scale_format=scale_format,
            seed=seed,
        )
        if as_json:
            output.document({"command": "run", **report.as_dict()})
        else:
            output.show(*_for_a_person(report))
        if not report.ok:
            raise typer.Exit(EXIT_FAILED)


def _for_a_person(report: StepReport) -> list[RenderableType]:
    rows = [
        [
            result.name + ("" if result.on_route else " *"),
            result.implementation or "none",
            why(result.decision),
            result.shape,
            describe_findings(result.findings),
            result.checked,
            describe_time(result.timing),
        ]
        for result in report.primitives
    ]
    step = ["the whole step", f"route {report.route}", "", f"T {report.shape.num_tokens}"]
    rows.append([*step, describe_findings(report.findings), report.checked, describe_time(report.forward)])
    rows.append(["planning the step", "", "", f"R {report.shape.num_reqs}", "", "", describe_time(report.plan)])
    headings = ["primitive", "served by", "why", "shape", "error / tolerance", "checked", "median ms (runs)"]
    others: dict[str, list[str]] = {}
    for result in report.primitives:
        others.setdefault(why_not_another(result.decision), []).append(result.name)
    verdict = "All errors are within their tolerances." if report.ok else "WRONG:"
    return [
        *step_headlines(report),
        table("", headings, rows, numbers=headings[-1:]),
        *(f"{', '.join(names)}: {words}." for words, names in others.items()),
        f"* not used by the route {report.route}; measured anyway. Times: {report.forward.clock}"
        + (", cold cache." if report.forward.cold_l2 else ".")
        + " Errors: against float64 on the CPU.",
        verdict,
        *(f"  {line}" for line in report.failures()),
    ]
