# SPDX-License-Identifier: Apache-2.0
"""Diagnosis: what is installed here, what works of it, what is wrong, and how to fix it."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Final

import torch

from mla_portable._version import __version__
from mla_portable.accelerator import device_names
from mla_portable.choose import PluginReport, Policy, ProbeReport, Registry
from mla_portable.choose.faults import first_line, is_fatal
from mla_portable.choose.probe import Unjudged
from mla_portable.contracts import Decision, DeviceFacts, InvalidArgument, MLAPortableError, Primitive, Reason, Request
from mla_portable.contracts.support import ONLY_WHEN_FORCED
from mla_portable.times.files import TimesFile
from mla_portable.times.selection import keys_of

_PORTABLE: Final = 50.0
"""The declared cost of portable kernels (`Implementation.preference`); those of a vendor declare less."""
_OF_DEVICES: Final = ("device type", "vendor", "arch")
"""Subjects of the reasons by which a declaration leaves a device out."""
PACKAGES: Final = ("torch", "triton", "vllm", "sglang", "numpy", "pluggy")


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


@dataclass(frozen=True, slots=True)
class Examined:
    """One implementation on the device.

    Attributes:
        cost, cost_source: what it is ranked by for a call of which only the primitive is known.
        reasons: all that speak against it; empty means that it works. probe: what its probe found, None where it was not
            tried because it does not claim the device, or because the probe itself broke down.
        low: its accuracy; it is chosen only when forced.
    """

    implementation: str
    primitive: str
    cost: float
    cost_source: str
    reasons: tuple[Reason, ...]
    probe: ProbeReport | None
    low: bool = False

    @property
    def remark(self) -> str:
        """Behind its state, "" for most."""
        return f" (low accuracy: {ONLY_WHEN_FORCED})" if self.low else ""

    @property
    def partly(self) -> bool:
        """It solves some of its probe's problems and fails others: it is used for requests whose own problem it solves."""
        return self.probe is not None and bool(self.probe.solved) and bool(self.probe.failed)


@dataclass(frozen=True, slots=True)
class PrimitiveChoice:
    """The implementation that is chosen for a primitive on the device; None when none can serve it.

    ranking: all candidates, in the order of the decision.
    """

    primitive: str
    chosen: str | None
    control: str
    forced: str | None
    ranking: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TimesRead:
    """What a file of times has for the device.

    Attributes:
        file: its name, the path of a user's own. owner: the plugin that ships it, "" for a user's own.
        device, recorded: where and when, the newest. times: that rank; configured: kernels that it configures.
        prompts: constants; of another device that stands for this one where the device's name says so.
    """

    file: str
    owner: str
    device: str
    recorded: str
    times: int
    configured: int
    prompts: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that `doctor` knows.

    Attributes:
        versions: (name, version), "not installed" where absent. devices: (torch name, facts) of all that are here.
        device: torch name of the one that was examined. rules: (primitive or "all", target, control), strongest first.
        disabled: (name, control). environment: variables of this project that are set.
        times: the files of times that say something of the device.
        choices: for each primitive; empty where the policy cannot be followed. problems: fatal ones first.
    """

    versions: tuple[tuple[str, str], ...]
    devices: tuple[tuple[str, DeviceFacts], ...]
    device: str
    plugins: tuple[PluginReport, ...]
    rules: tuple[tuple[str, str, str], ...]
    disabled: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    times: tuple[TimesRead, ...]
    examined: tuple[Examined, ...]
    choices: tuple[PrimitiveChoice, ...]
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Nothing that was selected is broken, and every primitive is served."""
        return not any(problem.fatal for problem in self.problems)

    def not_for_this_device(self, plugin: str) -> tuple[Reason, ...]:
        """Why a plugin declares nothing for the device, each once; () where one of its implementations is for it.

        Of architectures nothing is said where the vendor or the device type is another one.
        """
        own = [each for each in self.examined if each.implementation.partition(".")[0] == plugin]
        against = [
            () if each.probe is not None else [reason for reason in each.reasons if reason.subject in _OF_DEVICES]
            for each in own
        ]
        found = dict.fromkeys(reason for reasons in against for reason in reasons) if all(against) else ()
        return tuple(reason for reason in found if reason.subject != "arch") or tuple(found)

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def diagnose(registry: Registry, device: torch.device) -> Diagnosis:
    """Examine every implementation on `device`, probes included.

    What goes wrong on the way becomes a problem; nothing is raised on a plugin's behalf.
    """
    problems = list(_plugin_problems(registry))
    facts = registry.facts(device)
    policy, decisions = Policy(), list[Decision]()
    try:
        policy = registry.policy
    except InvalidArgument as error:
        remedy = "fix or unset the variable, or fix the file, that it names"
        problems.append(Problem(f"the policy cannot be followed: {error}", remedy, fatal=True))
        examined = tuple(_examine(registry, device, facts, policy, {}, problems))
    else:
        reported = list[Problem]()
        decisions = list(_decisions(registry, facts, reported))
        costs = {
            (verdict.implementation, str(decision.request.primitive)): (verdict.cost, verdict.cost_source)
            for decision in decisions
            for verdict in decision.verdicts
        }
        examined = tuple(_examine(registry, device, facts, policy, costs, problems))
        problems += [*reported, *_unserved(decisions, facts)]
    rules = tuple((str(rule.primitive or "all"), rule.target, rule.control) for rule in policy.rules)
    choices = tuple(
        PrimitiveChoice(str(d.request.primitive), d.chosen, d.control, d.forced, tuple(v.implementation for v in d.verdicts))
        for d in decisions
    )
    problems += [*_forced_plugins(registry, rules), *_slow_launches(device)]
    problems += [Problem(each.what, each.remedy) for each in registry.times_ignored]
    problems += _defects(examined, rules, choices)
    problems += _claims_of_everything(registry)
    devices = ("cpu", *(name for each in registry.device_types() if each != "cpu" for name in device_names(each)))
    return Diagnosis(
        versions=(("mla_portable", __version__), ("python", platform.python_version()), *map(_version, PACKAGES)),
        devices=tuple((name, registry.facts(name)) for name in devices),
        device=str(device),
        plugins=registry.plugin_reports,
        rules=rules,
        disabled=policy.disabled,
        environment=registry.environment,
        times=tuple(_times_read(registry.times_files, facts)),
        examined=examined,
        choices=choices,
        problems=tuple(sorted(problems, key=lambda problem: (not problem.fatal, not problem.broken))),
    )


