# SPDX-License-Identifier: Apache-2.0
"""Everything that is declared on one device, in the order in which it would be tried, with what is known of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from mla_portable.capability.matrix import Matrix, States
from mla_portable.capability.profiles import Profile
from mla_portable.choose import Registry
from mla_portable.contracts import Primitive, Request
from mla_portable.contracts.support import ONLY_WHEN_FORCED

Changed = Callable[[str, str], int | None]
"""(implementation, commit) -> files of its code that changed since; None where nobody knows."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One implementation at one place.

    Attributes:
        layout: "" where none plays a part. chosen: it would run by default. state: as of `States`. level, passed, missing,
            release, commit, date: of its newest run there. changed: files of its code that differ from that commit, None where
            nobody knows.
    """

    primitive: str
    layout: str
    implementation: str
    chosen: bool
    state: str
    level: str = ""
    passed: int = 0
    failed: int = 0
    missing: int = 0
    first_failed: str = ""
    release: str = ""
    date: str = ""
    commit: str | None = None
    changed: int | None = None

    @property
    def words(self) -> str:
        """Everything that is known, in a line."""
        if not self.release:
            return self.state
        counts = f"{self.passed} cases passed"
        counts += f", {self.failed} failed, {self.first_failed} first" if self.failed else ""
        counts += f", {self.missing} of level {self.level} did not run" if self.missing else f" at level {self.level}"
        files = "unknown" if self.changed is None else str(self.changed)
        commit = (self.commit or "unknown")[:12]
        return f"{self.state}: {counts} on {self.date}, commit {commit}; files changed since: {files}"


def offers_on(profile: Profile, matrix: Matrix, registry: Registry, changed: Changed) -> list[Offer]:
    """Of every primitive and layout, what includes the device."""
    # a CPU is always here: what works on this machine decides there, such as whether Triton interprets
    facts = registry.facts("cpu") if profile.device_type == "cpu" else profile.device_facts()
    states = States(profile.slug, profile.arch, matrix.proofs, matrix.ci, {each.slug: each.short for each in matrix.devices})
    since = cache(changed)
    found: list[Offer] = []
    for primitive in Primitive.all():
        for layout in primitive.layouts or (None,):
            request = Request(primitive, facts, kv_layout=layout, **primitive.promises)
            decision = registry.decide(request, probe=False, thorough=True)
            for verdict in decision.verdicts:
                low = [each.limit for each in verdict.reasons] == [ONLY_WHEN_FORCED]
                if verdict.reasons and not low:
                    continue
                name = verdict.implementation
                here = {
                    "primitive": str(primitive),
                    "layout": layout or "",
                    "implementation": name,
                    "state": states.of(name, str(primitive), layout) + (f", low accuracy: {ONLY_WHEN_FORCED}" if low else ""),
                }
                proof = states.proof(name, str(primitive), layout)
                run = {} if proof is None else proof.model_dump(include=set(_OF_A_PROOF))
                count = since(name, proof.commit) if proof is not None and proof.commit else None
                found.append(Offer(**here, chosen=name == decision.chosen, changed=count, **run))
    return found


_OF_A_PROOF = ("level", "passed", "failed", "missing", "first_failed", "release", "date", "commit")
