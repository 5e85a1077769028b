# SPDX-License-Identifier: Apache-2.0
"""`mla-portable doctor`: what is installed here, what works, and how to fix the rest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from mla_portable.cli.options import DeviceOption, JsonOption, resolve_device
from mla_portable.cli.output import EXIT_FAILED, columns, command, hanging
from mla_portable.models import DEEPSEEK_V32

if TYPE_CHECKING:
    from mla_portable.choose import PluginReport
    from mla_portable.cli.doctor.diagnosis import Diagnosis, PrimitiveChoice, TimesRead
    from mla_portable.contracts import DeviceFacts, EngineStatus


def doctor(
    device: DeviceOption = None,
    every: Annotated[bool, typer.Option("--all", help="List every implementation and the result of its probe.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the tracebacks of plugins that did not load.")] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="URL|FILE",
            help="Examine an engine that runs, and nothing else: the URL of a vLLM or SGLang server, or the file of its log.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Examine devices, plugins and policy, probe every implementation, and say how to fix each problem.

    Exit code 1 when something that was selected is broken: the policy names a backend that did not load or fails its probe, or
    nothing can serve some primitive. With --engine: exit code 0 only when the plugin is seen to serve.
    """
    if engine is not None:
        for option, given in (("--device", device), ("--all", every), ("--verbose", verbose)):
            if given:
                raise typer.BadParameter("does not apply to --engine, which examines an engine that runs", param_hint=option)
        _running(engine, as_json=as_json)
        return
    with command(as_json=as_json, doing="probing every implementation") as output:
        where = resolve_device(device)
        from mla_portable.cli.doctor.diagnosis import diagnose
        from mla_portable.dispatch import current_registry

        registry = current_registry()
        diagnosis = diagnose(registry, where)
        # without a policy that can be followed nothing is chosen, for an engine's layers neither
        engines = {each.name: each.status(registry, where) if diagnosis.choices else None for each in registry.engines}
        if as_json:
            statuses = {name.lower(): status and status.as_dict() for name, status in engines.items()}
            output.document({"command": "doctor", **diagnosis.as_dict(), **statuses})
        else:
            output.show(*_for_a_person(diagnosis, every=every, verbose=verbose))
            output.show(*(line for name, status in engines.items() for line in _engine(name, status)))
        if not diagnosis.ok:
            raise typer.Exit(EXIT_FAILED)


def _running(where: str, *, as_json: bool) -> None:
    """Examine an engine that runs. Raises: typer.Exit with 1 unless the plugin serves there."""
    from mla_portable.cli.doctor.running import look_at

    with command(as_json=as_json, doing=f"asking {where}") as output:
        found = look_at(where)
        if as_json:
            output.document({"command": "doctor", "ok": found.serves is True, "engine": found})
        else:
            server = f"{found.engine or 'unknown'} at {found.where}"
            log = [hanging("log", found.where), *([hanging("engine", found.engine)] if found.engine else [])]
            output.show(*([hanging("engine", server)] if "://" in found.where else log))
            output.show(*([hanging("tested", found.tested)] if found.tested else []))
            output.show(*(hanging("model", name) for name in found.models))
            if found.served:
                headings = ["primitive", "served by", "device", "processes"]
                rows = [[each.primitive, each.implementation, each.device, str(each.processes)] for each in found.served]
                output.show("", columns(headings, rows, numbers=headings[3:]), "")
            output.show(*(hanging("why" if not found.serves else "note", line) for line in found.why))
            if found.serves:
                output.show(Text("mla_portable serves there.", "green"))
            else:
                unknown = "Whether mla_portable serves there is unknown."
                words = unknown if found.serves is None else "mla_portable does NOT serve there."
                output.show(Text(words, "bold red"), hanging("remedy", found.remedy))
        if not found.serves:
            raise typer.Exit(EXIT_FAILED)


