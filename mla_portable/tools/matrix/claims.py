# SPDX-License-Identifier: Apache-2.0
"""Claims: what the installed implementations declare, as plain data, and held against every device profile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, cast

from mla_portable.contracts import Primitive, Reason, Request, Support
from mla_portable.registry import Registry
from mla_portable.registry.names import CORE_DISTRIBUTION, CORE_MODULE
from mla_portable.sources import sources_of
from mla_portable.tools.matrix.profiles import Profile

COMPILER: Final = "compile_all"
"""A plugin whose kernels compile ahead of time has a module of this name: `TARGETS` lists its architectures, and
`python -m <plugin>.compile_all --json [--quick] [ARCH ...]` compiles for them. Where some of its implementations bring
kernels of others that it cannot compile, `IMPLEMENTATIONS` names the rest."""
_HEADS: Final = ("num_heads", "max_heads", "padded_heads")
_NOT_LIMITS: Final = ("source", "workspace_bytes")
"""Fields of Support that claim nothing about what can run."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One implementation of one primitive.

    Attributes:
        plugin, module, distribution, version: what brought it. preference: its declared cost.
        sources: where the code that its evidence is bound to starts. support: the declaration, as JSON holds it.
        targets: architectures that it declares and its plugin compiles for ahead of time, () where it cannot.
        core: it belongs to the core distribution, so that a CPU runs it as it is.
        devices: profile slug -> reasons against it; empty where the declaration includes the device.
    """

    implementation: str
    primitive: str
    plugin: str
    module: str
    distribution: str
    version: str
    preference: float
    core: bool
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    support: Mapping[str, Any]
    devices: Mapping[str, tuple[Reason, ...]]

    @property
    def backend(self) -> str:
        return self.implementation.partition(".")[0]

    @property
    def layouts(self) -> tuple[str | None, ...]:
        """The rows that the claim fills in the matrix."""
        primitive = Primitive.named(self.primitive)
        if not primitive.cache:
            return (None,)
        declared = self.support["kv_layouts"]
        return primitive.layouts if declared is None else tuple(declared)


@dataclass(frozen=True, slots=True)
class Declarations:
    """Everything that is declared. missing: plugins that did not load, with why. plugins: (name, distribution, version)."""

    claims: tuple[Claim, ...]
    missing: tuple[tuple[str, str], ...] = ()
    plugins: tuple[tuple[str, str, str], ...] = ()


def collect_declarations(registry: Registry, profiles: Mapping[str, Profile]) -> Declarations:
    """Everything that is registered, held against every profile. No device is touched."""
    owner = {entry: report for report in registry.plugin_reports for entry in report.implementations}
    facts = {slug: profile.device_facts() for slug, profile in profiles.items()}
    claims: list[Claim] = []
    for each in registry.implementations():
        report = owner[f"{each.name} / {each.primitive}"]
        claims.append(
            Claim(
                implementation=each.name,
                primitive=str(each.primitive),
                plugin=report.name,
                module=report.module,
                distribution=report.distribution,
                version=report.version,
                preference=each.preference,
                core=(report.distribution, report.module) == (CORE_DISTRIBUTION, CORE_MODULE),
                sources=sources_of(each),
                targets=_targets(report.module, each.name, each.support.archs),
                support=support_data(each.support),
                devices={slug: tuple(each.support.device_reasons(device)) for slug, device in facts.items()},
            )
        )
    missing = tuple((report.name, report.error) for report in registry.plugin_reports if not report.loaded)
    plugins = tuple((report.name, report.distribution, report.version) for report in registry.plugin_reports)
    return Declarations(tuple(claims), missing, plugins)


def support_data(support: Support) -> dict[str, Any]:
    """A declaration as JSON holds it, with its source; what a function computes is left out."""
    values = {field.name: getattr(support, field.name) for field in fields(support) if field.name != "workspace_bytes"}
    return {name: _as_json(value) for name, value in values.items()}


def _as_json(value: Any) -> Any:
    return [_as_json(each) for each in cast("tuple[Any, ...]", value)] if isinstance(value, tuple) else value


def suite_cases(registry: Registry, level: str = "quick") -> Callable[[Claim, Profile], list[Request]]:
    """Collects the requests of the suite's cases for a claim on a device. Nothing is run."""
    from mla_portable.tools.conformance import cases_for

    by_name = {(each.name, str(each.primitive)): each for each in registry.implementations()}

    def collect(claim: Claim, profile: Profile) -> list[Request]:
        implementation = by_name[claim.implementation, claim.primitive]
        return [case.request for case in cases_for(implementation, profile.device_facts(), level)]

    return collect


