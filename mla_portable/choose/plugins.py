# SPDX-License-Identifier: Apache-2.0
"""Loading plugins: each one alone, wholly or not at all, with a report whatever happens.

What only a tool needs of them (baselines, tunables) is loaded when it asks, in the same way.
"""

from __future__ import annotations

import traceback as traceback_module
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Generic, TypeVar

from mla_portable.choose.faults import first_line
from mla_portable.choose.limits import DEFAULT_SECONDS, limited
from mla_portable.choose.names import ADAPTERS, CORE_MODULE
from mla_portable.choose.plugin_sources import PluginCaller, PluginSource
from mla_portable.choose.registrar import CollectingRegistrar, Taken, take
from mla_portable.contracts import Baseline, Detector, Engine, Implementation, PluginError, Tunable, Variable
from mla_portable.errors import printable
from mla_portable.times.files import TimesFile

T = TypeVar("T", Baseline, Tunable)
Loaders = tuple[tuple[str, Callable[[], Iterable[T]]], ...]
"""(plugin, function that returns what it brings)."""


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

    `detectors`, `baselines` and `tunables` pair each function with the name of its plugin. `variables` and `engines`
    are those that this package's adapters and plugins declared. `times` are the files of times of all of them.
    """

    implementations: tuple[Implementation, ...]
    detectors: tuple[tuple[str, Detector], ...]
    reports: tuple[PluginReport, ...]
    variables: tuple[Variable, ...]
    engines: tuple[Engine, ...]
    times: tuple[TimesFile, ...]
    baselines: Loaders[Baseline]
    tunables: Loaders[Tunable]


@dataclass(frozen=True, slots=True)
class Brought(Generic[T]):
    """What plugins brought for a tool. failures: (plugin, one line) of those that failed; nothing that they brought stays."""

    found: tuple[T, ...]
    failures: tuple[tuple[str, str], ...] = ()


def load_plugins(
    sources: Iterable[PluginSource], *, disabled: Mapping[str, str] | None = None, seconds: float = DEFAULT_SECONDS
) -> Loaded:
    """Load each plugin by itself. Never raises on a plugin's behalf; a user's interrupt goes through.

    Args:
        disabled: names of plugins that are not to be imported -> what disables them; the core's own is imported all the same.
        seconds: the time limit for importing a plugin and for its hook.
    """
    sources, disabled = tuple(sources), disabled or {}
    caller = PluginCaller(seconds)
    own = _own_adapters()
    taken: Taken = {name: adapter for staged in own for name, adapter in staged.taken.items()}
    reports: list[PluginReport] = []
    loaded: list[tuple[str, CollectingRegistrar]] = []
    times: list[TimesFile] = []
    for source in sources:
        report = PluginReport(source.name, source.module, source.distribution, source.version, ok=True)
        if source.name in disabled and source.module != CORE_MODULE:
            reports.append(replace(report, loaded=False, disabled=disabled[source.name]))
            continue
        try:
            if any(source.name == other.name for other in reports):
                raise PluginError(f"duplicate plugin name {source.name!r}: uninstall one of the two distributions")
            staged = caller.call(source, taken)
        except Exception as error:  # what the plugin raised and is none, such as SystemExit, has become one (`limited`)
            text = printable("".join(traceback_module.format_exception(error)))
            reports.append(replace(report, ok=False, loaded=False, error=first_line(error), traceback=text))
            continue
        taken.update(staged.taken)
        loaded.append((source.name, staged))
        times += staged.times_files()
        offered = tuple(f"{i.name} / {i.primitive}" for i in staged.offers)
        reports.append(replace(report, implementations=offered, notes=tuple(staged.notes)))
    declared = (*own, *(staged for _, staged in loaded))
    return Loaded(
        implementations=tuple(offer for _, staged in loaded for offer in staged.offers),
        detectors=tuple((name, detector) for name, staged in loaded for detector in staged.detectors),
        reports=tuple(reports),
        variables=tuple(variable for staged in declared for variable in staged.variables),
        engines=tuple(engine for staged in declared for engine in staged.engines),
        times=tuple(times),
        baselines=tuple((name, load) for name, staged in loaded for load in staged.baselines),
        tunables=tuple((name, load) for name, staged in loaded for load in staged.tunables),
    )


def _own_adapters() -> list[CollectingRegistrar]:
    """What the adapters of this package declare, in order. They are imported here; none of them imports its engine."""
    found: list[CollectingRegistrar] = []
    for name in ADAPTERS:
        registrar = CollectingRegistrar(name.rpartition(".")[2], {})
        import_module(f"mla_portable.{name}.registration").mla_portable_register(registrar)
        found.append(registrar)
    return found


def load_offers(loaders: Loaders[T], kind: type[T], reports: Iterable[PluginReport], *, seconds: float) -> Brought[T]:
    """Ask plugins for what they bring for a tool. Never raises on a plugin's behalf; a user's interrupt goes through.

    Args:
        kind: what each function must return. reports: a plugin that did not load, and is not disabled, is a failure.
        seconds: the time limit for each function.
    """
    taken: Taken = {}
    found: list[T] = []
    failures = [(report.name, report.error) for report in reports if not report.loaded and not report.disabled]
    for plugin, load in loaders:
        try:
            what = f"loading the {kind.__name__.lower()}s of the plugin {plugin}"
            offers = limited(what, seconds, lambda load=load: tuple(load()))
            with_these = dict(taken)
            for offer in offers:
                if not isinstance(offer, kind):
                    raise PluginError(f"expected a {kind.__name__}, got {type(offer).__name__}")
                take(with_these, offer, plugin)
        except Exception as error:  # as in `load_plugins`
            failures.append((plugin, first_line(error)))
            continue
        taken = with_these
        found += offers
    return Brought(tuple(found), tuple(failures))