def _for_a_person(diagnosis: Diagnosis, *, every: bool, verbose: bool) -> Iterator[RenderableType]:
    yield ", ".join(f"{name} {version}" for name, version in diagnosis.versions)
    for name, facts in diagnosis.devices:
        mark = " (examined below)" if name == diagnosis.device and len(diagnosis.devices) > 1 else ""
        yield hanging("device", f"{name}: {_device(facts)}{mark}")
    if len(diagnosis.devices) == 1:
        from mla_portable.choose.facts import why_no_accelerator

        here = (
            "What follows holds for this CPU; `mla-portable explain route --device NAME` answers for a device that is not here."
        )
        yield hanging("", f"no accelerator: {why_no_accelerator()}. {here}")
    for report in diagnosis.plugins:
        distribution = f"{report.distribution} {report.version}".strip() or report.module
        against = diagnosis.not_for_this_device(report.name)
        none = f", none for this device: {', '.join(map(str, against))}" if against else ""
        yield hanging("plugin", f"{report.name} ({distribution}): {_state(report)}{none}")
        yield from (hanging("  ignored", note) for note in report.notes)
    if any(diagnosis.not_for_this_device(report.name) for report in diagnosis.plugins):
        yield hanging("", _how_to_include(diagnosis.device))
    if verbose:
        yield from (f"{report.name}:\n{report.traceback}" for report in diagnosis.plugins if report.traceback)
    yield from (hanging("policy", line) for line in _policy(diagnosis))
    yield from (hanging("times", line) for line in map(_times, diagnosis.times))
    if not diagnosis.times:
        yield hanging("times", "none on record for this device: declared costs rank; `mla-portable bench` makes some")
    yield ""
    if diagnosis.choices:
        served = list(map(partial(_served, diagnosis), diagnosis.choices))
        alone = not any(row[-1] for row in served)
        by_whom = {(chosen, why) for _, chosen, why, _ in served}
        if alone and len(by_whom) == 1 and len(served) > 1:
            ((chosen, why),) = by_whom
            yield f"  {chosen} serves all {len(served)} primitives ({why}); no other implementation works here"
        else:
            headings = ["primitive", "served by", "why", "next best"]
            yield columns(headings[:-1] if alone else headings, [row[:-1] if alone else row for row in served])
            if alone:
                yield "  no other implementation works here"
        yield ""
    if every:
        yield from _implementations(diagnosis)
    for problem in diagnosis.problems:
        bad = problem.fatal or problem.broken
        yield Text.assemble((f"{'BROKEN' if bad else 'note'}  ", "bold red" if bad else "yellow"), problem.what)
        yield hanging("      remedy:", problem.remedy)
    if not diagnosis.problems:
        yield Text("No problems found.", "green")
    elif diagnosis.ok and any(problem.broken for problem in diagnosis.problems):
        yield "Nothing that is broken was selected: exit code 0."


def _how_to_include(device: str) -> str:
    """What the author of a plugin does who wants it to be a candidate on a device."""
    if device == "cpu":
        return 'in a plugin of your own, add "cpu" to `vendors` and `device_types` to try it on a CPU'
    return "in a plugin of your own for this device, declare its vendor and type, or have a detector name the vendor"


def _times(read: TimesRead) -> str:
    counts = {"times": read.times, "configured kernels": read.configured, "constants of prompts": read.prompts}
    words = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    whose = f"of the plugin {read.owner}" if read.owner else "your own"
    return f"{read.file}, {whose}: {words}, {' '.join(filter(None, ('measured', read.recorded, 'on', read.device)))}"


def _device(facts: DeviceFacts) -> str:
    able = {"bf16": facts.has_bf16, "e4m3 conversion": facts.has_fp8_conversion, "fp64": facts.has_fp64}
    words = [
        str(facts),
        f"{facts.num_sms} SMs" if facts.num_sms else "",
        f"{facts.memory_bytes / 2**30:.0f} GiB" if facts.memory_bytes else "",
        f"{facts.shared_memory / 1024:g} KiB of shared memory" if facts.shared_memory else "",
        *(word for word, has in able.items() if has),
        {True: "graphs", False: "no graphs", None: "graphs not tried"}[facts.graph_capture],
    ]
    return ", ".join(filter(None, words))


