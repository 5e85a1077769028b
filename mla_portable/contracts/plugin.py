# SPDX-License-Identifier: Apache-2.0
"""The plugin API: what a vendor's package registers, by the hook of `BackendSpec` in a module that its entry point names.

The module should be light: import the vendor's library in `check` and `bind`, not at import. pluggy is used only for
registration, not on the path of a call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol

import pluggy
import torch

from mla_portable.contracts.device import DeviceFacts
from mla_portable.contracts.engine import Engine
from mla_portable.contracts.primitive import F, Primitive
from mla_portable.contracts.request import Request
from mla_portable.contracts.schedule import ScheduleKind
from mla_portable.contracts.support import Reason, Support
from mla_portable.contracts.values import describe
from mla_portable.errors import PluginError

if TYPE_CHECKING:
    from importlib.abc import Traversable

PROJECT_NAME: Final = "mla_portable"
ENTRY_POINT_GROUP: Final = "mla_portable.backends"
hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)

_NAME = re.compile(r"[a-z][a-z0-9_]*\.[a-z][a-z0-9_]*")


def _is_cost(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _nothing_missing(device: DeviceFacts) -> Iterable[Reason]:
    return ()


@dataclass(frozen=True, slots=True)
class Implementation(Generic[F]):
    """One way to run one primitive.

    Attributes:
        name: "<backend>.<variant>", lower case, e.g. "triton.portable". The backend part groups a vendor's variants and is
            what users name in `backend=`.
        primitive: the operation.
        support: the only declaration of what it can run.
        bind: makes the callable for one request (which `support` accepts). Kernel configuration is chosen here, never
            per call. May import the vendor's library; may compile.
        check: library found, symbols found, calling convention identified on this device? Returns the reasons why not.
            It runs once per device, before the numeric probe.
        preference: declared cost, smaller is preferred. Vendor kernels about 10, portable kernels 50, reference 1000.
        schedule_kind: what `schedule=` of sparse_decode, indexer_logits or indexer_select takes, and who plans it; None where
            any is ignored. One with a kind is also called without a schedule, and then makes its own.
        prefills_as: of sparse_decode, the name of the sparse_prefill that is the same kernel on the same cache, so that one
            call may serve a step's decodes and prefills together; "" for none.
    """

    name: str
    primitive: Primitive[F]
    support: Support
    bind: Callable[[Request[F]], F]
    check: Callable[[DeviceFacts], Iterable[Reason]] = _nothing_missing
    preference: float = 50.0
    schedule_kind: ScheduleKind | None = None
    prefills_as: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise PluginError(f"implementation name {self.name!r}: expected '<backend>.<variant>' in lower case")
        if not isinstance(self.primitive, Primitive):
            raise PluginError(f"{self.name}: primitive {self.primitive!r} is not one of {', '.join(Primitive.all())}")
        if not isinstance(self.support, Support):
            raise PluginError(f"{self.name} / {self.primitive}: support must be a Support, got {type(self.support).__name__}")
        if not callable(self.bind):
            raise PluginError(f"{self.name} / {self.primitive}: bind must be callable, got {type(self.bind).__name__}")
        if not callable(self.check):
            raise PluginError(f"{self.name} / {self.primitive}: check must be callable, got {type(self.check).__name__}")
        if not _is_cost(self.preference):
            expected = f"a finite number of 0 or more, got {describe(self.preference)}"
            raise PluginError(f"{self.name} / {self.primitive}: preference must be {expected}")
        if self.schedule_kind is not None and not isinstance(self.schedule_kind, ScheduleKind):
            got = type(self.schedule_kind).__name__
            raise PluginError(f"{self.name} / {self.primitive}: schedule_kind must be a ScheduleKind or None, got {got}")

    @property
    def backend(self) -> str:
        return self.name.partition(".")[0]

    @property
    def layouts(self) -> tuple[str, ...]:
        """Names of the layouts that it declares of the primitive's cache; () where the primitive touches none."""
        declared = self.support.layouts
        return tuple(name for name in self.primitive.layouts if name in declared)


Detector = Callable[[torch.device], DeviceFacts | None]
"""Recognises a vendor's device and characterises it; None means "not mine". Must not raise on other vendors' machines."""


