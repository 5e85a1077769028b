# SPDX-License-Identifier: Apache-2.0
"""What continuous integration refuses, a function for each gate; it returns its problems in words, [] when all is well.

A gate is a pure function of what it is given. `ci/gates.py` reads the records, calls the gates and prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from mla_portable.contracts import Request
from mla_portable.tools.matrix.claims import Claim
from mla_portable.tools.matrix.evidence import Evidence
from mla_portable.tools.matrix.levels import Cell
from mla_portable.tools.matrix.profiles import Profile

SLOWER: Final = 1.15
"""A benchmark that takes more than this share of its record on the same device is a regression."""
CHECKABLE: Final = ("compiled", "interpreted")
"""Levels that a machine without a GPU can prove; `verified` on a CPU is the third thing it can do."""
_COVERED: Final = ("kv_layout", "num_heads", "block_size")
_COMPARED: Final = ("shared", "registers", "spilled")
_NO_COMPILER: Final = ("python", "torch")
"""What a compiled record names the version of, though no kernel depends on it."""


def staleness(cells: Iterable[Cell], profiles: Mapping[str, Profile]) -> list[str]:
    """Evidence that any machine can renew is of today's sources. Other stale evidence only has to be shown as such."""
    return _about(cells, profiles, "stale", "run ci/refresh_evidence")


def claims_within_evidence(cells: Iterable[Cell], claims: Sequence[Claim], profiles: Mapping[str, Profile]) -> list[str]:
    """No claim reaches beyond its evidence, as far as a machine without a GPU can tell, and no evidence has a failure.

    What a plugin compiles for, it has compiled; what can run on a CPU, has run there and passed.
    """
    cells = list(cells)
    found = _about(cells, profiles, "partial", "narrow the declaration, or run ci/refresh_evidence")
    found += _about(cells, profiles, "failing", "fix it, or exclude the device", every_level=True)
    targets = {(claim.implementation, claim.primitive): claim.targets for claim in claims}
    for cell in (cell for cell in cells if cell.state not in ("never", "unknown")):
        levels, profile = {proof.level for proof in cell.proofs}, profiles[cell.device]
        if profile.arch in targets[cell.implementation, cell.primitive] and "compiled" not in levels:
            found.append(f"{cell.name}: compiles for {profile.arch}, yet there is no evidence of it; run ci/refresh_evidence")
        if profile.device_type == "cpu" and not levels & {"interpreted", "verified"}:
            found.append(f"{cell.name}: claims a CPU, yet no run of the suite is recorded; run ci/refresh_evidence")
    return list(dict.fromkeys(found))


def _about(
    cells: Iterable[Cell], profiles: Mapping[str, Profile], status: str, remedy: str, *, every_level: bool = False
) -> list[str]:
    found: dict[str, None] = {}
    for cell in cells:
        for proof in cell.proofs:
            on_cpu = profiles[cell.device].device_type == "cpu"
            here = proof.level in CHECKABLE or (proof.level == "verified" and on_cpu)
            if proof.status == status and (here or every_level):
                where = proof.evidence.data.get("target", cell.device if proof.level != "interpreted" else "the CPU")
                found[f"{cell.name} on {where}: {proof.level} is {status}: {'; '.join(proof.reasons)}; {remedy}"] = None
    return list(found)


def untested_claims(
    claims: Iterable[Claim], profiles: Mapping[str, Profile], cases: Callable[[Claim, Profile], Sequence[Request]]
) -> list[str]:
    """What a declaration offers on a device, the suite has a case for. cases: `claims.suite_cases`."""
    found: dict[str, None] = {}
    for claim in claims:
        included = {profiles[slug].arch: profiles[slug] for slug, objections in claim.devices.items() if not objections}
        for profile in included.values():  # one device of each architecture: cases depend on no more than that
            for what in _uncovered(claim, cases(claim, profile)):
                found[f"{claim.implementation} / {claim.primitive}: {what}; add cases to mla_portable/tools/conformance"] = None
    return list(found)


def _uncovered(claim: Claim, collected: Sequence[Request]) -> list[str]:
    if not collected:
        return ["declared, yet the suite has no case"]
    has, limits = {name: {getattr(case, name) for case in collected} - {None} for name in _COVERED}, claim.support
    heads = [*(limits.get("num_heads") or ()), *(limits.get("padded_heads") or ()), limits.get("max_heads")]
    declared = {
        "kv_layout": ([each for each in claim.layouts if each], "layout {} is declared, yet no case has it"),
        "num_heads": ([each for each in heads if each], "{} heads are declared, yet no case has them"),
        "block_size": (limits.get("block_sizes") or (), "blocks of {} are declared, yet no case has them"),
    }
    return [
        text.format(value)
        for name, (values, text) in declared.items()
        if has[name] or name == "kv_layout"
        for value in values
        if value not in has[name]
    ]


def regressions(evidence: Iterable[Evidence]) -> list[str]:
    """The newest benchmark of each kind is no more than 15 % slower than the fastest before it, on the same device."""
    series: dict[str, list[Evidence]] = {}
    for each in evidence:
        if each.kind == "benchmark":
            data = each.data
            name = f"{data['implementation']} / {data['primitive']}, {data['shape']} on {each.profile}"
            series.setdefault(f"{name} {data['layout']} {data['heads']} {data['topk']}", []).append(each)
    found: list[str] = []
    for name, (*before, last) in series.items():
        record = min(before, key=lambda each: each.data["median_us"], default=last)
        ratio = last.data["median_us"] / record.data["median_us"]
        if ratio > SLOWER:
            times = f"{last.data['median_us']:g} us, {record.data['median_us']:g} us on {record.recorded[:10]}"
            found.append(f"{name}: {100 * (ratio - 1):.0f} % slower than its record ({times})")
    return found


def compiled_as_recorded(recorded: Iterable[Mapping[str, Any]], fresh: Iterable[Mapping[str, Any]]) -> list[str]:
    """A spot check: kernels that were compiled again use no more than the records say, and none of them failed.

    Args:
        recorded: newest "compiled" records, by claim and target. fresh: the same made from a new, perhaps smaller, run.
    """
    known = {(each["implementation"], each["primitive"], each["target"]): each for each in recorded}
    found: dict[str, None] = {}
    for new in fresh:
        for failure in new["failures"]:
            found[f"{new['target']}: {failure}"] = None
        old = known.get((new["implementation"], new["primitive"], new["target"]))
        if old is None or old["source_hash"] != new["source_hash"]:
            why = "no record" if old is None else "the record is of other sources"
            found[f"{new['implementation']} / {new['primitive']} for {new['target']}: {why}; run ci/refresh_evidence"] = None
            continue
        if _compilers(old) != _compilers(new):
            continue  # another compiler may use other registers; that it fits was checked above
        for kernel, use in new["kernels"].items():
            before = old["kernels"].get(kernel)
            for name in _COMPARED:
                said = None if before is None else before[name]
                if before is None or (use[name] or 0) > (said or 0):
                    found[f"{kernel} for {new['target']}: {name} is {use[name]}, the record says {said}"] = None
    return list(found)


def _compilers(record: Mapping[str, Any]) -> dict[str, str]:
    return {name: version for name, version in record["versions"].items() if name not in _NO_COMPILER}
