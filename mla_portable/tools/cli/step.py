# SPDX-License-Identifier: Apache-2.0
"""`mla-portable run` and `mla-portable bench step`: a seeded step from cache write to output, checked and timed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from mla_portable.tools.cli.options import DeviceOption, JsonOption, resolve_device, with_options
from mla_portable.tools.cli.output import EXIT_FAILED, Output, command, for_other_devices, table

if TYPE_CHECKING:
    from mla_portable.contracts import Decision, Verdict
    from mla_portable.problems.compare import Finding
    from mla_portable.tools.bench.step import StepReport
    from mla_portable.tools.bench.timing import Timing

__all__ = ["bench_step", "run"]

_MAX_SECONDS = 2.0
"""Bound on the timed runs of one part: plain torch on a CPU would take minutes otherwise."""
_STEP = "Size of the step"
_CACHE = "Cache"
_COSINE = "1 - cosine"


def _size(flag: str, text: str, *, panel: str = _STEP, metavar: str | None = None) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=panel, metavar=metavar)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Fields of StepShape, None for the default of the device."""

    num_heads: Annotated[int | None, _size("--heads", "Query heads of this rank. Default: 16 on a CPU, 128 on a GPU.")] = None
    topk: Annotated[int | None, _size("--topk", "Indices per token. Default: 2048.")] = None
    decodes: Annotated[int | None, _size("--decodes", "Requests that decode. Default: 8 on a CPU, 64 on a GPU.")] = None
    decode_query_len: Annotated[
        int | None, _size("--query-len", "Tokens per decode, above 1 for speculative decoding. Default: 1.")
    ] = None
    prefills: Annotated[int | None, _size("--prefills", "Requests that prefill; the first is fresh. Default: 2.")] = None
    prefill_tokens: Annotated[
        int | None, _size("--prefill-tokens", "Tokens per prefill. Default: 64 on a CPU, 512 on a GPU.")
    ] = None
    context: Annotated[
        int | None,
        _size(
            "--context",
            "Cached tokens of the longest request; the others have an eighth of it or more. Default: 4096 on a CPU, "
            "8192 on a GPU.",
        ),
    ] = None
    seed: Annotated[int | None, _size("--seed", "Random seed; gives the same step on every device. Default: 0.")] = None
    block_size: Annotated[int | None, _size("--block-size", "Tokens per block. Default: 64.", panel=_CACHE)] = None
    kv_layout: Annotated[str | None, _size("--kv-layout", "fp8_ds_mla (default) or bf16.", panel=_CACHE, metavar="LAYOUT")] = (
        None
    )
    scale_format: Annotated[
        str | None, _size("--scale-format", "Of FP8 scales: pow2 (default) or amax.", panel=_CACHE, metavar="FORMAT")
    ] = None


ForcedOption = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="[PRIMITIVE=]NAME",
        help="Force a backend ('triton') or one implementation ('triton.portable'), for everything or for one primitive; "
        "may be repeated. A forced choice never falls back. Default: the registry chooses.",
    ),
]
RouteOption = Annotated[
    str, typer.Option("--route", metavar="ROUTE", help="auto, fused, split, direct or upconvert: how primitives are composed.")
]
CheckRowsOption = Annotated[
    int, typer.Option("--check-rows", min=0, help="Attention rows that the float64 oracle computes; 0 for all of them.")
]


@with_options(Sizes)
def run(
    device: DeviceOption = None,
    backend: ForcedOption = None,
    route: RouteOption = "auto",
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Timed runs of each part (stops after two seconds).")] = 5,
    check_rows: CheckRowsOption = 64,
    as_json: JsonOption = False,
    *,
    options: Sizes,
) -> None:
    """Run a DeepSeek-V3.2-shaped step (mixed prefill and decode, paged cache) on the best implementations found here.

    Every primitive from cache write on is checked against a float64 oracle and timed, those that the chosen route does
    without included.
    Exit code 1 when an error is beyond its tolerance or nothing can serve the step.
    """
    with command(as_json=as_json) as output:
        report = _report(output, device, backend, route, repeat, check_rows, _MAX_SECONDS, options)
        if as_json:
            output.document({"command": "run", **report.as_dict()})
        else:
            output.show(*_errors_and_times(report))
        if not report.ok:
            raise typer.Exit(EXIT_FAILED)


