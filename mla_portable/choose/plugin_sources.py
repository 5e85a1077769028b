# SPDX-License-Identifier: Apache-2.0
"""Where plugins come from, and the one way into their code: under a time limit, through a hook that pluggy has checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module, metadata
from typing import Any, Final

import pluggy

from mla_portable._version import __version__
from mla_portable.choose.limits import PluginTimeout, limited
from mla_portable.choose.names import CORE_DISTRIBUTION, CORE_MODULE
from mla_portable.choose.registrar import CollectingRegistrar, Taken
from mla_portable.contracts import ENTRY_POINT_GROUP, PROJECT_NAME, BackendSpec, PluginError
from mla_portable.contracts.values import check_type, describe, refuse

HOOK: Final = "mla_portable_register"


@dataclass(frozen=True, slots=True)
class PluginSource:
    """Where a plugin comes from, before any of its code runs.

    Attributes:
        load: returns its module (or any object with the hook). requires: its distribution's requirements, as in metadata.
    """

    name: str
    module: str
    load: Callable[[], object]
    distribution: str = ""
    version: str = ""
    requires: tuple[str, ...] = ()


def installed_plugins() -> tuple[PluginSource, ...]:
    """The core's own plugin, then every other entry point of the group by name; reads metadata, imports nothing.

    The core is this package, whatever distributions call themselves.
    """

    def source(point: metadata.EntryPoint) -> PluginSource:
        distribution = point.dist
        return PluginSource(
            name=point.name,
            module=point.value,
            load=point.load,
            distribution=distribution.name if distribution else "",
            version=distribution.version if distribution else "",
            requires=tuple(distribution.requires or ()) if distribution else (),
        )

    core = PluginSource("reference", CORE_MODULE, lambda: import_module(CORE_MODULE), CORE_DISTRIBUTION, __version__)
    points = metadata.entry_points(group=ENTRY_POINT_GROUP)
    found = [source(point) for point in points if point.value != CORE_MODULE]
    return (core, *sorted(found, key=lambda s: (s.name, s.distribution)))


def given_plugins(plugins: Iterable[tuple[str, object]]) -> tuple[PluginSource, ...]:
    """Sources for plugins handed over in code: (name, module or object with the hook, or the name of a module).

    Raises: InvalidArgument for what is no such pair.
    """
    expected = "pairs of a name and a module, an object with the hook or a module's name"
    check_type("Registry", "plugins", plugins, Iterable, expected)
    plugins = tuple(plugins)
    for index, pair in enumerate(plugins):
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):  # pyright: ignore[reportUnnecessaryComparison, reportUnnecessaryIsInstance]
            refuse("Registry", f"plugins[{index}]", describe(pair), expected)

    def source(name: str, plugin: object) -> PluginSource:
        if isinstance(plugin, str):
            return PluginSource(name=name, module=plugin, load=lambda: import_module(plugin))
        return PluginSource(name=name, module=getattr(plugin, "__name__", type(plugin).__name__), load=lambda: plugin)

    return tuple(source(name, plugin) for name, plugin in plugins)


class PluginCaller:
    """Imports plugins and calls their hook, one after the other, through one plugin manager.

    The manager holds a plugin only while that registers, so a call of the hook reaches no other plugin, and neither does what
    pluggy finds wrong with one.
    """

    def __init__(self, seconds: float) -> None:
        """seconds: the time limit for importing a plugin and for its hook."""
        self._seconds, self._manager = seconds, _plugin_manager()

    def call(self, source: PluginSource, taken: Taken) -> CollectingRegistrar:
        """Import a plugin and let it register. Returns all that it registered.

        Args:
            taken: the offers that other plugins made before.
        Raises: PluginTimeout; PluginError; whatever the plugin raises.
        """
        registrar = CollectingRegistrar(source.name, taken)
        try:
            limited(f"loading the plugin {source.name}", self._seconds, partial(_call, self._manager, source, registrar))
        except PluginTimeout:
            self._manager = _plugin_manager()  # the plugin's thread is left behind and may still use the other
            raise
        finally:
            registrar.close()  # for that thread
        return registrar


def _plugin_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(BackendSpec)
    return manager


def _call(manager: pluggy.PluginManager, source: PluginSource, registrar: CollectingRegistrar) -> None:
    _require_core(source)
    plugin = source.load()
    try:
        manager.register(plugin, source.name)
        manager.check_pending()  # a hookimpl of an unknown name, which pluggy alone would leave uncalled
        hook: Any = getattr(manager.hook, HOOK)
        if not hook.get_hookimpls():
            close = get_close_matches(HOOK, dir(plugin), n=1)
            hint = f"; did you mean {close[0]!r}, and is it decorated with @hookimpl?" if close else ""
            raise PluginError(f"{source.module} has no @hookimpl named {HOOK}{hint}")
        hook(registrar=registrar)
    finally:
        if manager.has_plugin(source.name):
            manager.unregister(name=source.name)
    if registrar.is_empty:
        raise PluginError(
            f"{source.module} registered nothing; offer every implementation and let `check` say what is missing here"
        )


def _require_core(source: PluginSource) -> None:
    """Raise PluginError where the plugin's distribution requires another version of this package.

    Reads requirements with `packaging`, where that is installed; installers check them too.
    """
    try:
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.utils import canonicalize_name
    except ImportError:
        return
    for line in source.requires:
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue
        if canonicalize_name(wanted.name) != CORE_DISTRIBUTION or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        if not wanted.specifier.contains(__version__, prereleases=True):
            raise PluginError(f"{source.distribution} {source.version} requires {line}, and {__version__} is installed")