def _times_read(files: Iterable[TimesFile], facts: DeviceFacts) -> Iterator[TimesRead]:
    """What each file has for a device, where it has something. Times of a selection by its keys rank nothing."""
    for file in files:
        times = [each for each in file.times if each.measurement.matches(facts.name) and keys_of(each.form) is None]
        prompts = [each for each in file.prompts if each.measurement.matches(facts.name) or facts.vendor in each.stands_for]
        if not times and not prompts:
            continue
        newest = max((each.measurement for each in (*times, *prompts)), key=lambda each: each.recorded)
        tuned = {(each.implementation, each.primitive, each.layout, each.heads) for each in times if each.configuration}
        ranking = sum(each.configuration is None for each in times)
        yield TimesRead(file.name, file.owner, newest.device, newest.recorded, ranking, len(tuned), len(prompts))


def _slow_launches(device: torch.device) -> Iterator[Problem]:
    """Kernels of Triton that it launches itself, which takes the host longer. On a CPU they are interpreted."""
    if device.type != "cpu" and find_spec("triton") is not None:
        from mla_portable.kit.triton_launcher import why_through_triton

        why = why_through_triton(device.type)
        if why is not None:
            yield Problem(
                f"launches of Triton kernels take the host longer than they need to: {why}",
                "take one of those versions, or leave it as it is: results do not change",
            )


def _version(package: str) -> tuple[str, str]:
    try:
        return package, metadata.version(package)
    except metadata.PackageNotFoundError:
        return package, "not installed"


def _plugin_problems(registry: Registry) -> Iterator[Problem]:
    for report in registry.plugin_reports:
        if not report.ok:
            dist = report.distribution or report.module
            yield Problem(
                f"the plugin {report.name} ({dist} {report.version}) {report.trouble}",
                f"see the traceback with --verbose; then install what is missing, another version of {dist}, or uninstall it; "
                "in a plugin of your own, correct the line that it names",
                broken=True,
            )


def _examine(
    registry: Registry,
    device: torch.device,
    facts: DeviceFacts,
    policy: Policy,
    costs: dict[tuple[str, str], tuple[float, str]],
    problems: list[Problem],
) -> Iterator[Examined]:
    """Each implementation on the device. After a fault of the device itself nothing more is probed."""
    usable = True
    for implementation in registry.implementations():
        name, primitive = implementation.name, str(implementation.primitive)
        reasons = (*policy.against(implementation), *implementation.support.device_reasons(facts))
        report: ProbeReport | None = None
        if not reasons and not usable:
            reasons = (Reason("probe", "not run", "the device failed before"),)
        elif not reasons:
            try:
                report = registry.probe(implementation, device)
                reasons = report.reasons
            except Exception as error:
                usable = not is_fatal(error, device.type)
                reasons = (Reason("probe", f"raised {first_line(error)}", "it should finish"),)
                subject = "the probe" if usable else "the device"
                what = f"{subject} failed while {name} / {primitive} was probed: {first_line(error)}"
                repair = "" if usable else "free its memory or reset it, or "
                remedy = f"{repair}set MLA_PORTABLE_DISABLE={implementation.backend}"
                problems.append(Problem(what, remedy, fatal=True))
        cost = costs.get((name, primitive), (implementation.preference, "declared"))
        yield Examined(name, primitive, *cost, reasons, report, implementation.support.accuracy == "low")


