# SPDX-License-Identifier: Apache-2.0
"""Make reports of what was run: of the conformance suite, by a plugin's compiler, by the benchmark of kernels."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, Final

from mla_portable.contracts import DeviceFacts, Primitive
from mla_portable.registry.facts import library_versions
from mla_portable.sources import code_of, source_hash
from mla_portable.tools.conformance import CaseResult
from mla_portable.tools.conformance import Report as Results
from mla_portable.tools.matrix.claims import Claim, Declarations
from mla_portable.tools.matrix.evidence import without_folders
from mla_portable.tools.matrix.model import RecordError
from mla_portable.tools.matrix.profiles import Profile, shared_memory_limit
from mla_portable.tools.matrix.records import suite_hash
from mla_portable.tools.provenance import Provenance

_CUDA_KERNEL: Final = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\s*\(")
_DIGITS: Final = 4
"""Significant ones of an error, and of its tolerance: both are rounded, so that neither passes the other by it."""
_SHARED: Final = ("schema", "kind", "device")
Document = dict[str, Any]


def document_of(run: Provenance, kind: str) -> Document:
    """What reports of every kind carry. `files` stands for `changed` until `provenance.settled` has compared them."""
    state = {"files": dict(run.files)} if run.files is not None else {"changed": dict(run.changed or {})}
    told = {"recorded": run.recorded, "command": without_folders(run.command), "machine": run.machine, "commit": run.commit}
    return {"schema": 1, "kind": kind, **told, **state}


def _claimed(claim: Claim, arch: str, **more: Any) -> Document:
    if not claim.sources:
        name = f"{claim.implementation} / {claim.primitive}"
        raise RecordError(name, "its code is in no module, so evidence cannot be bound to it; define bind in a module")
    return {
        **{name: getattr(claim, name) for name in ("implementation", "primitive", "distribution", "version")},
        "arch": arch,
        "support": dict(claim.support),
        "source_hash": source_hash(claim.sources, arch),
        **more,
    }


def mode_of(claim: Claim, device_type: str, environ: Mapping[str, str]) -> str:
    """How an implementation ran: on a device as it is; on a CPU in an interpreter or on a stand-in, the core's own apart."""
    if device_type != "cpu" or claim.core:
        return "native"
    return "interpreter" if environ.get("TRITON_INTERPRET", "0") not in ("", "0") else "stand_in"


