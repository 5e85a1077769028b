# SPDX-License-Identifier: Apache-2.0
"""Make evidence records from what was run: a report of the conformance suite, the output of a plugin's compiler."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from mla_portable.contracts import DeviceFacts, Primitive
from mla_portable.registry.facts import library_versions
from mla_portable.sources import code_of, module_file, source_hash
from mla_portable.tools.conformance import CaseResult, Report
from mla_portable.tools.matrix.claims import Claim, Declarations
from mla_portable.tools.matrix.evidence import without_folders
from mla_portable.tools.matrix.model import RecordError
from mla_portable.tools.matrix.profiles import Profile
from mla_portable.tools.matrix.records import suite_hash

_CUDA_KERNEL: Final = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\s*\(")
_RECORDS: Final = "capability/"
"""What lies here may change without making a tree dirty: evidence is written while it is gathered."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where evidence comes from. commit: None outside git. dirty: tracked or new files differ from it. recorded: UTC."""

    commit: str | None
    dirty: bool
    recorded: str
    command: str


def origin_of(root: Path, command: str) -> Origin:
    """The state of the checkout at `root`, now."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout

    recorded = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    try:
        commit = git("rev-parse", "HEAD").strip()
        changed = [line[3:] for line in git("status", "--porcelain", "--untracked-files=all").splitlines()]
    except (OSError, subprocess.CalledProcessError):
        return Origin(None, True, recorded, command)
    return Origin(commit, any(not path.startswith(_RECORDS) for path in changed), recorded, command)


def origin_of_package(claims: Iterable[Claim], command: str) -> Origin:
    """Where installed plugins come from: their checkout; else no commit, and the versions of their distributions say it."""
    files = [module_file(source) for claim in claims for source in claim.sources]
    for path in files:
        tracked = subprocess.run(["git", "ls-files", path.name], cwd=path.parent, capture_output=True, text=True, check=False)
        if tracked.stdout.strip():
            return origin_of(path.parent, command)
    return Origin(None, False, origin_of(Path(), command).recorded, command)


def profile_of(device_name: str, profiles: Mapping[str, Profile]) -> Profile:
    """The profile of a device by the name its driver reports. Raises: RecordError for a device without a profile."""
    found = [profile for profile in profiles.values() if profile.matches(device_name)]
    if len(found) != 1:
        which = f"{len(found)} profiles match: {', '.join(p.slug for p in found)}" if found else "no profile matches"
        raise RecordError(f"device {device_name!r}", f"{which}; add or correct one in capability/profiles (docs/matrix.md)")
    return found[0]


def common_fields(claim: Claim, origin: Origin, kind: str, arch: str) -> dict[str, Any]:
    """What records of every kind carry. arch: whose code ran or was compiled."""
    return {
        "schema": 1,
        "kind": kind,
        "recorded": origin.recorded,
        "implementation": claim.implementation,
        "primitive": claim.primitive,
        "provider": {"distribution": claim.distribution, "version": claim.version},
        "commit": origin.commit,
        "dirty": origin.dirty,
        "source_hash": source_hash(claim.sources, arch),
        "support": dict(claim.support),
        "command": without_folders(origin.command),
    }


def mode_of(claim: Claim, device_type: str, environ: Mapping[str, str]) -> str:
    """How an implementation ran: on a device as it is; on a CPU in an interpreter or on a stand-in, the core's own apart."""
    if device_type != "cpu" or claim.core:
        return "native"
    return "interpreter" if environ.get("TRITON_INTERPRET", "0") not in ("", "0") else "stand_in"


def conformance_records(
    report: Report,
    declarations: Declarations,
    profiles: Mapping[str, Profile],
    origin: Origin,
    *,
    match: str = "",
    driver: str | None = None,
    ran_on: DeviceFacts | None = None,
    environ: Mapping[str, str] = os.environ,
) -> list[dict[str, Any]]:
    """One record per implementation, primitive and layout that the report has cases of.

    Args:
        report: of `run_suite`, in this process. match: the filter it ran with. driver: its version, None on a CPU.
        ran_on: the device that ran code for the architecture of the report's device, which itself is not here.
    Raises: RecordError for a device without a profile.
    """
    device = report.device if ran_on is None else ran_on
    profile = profile_of(device.name, profiles)
    code: dict[str, Any] = {} if ran_on is None else {"mode": "ptx", "target": report.device.arch}
    claims = {(claim.implementation, claim.primitive): claim for claim in declarations.claims}
    groups: dict[tuple[str, str, str | None], list[CaseResult]] = {}
    for result in report.results:
        case = result.case
        layout = case.request.kv_layout if case.primitive.cache else None
        groups.setdefault((case.implementation, str(case.primitive), layout), []).append(result)
    records: list[dict[str, Any]] = []
    for (implementation, primitive, layout), results in groups.items():
        claim = claims[implementation, primitive]
        requests = [result.case.request for result in results]
        passed = sum(result.status == "passed" for result in results)
        records.append(
            {
                **common_fields(claim, origin, "conformance", report.device.arch),
                "layout": layout,
                "device": {"profile": profile.slug, "name": device.name, "arch": device.arch},
                "driver": driver,
                "versions": dict(report.versions),
                "mode": mode_of(claim, report.device.device_type, environ),
                "level": report.level,
                "match": match,
                "suite_hash": suite_hash(Primitive.named(primitive)),
                "heads": sorted({r.num_heads for r in requests if r.num_heads is not None}),
                "topk": sorted({r.topk for r in requests if r.topk is not None}),
                "cases": {"passed": passed, "failed": len(results) - passed, "skipped": 0},
                "errors": _worst(results),
                **code,
            }
        )
    return records


