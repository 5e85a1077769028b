# SPDX-License-Identifier: Apache-2.0
"""Loading plugins: each one alone, wholly or not at all, with a report whatever happens.

A plugin may fail in any way (its module raises, exits or does not return, the hook is missing, misspelled or raises, a
registration is malformed or taken); the others and the core never notice, and nothing that it had registered before it failed
stays. A plugin that is disabled by its name is not imported at all.
"""

from __future__ import annotations

import threading
import traceback as traceback_module
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from importlib import import_module, metadata
from typing import Any, Final, TypeVar

import pluggy

from mla_portable import __version__
from mla_portable.contracts import (
    ENTRY_POINT_GROUP,
    PROJECT_NAME,
    BackendSpec,
    Detector,
    DeviceFacts,
    Implementation,
    PluginError,
    Primitive,
    Request,
    Variable,
)
from mla_portable.layouts import FP8_DS_MLA
from mla_portable.primitives import SPARSE_DECODE
from mla_portable.registry.costs import MeasuredCosts, MeasuredTime, parse_costs
from mla_portable.registry.limits import DEFAULT_SECONDS, limited
from mla_portable.registry.variables import CORE_VARIABLES, prefix_of

__all__ = [
    "AUTO",
    "CORE_DISTRIBUTION",
    "CORE_MODULE",
    "REFERENCE",
    "Loaded",
    "PluginReport",
    "PluginSource",
    "first_line",
    "given_plugins",
    "import_plugin",
    "installed_plugins",
    "load_plugins",
]

T = TypeVar("T")
HOOK: Final = "mla_portable_register"
CORE_DISTRIBUTION: Final = "mla-portable"
CORE_MODULE: Final = "mla_portable.reference"
"""The core's own plugin: every other implementation is compared with it, so it cannot be left out."""
REFERENCE: Final = "reference.torch"
"""The implementation that probes compare with; it is checked, not probed."""
AUTO: Final = "auto"
"""What users write for "let the registry choose"; no backend may carry the name."""

_EVERYTHING: Final = Request(
    SPARSE_DECODE,
    DeviceFacts(vendor="cpu", name="any", arch="cpu", device_type="cpu"),
    kv_layout=FP8_DS_MLA.name,
    num_heads=1,
    topk=1,
    block_size=1,
    query_len=1,
    rows=1,
    scale_format="amax",
    cache_alignment=1,
    uneven_blocks=True,
    lse=True,
    attn_sink=True,
    lengths=True,
    compact=True,
    prefill_workspace=True,
    graph=True,
)
"""A request that touches every field of a Support."""