def _any_value(value: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable, and what it may be set to. A variable of mla_portable that does not exist is an error.

    Attributes:
        name: starts with MLA_PORTABLE_<PLUGIN>, the plugin's name in upper case.
        expected: the allowed values in words, for the error message.
        accepts: whether a value, stripped and not empty, is allowed.
    """

    name: str
    expected: str
    accepts: Callable[[str], bool] = _any_value

    @classmethod
    def choice(cls, name: str, *values: str) -> Variable:
        """A variable that takes one of `values`, in upper or lower case."""
        return cls(name, f"one of {', '.join(values)}", lambda value: value.lower() in values)


class Registrar(Protocol):
    """What the hook receives. A malformed registration raises PluginError on the plugin's own line."""

    def add(self, implementation: Implementation) -> None:
        """Offer an implementation; two of one name and primitive are an error."""
        ...

    def add_detector(self, detector: Detector) -> None:
        """Recognise this vendor's devices, before torch's own names are used."""
        ...

    def add_baselines(self, load: Callable[[], Iterable[Baseline]]) -> None:
        """Bring kernels of other projects to the benchmark.

        Args:
            load: called by `mla-portable bench kernels` alone, which times what it returns. It imports the modules that only
                the benchmark needs. If it fails, the plugin's implementations stay.
        """
        ...

    def add_tunables(self, load: Callable[[], Iterable[Tunable]]) -> None:
        """Declare which implementations can be tuned.

        Args:
            load: called by `mla-portable tune` alone, in the same way.
        """
        ...

    def add_costs(self, costs: str | Traversable) -> None:
        """Add times of the plugin's implementations, which `mla-portable bench costs` and `bench prompts --fit --out` write.

        They rank implementations on the devices that were timed, and decide which prompts a masked_prefill serves in an engine.
        The fastest time on record is over those of all plugins. What cannot be used of a file is left out, and `mla-portable
        doctor` says why.

        Args:
            costs: a folder with a file "<device>.json" for each device, as in `importlib.resources.files(__name__) / "costs"`;
                one such file; or its text.
        """
        ...

    def add_variable(self, variable: Variable) -> None:
        """Declare an environment variable that the plugin reads, so that its name is known and its value checked."""
        ...

    def add_engine(self, engine: Engine) -> None:
        """Declare an adapter for an inference engine, of which `mla-portable doctor` shows the status."""
        ...


@dataclass(frozen=True, slots=True)
class BaselineCall:
    """A baseline made ready for one problem.

    Attributes:
        run: does the work on prepared arguments; timed, on a GPU by replaying a CUDA graph.
        result: the results of the latest `run`, converted to the primitive's conventions; never timed.
    """

    run: Callable[[], object]
    result: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Baseline:
    """A kernel of another project for a primitive's work: timed by `mla-portable bench kernels`, never chosen.

    Attributes:
        name: "<owner>.<variant>", lower case. primitive: whose work it does.
        reasons: every reason why it cannot run a request here; may import its library.
        prepare: (request, the primitive's arguments by name, results included) -> the call. May copy, pad, plan.
        remark: what the primitive requires and the call does not do, for readers of a comparison.
    """

    name: str
    primitive: Primitive
    reasons: Callable[[Request], Iterable[Reason]]
    prepare: Callable[[Request, Mapping[str, Any]], BaselineCall]
    remark: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise PluginError(f"baseline name {self.name!r}: expected '<owner>.<variant>' in lower case")
        if not isinstance(self.primitive, Primitive):
            raise PluginError(f"{self.name}: primitive {self.primitive!r} is not one of {', '.join(Primitive.all())}")


@dataclass(frozen=True, slots=True)
class Tunable:
    """An implementation whose kernel configuration `mla-portable tune` may choose by timing.

    Its `bind` gets one of them in `Request.configuration`, and refuses one with unknown names or values by InvalidArgument.

    Attributes:
        implementation: its name. primitive: that it serves.
        configurations: for a request, those to try, as flat {name: number}; the first is the shipped one.
    """

    implementation: str
    primitive: Primitive
    configurations: Callable[[Request], Iterable[Mapping[str, int]]]


class BackendSpec:
    """The hook specification."""

    @hookspec
    def mla_portable_register(self, registrar: Registrar) -> None:
        """Register all that a plugin brings. Called once per registry."""