def _worst(results: Sequence[CaseResult]) -> dict[str, Any]:
    """By quantity the case that came nearest to its tolerance; what is exact and holds is left out."""
    found: dict[str, tuple[float, dict[str, Any]]] = {}
    for said in (result.as_dict() for result in results):
        for quantity, error in said["errors"].items():
            limit = said["tolerances"][quantity]
            share = float(error) / float(limit) if float(limit) else float("inf")
            if quantity not in found or share > found[quantity][0]:
                found[quantity] = (share, {"error": error, "tolerance": limit, "case": said["id"]})
    return {quantity: row for quantity, (_, row) in found.items()}


def kernels_of(claim: Claim) -> dict[str, str]:
    """Kernels that the claim's code has -> the source that it is.

    In Python they are functions whose names end in `_kernel`; in any other file, what is declared `__global__`.
    """
    found: dict[str, str] = {}
    for source, code in code_of(claim.sources).items():
        name = source.partition("::")[2]
        if name.endswith("_kernel") and code.startswith("FunctionDef("):
            found[name] = source
        elif not name:
            found.update(dict.fromkeys(_CUDA_KERNEL.findall(code), source))
    return found


def compiled_records(
    lines: Iterable[Mapping[str, Any]], module: str, declarations: Declarations, profiles: Mapping[str, Profile], origin: Origin
) -> list[dict[str, Any]]:
    """One record per implementation, primitive and architecture of one plugin, for claims with targets.

    Args:
        lines: what `python -m <plugin>.compile_all --json` printed. module: the plugin's. A line's `versions`, where it has
            them, are of compilers that are no Python distributions.
    The limit on shared memory is the smallest of the profiles of an architecture, so that a kernel fits each of them.
    Raises: RecordError when a kernel of a claim was not compiled for an architecture that others were compiled for.
    """
    by_arch: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for line in lines:
        by_arch.setdefault(line["arch"], {}).setdefault(line["kernel"], []).append(line)
    libraries = {name: version for name, version in library_versions() if name in ("torch", "triton")}
    records: list[dict[str, Any]] = []
    for claim in declarations.claims:
        wanted = kernels_of(claim) if claim.module == module and claim.targets else {}
        for arch, compiled in by_arch.items() if wanted else ():
            if arch not in claim.targets:
                continue
            absent = [kernel for kernel in wanted if kernel not in compiled]
            if absent:
                name = f"{claim.implementation} / {claim.primitive} for {arch}"
                raise RecordError(name, f"not compiled: {', '.join(absent)}")
            limit = shared_memory_limit(arch, profiles)
            variants = [line for kernel in wanted for line in compiled[kernel]]
            failures = [failure for line in variants if (failure := _failure(line, arch, limit))]
            versions = {"python": platform.python_version(), **libraries}
            for line in variants:
                versions |= line.get("versions", {})
            records.append(
                {
                    **common_fields(claim, origin, "compiled", arch),
                    "target": arch,
                    "versions": versions,
                    "shared_memory_limit": limit,
                    "cases": {"passed": len(variants) - len(failures), "failed": len(failures), "skipped": 0},
                    "kernels": {kernel: _usage(compiled[kernel]) for kernel in sorted(wanted)},
                    "failures": failures,
                }
            )
    return records


def shared_memory_limit(arch: str, profiles: Mapping[str, Profile]) -> int:
    """Bytes that every device of an architecture gives to a thread block. Raises: RecordError where no profile says."""
    known = [p.facts.shared_memory for p in profiles.values() if p.arch == arch and p.facts.shared_memory is not None]
    if not known:
        problem = "no profile says how much shared memory it has; add one to capability/profiles"
        raise RecordError(f"architecture {arch}", problem)
    return min(known)


def _failure(line: Mapping[str, Any], arch: str, limit: int) -> str:
    if not line["error"] and line["shared"] > limit:
        return f"{line['label']}: {line['shared']} bytes of shared memory, {arch} has {limit}"
    return f"{line['label']}: {line['error']}" if line["error"] else ""


def _usage(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The largest of each resource over a kernel's variants; None where the compiler does not say."""
    names = ("shared", "registers", "spilled")
    known = {name: [line[name] for line in lines if line.get(name) is not None] for name in names}
    largest = {name: max(values, default=0 if name == "shared" else None) for name, values in known.items()}
    return {"variants": len(lines), **largest}
