# SPDX-License-Identifier: Apache-2.0
"""What plugins bring to the benchmark beside their implementations; a plugin that fails at it costs only its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pluggy

from mla_portable.contracts import PROJECT_NAME, Baseline, PluginError, Tunable
from mla_portable.contracts.plugin import BackendSpec
from mla_portable.registry.plugins import PluginSource, first_line, given_plugins, import_plugin, installed_plugins
from mla_portable.registry.policy import disabled_plugins

__all__ = ["Brought", "load_baselines", "load_tunables"]

T = TypeVar("T")
Plugins = Iterable[tuple[str, object]]


@dataclass(frozen=True, slots=True)
class Brought(Generic[T]):
    """What the plugins brought. failures: (plugin, one line) of those whose hook failed; nothing that they brought stays."""

    found: tuple[T, ...]
    failures: tuple[tuple[str, str], ...] = ()


class _Collector(Generic[T]):
    """The registrar that one plugin sees."""

    def __init__(self, kind: type[T], key: Callable[[T], str], taken: Iterable[T]) -> None:
        self.found: list[T] = []
        self._kind, self._key = kind, key
        self._taken = {key(each) for each in taken}

    def add(self, each: T) -> None:
        """Offer one. Raises: PluginError when it is of another kind or its name is taken."""
        if not isinstance(each, self._kind):
            raise PluginError(f"expected a {self._kind.__name__}, got {type(each).__name__}")
        key = self._key(each)
        if key in self._taken:
            raise PluginError(f"{key}: there is a {self._kind.__name__} of that name already")
        self._taken.add(key)
        self.found.append(each)


def load_baselines(plugins: Plugins | None = None) -> Brought[Baseline]:
    """Ask every installed plugin, or those that are given as for `Registry`. Never raises on a plugin's behalf."""
    return _load(plugins, "mla_portable_register_baselines", Baseline, lambda each: f"{each.name} / {each.primitive}")


def load_tunables(plugins: Plugins | None = None) -> Brought[Tunable]:
    """The same for what can be tuned."""
    return _load(plugins, "mla_portable_register_tunables", Tunable, lambda each: f"{each.implementation} / {each.primitive}")


def _load(plugins: Plugins | None, hook: str, kind: type[T], key: Callable[[T], str]) -> Brought[T]:
    sources = installed_plugins() if plugins is None else given_plugins(plugins)
    disabled = disabled_plugins(os.environ)
    found: list[T] = []
    failures: list[tuple[str, str]] = []
    for source in sources:
        if source.name in disabled:
            continue
        collector = _Collector(kind, key, found)
        try:
            _ask(source, hook, collector)
        except (Exception, SystemExit) as error:
            failures.append((source.name, first_line(error)))
        else:
            found += collector.found
    return Brought(tuple(found), tuple(failures))


def _ask(source: PluginSource, name: str, collector: object) -> None:
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(BackendSpec)
    manager.register(import_plugin(source), source.name)
    manager.check_pending()
    hook: Any = getattr(manager.hook, name)
    hook(registrar=collector)
