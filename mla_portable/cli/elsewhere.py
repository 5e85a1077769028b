# SPDX-License-Identifier: Apache-2.0
"""Decisions for a device that is known by its profile alone: what is declared, and how far the matrix says it is proven.

Nothing is checked or probed there, so no candidate "can run": the chosen one would be tried first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_portable.cli.matrix import read
from mla_portable.cli.options import profile_by_name

if TYPE_CHECKING:
    from mla_portable.attention import RouteDecision
    from mla_portable.capability.matrix import States
    from mla_portable.capability.profiles import Profile
    from mla_portable.contracts import Decision


def find_profile(name: str, records: Path | None = None) -> Elsewhere | None:
    """The device profile of that name; None for the name of a device of this machine.

    Args:
        records: a folder of records instead of those that ship.
    Raises: typer.BadParameter for a name that no profile has; RecordError.
    """
    import torch

    from mla_portable.accelerator import known_types
    from mla_portable.dispatch import current_registry

    current_registry()  # first: a vendor's plugin may bring the device type
    try:
        torch.device(name)
    except RuntimeError:
        return Elsewhere(profile_by_name(name, records, param_hint="--device", others=known_types()), records)
    return None


def gpu_names() -> list[str]:
    """The GPUs of this machine, as their driver names them."""
    from mla_portable.accelerator import device_names
    from mla_portable.dispatch import current_registry

    registry = current_registry()
    return [registry.facts(name).name for each in registry.device_types() if each != "cpu" for name in device_names(each)]


@dataclass(frozen=True)
class Elsewhere:
    """A device that is not here: its published profile. records: a folder of records instead of those that ship."""

    profile: Profile
    records: Path | None

    @cached_property
    def _states(self) -> States:
        """Raises: RecordError."""
        from mla_portable.capability.matrix import States

        matrix = read(self.records)
        names = {each.slug: each.short for each in matrix.devices}
        return States(self.profile.slug, self.profile.arch, matrix.proofs, matrix.ci, names)

    def state(self, decision: Decision, implementation: str) -> str | None:
        """What is known of an implementation at the request's layout, in words; None where its declaration excludes it."""
        if any(each.implementation == implementation and each.reasons for each in decision.verdicts):
            return None
        return self._states.of(implementation, str(decision.request.primitive), decision.request.kv_layout)

    def document(self, decision: Decision | RouteDecision) -> dict[str, Any]:
        """The decision for `--json`: can_run is null where no declaration is against it, and each candidate has its level."""
        from mla_portable.contracts import Decision

        document = decision.as_dict()
        if isinstance(decision, Decision):
            self._claim(document, decision)
        else:
            for entry, verdict in zip(document["routes"], decision.verdicts, strict=True):
                entry["can_run"] = None if verdict.can_run else False
                for part, each in zip(entry["parts"], verdict.parts, strict=True):
                    self._claim(part, each.decision)
        return {**document, "checked": False}

    def _claim(self, document: dict[str, Any], decision: Decision) -> None:
        for entry, verdict in zip(document["candidates"], decision.verdicts, strict=True):
            entry["can_run"] = None if verdict.can_run else False
            entry["matrix"] = self.state(decision, verdict.implementation)
        document["checked"] = False

    def head(self) -> str:
        """What a person has to know before anything else."""
        here = any(map(self.profile.matches, gpu_names()))
        head = f"{self.profile.name} (profile {self.profile.slug}){'' if here else ' is not here'}"
        head += ": nothing was checked or probed"
        return head + ("; --device with torch's name of it examines the one that is here" if here else "")
