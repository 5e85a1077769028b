# SPDX-License-Identifier: Apache-2.0
"""Machine: what this process has found out about its devices, and about implementations on them. Asked once, then kept."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from mla_portable.accelerator import accelerator, device_names
from mla_portable.choose.facts import ask_detector, collect, interpret, resolve_device
from mla_portable.choose.faults import blame, first_line, is_fatal
from mla_portable.choose.limits import DEFAULT_SECONDS, PluginTimeout, isolated, running
from mla_portable.choose.names import REFERENCE
from mla_portable.choose.probe import ProbeReport, Unfinished, probe_implementation, run_check
from mla_portable.contracts import (
    Detector,
    DeviceFacts,
    Implementation,
    InvalidArgument,
    PluginError,
    Primitive,
    Reason,
    Request,
)

if TYPE_CHECKING:
    from mla_portable.judge.problems.probe import ProbeCase

REQUEST_LIMIT: Final = 4096
"""Results of probes for requests that are kept; beyond that the oldest is dropped and found out again as needed."""

logger = logging.getLogger("mla_portable.choose")


class Machine:
    """Facts of devices, results of checks and probes. Safe to use from several threads: one asks, the others wait."""

    def __init__(
        self,
        *,
        detectors: Iterable[tuple[str, Detector]] = (),
        simulated: Mapping[str, DeviceFacts] | None = None,
    ) -> None:
        """Touches no device.

        Args:
            detectors: each with the name of its plugin.
            simulated: facts by torch name; "cuda" stands for every index of it.
        """
        self._detectors = tuple(detectors)
        self._simulated = dict(simulated or {})
        self.limit = DEFAULT_SECONDS
        """Seconds that a detector, a check or one problem of a probe may take."""
        self._facts: dict[str, DeviceFacts] = {}
        self._devices: dict[DeviceFacts, torch.device] = {}
        """Of several devices with equal facts, the one that was asked about last."""
        self._searched: set[str] = set()
        self._checks: dict[tuple[str, Primitive, DeviceFacts], tuple[Reason, ...]] = {}
        self._probes: dict[tuple[str, Primitive, str | None, DeviceFacts], ProbeReport] = {}
        self._requests: dict[tuple[str, Request], tuple[Reason, ...]] = {}
        self._unfinished: dict[tuple[str, Primitive | None, DeviceFacts], tuple[Reason, ...]] = {}
        """What did not finish within its limit is not run again: of a name and primitive, or of a name's checks (None)."""
        self._hung_detectors: list[Detector] = []
        self.detector_failures: dict[str, str] = {}
        """By plugin, one line on the first failure of a detector of it."""
        self._lock = threading.RLock()

    def renew_lock(self) -> None:
        """Forget who held the lock: for the child of a fork, where that thread does not exist."""
        self._lock = threading.RLock()

    @contextmanager
    def _alone(self) -> Generator[None, None, None]:
        """Hold the lock. Code of a plugin must not wait for the thread that waits for it.

        Raises: PluginError there when the lock is held.
        """
        lock, inside = self._lock, running()
        if not lock.acquire(blocking=not inside):
            raise PluginError(f"{inside}: the plugin called the registry; its check, bind and kernels must not do that")
        try:
            yield
        finally:
            lock.release()

    def facts(self, device: torch.device | str) -> DeviceFacts:
        """The facts of a device; simulated ones as they were given.

        Raises: InvalidArgument when the device is neither simulated nor here.
        """
        simulated = self._simulation_of(device)
        if simulated is not None:
            return simulated
        found = resolve_device(device)
        name = str(found)
        known = self._facts.get(name)
        if known is None:
            with self._alone():
                if name not in self._facts:
                    self._facts[name] = self._detect(found) or interpret(collect(found))
                known = self._facts[name]
        self._devices[known] = found
        return known

    def guard(self, device: torch.device | str) -> AbstractContextManager[object]:
        """Makes a device the current one of its type in a `with` block: what is tried for it runs there, though another one
        has equal facts. Nothing is done for a simulated one. Raises: as `facts`.
        """
        return nullcontext() if self._simulation_of(device) else accelerator(resolve_device(device)).guard()

    def _simulation_of(self, device: torch.device | str) -> DeviceFacts | None:
        name = str(device)
        return self._simulated.get(name) or self._simulated.get(name.partition(":")[0])

    def _detect(self, device: torch.device) -> DeviceFacts | None:
        """What the first vendor that claims the device says; a detector that fails is noted and passed over."""
        for plugin, detector in self._detectors:
            if any(detector is hung for hung in self._hung_detectors):
                continue
            try:
                what = f"detector of {plugin} on {device}"
                facts = isolated(what, None, self.limit, partial(ask_detector, detector, device))
            except Exception as error:
                if isinstance(error, PluginTimeout):
                    self._hung_detectors.append(detector)
                if is_fatal(error, device.type):
                    blame(error, f"raised by a detector of the plugin {plugin}")
                    raise
                failure = f"its detector failed on {device}: {first_line(error)}"
                self.detector_failures.setdefault(plugin, failure)
                logger.warning("plugin %s: %s", plugin, failure)
            else:
                if facts is not None:
                    return facts
        return None

    def device_of(self, facts: DeviceFacts) -> torch.device | None:
        """The device of this machine that has these facts; None for one that is not here.

        Of several it is the current one of their type, or else the one that was asked about last: what runs there must not
        open a context on the GPU of another process.
        """
        if facts not in self._devices:
            with self._alone():
                if facts not in self._devices and facts.device_type not in self._searched:
                    self._searched.add(facts.device_type)
                    for name in device_names(facts.device_type):
                        self.facts(name)
        equal = [name for name, known in list(self._facts.items()) if known == facts]
        if len(equal) > 1:
            current = resolve_device(facts.device_type)
            if str(current) in equal:
                return current
        return self._devices.get(facts)

    def check(self, implementation: Implementation, device: torch.device, facts: DeviceFacts) -> tuple[Reason, ...]:
        """The implementation's own reasons against a device, one with these facts; asked once for equal facts.

        A name's primitives usually share one check: where that did not finish for one of them, the others are not asked.
        """
        key = (implementation.name, implementation.primitive, facts)
        with self._alone():
            if key not in self._checks:
                name = implementation.name
                hung = self._unfinished.get((name, None, facts))
                self._checks[key] = hung or run_check(implementation, facts, device, self.limit)
                self._note_unfinished((name, None, facts), self._checks[key])
            return self._checks[key]

    def probe(self, implementation: Implementation, device: torch.device, layout: str | None = None) -> ProbeReport:
        """Check, bind and compute tiny problems, once per implementation, layout and equal facts of devices.

        Args:
            layout: one cache layout; None means every one that the implementation declares.
        Raises: InvalidArgument when the device is simulated, not here or under graph capture; out of memory and device
            faults as they come, to be met again at the next call.
        """
        from mla_portable.judge.problems.probe import probe_cases, probe_layouts

        facts = self.facts(device)
        found = self.device_of(facts)
        if found is None:
            raise InvalidArgument("probe", "device", got=f"{device}, a simulated {facts}", expected="a device of this machine")
        if self._simulation_of(device) is None:
            found = resolve_device(device)
        reports: list[ProbeReport] = []
        for each in probe_layouts(implementation, layout):
            key = (implementation.name, implementation.primitive, each, facts)
            with self._alone():
                if key not in self._probes:
                    cases = probe_cases(implementation, facts, each)
                    self._probes[key] = self._solve(implementation, found, facts, each, cases)
                reports.append(self._probes[key])
        return ProbeReport.merged(reports)

    @staticmethod
    def kind_of(implementation: Implementation, request: Request) -> tuple[str, Request]:
        """What requests share whose probes are one: all but `rows`, and `graph` unless the implementation leaves that to it."""
        graph = request.graph and implementation.support.probes_graph
        return implementation.name, request.but(rows=None, graph=graph)

    def try_request(self, implementation: Implementation, device: torch.device, request: Request) -> tuple[Reason, ...]:
        """Check, bind and compute one problem of the request's own sizes and features; the reasons against serving it.

        Once per implementation and kind of request (`kind_of`).
        Raises: as `probe`, InvalidArgument under graph capture only where the result is not known yet.
        """
        key = self.kind_of(implementation, request)
        known = self._requests.get(key)
        if known is not None:
            return known
        from mla_portable.judge.problems.probe import probe_layouts, request_case

        with self._alone():
            if key not in self._requests:
                reports = [
                    self._solve(implementation, device, request.device, layout, request_case(implementation, asked))
                    for layout in probe_layouts(implementation, request.kv_layout)
                    for asked in [request.but(kv_layout=layout or request.kv_layout)]
                ]
                if len(self._requests) >= REQUEST_LIMIT:
                    del self._requests[next(iter(self._requests))]
                self._requests[key] = ProbeReport.merged(reports).reasons
            return self._requests[key]

    def _solve(
        self,
        implementation: Implementation,
        device: torch.device,
        facts: DeviceFacts,
        layout: str | None,
        cases: Iterable[ProbeCase],
    ) -> ProbeReport:
        key = (implementation.name, implementation.primitive, facts)
        check = self.check(implementation, device, facts) or self._unfinished.get(key, ())
        cases = () if implementation.name == REFERENCE else cases
        report = probe_implementation(implementation, device, layout, check, cases, self.limit)
        if not check:
            self._note_unfinished(key, report.reasons)
        return report

    def _note_unfinished(self, key: tuple[str, Primitive | None, DeviceFacts], reasons: Iterable[Reason]) -> None:
        """Keep the reasons that say that code did not finish: each attempt would cost the whole limit, and leave a thread."""
        if unfinished := tuple(reason for reason in reasons if isinstance(reason, Unfinished)):
            self._unfinished[key] = unfinished
