# SPDX-License-Identifier: Apache-2.0
"""Collect declarations from the registry: the one file of the matrix that loads plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

from mla_portable.contracts import Implementation, Support
from mla_portable.registry import PluginReport, Registry
from mla_portable.registry.plugins import CORE_DISTRIBUTION, CORE_MODULE
from mla_portable.tools.matrix.claims import Claim, Declarations, Objection
from mla_portable.tools.matrix.profiles import Profile

__all__ = ["COMPILER", "collect_declarations", "suite_cases", "support_data"]

COMPILER: Final = "compile_all"
"""A plugin whose kernels compile ahead of time has a module of this name: `TARGETS` lists its architectures, and
`python -m <plugin>.compile_all --json [--quick] [ARCH ...]` compiles for them. Where some of its implementations bring
kernels of others that it cannot compile, `IMPLEMENTATIONS` names the rest."""
_NOT_DATA: Final = ("workspace_bytes", "source")
"""Fields of Support that claim nothing about what can run."""


def collect_declarations(registry: Registry, profiles: Mapping[str, Profile]) -> Declarations:
    """Everything that is registered, held against every profile. No device is touched."""
    owner = {entry: report for report in registry.plugin_reports for entry in report.implementations}
    compilers: dict[str, ModuleType | None] = {}
    claims: list[Claim] = []
    for implementation in registry.implementations():
        report = owner[f"{implementation.name} / {implementation.primitive}"]
        if report.module not in compilers:
            compilers[report.module] = _compiler(report.module)
        targets = _targets(compilers[report.module], implementation.name)
        claims.append(_claim(implementation, report, targets, profiles))
    missing = tuple((report.name, report.error) for report in registry.plugin_reports if not report.loaded)
    return Declarations(tuple(claims), missing)


def suite_cases(registry: Registry, level: str = "quick") -> Callable[[Claim, Profile], list[dict[str, Any]]]:
    """Collects the suite for a claim on a device: the fields of each case's request. Nothing is run."""
    from mla_portable.tools.conformance import cases_for

    by_name = {(each.name, str(each.primitive)): each for each in registry.implementations()}

    def collect(claim: Claim, profile: Profile) -> list[dict[str, Any]]:
        implementation = by_name[claim.implementation, claim.primitive]
        requests = [case.request for case in cases_for(implementation, profile.device_facts(), level)]
        names = ("kv_layout", "num_heads", "topk", "block_size")
        return [{name: getattr(request, name) for name in names} for request in requests]

    return collect


def _claim(
    implementation: Implementation, report: PluginReport, targets: tuple[str, ...], profiles: Mapping[str, Profile]
) -> Claim:
    devices = {
        slug: tuple(
            Objection(reason.subject, reason.given, reason.limit)
            for reason in implementation.support.device_reasons(profile.device_facts())
        )
        for slug, profile in profiles.items()
    }
    return Claim(
        implementation=implementation.name,
        primitive=str(implementation.primitive),
        plugin=report.name,
        module=report.module,
        distribution=report.distribution,
        version=report.version,
        preference=implementation.preference,
        core=(report.distribution, report.module) == (CORE_DISTRIBUTION, CORE_MODULE),
        sources=tuple(sorted(implementation.sources)),
        targets=targets,
        support=support_data(implementation.support),
        devices=devices,
    )


def support_data(support: Support) -> dict[str, Any]:
    """A declaration as JSON holds it, with its source; what a function computes is left out."""
    data: dict[str, Any] = {"source": support.source}
    for field in fields(support):
        if field.name not in _NOT_DATA:
            value = getattr(support, field.name)
            data[field.name] = list(value) if isinstance(value, tuple) else value
    return data


def _compiler(module: str) -> ModuleType | None:
    package = module.partition(":")[0]
    if find_spec(package) is None or not hasattr(import_module(package), "__path__"):
        return None
    if find_spec(f"{package}.{COMPILER}") is None:
        return None
    return import_module(f"{package}.{COMPILER}")


def _targets(compiler: ModuleType | None, implementation: str) -> tuple[str, ...]:
    if compiler is None or implementation not in getattr(compiler, "IMPLEMENTATIONS", (implementation,)):
        return ()
    return tuple(compiler.TARGETS)