@with_options(Sizes)
def bench_step(
    device: DeviceOption = None,
    backend: ForcedOption = None,
    route: RouteOption = "auto",
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Timed runs of each part.")] = 30,
    check_rows: CheckRowsOption = 16,
    as_json: JsonOption = False,
    *,
    options: Sizes,
) -> None:
    """Time every primitive of a step, with no bound on the time that takes. Exit code 1 when a result is wrong."""
    with command(as_json=as_json) as output:
        report = _report(output, device, backend, route, repeat, check_rows, None, options)
        if as_json:
            output.document({"command": "bench step", **report.as_dict()})
        else:
            headings = ["what", "served by", "shape", "median ms", "p10 ms", "p90 ms", "n"]
            output.show(*_headlines(report), table("", headings, _times(report), numbers=headings[3:]))
            output.show(*(f"WRONG  {line}" for line in report.failures()))
        if not report.ok:
            raise typer.Exit(EXIT_FAILED)


def _report(
    output: Output,
    device: str | None,
    backend: list[str] | None,
    route: str,
    repeat: int,
    check_rows: int,
    max_seconds: float | None,
    sizes: Sizes,
) -> StepReport:
    """Run the step that the options choose. Raises: typer.BadParameter; otherwise as `run_step`."""
    where = resolve_device(device)
    forced = _forced(backend)
    from mla_portable.dispatch import current_registry
    from mla_portable.tools.bench.inputs import default_shape
    from mla_portable.tools.bench.step import run_step

    given: dict[str, Any] = {name: value for name, value in asdict(sizes).items() if value is not None}
    shape = replace(default_shape(where.type), **given)
    with output.progress() as advance:
        return run_step(
            shape,
            device=where,
            registry=current_registry(),
            backend=forced,
            route=route,
            repeat=repeat,
            check_rows=check_rows,
            max_seconds=max_seconds,
            progress=advance,
        )


def _forced(words: list[str] | None) -> str | dict[str, str] | None:
    """What `--backend` forces: one name for everything, or names by primitive.

    Raises: typer.BadParameter when both kinds are mixed, or two names are given for the same thing.
    """
    if not words:
        return None
    if len(words) == 1 and "=" not in words[0]:
        return words[0]
    by_primitive: dict[str, str] = {}
    for word in words:
        primitive, _, name = word.partition("=")
        if not primitive or not name:
            raise typer.BadParameter(
                f"got {word!r} beside others, expected PRIMITIVE=NAME: one name for everything stands alone",
                param_hint="--backend",
            )
        if primitive in by_primitive:
            raise typer.BadParameter(f"{primitive} is given twice", param_hint="--backend")
        by_primitive[primitive] = name
    return by_primitive


def _headlines(report: StepReport) -> list[str]:
    """What was run where, in a few lines."""
    shape = report.shape
    speculative = f" of {shape.decode_query_len} tokens" if shape.decode_query_len > 1 else ""
    scales = f", {shape.scale_format} scales" if shape.kv_layout != "bf16" else ""
    return [
        f"device  {report.facts} [{report.device}]",
        f"step    {shape.decodes} decodes{speculative} + {shape.prefills} prefills of {shape.prefill_tokens} tokens = "
        f"{shape.num_tokens} tokens, {shape.num_heads} heads, topk {shape.topk}, context up to {shape.context}, "
        f"{shape.kv_layout} cache in blocks of {shape.block_size}{scales}, seed {shape.seed}",
        *(
            f"{'route ' if verdict.route == report.route else '':<6}  {verdict.route}: {verdict}"
            for verdict in report.route_decision.verdicts
        ),
    ]


