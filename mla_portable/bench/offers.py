# SPDX-License-Identifier: Apache-2.0
"""What plugins bring to the benchmark beside their implementations; a plugin that fails at it costs only its own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mla_portable.contracts import Baseline, Tunable
from mla_portable.registry.faults import first_line
from mla_portable.registry.plugin_sources import given_plugins, installed_plugins
from mla_portable.registry.plugins import collect
from mla_portable.registry.policy import disabled_plugins
from mla_portable.registry.registrar import Taken

T = TypeVar("T")
Plugins = Iterable[tuple[str, object]]


@dataclass(frozen=True, slots=True)
class Brought(Generic[T]):
    """What the plugins brought. failures: (plugin, one line) of those whose hook failed; nothing that they brought stays."""

    found: tuple[T, ...]
    failures: tuple[tuple[str, str], ...] = ()


def load_baselines(plugins: Plugins | None = None) -> Brought[Baseline]:
    """Ask every installed plugin, or those that are given as for `Registry`. Never raises on a plugin's behalf."""
    return _load(plugins, "mla_portable_register_baselines")


def load_tunables(plugins: Plugins | None = None) -> Brought[Tunable]:
    """The same for what can be tuned."""
    return _load(plugins, "mla_portable_register_tunables")


def _load(plugins: Plugins | None, hook: str) -> Brought[Any]:
    disabled = disabled_plugins(os.environ)
    taken: Taken = {}
    found: list[Any] = []
    failures: list[tuple[str, str]] = []
    for source in installed_plugins() if plugins is None else given_plugins(plugins):
        try:
            found += () if source.name in disabled else collect(source, taken, hook).offers
        except (Exception, SystemExit) as error:
            failures.append((source.name, first_line(error)))
    return Brought(tuple(found), tuple(failures))
