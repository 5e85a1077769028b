# SPDX-License-Identifier: Apache-2.0
"""The records of a report: what the matrix reads, derived from what a run said by one function, `records_of`.

Gates call it on every report that is kept and compare: no record is typed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from mla_portable.tools.matrix.model import RecordError
from mla_portable.tools.matrix.profiles import Profile, profile_of
from mla_portable.tools.matrix.reports import Benchmark, Case, Claimed, Compiled, Conformance, Engine, Report

_PROBLEM: Final = ("primitive", "layout", "shape")
_COPIED: Final = ("layout", "shape", "rows", "overlap", "median_us", "p10_us", "p90_us", "runs")
_RESOURCES: Final = ("shared", "registers", "spilled")


def records_of(report: Report, sha: str, profiles: Mapping[str, Profile]) -> list[dict[str, Any]]:
    """Everything that a report proves, a record for each implementation, primitive and layout, target or size.

    Args:
        sha: of the report's text.
    Raises: RecordError for a device without a profile.
    """
    if isinstance(report, Conformance):
        return list(_conformance(report, sha, profiles))
    if isinstance(report, Compiled):
        return [_compiled(report, sha, claim) for claim in report.claims]
    if isinstance(report, Engine):
        return [_engine(report, sha, claim, profiles) for claim in report.claims]
    return list(_benchmarks(report, sha, profiles))


def _common(report: Report, sha: str, claim: Claimed, versions: Mapping[str, str]) -> dict[str, Any]:
    return {
        "schema": 1,
        "kind": report.kind,
        "report": sha,
        "recorded": report.recorded,
        "machine": report.machine,
        "implementation": claim.implementation,
        "primitive": claim.primitive,
        "provider": {"distribution": claim.distribution, "version": claim.version},
        "versions": dict(versions),
        "commit": report.commit,
        "dirty": bool(report.changed),
        "source_hash": claim.source_hash,
        "support": dict(claim.support),
        "command": report.command,
    }


def _device(report: Conformance | Benchmark | Engine, profiles: Mapping[str, Profile]) -> dict[str, Any]:
    name, arch = report.device.get("name", ""), report.device.get("arch", "")
    return {"profile": profile_of(name, profiles).slug, "name": name, "arch": arch}


def _conformance(report: Conformance, sha: str, profiles: Mapping[str, Profile]) -> Iterator[dict[str, Any]]:
    claims = {(each.implementation, each.primitive): each for each in report.claims}
    groups: dict[tuple[str, str, str | None], list[Case]] = {}
    for case in report.cases:
        groups.setdefault((case.implementation, case.primitive, case.layout), []).append(case)
    for (implementation, primitive, layout), cases in groups.items():
        claim = claims.get((implementation, primitive))
        if claim is None:
            raise RecordError(f"report {sha[:16]}", f"has cases of {implementation} / {primitive}, and not what it claims")
        passed = sum(case.status == "passed" for case in cases)
        yield {
            **_common(report, sha, claim, report.versions),
            "layout": layout,
            "device": _device(report, profiles),
            "driver": report.driver,
            "mode": claim.mode,
            "level": report.level,
            "match": report.match,
            "suite_hash": claim.suite_hash,
            "heads": sorted({case.heads for case in cases if case.heads is not None}),
            "topk": sorted({case.topk for case in cases if case.topk is not None}),
            "cases": {"passed": passed, "failed": len(cases) - passed, "skipped": 0},
            "errors": _worst(cases),
            **({"target": report.target} if report.target else {}),
        }


def _worst(cases: Sequence[Case]) -> dict[str, Any]:
    """By quantity the case that came nearest to its tolerance."""
    found: dict[str, tuple[float, dict[str, Any]]] = {}
    for case in cases:
        for quantity, error in case.errors.items():
            limit = case.tolerances[quantity]
            share = float(error) / float(limit) if float(limit) else float("inf")
            if quantity not in found or share > found[quantity][0]:
                found[quantity] = (share, {"error": error, "tolerance": limit, "case": case.id})
    return {quantity: row for quantity, (_, row) in found.items()}


def _engine(report: Engine, sha: str, claim: Claimed, profiles: Mapping[str, Profile]) -> dict[str, Any]:
    judged = [line.passed for line in report.lines if line.passed is not None]
    return {
        **_common(report, sha, claim, report.versions),
        "device": _device(report, profiles),
        "driver": report.driver,
        "engine": report.engine,
        "suite": report.suite,
        "cases": {"passed": sum(judged), "failed": len(judged) - sum(judged), "skipped": 0},
    }


def _compiled(report: Compiled, sha: str, claim: Claimed) -> dict[str, Any]:
    kernels = sorted(claim.kernels or ())
    lines = [line for line in report.lines if line["arch"] == claim.arch and line["kernel"] in kernels]
    failures = [failure for line in lines if (failure := fits(line, claim.shared_memory_limit or 0))]
    versions = dict(report.versions)
    for line in lines:
        versions |= line.get("versions", {})
    usage: dict[str, Any] = {}
    for kernel in kernels:
        variants = [line for line in lines if line["kernel"] == kernel]
        known = {name: [line[name] for line in variants if line.get(name) is not None] for name in _RESOURCES}
        largest = {name: max(values, default=0 if name == "shared" else None) for name, values in known.items()}
        usage[kernel] = {"variants": len(variants), **largest}
    return {
        **_common(report, sha, claim, versions),
        "target": claim.arch,
        "shared_memory_limit": claim.shared_memory_limit,
        "cases": {"passed": len(lines) - len(failures), "failed": len(failures), "skipped": 0},
        "kernels": usage,
        "failures": failures,
    }


def fits(line: Mapping[str, Any], limit: int) -> str:
    """Why a variant is of no use where a block has `limit` bytes of shared memory; "" where it is."""
    if not line["error"] and line["shared"] > limit:
        return f"{line['label']}: {line['shared']} bytes of shared memory, {line['arch']} has {limit}"
    return f"{line['label']}: {line['error']}" if line["error"] else ""


def _benchmarks(report: Benchmark, sha: str, profiles: Mapping[str, Profile]) -> Iterator[dict[str, Any]]:
    claims = {(each.implementation, each.primitive): each for each in report.claims}
    rates = report.ceilings["bytes_per_second"] / 1e12, report.ceilings["flops_per_second"] / 1e12
    bound = f"copy at {rates[0]:.3g} TB/s, bf16 product at {rates[1]:.3g} TFLOP/s"
    baselines = baselines_of(report.lines)
    for line in report.lines:
        claim = claims.get((line["name"], line["primitive"]))
        if claim is None or unfit(line, baselines):
            continue
        baseline = baselines[problem_of(line)]
        yield {
            **_common(report, sha, claim, report.versions),
            **{field: line[field] for field in _COPIED},
            "driver": report.driver,
            "clocks": dict(report.clocks),
            "device": _device(report, profiles),
            "heads": [line["heads"]] if line["heads"] else [],
            "topk": [line["topk"]] if line["topk"] else [],
            "bound": {"name": bound, "median_us": line["bound_us"]},
            "baseline": {"name": baseline["name"], "median_us": baseline["median_us"]},
        }


def unfit(line: Mapping[str, Any], baselines: Mapping[Any, Any]) -> str:
    """Why a line of a benchmark is no record; "" when it is one. baselines: `baselines_of` the run."""
    if line["role"] == "baseline":
        return "a baseline"
    if line["median_us"] is None:
        return line["failure"] or "; ".join(line["wrong"])
    if line["source_hash"] is None:
        return "its code is in no module that evidence could be bound to"
    return "" if problem_of(line) in baselines else "no baseline was timed in the same run"


def baselines_of(lines: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """Problem -> its fastest baseline."""
    found: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for line in lines:
        if line["role"] == "baseline" and line["median_us"] is not None:
            best = found.setdefault(problem_of(line), line)
            if line["median_us"] < best["median_us"]:
                found[problem_of(line)] = line
    return found


def problem_of(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """What lines of one problem share."""
    return tuple(line[name] for name in _PROBLEM)