def _times(report: StepReport) -> list[list[str]]:
    parts = [
        *((result.name, result.implementation or "none", result.shape, result.timing) for result in report.primitives),
        ("the whole step", f"route {report.route}", f"T {report.shape.num_tokens}", report.forward),
        ("planning the step", "", f"R {report.shape.num_reqs}", report.plan),
    ]
    return [
        [name, who, shape, f"{t.median_ms:.4f}", f"{t.p10_ms:.4f}", f"{t.p90_ms:.4f}", str(t.n)]
        for name, who, shape, t in parts
        if t is not None
    ]


def _errors_and_times(report: StepReport) -> list[RenderableType]:
    rows = [
        [
            result.name + ("" if result.on_route else " *"),
            result.implementation or "none",
            _why(result.decision),
            result.shape,
            _findings(result.findings),
            result.checked,
            _time(result.timing),
        ]
        for result in report.primitives
    ]
    step = ["the whole step", f"route {report.route}", "", f"T {report.shape.num_tokens}"]
    rows.append([*step, _findings(report.findings), report.checked, _time(report.forward)])
    rows.append(["planning the step", "", "", f"R {report.shape.num_reqs}", "", "", _time(report.plan)])
    headings = ["primitive", "served by", "why", "shape", "error / tolerance", "checked", "median ms (runs)"]
    others: dict[str, list[str]] = {}
    for result in report.primitives:
        others.setdefault(_why_not_another(result.decision), []).append(result.name)
    verdict = "All errors are within their tolerances." if report.ok else "WRONG:"
    return [
        *_headlines(report),
        table("", headings, rows, numbers=headings[-1:]),
        *(f"{', '.join(names)}: {words}." for words, names in others.items()),
        f"* not used by the route {report.route}; measured anyway. Times: {report.forward.clock}"
        + (", cold cache." if report.forward.cold_l2 else ".")
        + " Errors: against float64 on the CPU.",
        verdict,
        *(f"  {line}" for line in report.failures()),
    ]


def _why(decision: Decision) -> str:
    """Who decided, and at what cost."""
    chosen = next((v for v in decision.verdicts if v.implementation == decision.chosen), None)
    return f"{decision.control}, {chosen.cost_source} cost {chosen.cost:g}" if chosen else "nothing can run it"


def _why_not_another(decision: Decision) -> str:
    """What became of the next best candidate; of every candidate where none can run."""
    others = sorted((v for v in decision.verdicts if v.implementation != decision.chosen), key=lambda v: v.rank)
    if decision.chosen is None:
        return "; ".join(map(_judgement, others)) or "no installed plugin offers it"
    others = [v for v in others if not for_other_devices(v.reasons)]
    return f"next best is {_judgement(others[0])}" if others else "there is no other candidate for this device"


def _judgement(verdict: Verdict) -> str:
    return f"{verdict.implementation} (cost {verdict.cost:g}): {'; '.join(map(str, verdict.reasons)) or 'can run'}"


def _findings(findings: Iterable[Finding]) -> str:
    """Each quantity's error and limit; cosines only where they are beyond theirs."""
    shown = (finding for finding in findings if finding.message or not finding.quantity.startswith(_COSINE))
    return "\n".join(map(_finding, shown))


def _finding(finding: Finding) -> str:
    mark = "  WRONG" if finding.message else ""
    if finding.limit == 0:
        return f"{finding.quantity} exact" if not finding.message else f"{finding.quantity}: {finding.error:g} differ{mark}"
    return f"{finding.quantity} {finding.error:.1e} / {finding.limit:.1e}{mark}"


def _time(timing: Timing | None) -> str:
    """Median in milliseconds and the number of runs, "" for what did not run."""
    return "" if timing is None else f"{timing.median_ms:.3f} ({timing.n})"
