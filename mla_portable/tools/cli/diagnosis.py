# SPDX-License-Identifier: Apache-2.0
"""Diagnosis: what is installed here, what works of it, what is wrong, and how to fix it."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any, Final

import torch

from mla_portable import __version__
from mla_portable.accelerator import device_names
from mla_portable.contracts import (
    Decision,
    DeviceFacts,
    InvalidArgument,
    MLAPortableError,
    Primitive,
    Reason,
    Request,
)
from mla_portable.registry import PluginReport, Policy, ProbeReport, Registry

__all__ = ["Choice", "Diagnosis", "Examined", "Problem", "diagnose"]

PACKAGES: Final = ("torch", "triton", "vllm", "numpy", "pluggy")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong.

    Attributes:
        remedy: how to fix it. fatal: it touches what was selected, or leaves a primitive unserved.
        broken: it does not work at all, selected or not; otherwise another implementation takes its place.
    """

    what: str
    remedy: str
    fatal: bool = False
    broken: bool = False

    @property
    def word(self) -> str:
        """What it is called in a listing."""
        return "BROKEN" if self.fatal or self.broken else "note"


@dataclass(frozen=True, slots=True)
class Examined:
    """One implementation on the device.

    Attributes:
        implementation, primitive: what it is. cost, cost_source: what it is ranked by here, for a call of which only the
            primitive is known; cost_source is "declared" or the record of a measurement.
        reasons: all that speak against it; empty means that it works. probe: what its probe found, None where it was not
            tried because it does not claim the device, or because the probe itself broke down.
    """

    implementation: str
    primitive: str
    cost: float
    cost_source: str
    reasons: tuple[Reason, ...]
    probe: ProbeReport | None

    @property
    def ok(self) -> bool:
        return not self.reasons

    @property
    def claims_device(self) -> bool:
        """Its declaration covers the device, so reasons against it are defects or missing pieces."""
        return self.probe is not None or any(reason.subject == "probe" for reason in self.reasons)