def _state(report: PluginReport) -> str:
    if report.disabled:
        return f"not imported, disabled by {report.disabled}"
    return f"{len(report.implementations)} implementations" if report.ok else f"BROKEN  {report.error}"


def _policy(diagnosis: Diagnosis) -> list[str]:
    """What is forced, strongest first."""
    if not diagnosis.choices:
        return ["cannot be followed, see below"]
    lines = {control: f"{control}: {primitive}: {target}" for primitive, target, control in diagnosis.rules}
    lines |= {control: f"{control}: disabled: {name}" for name, control in diagnosis.disabled}
    lines |= {name: f"{name}={value}" for name, value in diagnosis.environment if name not in lines}
    return list(lines.values()) or ["no backend is forced; the registry chooses by cost"]


def _served(diagnosis: Diagnosis, choice: PrimitiveChoice) -> list[str]:
    """What serves a primitive, by whose decision or at what cost, and what would serve it otherwise."""
    examined = [each for each in diagnosis.examined if each.primitive == choice.primitive]
    costs = {each.implementation: f"{each.cost:g} {each.cost_source.partition(' ')[0]}" for each in examined}
    partly = {each.implementation for each in examined if each.partly}
    working = partly | {each.implementation for each in examined if not each.reasons}
    working -= {each.implementation for each in examined if each.low}
    others = [f"{name} ({costs[name]})" for name in choice.ranking if name in working and name != choice.chosen]
    why = f"forced by {choice.control}" if choice.forced else f"cost {costs[choice.chosen]}" if choice.chosen else ""
    why += ", for some requests" if choice.chosen in partly else ""
    return [choice.primitive, choice.chosen or "NOTHING", why, others[0] if others else ""]


def _implementations(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """Each of every primitive, with its probe."""
    for primitive, found in groupby(diagnosis.examined, lambda each: each.primitive):
        rows = [
            [
                each.implementation,
                f"{each.cost:g} {each.cost_source.partition(' ')[0]}",
                ("for some requests; " if each.partly else "")
                + ("; ".join(map(str, each.reasons)) or "works")
                + each.remark
                + (f" ({each.probe.stage}, {each.probe.seconds * 1e3:.0f} ms)" if each.probe else ""),
            ]
            for each in found
        ]
        yield Text(primitive, "bold")
        yield columns(["implementation", "cost", f"on {diagnosis.device}"], rows)
    yield ""


def _engine(name: str, status: EngineStatus | None) -> Iterator[RenderableType]:
    if status is None:
        yield f"{name}: not examined, because the policy cannot be followed"
        return
    if status.version is None:
        yield f"{name}: not installed in {sys.prefix}"
        return
    yield f"{name} {status.version}: plugin {'registered' if status.registered else 'NOT registered'} ({status.note})"
    alike = {(route, served) for _, _, route, served in status.choices}
    if len(alike) == 1:
        ((route, served),) = alike
        yield hanging(f"  {DEEPSEEK_V32.name}", f"route {route or 'none'}, whatever the cache and the heads: {served}")
    elif alike:
        rows = [
            [layout, f"{heads} (TP {DEEPSEEK_V32.heads // heads})", route or "none", served]
            for layout, heads, route, served in status.choices
        ]
        yield f"For {DEEPSEEK_V32.name} it would choose"
        yield columns(["cache", "heads per GPU", "route", "served by"], rows)
    if status.indexer:
        yield f"DSA indexer in {name}: {status.indexer}"
    if status.layer:
        yield f"Layer around attention in {name}: {status.layer}"
    for model, words in status.models:
        yield f"{model}'s attention in {name}: {words}"
