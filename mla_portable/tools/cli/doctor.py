# SPDX-License-Identifier: Apache-2.0
"""`mla-portable doctor`: what is installed here, what works, and how to fix the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from mla_portable.tools.cli.options import DeviceOption, JsonOption, resolve_device
from mla_portable.tools.cli.output import EXIT_FAILED, command, table

if TYPE_CHECKING:
    from mla_portable.registry import PluginReport
    from mla_portable.tools.cli.diagnosis import Diagnosis
    from mla_portable.vllm.status import VllmStatus

__all__ = ["doctor"]


def doctor(
    device: DeviceOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the tracebacks of plugins that did not load.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Examine devices, plugins and policy, probe every implementation, and say how to fix each problem.

    Exit code 1 when a selected backend is broken: the policy names one that did not load or fails its probe, or
    nothing can serve some primitive.
    """
    with command(as_json=as_json) as output:
        where = resolve_device(device)
        from mla_portable.dispatch import current_registry
        from mla_portable.tools.cli.diagnosis import diagnose
        from mla_portable.vllm.status import vllm_status

        diagnosis = diagnose(current_registry(), where)
        # without a policy that can be followed nothing is chosen, for vLLM's layers neither
        vllm = vllm_status(current_registry(), where) if diagnosis.choices else None
        if as_json:
            output.document({"command": "doctor", **diagnosis.as_dict(), "vllm": vllm and vllm.as_dict()})
        else:
            output.show(*_for_a_person(diagnosis, verbose=verbose), _vllm(vllm), *_indexer(vllm))
        if not diagnosis.ok:
            raise typer.Exit(EXIT_FAILED)


def _for_a_person(diagnosis: Diagnosis, *, verbose: bool) -> Iterator[RenderableType]:
    yield "  ".join(f"{name} {version}" for name, version in diagnosis.versions)
    yield _devices(diagnosis)
    plugins = [
        [report.name, f"{report.distribution} {report.version}".strip() or report.module, _state(report)]
        for report in diagnosis.plugins
    ]
    yield table("Plugins", ["plugin", "distribution", "state"], plugins)
    if verbose:
        yield from (f"{report.name}:\n{report.traceback}" for report in diagnosis.plugins if report.traceback)
    yield _policy(diagnosis)
    yield _implementations(diagnosis)
    if not diagnosis.problems:
        yield "No problems found."
    for problem in diagnosis.problems:
        yield f"{'BROKEN' if problem.fatal or problem.broken else 'note'}  {problem.what}"
        yield f"        remedy: {problem.remedy}"
    if diagnosis.ok and any(problem.broken for problem in diagnosis.problems):
        yield "Nothing that is broken was selected: exit code 0."


def _devices(diagnosis: Diagnosis) -> RenderableType:
    rows: list[list[str]] = []
    for name, facts in diagnosis.devices:
        able = {"bf16": facts.has_bf16, "e4m3 conversion": facts.has_fp8_conversion, "fp64": facts.has_fp64}
        rows.append(
            [
                name + (" *" if name == diagnosis.device else ""),
                str(facts),
                facts.vendor,
                str(facts.num_sms or ""),
                f"{facts.shared_memory / 1024:g} KiB" if facts.shared_memory else "",
                f"{facts.memory_bytes / 2**30:.0f} GiB" if facts.memory_bytes else "",
                ", ".join(word for word, has in able.items() if has),
                {True: "yes", False: "no", None: "not tried"}[facts.graph_capture],
            ]
        )
    headings = ["device", "name", "vendor", "SMs", "shared memory", "memory", "abilities", "graphs"]
    return table("Devices (* = examined below)", headings, rows)


def _state(report: PluginReport) -> str:
    if report.disabled:
        return f"not imported, disabled by {report.disabled}"
    return f"{len(report.implementations)} implementations" if report.ok else f"BROKEN  {report.error}"


def _policy(diagnosis: Diagnosis) -> RenderableType:
    if not diagnosis.choices:
        return "Policy: cannot be followed, see below."
    rows = [[control, f"{primitive}: {target}"] for primitive, target, control in diagnosis.rules]
    rows += [[control, f"disabled: {name}"] for name, control in diagnosis.disabled]
    rows += [[name, value] for name, value in diagnosis.environment if not any(name == row[0] for row in rows)]
    if not rows:
        return "Policy: no backend is forced; the registry chooses by cost."
    return table("Policy in force, strongest first", ["forced by", "what"], rows)


def _implementations(diagnosis: Diagnosis) -> RenderableType:
    chosen = {(choice.primitive, choice.chosen): choice.control for choice in diagnosis.choices}
    rows: list[list[str]] = []
    others = Counter[str]()
    for each in diagnosis.examined:
        if any(reason.subject == "vendor" for reason in each.reasons):
            others[each.implementation.partition(".")[0]] += 1
            continue
        rows.append(
            [
                each.primitive,
                each.implementation,
                f"{each.cost:g} {each.cost_source.partition(' ')[0]}",
                "; ".join(map(str, each.reasons)) or "works",
                f"{each.probe.stage}, {each.probe.seconds * 1e3:.0f} ms" if each.probe else "",
                chosen.get((each.primitive, each.implementation), ""),
            ]
        )
    note = "for another vendor's devices; --json lists them"
    rows += [["", f"{count} of {backend}", "", note, "", ""] for backend, count in others.items()]
    headings = ["primitive", "implementation", "cost", f"on {diagnosis.device}", "probe", "selected by"]
    return table("Implementations", headings, rows, numbers=["cost"])


def _vllm(status: VllmStatus | None) -> RenderableType:
    if status is None:
        return "vLLM: not examined, because the policy cannot be followed"
    if status.version is None:
        return "vLLM: not installed"
    title = f"vLLM {status.version}: plugin {'registered' if status.registered else 'NOT registered'} ({status.note})"
    if not status.choices:
        return title
    rows = [[layout, str(heads), route or "none", served] for layout, heads, route, served in status.choices]
    return table(f"{title}; for DeepSeek-V3.2 it would choose", ["cache", "heads per GPU", "route", "served by"], rows)


def _indexer(status: VllmStatus | None) -> Iterator[RenderableType]:
    if status is not None and status.indexer:
        yield f"DSA indexer in vLLM: {status.indexer}"