def conformance_report(
    results: Results,
    declarations: Declarations,
    run: Provenance,
    *,
    match: str = "",
    driver: str | None = None,
    clocks: Mapping[str, float] | None = None,
    ran_on: DeviceFacts | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Document:
    """A run of the suite.

    Args:
        results: of `run_suite`, in this process. match: the filter it ran with. driver: its version, None on a CPU.
        ran_on: the device that ran code for the architecture of the results' device, which itself is not here.
    Raises: RecordError for an implementation whose code cannot be found.
    """
    arch, ran = results.device.arch, {(r.case.implementation, str(r.case.primitive)) for r in results.results}
    claims = [claim for claim in declarations.claims if (claim.implementation, claim.primitive) in ran]
    return {
        **document_of(run, "conformance"),
        "device": facts_of(ran_on or results.device),
        "driver": driver,
        "clocks": dict(clocks or {}),
        "versions": dict(results.versions),
        "level": results.level,
        "match": match,
        "target": None if ran_on is None else arch,
        "claims": [
            _claimed(
                claim,
                arch,
                mode="ptx" if ran_on else mode_of(claim, results.device.device_type, environ),
                suite_hash=suite_hash(Primitive.named(claim.primitive)),
            )
            for claim in claims
        ],
        "cases": [_case(each) for each in results.results],
    }


def facts_of(facts: DeviceFacts) -> Document:
    """The device of a report."""
    return {name: value for name, value in asdict(facts).items() if name != "libraries"}


def _case(result: CaseResult) -> Document:
    case, said = result.case, result.as_dict()
    usual = {each.name: each.default for each in fields(case.params)}
    params = {name: getattr(case.params, name) for name in usual if getattr(case.params, name) != usual[name]}
    return {
        **{name: said[name] for name in ("id", "implementation", "primitive", "status", "message")},
        "layout": case.request.kv_layout if case.primitive.cache else None,
        "heads": case.request.num_heads,
        "topk": case.request.topk,
        "params": {name: value if isinstance(value, (bool, int, float)) else str(value) for name, value in params.items()},
        "errors": {name: _short(value) for name, value in said["errors"].items()},
        "tolerances": {name: _short(value) for name, value in said["tolerances"].items()},
        "seconds": _short(result.seconds),
    }


def _short(value: float | str) -> float | str:
    return value if isinstance(value, str) or not math.isfinite(value) else float(f"{value:.{_DIGITS}g}")


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


def compiled_report(
    lines: Iterable[Mapping[str, Any]],
    module: str,
    declarations: Declarations,
    profiles: Mapping[str, Profile],
    run: Provenance,
) -> Document:
    """What the compiler of one plugin said, for claims with targets.

    Args:
        lines: what `python -m <plugin>.compile_all --json` printed. module: the plugin's. A line's `versions`, where it has
            them, are of compilers that are no Python distributions.
    The limit on shared memory is the smallest of the profiles of an architecture, so that a kernel fits each of them.
    Raises: RecordError when a kernel of a claim was not compiled for an architecture that others were compiled for.
    """
    lines = [dict(line) for line in lines]
    compiled: dict[str, set[str]] = {}
    for line in lines:
        compiled.setdefault(line["arch"], set()).add(line["kernel"])
    libraries = {name: version for name, version in library_versions() if name in ("torch", "triton")}
    claims: list[Document] = []
    for claim in declarations.claims:
        wanted = sorted(kernels_of(claim)) if claim.module == module and claim.targets else []
        for arch in [arch for arch in compiled if arch in claim.targets] if wanted else ():
            absent = [kernel for kernel in wanted if kernel not in compiled[arch]]
            if absent:
                name = f"{claim.implementation} / {claim.primitive} for {arch}"
                raise RecordError(name, f"not compiled: {', '.join(absent)}")
            claims.append(_claimed(claim, arch, kernels=wanted, shared_memory_limit=shared_memory_limit(arch, profiles)))
    versions = {"python": platform.python_version(), **libraries}
    return {**document_of(run, "compiled"), "versions": versions, "claims": claims, "lines": lines}


def benchmark_report(header: Mapping[str, Any], lines: Iterable[Mapping[str, Any]], declarations: Declarations) -> Document:
    """A run of the benchmark of kernels.

    Args:
        header, lines: of `mla_portable.tools.bench.kernel_records.read_runs`.
    Raises: RecordError for a run that a user's table may have configured, for an implementation that is not declared or was
        declared with other sources, and where nothing was timed.
    """
    if header["tuned"]:
        raise RecordError("benchmark", "a table of the user's may have configured it, and the sources do not say how")
    own: dict[str, Any] = {field.name: header.get(field.name) for field in fields(Provenance)}
    arch, lines = header["device"]["arch"], [{k: v for k, v in line.items() if k not in _SHARED} for line in lines]
    known = {(claim.implementation, claim.primitive): claim for claim in declarations.claims}
    claims: dict[tuple[str, str], Document] = {}
    for line in lines:
        name = line["name"], line["primitive"]
        if line["role"] == "baseline" or line["median_us"] is None or line["source_hash"] is None:
            continue
        if name not in known:
            raise RecordError(" / ".join(name), "no plugin here declares it; install the plugin, or remove the lines")
        claims.setdefault(name, _claimed(known[name], arch))
        if claims[name]["source_hash"] != line["source_hash"]:
            raise RecordError(" / ".join(name), "other sources than this tree's ran; check out the commit that ran")
    return {
        **document_of(Provenance(**own), "benchmark"),
        **{name: header[name] for name in ("device", "driver", "clocks", "versions", "ceilings")},
        "claims": list(claims.values()),
        "lines": lines,
    }