@dataclass(frozen=True, slots=True)
class PluginReport:
    """What became of one plugin.

    Attributes:
        name: of the entry point. module: that it names. distribution, version: that brought it, "" where none did.
        loaded: its implementations are in force. ok: it loaded, and its detectors have not failed since; or it is disabled.
        error: one line, "" when ok. traceback: the whole text, "" when ok.
        disabled: what disables it, so that it was not imported; "" where nothing does.
        implementations: "<backend>.<variant> / <primitive>" of all that is in force, in order of registration.
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

    @property
    def trouble(self) -> str:
        """What became of it, as the rest of a sentence that names it; "" when ok."""
        if self.ok:
            return ""
        return f"loaded, but {self.error}" if self.loaded else f"did not load: {self.error}"


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


@dataclass(frozen=True, slots=True)
class Loaded:
    """All that plugins brought: implementations and detectors of those that loaded, a report on each.

    `detectors` pairs each with the name of its plugin. `variables` are the core's and those of the plugins that loaded.
    `costs` are over the measured times of all of them.
    """

    implementations: tuple[Implementation, ...]
    detectors: tuple[tuple[str, Detector], ...]
    reports: tuple[PluginReport, ...]
    variables: tuple[Variable, ...] = CORE_VARIABLES
    costs: MeasuredCosts = field(default_factory=lambda: MeasuredCosts(()))


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
    """Sources for plugins handed over in code: (name, module or object with the hook, or the name of a module)."""

    def source(name: str, plugin: object) -> PluginSource:
        if isinstance(plugin, str):
            return PluginSource(name=name, module=plugin, load=lambda: import_module(plugin))
        return PluginSource(name=name, module=getattr(plugin, "__name__", type(plugin).__name__), load=lambda: plugin)

    return tuple(source(name, plugin) for name, plugin in plugins)


def load_plugins(
    sources: Iterable[PluginSource], *, disabled: Mapping[str, str] | None = None, seconds: float = DEFAULT_SECONDS
) -> Loaded:
    """Load each plugin by itself. Never raises on a plugin's behalf; a user's interrupt goes through.

    Args:
        disabled: names of plugins that are not to be imported -> what disables them; the core's own is imported all the same.
        seconds: the time limit for importing a plugin and for its hook.
    """
    sources, disabled = tuple(sources), disabled or {}
    names = frozenset(source.name for source in sources)
    taken: dict[tuple[str, Primitive], str] = {}
    implementations: list[Implementation] = []
    detectors: list[tuple[str, Detector]] = []
    reports: list[PluginReport] = []
    variables = list(CORE_VARIABLES)
    times: list[MeasuredTime] = []
    timed_devices: dict[str, str] = {}
    for source in sources:
        report = PluginReport(source.name, source.module, source.distribution, source.version, ok=True)
        if source.name in disabled and source.module != CORE_MODULE:
            reports.append(replace(report, loaded=False, disabled=disabled[source.name]))
            continue
        staged = StagingRegistrar(source.name, taken, reserved=names - {source.name})
        try:
            if any(source.name == other.name for other in reports):
                raise PluginError(f"duplicate plugin name {source.name!r}: uninstall one of the two distributions")
            guarded(f"loading the plugin {source.name}", seconds, partial(call_hook, source, staged))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit and the panics of extension modules are no Exception
            staged.close()  # one that hangs goes on in its thread
            text = "".join(traceback_module.format_exception(error))
            reports.append(replace(report, ok=False, loaded=False, error=first_line(error), traceback=text))
            continue
        taken.update({(i.name, i.primitive): source.name for i in staged.implementations})
        implementations += staged.implementations
        detectors += [(source.name, detector) for detector in staged.detectors]
        variables += staged.variables
        times += staged.times
        timed_devices |= staged.timed_devices
        offered = tuple(f"{i.name} / {i.primitive}" for i in staged.implementations)
        reports.append(replace(report, implementations=offered))
    costs = MeasuredCosts(times, timed_devices)
    return Loaded(tuple(implementations), tuple(detectors), tuple(reports), tuple(variables), costs)


def guarded(what: str, seconds: float, work: Callable[[], T]) -> T:
    """Run code of a plugin under a time limit; its own KeyboardInterrupt is a failure, the user's is not.

    Signals reach the main thread alone, so one that is raised in the thread of the work is the plugin's. Without a limit the
    work runs in the caller's thread, and an interrupt there is taken for the user's.

    Raises: PluginTimeout; PluginError for a KeyboardInterrupt of the plugin's; what the work raises.
    """

    def run() -> T:
        try:
            return work()
        except KeyboardInterrupt as error:
            if threading.current_thread() is threading.main_thread():
                raise
            raise PluginError(f"{what} raised KeyboardInterrupt") from error

    return limited(what, seconds, run)


def import_plugin(source: PluginSource, seconds: float = DEFAULT_SECONDS) -> object:
    """The plugin's module, imported under a time limit. Raises: as `guarded`."""
    return guarded(f"importing the plugin {source.name}", seconds, source.load)


def require_core(source: PluginSource) -> None:
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


def call_hook(source: PluginSource, registrar: StagingRegistrar) -> None:
    """Import a plugin and let it register, through a plugin manager of its own."""
    require_core(source)
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(BackendSpec)
    plugin = source.load()
    manager.register(plugin, source.name)
    manager.check_pending()  # a hookimpl of an unknown name, which pluggy alone would leave uncalled
    hook: Any = getattr(manager.hook, HOOK)
    if not hook.get_hookimpls():
        close = get_close_matches(HOOK, dir(plugin), n=1)
        hint = f"; did you mean {close[0]!r}, and is it decorated with @hookimpl?" if close else ""
        raise PluginError(f"{source.module} has no @hookimpl named {HOOK}{hint}")
    try:
        hook(registrar=registrar)
    finally:
        registrar.close()
    foreign = {time.implementation for time in registrar.times} - {each.name for each in registrar.implementations}
    if foreign:
        raise PluginError(f"{source.module} brings costs of {', '.join(sorted(foreign))}, which it does not offer")
    if not registrar.implementations and not registrar.detectors:
        raise PluginError(
            f"{source.module} registered nothing; offer every implementation and let `check` say what is missing here"
        )


