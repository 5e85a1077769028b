# SPDX-License-Identifier: Apache-2.0
"""Machine: what this process has found out about its devices, and about implementations on them. Asked once, kept after."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from typing import Final

import torch

from mla_portable.contracts import (
    BoundPrimitive,
    Detector,
    DeviceFacts,
    Implementation,
    InvalidArgument,
    Primitive,
    Reason,
    Request,
)
from mla_portable.registry.facts import ask_detector, collect, interpret, resolve_device
from mla_portable.registry.plugins import first_line
from mla_portable.registry.probe import ProbeReport, is_fatal, probe_implementation, run_check
from mla_portable.registry.tiny import tiny_layouts

__all__ = ["YARDSTICK", "Machine"]

YARDSTICK: Final = "reference.torch"
"""The implementation that probes compare with; it is checked, not probed."""

logger = logging.getLogger("mla_portable.registry")


class Machine:
    """Facts of devices, results of checks and probes. Safe to use from several threads: one asks, the others wait."""

    def __init__(
        self,
        *,
        detectors: Iterable[tuple[str, Detector]] = (),
        yardsticks: Iterable[Implementation] = (),
        simulated: Mapping[str, DeviceFacts] | None = None,
    ) -> None:
        """Touches no device.

        Args:
            detectors: each with the name of its plugin. yardsticks: the reference's implementations.
            simulated: facts by torch name; "cuda" stands for every index of it.
        """
        self._detectors = tuple(detectors)
        self._yardsticks = {i.primitive: i for i in yardsticks}
        self._simulated = dict(simulated or {})
        self._facts: dict[str, DeviceFacts] = {}
        self._devices: dict[DeviceFacts, torch.device] = {}
        self._searched: set[str] = set()
        self._checks: dict[tuple[str, Primitive, DeviceFacts], tuple[Reason, ...]] = {}
        self._probes: dict[tuple[str, Primitive, str | None, DeviceFacts], ProbeReport] = {}
        self.detector_failures: dict[str, str] = {}
        """By plugin, one line on the first failure of a detector of it."""
        self._lock = threading.RLock()

    def renew_lock(self) -> None:
        """Forget who held the lock: for the child of a fork, where that thread does not exist."""
        self._lock = threading.RLock()

    def facts(self, device: torch.device | str) -> DeviceFacts:
        """The facts of a device; simulated ones as they were given.

        Raises: InvalidArgument when the device is neither simulated nor here.
        """
        name = str(device)
        simulated = self._simulated.get(name) or self._simulated.get(name.partition(":")[0])
        if simulated is not None:
            return simulated
        found = resolve_device(device)
        name = str(found)
        with self._lock:
            if name not in self._facts:
                facts = self._detect(found) or interpret(collect(found))
                self._devices.setdefault(facts, found)
                self._facts[name] = facts
            return self._facts[name]

    def _detect(self, device: torch.device) -> DeviceFacts | None:
        """What the first vendor that claims the device says; a detector that fails is noted and passed over."""
        for plugin, detector in self._detectors:
            try:
                facts = ask_detector(detector, device)
            except (Exception, SystemExit) as error:
                if is_fatal(error):
                    raise
                failure = f"its detector failed on {device}: {first_line(error)}"
                self.detector_failures.setdefault(plugin, failure)
                logger.warning("plugin %s: %s", plugin, failure)
            else:
                if facts is not None:
                    return facts
        return None

    def device_of(self, facts: DeviceFacts) -> torch.device | None:
        """The device of this machine that has these facts; None for one that is not here."""
        with self._lock:
            if facts not in self._devices and facts.device_type not in self._searched:
                self._searched.add(facts.device_type)
                count = torch.cuda.device_count() if facts.device_type == "cuda" and torch.cuda.is_available() else 0
                for name in ["cpu"] if facts.device_type == "cpu" else [f"cuda:{index}" for index in range(count)]:
                    self.facts(name)
            return self._devices.get(facts)

    def check(self, implementation: Implementation, facts: DeviceFacts) -> tuple[Reason, ...]:
        """The implementation's own reasons against a device; asked once."""
        key = (implementation.name, implementation.primitive, facts)
        with self._lock:
            if key not in self._checks:
                self._checks[key] = run_check(implementation, facts)
            return self._checks[key]

    def probe(self, implementation: Implementation, device: torch.device, layout: str | None = None) -> ProbeReport:
        """Check, bind and compute tiny problems, once per implementation, layout and device.

        Args:
            layout: one cache layout; None means every one that the implementation declares.
        Raises: InvalidArgument when the device is simulated, not here or under graph capture; out of memory and device
            faults as they come, to be met again at the next call.
        """
        facts = self.facts(device)
        found = self.device_of(facts)
        if found is None:
            raise InvalidArgument("probe", "device", got=f"{device}, a simulated {facts}", expected="a device of this machine")
        reports: list[ProbeReport] = []
        for each in tiny_layouts(implementation, layout):
            key = (implementation.name, implementation.primitive, each, facts)
            with self._lock:
                if key not in self._probes:
                    self._probes[key] = probe_implementation(
                        implementation,
                        found,
                        facts,
                        each,
                        lambda facts: self.check(implementation, facts),
                        self._yardstick,
                        compute=implementation.name != YARDSTICK,
                    )
                reports.append(self._probes[key])
        return ProbeReport.merged(reports)

    def _yardstick(self, request: Request) -> BoundPrimitive | None:
        """The reference, bound for the same problem on the CPU."""
        reference = self._yardsticks.get(request.primitive)
        if reference is None:
            return None
        return reference.bind(request.but(device=interpret(collect(torch.device("cpu")))))
