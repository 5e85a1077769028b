# SPDX-License-Identifier: Apache-2.0
"""How far each claim is proven: a pure function of declarations, evidence and the hashes of today's sources.

Nothing here reads a file, a clock or a device, and no level is an input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mla_portable.tools.matrix.claims import Claim, wider
from mla_portable.tools.matrix.evidence import Evidence
from mla_portable.tools.matrix.profiles import Profile
from mla_portable.tools.matrix.trust import Trust
from mla_portable.tools.matrix.words import LEVELS

_ON_A_DEVICE: Final = ("compiled+run", "verified", "measured")
"""Levels that only a machine with the device can repeat; any machine, and continuous integration, repeats the others."""
SUITE_LEVELS: Final = ("quick", "full")
"""Levels of the conformance suite that prove something; "smoke" is for a first look."""


@dataclass(frozen=True, slots=True)
class Hashes:
    """Today's sources.

    Attributes:
        sources: (implementation, primitive, architecture that runs or is compiled for) -> hash.
        suite: primitive -> of the conformance suite with its problems and its oracle.
    """

    sources: Mapping[tuple[str, str, str], str]
    suite: Mapping[str, str]

    def changed(self, evidence: Evidence) -> str:
        """What has changed since a record was made; "" when it is of today's sources."""
        data = evidence.data
        if data["source_hash"] != self.sources.get((data["implementation"], data["primitive"], evidence.arch)):
            return "the sources"
        if evidence.kind == "conformance" and data["suite_hash"] != self.suite.get(data["primitive"]):
            return "the conformance suite"
        return ""


@dataclass(frozen=True, slots=True)
class Proof:
    """What the newest evidence says about one level of a cell.

    Attributes:
        level: that it would establish. status: "ok", "stale", "partial" or "failing". reasons: why not "ok".
        evidence: the record.
    """

    level: str
    status: str
    reasons: tuple[str, ...]
    evidence: Evidence


@dataclass(frozen=True, slots=True)
class Cell:
    """One claim on one device.

    Attributes:
        device: profile slug. implementation, primitive, layout: None where no layout plays a part.
        preference: declared cost, smaller is taken first. level: the highest that is proven.
        state: the level; or "failing", "stale", "partial" where newer or higher evidence is not good any more; or
            "unknown", "never". trust: in the evidence of the level, where a device made it.
        reasons: for every state that is no level, and remarks on the others.
        proofs: what the evidence says, by level.
    """

    device: str
    implementation: str
    primitive: str
    layout: str | None
    preference: float
    level: str
    state: str
    trust: str
    reasons: tuple[str, ...]
    proofs: tuple[Proof, ...]

    @property
    def name(self) -> str:
        return f"{self.implementation} / {self.primitive}" + (f" / {self.layout}" if self.layout else "")


def evaluate(
    claims: Iterable[Claim], evidence: Sequence[Evidence], hashes: Hashes, profiles: Mapping[str, Profile]
) -> tuple[Cell, ...]:
    """Every claim on every device.

    Args:
        claims: what is declared. evidence: in the order it was recorded. hashes: today's. profiles: by slug.
    """
    by_claim: dict[tuple[str, str], list[Evidence]] = {}
    for each in evidence:
        by_claim.setdefault((each.data["implementation"], each.data["primitive"]), []).append(each)
    cells: list[Cell] = []
    trust = Trust(evidence)
    for claim in claims:
        mine = by_claim.get((claim.implementation, claim.primitive), [])
        places = [(layout, profile) for profile in profiles.values() for layout in claim.layouts]
        cells += [_cell(claim, layout, profile, mine, hashes, trust) for layout, profile in places]
    return tuple(cells)


