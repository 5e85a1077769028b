# SPDX-License-Identifier: Apache-2.0
"""`mla-portable run`: a seeded step from cache write to output, checked and timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import RenderableType
from rich.text import Text

from mla_portable.cli.options import DeviceOption, JsonOption, check_name, resolve_device, with_options
from mla_portable.cli.output import EXIT_FAILED, columns, command, digits, hanging

if TYPE_CHECKING:
    from mla_portable.bench.step import StepReport
    from mla_portable.contracts import Decision, Verdict
    from mla_portable.judge.problems.compare import Finding

_MAX_SECONDS = 2.0
"""Plain torch on a CPU would take minutes otherwise."""


def _size(flag: str, text: str, *, of: Any = int, panel: str = "Size of the step", metavar: str | None = None) -> Any:
    least = None if of is not int else int(flag not in ("--decodes", "--prefills", "--context", "--seed"))
    metavar = "N" if of is int else metavar
    return Annotated[of | None, typer.Option(flag, min=least, help=text, rich_help_panel=panel, metavar=metavar)]


_CACHE: dict[str, Any] = {"panel": "Cache"}
_SIZES = {
    "num_heads": _size("--heads", "Query heads per GPU. Default: 16 on a CPU, 128 on a GPU."),
    "topk": _size("--topk", "Indices per token. Default: 2048."),
    "decodes": _size("--decodes", "Requests that decode. Default: 8 on a CPU, 64 on a GPU."),
    "decode_query_len": _size("--query-len", "Tokens per decode, above 1 for speculative decoding. Default: 1."),
    "prefills": _size("--prefills", "Requests that prefill; the first has no context. Default: 2."),
    "prefill_tokens": _size("--prefill-tokens", "Tokens per prefill. Default: 64 on a CPU, 512 on a GPU."),
    "context": _size(
        "--context",
        "Cached tokens of the longest request; the others have an eighth of it or more. Default: 4096 on a CPU, 8192 on a GPU.",
    ),
    "seed": _size("--seed", "Random seed; gives the same step on every device. Default: 0."),
    "block_size": _size("--block-size", "Tokens per block. Default: 64.", **_CACHE),
    "kv_layout": _size("--kv-layout", "fp8_ds_mla (default) or bf16.", of=str, metavar="LAYOUT", **_CACHE),
    "scale_format": _size("--scale-format", "Kind of FP8 scales. Default: pow2.", of=Literal["pow2", "amax"], **_CACHE),
}
"""Fields of StepShape; where one is not given, the default of the device holds."""

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
    Literal["auto", "fused", "split", "direct", "upconvert"],
    typer.Option("--route", help="How a layer composes the primitives."),
]
CheckRowsOption = Annotated[
    int, typer.Option("--check-rows", min=0, help="Attention rows that the float64 oracle computes; 0 for all of them.")
]


@with_options(_SIZES)
def run(
    device: DeviceOption = None,
    backend: ForcedOption = None,
    route: RouteOption = "auto",
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Timed runs of each part.")] = 5,
    max_seconds: Annotated[
        float, typer.Option("--max-seconds", min=0, help="Seconds after which the timed runs of a part stop; 0 for no bound.")
    ] = _MAX_SECONDS,
    check_rows: CheckRowsOption = 64,
    every: Annotated[bool, typer.Option("--all", help="Show every route, reason, error and percentile.")] = False,
    as_json: JsonOption = False,
    *,
    options: dict[str, Any],
) -> None:
    """Run a DeepSeek-V3.2-shaped step (mixed prefill and decode, paged cache) on the implementations that are chosen here.

    The step's output is checked against a float64 oracle. Then every primitive is checked and timed at the step's sizes, also
    those that the chosen route does not need.

    Exit code 1 when an error is beyond its tolerance or nothing can serve the step.
    """
    with command(as_json=as_json) as output:
        forced = _forced(backend)
        if "kv_layout" in options:
            check_name("layout", options["kv_layout"], param_hint="--kv-layout")
        where = resolve_device(device)
        from mla_portable.bench.step import run_step
        from mla_portable.dispatch import current_registry
        from mla_portable.judge.problems.step import default_shape

        with output.progress() as advance:
            report = run_step(
                replace(default_shape(where.type), **options),
                device=where,
                registry=current_registry(),
                backend=forced,
                route=route,
                repeat=repeat,
                check_rows=check_rows,
                max_seconds=max_seconds or None,
                progress=advance,
            )
        if as_json:
            output.document({"command": "run", **report.as_dict()})
        else:
            output.show(*_for_a_person(report, every=every))
        if not report.ok:
            raise typer.Exit(EXIT_FAILED)


def _forced(words: list[str] | None) -> str | dict[str, str] | None:
    """What `--backend` forces: one name for everything, or names by primitive.

    Raises: typer.BadParameter when both kinds are mixed, or two names are given for the same thing.
    """
    if not words:
        return None
    if len(words) == 1 and "=" not in words[0]:
        check_name("backend", words[0], param_hint="--backend")
        return words[0]
    by_primitive: dict[str, str] = {}
    for word in words:
        primitive, _, name = word.partition("=")
        if not primitive or not name:
            raise typer.BadParameter(
                f"must be PRIMITIVE=NAME where it is repeated (got {word!r}): one name for everything stands alone",
                param_hint="--backend",
            )
        if primitive in by_primitive:
            raise typer.BadParameter(f"names {primitive} twice", param_hint="--backend")
        check_name("primitive", primitive, param_hint="--backend")
        check_name("backend", name, param_hint="--backend")
        by_primitive[primitive] = name
    return by_primitive


def _for_a_person(report: StepReport, *, every: bool) -> Iterator[RenderableType]:
    shape = report.shape
    speculative = f" of {shape.decode_query_len} tokens" if shape.decode_query_len > 1 else ""
    scales = f", {shape.scale_format} scales" if shape.kv_layout != "bf16" else ""
    yield hanging("device", f"{report.facts} [{report.device}]")
    yield hanging(
        "step",
        f"{shape.decodes} decodes{speculative} + {shape.prefills} prefills of {shape.prefill_tokens} tokens = "
        f"{shape.num_tokens} tokens, {shape.num_heads} heads, topk {shape.topk}, context up to {shape.context}, "
        f"{shape.kv_layout} cache in blocks of {shape.block_size}{scales}, seed {shape.seed}",
    )
    for verdict in report.route_decision.verdicts if every else [report.route_decision.verdict]:
        yield hanging("route" if verdict.route == report.route else "", f"{verdict.route}: {verdict}")
    parts = [
        (part.name + ("" if part.on_route else " *"), part.implementation or "none", part.findings, part.timing)
        for part in report.primitives
    ]
    parts.append(("the whole step", "", report.findings, report.forward))
    parts.append(("planning the step", "", (), report.plan))
    rows = [[name, served, _worst(found), digits(time.median_ms) if time else ""] for name, served, found, time in parts]
    yield ""
    yield columns(["primitive", "served by", "worst error / tolerance", "median ms"], rows, numbers=["median ms"])
    yield ""
    if every:
        yield from _details(report)
    if any(not part.on_route for part in report.primitives):
        yield f"* not part of the route {report.route}; measured anyway"
    cold = ", cold cache" if report.forward.cold_l2 else ""
    yield f"Times: {report.forward.clock}{cold}. Errors: against float64 on the CPU, {report.checked} of the step."
    if any(finding.quantity == "x_q" for part in report.primitives for finding in part.findings):
        yield "x_q is in half steps between values of its FP8 dtype: up to 1 it is the nearest one."
    yield Text("All errors are within their tolerances.", "green") if report.ok else Text("WRONG:", "bold red")
    yield from (f"  {line}" for line in report.failures())


def _details(report: StepReport) -> Iterator[RenderableType]:
    """Of each primitive: why that serves it and not another, its shape, all errors, all times."""
    for part in report.primitives:
        yield Text(part.name, "bold")
        yield hanging("why", f"{_why(part.decision)}; {_why_not_another(part.decision)}")
        yield hanging("shape", part.shape)
        yield hanging("errors", ", ".join(map(_judged, part.findings)))
        if part.timing is not None:
            t = part.timing
            median, p10, p90 = map(digits, (t.median_ms, t.p10_ms, t.p90_ms))
            yield hanging("times", f"median {median} ms, p10 {p10}, p90 {p90}, n {t.n}")
    yield ""


def _why(decision: Decision) -> str:
    """What decided, and at what cost."""
    chosen = next((v for v in decision.verdicts if v.implementation == decision.chosen), None)
    return f"{decision.control}, {chosen.cost_source} cost {chosen.cost:g}" if chosen else "nothing can run it"


def _why_not_another(decision: Decision) -> str:
    """The next best candidate and the reasons against it; every candidate where none can run."""
    others = sorted((v for v in decision.verdicts if v.implementation != decision.chosen), key=lambda v: not v.passed_over)
    if decision.chosen is None:
        return "; ".join(map(_judgement, others)) or "no installed plugin offers it"
    others = [v for v in others if v.fits_device]
    return f"next best is {_judgement(others[0])}" if others else "there is no other candidate for this device"


def _judgement(verdict: Verdict) -> str:
    return f"{verdict.implementation} (cost {verdict.cost:g}): {'; '.join(map(str, verdict.reasons)) or 'can run'}"


def _judged(finding: Finding) -> str:
    mark = " WRONG" if finding.message else ""
    if finding.limit == 0:
        return f"{finding.quantity} {f'{finding.error:g} differ{mark}' if mark else 'exact'}"
    return f"{finding.quantity} {finding.error:.1e} / {finding.limit:.1e}{mark}"


def _worst(findings: tuple[Finding, ...]) -> str:
    """What is wrong, else the quantity that is closest to its tolerance."""
    wrong = [each for each in findings if each.message]
    close = sorted((each for each in findings if each.limit), key=lambda each: each.error / each.limit)
    return _judged((wrong or close[-1:])[0]) if wrong or close else "exact" if findings else ""