class StagingRegistrar:
    """The registrar that one plugin sees: checks on the plugin's own line, keeps everything until the hook is through."""

    def __init__(
        self, plugin: str, taken: Mapping[tuple[str, Primitive], str], *, reserved: Collection[str] = frozenset()
    ) -> None:
        """`taken` names the owner of each registered pair; `reserved` are the other plugins' names."""
        self.implementations: list[Implementation] = []
        self.detectors: list[Detector] = []
        self.variables: list[Variable] = []
        self.times: list[MeasuredTime] = []
        self.timed_devices: dict[str, str] = {}
        self._plugin, self._taken, self._reserved = plugin, dict(taken), reserved
        self._open = True

    def add(self, implementation: Implementation) -> None:
        """Offer an implementation. Raises: PluginError when it is malformed or its name is taken."""
        self._require_open()
        check_implementation(implementation)
        name, primitive = implementation.name, implementation.primitive
        if implementation.backend == AUTO:
            raise PluginError(f"{name}: {AUTO!r} means an automatic choice and cannot name a backend")
        if implementation.backend in self._reserved:
            raise PluginError(
                f"{name}: the backend name {implementation.backend!r} belongs to the plugin of that name; "
                f"register it as '{self._plugin}.<variant>'"
            )
        owner = self._taken.get((name, primitive))
        if owner is not None:
            raise PluginError(f"{name} / {primitive}: already registered by the plugin {owner!r}")
        self._taken[name, primitive] = self._plugin
        self.implementations.append(implementation)

    def add_detector(self, detector: Detector) -> None:
        """Offer a detector. Raises: PluginError when it cannot be called."""
        self._require_open()
        if not callable(detector):
            raise PluginError(f"a detector must be callable, got {type(detector).__name__}")
        self.detectors.append(detector)

    def add_costs(self, costs: str) -> None:
        """Bring measured times. Raises: PluginError for a text that `costs_text` did not write."""
        self._require_open()
        try:
            times, devices = parse_costs(costs)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise PluginError(f"costs cannot be read: {first_line(error)}") from error
        self.times += times
        self.timed_devices |= devices

    def add_variable(self, variable: Variable) -> None:
        """Declare an environment variable. Raises: PluginError when it is malformed, declared twice or not the plugin's own."""
        self._require_open()
        if not isinstance(variable, Variable):
            raise PluginError(f"expected a Variable, got {type(variable).__name__}")
        prefix = prefix_of(self._plugin)
        if variable.name != prefix and not variable.name.startswith(f"{prefix}_"):
            raise PluginError(f"variable {variable.name!r}: expected {prefix}, or a name that starts with {prefix}_")
        if variable.name in {each.name for each in (*CORE_VARIABLES, *self.variables)}:
            raise PluginError(f"variable {variable.name!r}: declared already")
        self.variables.append(variable)

    def close(self) -> None:
        """End registration: what is added later would reach nobody."""
        self._open = False

    def _require_open(self) -> None:
        if not self._open:
            raise PluginError(f"the plugin {self._plugin!r} registers after its hook has returned")


def check_implementation(implementation: object) -> None:
    """Raise PluginError unless every field can be used as declared. Contracts check the rest when the value is made."""
    if not isinstance(implementation, Implementation):
        raise PluginError(f"expected an Implementation, got {type(implementation).__name__}")
    where = f"{implementation.name} / {implementation.primitive}"
    if not callable(implementation.check):
        raise PluginError(f"{where}: check must be callable, got {type(implementation.check).__name__}")
    support = implementation.support
    for name in (
        "device_types",
        "vendors",
        "archs",
        "kv_layouts",
        "num_heads",
        "padded_heads",
        "block_sizes",
        "scale_formats",
    ):
        value = getattr(support, name)
        if value is not None and not isinstance(value, tuple):
            raise PluginError(f"{where}: Support.{name} must be a tuple, got {type(value).__name__} {value!r}")
    try:
        for reason in support.reasons(_EVERYTHING):
            str(reason)
    except Exception as error:  # whatever a wrongly typed limit leads to
        raise PluginError(f"{where}: its Support cannot be evaluated: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """`error` in one line: its type and the first line of its message."""
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0]}" if message else type(error).__name__
