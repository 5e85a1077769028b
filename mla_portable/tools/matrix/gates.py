# SPDX-License-Identifier: Apache-2.0
"""What continuous integration refuses, a function for each gate; it returns its problems in words, [] when all is well.

A gate is a pure function of what it is given. `ci/gates.py` reads the records, calls the gates and prints.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from mla_portable.tools.matrix.claims import Claim
from mla_portable.tools.matrix.evidence import Evidence
from mla_portable.tools.matrix.levels import Cell
from mla_portable.tools.matrix.profiles import Profile

__all__ = [
    "CHECKABLE",
    "SLOWER",
    "claims_within_evidence",
    "compiled_as_recorded",
    "regressions",
    "staleness",
    "strict_expectations",
    "untested_claims",
]

SLOWER: Final = 1.15
"""A benchmark that takes more than this share of its record on the same device is a regression."""
CHECKABLE: Final = ("compiled", "interpreted")
"""Levels that a machine without a GPU can prove; `verified` on a CPU is the third thing it can do."""
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
    for cell in cells:
        if cell.state in ("never", "unknown"):
            continue
        levels = {proof.level for proof in cell.proofs}
        name = f"{cell.implementation} / {cell.primitive}" + (f" / {cell.layout}" if cell.layout else "")
        arch = profiles[cell.device].arch
        if arch in targets[cell.implementation, cell.primitive] and "compiled" not in levels:
            found.append(f"{name}: compiles for {arch}, yet there is no evidence of it; run ci/refresh_evidence")
        if profiles[cell.device].device_type == "cpu" and not levels & {"interpreted", "verified"}:
            found.append(f"{name}: claims a CPU, yet no run of the suite is recorded; run ci/refresh_evidence")
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
                name = f"{cell.implementation} / {cell.primitive}" + (f" / {cell.layout}" if cell.layout else "")
                found[f"{name} on {where}: {proof.level} is {status}: {'; '.join(proof.reasons)}; {remedy}"] = None
    return list(found)


def untested_claims(
    claims: Iterable[Claim], profiles: Mapping[str, Profile], cases: Callable[[Claim, Profile], Sequence[Mapping[str, Any]]]
) -> list[str]:
    """What a declaration offers on a device, the suite has a case for.

    Args:
        cases: collects the suite without running it: the fields of each case's request (kv_layout, num_heads, topk,
            block_size, lse, ...).
    """
    found: dict[str, None] = {}
    for claim in claims:
        included = {profiles[slug].arch: slug for slug, objections in claim.devices.items() if not objections}
        for slug in included.values():  # one device of each architecture: cases depend on no more than that
            collected = cases(claim, profiles[slug])
            for what in _uncovered(claim, collected):
                found[f"{claim.implementation} / {claim.primitive}: {what}; add cases to mla_portable/tools/conformance"] = None
    return list(found)


def _uncovered(claim: Claim, collected: Sequence[Mapping[str, Any]]) -> list[str]:
    if not collected:
        return ["declared, yet the suite has no case"]
    missing = [
        f"layout {layout} is declared, yet no case has it"
        for layout in claim.layouts
        if layout is not None and all(case.get("kv_layout") != layout for case in collected)
    ]
    heads = {case["num_heads"] for case in collected if case.get("num_heads")}
    if heads:
        limits = [*(claim.support.get("num_heads") or ()), *(claim.support.get("padded_heads") or ())]
        limits += [claim.support["max_heads"]] if claim.support.get("max_heads") else []
        missing += [f"{count} heads are declared, yet no case has them" for count in limits if count not in heads]
    sizes = {case["block_size"] for case in collected if case.get("block_size")}
    if sizes:
        declared = claim.support.get("block_sizes") or ()
        missing += [f"blocks of {size} are declared, yet no case has them" for size in declared if size not in sizes]
    return missing


def regressions(evidence: Iterable[Evidence]) -> list[str]:
    """The newest benchmark of each kind is no more than 15 % slower than the fastest before it, on the same device."""
    series: dict[tuple[Any, ...], list[Evidence]] = {}
    for each in evidence:
        if each.kind == "benchmark":
            data = each.data
            names = ("implementation", "primitive", "layout", "shape")
            key = (*(data[name] for name in names), tuple(data["heads"]), tuple(data["topk"]), each.profile)
            series.setdefault(key, []).append(each)
    found: list[str] = []
    for key, runs in series.items():
        *before, last = runs
        if not before:
            continue
        record = min(before, key=lambda each: each.data["median_us"])
        ratio = last.data["median_us"] / record.data["median_us"]
        if ratio > SLOWER:
            name = f"{key[0]} / {key[1]}, {key[3]} on {key[-1]}"
            times = f"{last.data['median_us']:g} us, {record.data['median_us']:g} us on {record.recorded[:10]}"
            found.append(f"{name}: {100 * (ratio - 1):.0f} % slower than its record ({times})")
    return found


def strict_expectations(files: Mapping[str, str]) -> list[str]:
    """An expected failure that passes is an error, and nothing is skipped without a condition. files: path -> text."""
    found: list[str] = []
    for path, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                loose = node.func.attr == "xfail" and any(
                    keyword.arg == "strict" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                    for keyword in node.keywords
                )
                if loose:
                    found.append(f"{path}:{node.lineno}: xfail(strict=False) hides a claim that has come true")
            if isinstance(node, ast.Attribute) and node.attr == "skip" and ast.unparse(node).endswith("mark.skip"):
                found.append(f"{path}:{node.lineno}: a test that never runs proves nothing; delete it or give a condition")
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
                if before is None or (use[name] or 0) > (before[name] or 0):
                    said = None if before is None else before[name]
                    found[f"{kernel} for {new['target']}: {name} is {use[name]}, the record says {said}"] = None
    return list(found)


def _compilers(record: Mapping[str, Any]) -> dict[str, str]:
    return {name: version for name, version in record["versions"].items() if name not in _NO_COMPILER}
