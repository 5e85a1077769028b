# SPDX-License-Identifier: Apache-2.0
"""Decisions for a device that is known by its profile alone: what is declared, and how far the matrix says it is proven.

Nothing is checked or probed there, so no candidate "can run": the chosen one would be tried first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mla_portable.tools.cli.output import for_other_devices

if TYPE_CHECKING:
    from mla_portable.attention import RouteDecision
    from mla_portable.contracts import Decision, DeviceFacts, Verdict
    from mla_portable.tools.matrix.profiles import Profile

__all__ = ["Elsewhere", "find_profile", "gpu_names"]

_State = Mapping[tuple[str, str, "str | None"], str]
"""(implementation, primitive, layout) -> state in the matrix."""


def find_profile(name: str, records: Path | None = None) -> Elsewhere | None:
    """The device profile of that name; None for the name of a device of this machine.

    Args:
        records: a folder of records instead of those that ship.
    Raises: typer.BadParameter for a name that no profile has; RecordError.
    """
    from mla_portable.accelerator import known_types
    from mla_portable.dispatch import current_registry
    from mla_portable.tools.matrix import find_records, read_profiles

    current_registry()  # first: a vendor's plugin may bring the device type
    if _torch_knows(name):
        return None
    folder = find_records(records)
    profiles = read_profiles(folder)
    if name not in profiles:
        known = ", ".join(dict.fromkeys((*known_types(), *profiles)))
        raise typer.BadParameter(f"got {name!r}, expected one of {known}", param_hint="--device")
    return Elsewhere(profiles[name], folder)


def _torch_knows(name: str) -> bool:
    import torch

    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def gpu_names() -> list[str]:
    """The GPUs of this machine, as their driver names them."""
    from mla_portable.accelerator import device_names
    from mla_portable.dispatch import current_registry

    registry = current_registry()
    return [registry.facts(name).name for each in registry.device_types() if each != "cpu" for name in device_names(each)]


class Elsewhere:
    """A device that is not here. profile: what is published of it."""

    def __init__(self, profile: Profile, folder: Path) -> None:
        self.profile, self._folder = profile, folder

    @property
    def facts(self) -> DeviceFacts:
        """The device as the registry would see it."""
        return self.profile.device_facts()

    def document(self, decision: Decision | RouteDecision) -> dict[str, Any]:
        """The decision for `--json`: can_run is null where no declaration is against it, and each candidate has its level."""
        from mla_portable.contracts import Decision

        states = self._states()
        if isinstance(decision, Decision):
            return self._one(decision, states)
        document = decision.as_dict()
        for entry, verdict in zip(document["routes"], decision.verdicts, strict=True):
            entry["can_run"] = None if verdict.can_run else False
            entry["parts"] = [
                {**part, **self._one(each.decision, states)} for part, each in zip(entry["parts"], verdict.parts, strict=True)
            ]
        return {**document, "checked": False}

    def _one(self, decision: Decision, states: _State) -> dict[str, Any]:
        document = decision.as_dict()
        for entry, verdict in zip(document["candidates"], decision.verdicts, strict=True):
            entry["can_run"] = None if verdict.can_run else False
            entry["matrix"] = _state(states, decision, verdict.implementation)
        return {**document, "checked": False}

    def text(self, decision: Decision | RouteDecision) -> str:
        """The decision for a person."""
        from mla_portable.contracts import Decision

        states = self._states()
        where = f"{self.profile.name} (profile {self.profile.slug}){'' if self._is_here() else ' is not here'}"
        head = f"{where}: declarations only, nothing was checked or probed"
        if self._is_here():
            head += "; --device with torch's name of it examines the one that is here"
        if decision.chosen is None:
            return f"{head}\n{decision.failure_text()}"
        if isinstance(decision, Decision):
            return "\n".join([head, *_lines(decision, states)])
        control = "forced by route=" if decision.forced else "automatic"
        lines = [head, f"route: {decision.chosen} would be tried first ({control})"]
        lines += [f"  {verdict.route:<10} {verdict}" for verdict in decision.verdicts]
        parts = {part.decision.request: part.decision for part in decision.verdict.parts}
        return "\n".join([*lines, *(line for part in parts.values() for line in _lines(part, states))])

    def _is_here(self) -> bool:
        """A GPU of this machine is such a device; its profile still stands for any of them."""
        return any(map(self.profile.matches, gpu_names()))

    def _states(self) -> _State:
        """What the matrix says of this device; read once a command. Raises: RecordError."""
        from mla_portable.tools.matrix import read_records

        records = read_records(self._folder)
        here = replace(records, profiles={self.profile.slug: self.profile})
        return {(cell.implementation, cell.primitive, cell.layout): cell.state for cell in here.cells()}


def _state(states: _State, decision: Decision, implementation: str) -> str | None:
    """The state of an implementation at the request's layout; None where the matrix does not have it."""
    primitive, layout = str(decision.request.primitive), decision.request.kv_layout
    return states.get((implementation, primitive, layout), states.get((implementation, primitive, None)))


def _lines(decision: Decision, states: _State) -> list[str]:
    shown = [verdict for verdict in decision.verdicts if not for_other_devices(verdict.reasons)]
    width = max((len(verdict.implementation) for verdict in shown), default=0)
    lines = [
        f"{decision.request.primitive}: {decision.chosen} would be tried first ({decision.control})",
        f"  request   {decision.request}",
        *(f"  {verdict.implementation:<{width}}  {_judgement(decision, verdict, states)}" for verdict in shown),
    ]
    others = len(decision.verdicts) - len(shown)
    lines += [f"  and {others} for other devices; --json lists them"] if others else []
    return lines


def _judgement(decision: Decision, verdict: Verdict, states: _State) -> str:
    first = verdict.implementation == decision.chosen
    words = "; ".join(map(str, verdict.reasons)) or ("would be tried first" if first else "not checked")
    state = _state(states, decision, verdict.implementation)
    matrix = f"; matrix: {state}" if state else ""
    return f"{words} [{verdict.cost_source} cost {verdict.cost:g}{matrix}]"