def case_ids(registry: Registry, profiles: Mapping[str, Profile]) -> Callable[[Any, str, str], Collection[str] | None]:
    """Collects the ids of cases for (claim of a report, level, profile); None where it declares something else now."""
    from mla_portable.tools.conformance import cases_for

    by_name = {(each.name, str(each.primitive)): each for each in registry.implementations()}

    def collect(claim: Any, level: str, profile: str) -> Collection[str] | None:
        implementation = by_name.get((claim.implementation, claim.primitive))
        if implementation is None or support_data(implementation.support) != claim.support:
            return None
        return [case.id for case in cases_for(implementation, profiles[profile].device_facts(), level)]

    return collect


def _targets(module: str, implementation: str, archs: tuple[str, ...] | None) -> tuple[str, ...]:
    package = module.partition(":")[0]
    if find_spec(package) is None or not hasattr(import_module(package), "__path__"):
        return ()
    name = f"{package}.{COMPILER}"
    compiler = None if find_spec(name) is None else import_module(name)
    if compiler is None or implementation not in getattr(compiler, "IMPLEMENTATIONS", (implementation,)):
        return ()
    return tuple(target for target in compiler.TARGETS if archs is None or target in archs)


def wider(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What declaration `new` claims beyond `old`, in words; [] when everything it claims was claimed before.

    What a field limits follows from its type and name in Support, so that a new field counts at once: a tuple allows its
    elements and None everything; `max_` is a limit; `needs_` and `min_` ask for something of the device; another bool is a
    feature; another int divides what is accepted. A field that one of the declarations lacks has its default there.
    """
    found = _wider_heads(old, new)
    for field in fields(Support):
        name = field.name
        if name in (*_HEADS, *_NOT_LIMITS):
            continue
        before, after = (each.get(name, field.default) for each in (old, new))
        if str(field.type).startswith("tuple"):
            if before is not None and (after is None or not _elements(after) <= _elements(before)):
                more = "any" if after is None else _words(_elements(after) - _elements(before))
                found.append(f"{name} {more} (evidence covers {_words(before)})")
        elif name.startswith("max_"):
            if before is not None and (after is None or after > before):
                found.append(f"{name} {'without limit' if after is None else after} (evidence covers {before})")
        elif name.startswith(("needs_", "min_")):
            found += [f"{name} {after} (evidence has {before})"] if after < before else []
        elif field.type == "bool":
            found += [f"{name} (evidence is without)"] if after > before else []
        elif after % before:
            found.append(f"{name} {after} (evidence covers {before})")
    return found


def _elements(values: Iterable[Any]) -> set[Any]:
    """Those of a declared tuple; pairs are lists where they come from JSON."""
    return {tuple(each) if isinstance(each, list) else each for each in values}


def _words(values: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, values))) or "none"


def _wider_heads(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Head counts are one claim in three fields: all absent means every count."""
    if not any(old.get(name) for name in _HEADS) or all(old.get(name) == new.get(name) for name in _HEADS):
        return []
    if not any(new.get(name) for name in _HEADS):
        return ["num_heads any (evidence covers a limited set)"]
    more = sorted(_heads(new) - _heads(old))
    span = "" if not more else str(more[0]) if len(more) == 1 else f"{more[0]} to {more[-1]}"
    return [f"num_heads {span} (evidence is without)"] if more else []


def _heads(support: Mapping[str, Any]) -> set[int]:
    highest = max([support.get("max_heads") or 0, *(support.get("padded_heads") or ())])
    return {*range(1, highest + 1), *(support.get("num_heads") or ())}