@dataclass(frozen=True, slots=True)
class Choice:
    """Who serves a primitive on the device under the policy in force; chosen is None when nobody can."""

    primitive: str
    chosen: str | None
    control: str
    forced: str | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that `doctor` knows.

    Attributes:
        versions: (name, version), "not installed" where absent. devices: (torch name, facts) of all that are here.
        device: torch name of the one that was examined. plugins: what became of each.
        rules: (primitive or "all", target, who forces it), strongest first. disabled: (name, by whom).
        environment: variables of this project that are set.
        examined: every implementation. choices: for each primitive; empty where the policy cannot be followed.
        problems: what is wrong, fatal ones first.
    """

    versions: tuple[tuple[str, str], ...]
    devices: tuple[tuple[str, DeviceFacts], ...]
    device: str
    plugins: tuple[PluginReport, ...]
    rules: tuple[tuple[str, str, str], ...]
    disabled: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    examined: tuple[Examined, ...]
    choices: tuple[Choice, ...]
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Nothing that was selected is broken, and every primitive is served."""
        return not any(problem.fatal for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def diagnose(registry: Registry, device: torch.device) -> Diagnosis:
    """Examine every implementation on `device`, probes included.

    What goes wrong on the way becomes a problem; nothing is raised on a plugin's behalf.
    """
    problems: list[Problem] = list(_plugin_problems(registry))
    facts = registry.facts(device)
    examined = tuple(_examine(registry, device, facts, problems))
    rules: tuple[tuple[str, str, str], ...] = ()
    disabled: tuple[tuple[str, str], ...] = ()
    choices: tuple[Choice, ...] = ()
    try:
        policy = registry.policy
    except InvalidArgument as error:
        remedy = "fix or unset the variable, or fix the file, that it names"
        problems.append(Problem(f"the policy cannot be followed: {error}", remedy, fatal=True))
    else:
        rules = tuple((str(rule.primitive or "all"), rule.target, rule.control) for rule in policy.rules)
        disabled = policy.disabled
        decisions = tuple(_decisions(registry, facts, problems))
        problems += _unserved(decisions, facts)
        examined = tuple(_with_cost(each, decisions) for each in examined)
        choices = tuple(Choice(str(d.request.primitive), d.chosen, d.control, d.forced) for d in decisions)
    problems += _forced_plugins(registry, rules)
    problems += _defects(examined, rules, choices)
    return Diagnosis(
        versions=_versions(),
        devices=tuple(_devices(registry)),
        device=str(device),
        plugins=registry.plugin_reports,
        rules=rules,
        disabled=disabled,
        environment=registry.environment,
        examined=examined,
        choices=choices,
        problems=tuple(sorted(problems, key=lambda problem: (not problem.fatal, not problem.broken))),
    )


def _versions() -> tuple[tuple[str, str], ...]:
    found = [("mla_portable", __version__), ("python", platform.python_version())]
    for name in PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append((name, "not installed"))
    return tuple(found)


def _devices(registry: Registry) -> Iterator[tuple[str, DeviceFacts]]:
    for name in ("cpu", *(name for each in registry.device_types() if each != "cpu" for name in device_names(each))):
        yield name, registry.facts(name)


def _plugin_problems(registry: Registry) -> Iterator[Problem]:
    for report in registry.plugin_reports:
        if not report.ok:
            dist = report.distribution or report.module
            yield Problem(
                f"the plugin {report.name} ({dist} {report.version}) {report.trouble}",
                f"install its missing dependency, install another version of {dist}, or uninstall it; "
                "--verbose shows the traceback",
                broken=True,
            )


def _examine(registry: Registry, device: torch.device, facts: DeviceFacts, problems: list[Problem]) -> Iterator[Examined]:
    """Each implementation on the device. After a fault of the device itself nothing more is probed."""
    usable = True
    try:
        policy = registry.policy
    except InvalidArgument:  # reported as a problem of its own
        policy = Policy()
    for implementation in registry.implementations():
        reasons = (*policy.against(implementation), *implementation.support.device_reasons(facts))
        report: ProbeReport | None = None
        if not reasons and usable:
            try:
                report = registry.probe(implementation, device)
                reasons = report.reasons
            except Exception as error:
                usable = False
                text = _one_line(error)
                reasons = (Reason("probe", f"raised {text}", "it should finish"),)
                problems.append(
                    Problem(
                        f"the device failed while {implementation.name} / {implementation.primitive} was probed: {text}",
                        f"free its memory or reset it, or set MLA_PORTABLE_DISABLE={implementation.backend}",
                        fatal=True,
                    )
                )
        elif not reasons:
            reasons = (Reason("probe", "not run", "the device failed before"),)
        name, primitive = implementation.name, str(implementation.primitive)
        yield Examined(name, primitive, implementation.preference, "declared", reasons, report)


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _decisions(registry: Registry, facts: DeviceFacts, problems: list[Problem]) -> Iterator[Decision]:
    """Who serves each primitive here, whatever the shapes of a call are."""
    for primitive in Primitive.all():
        try:
            yield registry.decide(Request(primitive, facts))
        except MLAPortableError as error:
            problems.append(Problem(f"{primitive}: {error}", "fix what it names", fatal=True))
        except Exception as error:  # of the device, which a probe ran into
            problems.append(Problem(f"{primitive}: {_one_line(error)}", "see what the table says of its probe", fatal=True))


def _unserved(decisions: Iterable[Decision], facts: DeviceFacts) -> Iterator[Problem]:
    """Primitives that nothing, or not what is forced, can serve."""
    unserved: dict[tuple[str, str, str], list[str]] = {}
    for decision in decisions:
        if decision.chosen is not None:
            continue
        who = f"{decision.forced}, forced by {decision.control}, cannot" if decision.forced else "nothing installed can"
        reasons = "; ".join(f"{v.implementation}: {_words(v.reasons)}" for v in decision.causes)
        remedies = _remedies(reason for v in decision.causes for reason in v.reasons)
        if decision.forced:
            remedies = [f"drop {decision.control} to let the registry choose", *remedies]
        key = (who, reasons or "no plugin offers it", " or ".join(remedies) or "install a backend for this device")
        unserved.setdefault(key, []).append(str(decision.request.primitive))
    for (who, reasons, remedy), primitives in unserved.items():
        yield Problem(f"{who} serve {', '.join(primitives)} on {facts}: {reasons}", remedy, fatal=True)


def _with_cost(each: Examined, decisions: Iterable[Decision]) -> Examined:
    """The same with the cost that decided."""
    for decision in decisions:
        for verdict in decision.verdicts:
            if (verdict.implementation, str(decision.request.primitive)) == (each.implementation, each.primitive):
                return replace(each, cost=verdict.cost, cost_source=verdict.cost_source)
    return each


def _words(reasons: Iterable[Reason]) -> str:
    return ", ".join(map(str, reasons))


def _remedies(reasons: Iterable[Reason]) -> list[str]:
    return list(dict.fromkeys(reason.remedy for reason in reasons if reason.remedy))


def _forced_plugins(registry: Registry, rules: tuple[tuple[str, str, str], ...]) -> Iterator[Problem]:
    """Plugins that the policy names and that did not load, or whose detector failed."""
    broken = {report.name: report for report in registry.plugin_reports if not report.ok}
    for target, control in dict.fromkeys((target, control) for _, target, control in rules):
        report = broken.get(target.partition(".")[0])
        if report is not None:
            what = f"{control} names {target}, whose plugin {report.trouble}"
            yield Problem(what, f"fix the plugin, or drop {control}", fatal=True)


def _defects(
    examined: tuple[Examined, ...], rules: tuple[tuple[str, str, str], ...], choices: tuple[Choice, ...]
) -> Iterator[Problem]:
    """Implementations that are declared for the device and do not work, fatal where the policy names them.

    Those whose failure leaves a forced choice unserved are reported already.
    """
    forced = {choice.primitive for choice in choices if choice.chosen is None and choice.forced}
    groups: dict[tuple[str, str, tuple[Reason, ...]], list[str]] = {}
    for each in examined:
        if each.ok or not each.claims_device:
            continue
        names = (each.implementation, each.implementation.partition(".")[0])
        controls = [control for primitive, target, control in rules if target in names and primitive in ("all", each.primitive)]
        if not (controls and each.primitive in forced):
            key = (each.implementation, controls[0] if controls else "", each.reasons)
            groups.setdefault(key, []).append(each.primitive)
    for (name, control, reasons), primitives in groups.items():
        what = f"{name} ({', '.join(primitives)}) does not work here: {_words(reasons)}"
        remedy = " or ".join(_remedies(reasons)) or "install what it misses; it is left out until then"
        if control:
            yield Problem(f"{control} names {name}, but {what}", f"drop {control} or {remedy}", fatal=True)
        else:
            yield Problem(what, remedy)
