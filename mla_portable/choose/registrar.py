# SPDX-License-Identifier: Apache-2.0
"""The registrar that a plugin's hook receives: checks on the plugin's own line, keeps all until the hook returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from mla_portable.choose.names import AUTO
from mla_portable.choose.settings import core_variables, prefix_of
from mla_portable.contracts import (
    Baseline,
    Detector,
    Engine,
    Implementation,
    PluginError,
    Tunable,
    Variable,
)
from mla_portable.times.files import TimesFile, parse_times, read_documents

if TYPE_CHECKING:
    from importlib.abc import Traversable

Offer = Implementation | Baseline | Tunable
Taken = dict[tuple[str, str], str]
"""(name, primitive) of an offer, or ("variable" or "engine" in the primitive's place) of a declaration -> who made it."""
_MOST_NOTES: Final = 10
"""On one file of times."""


class CollectingRegistrar:
    """The registrar of one plugin; what it holds counts only once the hook has returned."""

    def __init__(self, plugin: str, taken: Mapping[tuple[str, str], str]) -> None:
        """`taken` are the offers and declarations that were made before."""
        self.offers: list[Implementation] = []
        self.baselines: list[Callable[[], Iterable[Baseline]]] = []
        self.tunables: list[Callable[[], Iterable[Tunable]]] = []
        self.detectors: list[Detector] = []
        self.variables: list[Variable] = []
        self.engines: list[Engine] = []
        self.costs: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.taken: Taken = dict(taken)
        self._plugin = plugin
        self._open = True

    @property
    def is_empty(self) -> bool:
        """Whether the plugin brought nothing that is of use by itself."""
        return not (self.offers or self.detectors or self.baselines or self.tunables or self.engines)

    def add(self, implementation: Implementation) -> None:
        """Offer an implementation. Raises: PluginError when it is malformed or its name is taken."""
        self._require_open()
        if not isinstance(implementation, Implementation):
            raise PluginError(f"expected an Implementation, got {type(implementation).__name__}")
        self._check_backend(implementation)
        take(self.taken, implementation, self._plugin)
        self.offers.append(implementation)

    def add_baselines(self, load: Callable[[], Iterable[Baseline]]) -> None:
        """Bring baselines; `load` is called when they are asked for. Raises: PluginError when it cannot be called."""
        self._require_loader(load, "baselines")
        self.baselines.append(load)

    def add_tunables(self, load: Callable[[], Iterable[Tunable]]) -> None:
        """Bring tunables; `load` is called when they are asked for. Raises: PluginError when it cannot be called."""
        self._require_loader(load, "tunables")
        self.tunables.append(load)

    def _require_loader(self, load: object, what: str) -> None:
        self._require_open()
        if not callable(load):
            raise PluginError(f"add_{what}: expected a function that returns the {what}, got {type(load).__name__}")

    def _check_backend(self, implementation: Implementation) -> None:
        name, backend = implementation.name, implementation.backend
        if backend == AUTO:
            raise PluginError(f"{name}: {AUTO!r} means an automatic choice and cannot name a backend")
        if backend != self._plugin:
            raise PluginError(
                f"{name}: expected a name that starts with {self._plugin + '.'!r}, for the plugin is called {self._plugin!r}; "
                f"rename it to {self._plugin + name[len(backend) :]!r}, or the plugin's entry point to {backend!r}"
            )

    def add_detector(self, detector: Detector) -> None:
        """Offer a detector. Raises: PluginError when it cannot be called."""
        self._require_open()
        if not callable(detector):
            raise PluginError(f"a detector must be callable, got {type(detector).__name__}")
        self.detectors.append(detector)

    def add_costs(self, costs: str | Traversable) -> None:
        """Bring measured times. What cannot be used of them is left out, and described in the plugin's report."""
        self._require_open()
        documents, problems = read_documents(costs)
        self.costs += documents
        self.notes += problems

    def times_files(self) -> list[TimesFile]:
        """What the documents have of what was offered; what cannot be used joins `notes`."""
        offered = {(each.name, str(each.primitive)) for each in self.offers}
        files = [parse_times(text, offered, name=name, owner=self._plugin) for name, text in self.costs]
        for file in files:
            self.notes += [f"{file.name}: {problem}" for problem in file.problems[:_MOST_NOTES]]
            if len(file.problems) > _MOST_NOTES:
                self.notes.append(f"{file.name}: {len(file.problems) - _MOST_NOTES} more like these")
        return files

    def add_variable(self, variable: Variable) -> None:
        """Declare an environment variable. Raises: PluginError when it is malformed, declared twice or not the plugin's own."""
        self._require_open()
        if not isinstance(variable, Variable):
            raise PluginError(f"expected a Variable, got {type(variable).__name__}")
        prefix = prefix_of(self._plugin)
        if variable.name != prefix and not variable.name.startswith(f"{prefix}_"):
            raise PluginError(f"variable {variable.name!r}: expected {prefix}, or a name that starts with {prefix}_")
        if variable.name in {each.name for each in core_variables()}:
            raise PluginError(f"variable {variable.name!r}: declared already")
        self._declare("variable", variable.name)
        self.variables.append(variable)

    def add_engine(self, engine: Engine) -> None:
        """Declare an adapter for an engine. Raises: PluginError when it is no Engine, or another plugin has the adapter."""
        self._require_open()
        if not isinstance(engine, Engine):
            raise PluginError(f"expected an Engine, got {type(engine).__name__}")
        self._declare("engine", engine.name.lower())
        self.engines.append(engine)

    def _declare(self, what: str, name: str) -> None:
        if (name, what) in self.taken:
            raise PluginError(f"{what} {name!r}: declared already")
        self.taken[name, what] = self._plugin

    def close(self) -> None:
        """End registration: what is added later would reach nobody."""
        self._open = False

    def _require_open(self) -> None:
        if not self._open:
            raise PluginError(f"the plugin {self._plugin!r} registers after its hook has returned")


def take(taken: Taken, offer: Offer, plugin: str) -> None:
    """Note that an offer is `plugin`'s. Raises: PluginError where its name is taken for that primitive."""
    name = offer.implementation if isinstance(offer, Tunable) else offer.name
    owner = taken.get((name, offer.primitive))
    if owner is not None:
        raise PluginError(f"{name} / {offer.primitive}: already registered by the plugin {owner!r}")
    taken[name, offer.primitive] = plugin