def _cell(
    claim: Claim, layout: str | None, profile: Profile, evidence: Sequence[Evidence], hashes: Hashes, trust: Trust
) -> Cell:
    def made(level: str, state: str, reasons: Iterable[str], proofs: Sequence[Proof] = ()) -> Cell:
        key = (profile.slug, claim.implementation, claim.primitive, layout, claim.preference)
        device = level in _ON_A_DEVICE and profile.device_type != "cpu"
        said = [trust.of(proof.evidence) for proof in proofs if device and proof.level == level]
        return Cell(*key, level, state, "".join(said), tuple(dict.fromkeys(reasons)), tuple(proofs))

    objections = claim.devices[profile.slug]
    certain = [each for each in objections if each.subject not in profile.unknown_subjects]
    if certain:
        return made("declared", "never", map(str, certain))
    if objections:
        return made("declared", "unknown", [f"{each.subject} is not published for this device" for each in objections])

    proofs = list(_proofs(claim, layout, profile, evidence, hashes))
    good = {proof.level for proof in proofs if proof.status == "ok"}
    compiles = profile.arch in claim.targets
    uncompiled = f", but not compiled for {profile.arch}"
    baseless = {
        "measured": ("verified" not in good, ": counts only beside a passed conformance run of the same sources"),
        "compiled+run": ("compiled" not in good, uncompiled),
        "interpreted": (compiles and not good & {"compiled", "verified"}, uncompiled),
    }
    alone = [level for level, (is_so, _) in baseless.items() if is_so and level in good]
    remarks = [f"{level}{baseless[level][1]}" for level in alone]
    good -= {*alone}
    level = max(good | {"declared"}, key=LEVELS.index)
    reasons = [f"{proof.level}: {reason}" for proof in proofs if proof.status != "ok" for reason in proof.reasons]
    bad = {proof.status for proof in proofs if proof.status == "failing" or LEVELS.index(proof.level) > LEVELS.index(level)}
    bad |= {"partial"} if remarks and "failing" not in bad else set()
    state = next((status for status in ("failing", "stale", "partial") if status in bad), level)
    if claim.targets and not compiles and profile.device_type != "cpu" and level != "declared" and state == level:
        remarks.append(f"no ahead-of-time target for {profile.arch}")
    if state == level == "compiled+run":
        ran_on = next(proof.evidence.data["device"]["name"] for proof in proofs if proof.level == level)
        remarks.append(f"the code for {profile.arch} ran on {ran_on}")
    return made(level, state, [*reasons, *remarks], proofs)


def _proofs(
    claim: Claim, layout: str | None, profile: Profile, evidence: Sequence[Evidence], hashes: Hashes
) -> Iterable[Proof]:
    """The newest word on each level: of a record of today's sources where there is one, else of the newest stale one."""
    found: dict[str, list[Evidence]] = {}
    for each in evidence:
        level = _level_of(each, layout, profile)
        if level is not None:
            found.setdefault(level, []).append(each)
    for level in LEVELS:
        records = found.get(level, [])
        current = [each for each in records if not hashes.changed(each)]
        if current:
            yield _judge(level, current, claim)
        elif records:
            newest = records[-1]
            day = newest.recorded.partition("T")[0]
            yield Proof(level, "stale", (f"{hashes.changed(newest)} changed since {day}",), newest)


def _level_of(evidence: Evidence, layout: str | None, profile: Profile) -> str | None:
    """The level that a record speaks about in this cell; None when it is about another one."""
    data = evidence.data
    if evidence.kind == "compiled":
        return "compiled" if data["target"] == profile.arch else None
    if data["layout"] != layout:
        return None
    if evidence.kind == "benchmark":
        return "measured" if evidence.profile == profile.slug else None
    if data["mode"] == "ptx":
        return "compiled+run" if data["target"] == profile.arch else None
    if data["mode"] != "native":
        return "interpreted"
    return "verified" if evidence.profile == profile.slug else None


def _judge(level: str, current: Sequence[Evidence], claim: Claim) -> Proof:
    """Of records about the same sources the newest counts; a complete one is not undone by a later, narrower one."""
    newest = current[-1]
    if newest.failed:
        return Proof(level, "failing", (f"{newest.failed} of {newest.failed + newest.passed} failed",), newest)
    last_failure = max((i for i, each in enumerate(current) if each.failed), default=-1)
    proofs: list[Proof] = []
    for each in current[last_failure + 1 :]:
        gaps = _gaps(each, claim)
        proofs.append(Proof(level, "partial" if gaps else "ok", tuple(gaps), each))
    return next((proof for proof in reversed(proofs) if proof.status == "ok"), proofs[-1])


def _gaps(evidence: Evidence, claim: Claim) -> list[str]:
    """Why a record without a failure still does not prove all that is claimed."""
    data = evidence.data
    checks = {
        f"{evidence.skipped} case{'' if evidence.skipped == 1 else 's'} skipped": evidence.skipped,
        "nothing ran": not evidence.passed,
        f"only cases that contain {data.get('match')!r}": data.get("match"),
        f"level {data.get('level')} of the suite": data.get("level", "full") not in SUITE_LEVELS,
        "from a tree with uncommitted changes": data["dirty"],
    }
    gaps = [f"declared beyond the evidence: {more}" for more in wider(data["support"], claim.support)]
    return gaps + [gap for gap, is_so in checks.items() if is_so]
