# SPDX-License-Identifier: Apache-2.0
"""Loading plugins: each one alone, wholly or not at all, with a report whatever happens."""

from __future__ import annotations

import traceback as traceback_module
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mla_portable.contracts import Detector, Implementation, PluginError, Variable
from mla_portable.contracts.values import printable
from mla_portable.registry.costs import MeasuredCosts, MeasuredTime
from mla_portable.registry.faults import first_line
from mla_portable.registry.limits import DEFAULT_SECONDS
from mla_portable.registry.names import CORE_MODULE
from mla_portable.registry.plugin_sources import HOOK, PluginSource, call_hook
from mla_portable.registry.registrar import StagingRegistrar, Taken


@dataclass(frozen=True, slots=True)
class PluginReport:
    """What became of one plugin.

    Attributes:
        name: of the entry point. module: that it names. distribution, version: that brought it, "" where none did.
        loaded: its implementations are in force. ok: it loaded, and its detectors have not failed since; or it is disabled.
        error: one line, "" when ok. traceback: the whole text, "" when ok.
        disabled: what disables it, so that it was not imported; "" where nothing does.
        implementations: "<backend>.<variant> / <primitive>" of all that is in force, in order of registration.
        notes: what of its measured times is ignored, and why; the plugin is ok all the same.
    """

    name: str
    module: str
    distribution: str
    version: str
    ok: bool
    error: str = ""
    traceback: str = ""
    implementations: tuple[str, ...] = ()
    loaded: bool = True
    disabled: str = ""
    notes: tuple[str, ...] = ()

    @property
    def trouble(self) -> str:
        """What became of it, as the rest of a sentence that names it; "" when ok."""
        if self.ok:
            return ""
        return f"loaded, but {self.error}" if self.loaded else f"did not load: {self.error}"


@dataclass(frozen=True, slots=True)
class Loaded:
    """All that plugins brought: implementations and detectors of those that loaded, a report on each.

    `detectors` pairs each with the name of its plugin. `variables` are those that plugins declared.
    `costs` are over the measured times of all of them.
    """

    implementations: tuple[Implementation, ...]
    detectors: tuple[tuple[str, Detector], ...]
    reports: tuple[PluginReport, ...]
    variables: tuple[Variable, ...]
    costs: MeasuredCosts


def collect(source: PluginSource, taken: Taken, hook: str, *, seconds: float = DEFAULT_SECONDS) -> StagingRegistrar:
    """All that a plugin registers by one hook; its offers join `taken`.

    Raises: PluginTimeout, PluginError, whatever the plugin raises; `taken` is as before then.
    """
    staged = StagingRegistrar(source.name, taken, hook)
    try:
        call_hook(source, hook, staged, seconds)
    finally:
        staged.close()  # a plugin that hangs goes on in its thread
    taken.update(staged.taken)
    return staged


def load_plugins(
    sources: Iterable[PluginSource], *, disabled: Mapping[str, str] | None = None, seconds: float = DEFAULT_SECONDS
) -> Loaded:
    """Load each plugin by itself. Never raises on a plugin's behalf; a user's interrupt goes through.

    Args:
        disabled: names of plugins that are not to be imported -> what disables them; the core's own is imported all the same.
        seconds: the time limit for importing a plugin and for its hook.
    """
    sources, disabled = tuple(sources), disabled or {}
    taken: Taken = {}
    reports: list[PluginReport] = []
    loaded: list[tuple[str, StagingRegistrar]] = []
    times: list[MeasuredTime] = []
    for source in sources:
        report = PluginReport(source.name, source.module, source.distribution, source.version, ok=True)
        if source.name in disabled and source.module != CORE_MODULE:
            reports.append(replace(report, loaded=False, disabled=disabled[source.name]))
            continue
        try:
            if any(source.name == other.name for other in reports):
                raise PluginError(f"duplicate plugin name {source.name!r}: uninstall one of the two distributions")
            staged = collect(source, taken, HOOK, seconds=seconds)
        except Exception as error:  # what the plugin raised and is none, such as SystemExit, has become one (`limited`)
            text = printable("".join(traceback_module.format_exception(error)))
            reports.append(replace(report, ok=False, loaded=False, error=first_line(error), traceback=text))
            continue
        loaded.append((source.name, staged))
        times += staged.measured_times()
        offered = tuple(f"{i.name} / {i.primitive}" for i in staged.offers)
        reports.append(replace(report, implementations=offered, notes=tuple(staged.notes)))
    return Loaded(
        implementations=tuple(offer for _, staged in loaded for offer in staged.offers),
        detectors=tuple((name, detector) for name, staged in loaded for detector in staged.detectors),
        reports=tuple(reports),
        variables=tuple(variable for _, staged in loaded for variable in staged.variables),
        costs=MeasuredCosts(times),
    )