def _decisions(registry: Registry, facts: DeviceFacts, problems: list[Problem]) -> Iterator[Decision]:
    """The choice for each primitive here, whatever the shapes of a call are, under the promises that engines give."""
    for primitive in Primitive.all():
        try:
            yield registry.decide(Request(primitive, facts, **primitive.promises))
        except MLAPortableError as error:
            problems.append(Problem(f"{primitive}: {error}", "fix what it names", fatal=True))
        except Exception as error:  # of the device, which a probe ran into
            problems.append(Problem(f"{primitive}: {first_line(error)}", "see its probe in the table", fatal=True))


def _unserved(decisions: Iterable[Decision], facts: DeviceFacts) -> Iterator[Problem]:
    """Primitives that nothing, or not what is forced, can serve."""
    unserved: dict[tuple[str, str, str], list[str]] = {}
    for decision in decisions:
        if decision.chosen is not None:
            continue
        who = f"{decision.forced}, forced by {decision.control}, cannot" if decision.forced else "nothing installed can"
        reasons = "; ".join(f"{v.implementation}: {_words(v.reasons)}" for v in decision.causes)
        remedy = " or ".join(decision.remedies) if decision.causes else "install a backend for this device"
        key = (who, reasons or "no plugin offers it", remedy)
        unserved.setdefault(key, []).append(str(decision.request.primitive))
    for (who, reasons, remedy), primitives in unserved.items():
        yield Problem(f"{who} serve {', '.join(primitives)} on {facts}: {reasons}", remedy, fatal=True)


def _words(reasons: Iterable[Reason]) -> str:
    return ", ".join(map(str, reasons))


def _remedies(reasons: Iterable[Reason]) -> str:
    return " or ".join(dict.fromkeys(reason.remedy for reason in reasons if reason.remedy))


def _forced_plugins(registry: Registry, rules: tuple[tuple[str, str, str], ...]) -> Iterator[Problem]:
    """Plugins that the policy names and that did not load, or whose detector failed."""
    broken = {report.name: report for report in registry.plugin_reports if not report.ok}
    for target, control in dict.fromkeys((target, control) for _, target, control in rules):
        report = broken.get(target.partition(".")[0])
        if report is not None:
            what = f"{control} names {target}, whose plugin {report.trouble}"
            yield Problem(what, f"fix the plugin, or drop {control}", fatal=True)


def _claims_of_everything(registry: Registry) -> Iterator[Problem]:
    """Vendors' kernels whose declarations name neither a vendor nor an architecture of a device type that vendors share."""
    claims: dict[str, list[str]] = {}
    for each in registry.implementations():
        shared = each.support.device_types is None or "cuda" in each.support.device_types
        if each.preference < _PORTABLE and shared and each.support.vendors is None and each.support.archs is None:
            claims.setdefault(each.name, []).append(str(each.primitive))
    for name, primitives in claims.items():
        where = "it is a candidate on every vendor's devices, before portable kernels"
        what = f"{name} ({', '.join(primitives)}) names no vendor: {where}"
        yield Problem(what, 'in a plugin of your own, declare `vendors=("...",)`, as its detector reports it')


def _defects(
    examined: tuple[Examined, ...], rules: tuple[tuple[str, str, str], ...], choices: tuple[PrimitiveChoice, ...]
) -> Iterator[Problem]:
    """Implementations that are declared for the device and do not work, fatal where the policy names them.

    Those whose failure leaves a forced choice unserved are reported already.
    """
    forced = {choice.primitive for choice in choices if choice.chosen is None and choice.forced}
    groups: dict[tuple[str, str, str, tuple[Reason, ...]], list[str]] = {}
    for each in examined:
        claims_device = each.probe is not None or any(reason.subject == "probe" for reason in each.reasons)
        if not each.reasons or not claims_device:
            continue
        names = (each.implementation, each.implementation.partition(".")[0])
        controls = [control for primitive, target, control in rules if target in names and primitive in ("all", each.primitive)]
        if not (controls and each.primitive in forced):
            solved = ", ".join(each.probe.solved) if each.probe is not None and each.partly else ""
            key = (each.implementation, controls[0] if controls else "", solved, each.reasons)
            groups.setdefault(key, []).append(each.primitive)
    for (name, control, solved, reasons), primitives in groups.items():
        everything = len(primitives) > 1 and len(primitives) == sum(each.implementation == name for each in examined)
        of = f"all {len(primitives)} primitives" if everything else ", ".join(primitives)
        verdict = f"works for some requests only: it solves {solved}, and fails" if solved else "does not work here"
        what = f"{name} ({of}) {verdict}: {_words(reasons)}"
        if all(isinstance(reason, Unjudged) for reason in reasons):
            unjudged = "; ".join(f"{each.given.removeprefix('problem ')} ({each.limit})" for each in reasons)
            what = f"the problem of {name}, {of} {unjudged}"
        remedy = _remedies(reasons) or "install what it misses; it is left out until then"
        if solved:
            remedy += f"; `mla-portable conform {name} --primitive {primitives[0]}` runs every case"
        if control:
            yield Problem(f"{control} names {name}, but {what}", f"drop {control} or {remedy}", fatal=True)
        else:
            yield Problem(what, remedy)
