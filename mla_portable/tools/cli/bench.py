# SPDX-License-Identifier: Apache-2.0
"""`mla-portable bench kernels | plan | dispatch | plot`: what kernels, planning and dispatch cost on this machine."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mla_portable.tools.cli.kernels import kernels
from mla_portable.tools.cli.options import DeviceOption, JsonOption, check_name, numbers, resolve_device
from mla_portable.tools.cli.output import columns, command, hanging

if TYPE_CHECKING:
    from mla_portable.contracts import DeviceFacts, ScheduleKind

bench = typer.Typer(no_args_is_help=True, help="Measure what kernels, planning and dispatch cost on this machine.")
bench.command()(kernels)


@bench.command()
def plan(
    device: DeviceOption = None,
    route: Annotated[
        Literal["fused", "split", "direct", "upconvert"], typer.Option("--route", help="How primitives are composed.")
    ] = "split",
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule", metavar="KIND", help="none, or a kind of an installed plugin. Default: what sparse_decode wants here."
        ),
    ] = None,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Query heads.")] = 128,
    topk: Annotated[int, typer.Option("--topk", min=1, help="Indices per token.")] = 2048,
    arch: Annotated[
        str | None, typer.Option("--arch", metavar="ARCH", help="Plan for this architecture, e.g. sm90. Default: the device's.")
    ] = None,
    num_sms: Annotated[
        int | None, typer.Option("--num-sms", min=0, help="Plan for so many multiprocessors. Default: the device's.")
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Timed plans per case.")] = 200,
    as_json: JsonOption = False,
) -> None:
    """Time `Planner.plan` on steps of common sizes: host time, and until its copy has landed."""
    with command(as_json=as_json) as output:
        where = resolve_device(device)
        from mla_portable.dispatch import current_registry
        from mla_portable.planner import PlannerConfig
        from mla_portable.tools.bench.plan import PLAN_CASES, time_plans

        facts = current_registry().facts(where)
        kind = _schedule_kind(schedule, facts, heads, topk)
        config = PlannerConfig(
            device=where,
            route=route,
            num_heads=heads,
            topk=topk,
            max_num_reqs=max(case.num_reqs for case in PLAN_CASES),
            max_num_tokens=max(case.num_tokens for case in PLAN_CASES),
            max_model_len=163_840,  # DeepSeek-V3.2's
            schedule_kind=kind,
            num_sms=facts.num_sms if num_sms is None else num_sms,
            arch=arch or facts.arch,
        )
        with output.progress() as advance:
            advance("planning", 0, len(PLAN_CASES))
            rows = time_plans(config, repeat=repeat)
        if as_json:
            values = {each.name: getattr(config, each.name) for each in fields(config) if each.name != "decode_request"}
            shown = values | {"schedule_kind": kind.name if kind else "none"}
            output.document({"command": "bench plan", "ok": True, "facts": facts, "config": shown, "rows": rows})
            return
        cells = [
            [row.case, str(row.num_tokens), *_figures(row.median_us, row.p10_us, row.p90_us, row.landed_us)] for row in rows
        ]
        headings = ["step", "tokens", "median us", "p10 us", "p90 us", "landed us"]
        schedule = kind.name if kind else "none"
        output.show(
            hanging("device", f"{facts} [{where}]"),
            hanging("plans", f"on the host: route {config.route}, schedule {schedule}, {heads} heads, topk {topk}"),
            "",
            columns(headings, cells, numbers=headings[1:]),
        )


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


def _schedule_kind(name: str | None, facts: DeviceFacts, heads: int, topk: int) -> ScheduleKind | None:
    """The kind of that name among those of all plugins; without a name, what the chosen sparse_decode takes."""
    from mla_portable.contracts import Request
    from mla_portable.dispatch import current_registry
    from mla_portable.primitives import SPARSE_DECODE

    registry = current_registry()
    if name is None:
        cache: dict[str, Any] = {"kv_layout": "fp8_ds_mla", "block_size": 64, "scale_format": "pow2"}
        request = Request(SPARSE_DECODE, facts, num_heads=heads, topk=topk, query_len=1, lse=True, **cache)
        return registry.select(request)[0].schedule_kind
    offered = (each.schedule_kind for each in registry.implementations(SPARSE_DECODE))
    kinds = {"none": None} | {kind.name: kind for kind in offered if kind}
    if name not in kinds:
        raise typer.BadParameter(f"got {name!r}, expected one of {', '.join(kinds)}", param_hint="--schedule")
    return kinds[name]
