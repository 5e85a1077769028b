# SPDX-License-Identifier: Apache-2.0
"""A line of JSON for each (case, candidate) of a kernel benchmark, after one that says what the lines of a run share."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

from mla_portable.contracts import InvalidArgument
from mla_portable.registry.tuned import TunedConfigurations
from mla_portable.sources import source_hash, sources_of
from mla_portable.tools.bench.kernels import CaseTimes, KernelReport, KernelTime
from mla_portable.tools.bench.timing import Timing
from mla_portable.tools.provenance import code_root, provenance_of

RUN: Final = "kernel_run"
KIND: Final = "kernel_time"
SCHEMA: Final = 3


def kernel_run(report: KernelReport, command: str, device: torch.device) -> dict[str, Any]:
    """What the lines of a run share, with where and from which code it ran. Call this in the process that ran.

    `tuned` is true where a user's table may have configured the kernels.
    """
    facts = {name: value for name, value in asdict(report.facts).items() if name != "libraries"}
    return {
        "schema": SCHEMA,
        "kind": RUN,
        **asdict(provenance_of(code_root(), command, device)),
        "device": facts,
        "ceilings": asdict(report.ceilings),
        **asdict(report.machine),
        "tuned": bool(TunedConfigurations.read(os.environ).entries),
    }


def kernel_lines(report: KernelReport) -> list[dict[str, Any]]:
    """One document per candidate that ran or was refused a time.

    `median_us` is null where the result was wrong or the run failed. Sources are hashed now: call this in the process that ran.
    """
    facts = report.facts
    common = {"schema": SCHEMA, "kind": KIND, "device": {"name": facts.name, "arch": facts.arch, "vendor": facts.vendor}}
    return [
        common | _of_case(case) | _of_candidate(each, facts.arch) | _figures(each.timing)
        for case in report.cases
        for each in case.times
    ]


def _of_case(times: CaseTimes) -> dict[str, Any]:
    case = times.case
    return {
        "primitive": str(case.primitive),
        "layout": case.kv_layout,
        "heads": case.num_heads,
        **{name: getattr(case, name) for name in ("topk", "rows", "width", "overlap", "shape")},
        "bytes": times.bytes_moved,
        "flops": times.flops,
        "bound_us": times.bound_us,
    }


def _of_candidate(each: KernelTime, arch: str) -> dict[str, Any]:
    sources = () if each.implementation is None else sources_of(each.implementation)
    return {
        "name": each.name,
        "role": "baseline" if each.implementation is None else "implementation",
        "source_hash": source_hash(sources, arch) if sources else None,
        "remark": each.remark,
        "errors": {name: error if math.isfinite(error) else str(error) for name, error in each.errors.items()},
        "wrong": list(each.wrong),
        "failure": each.failure,
    }


def _figures(timing: Timing | None) -> dict[str, Any]:
    if timing is None:
        return {"median_us": None, "p10_us": None, "p90_us": None, "runs": 0, "clock": None, "cold_l2": None}
    times = {f"{name}_us": 1e3 * getattr(timing, f"{name}_ms") for name in ("median", "p10", "p90")}
    return {**times, "runs": timing.n, "clock": timing.clock, "cold_l2": timing.cold_l2}


def append_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Add documents to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, sort_keys=True, allow_nan=False) + "\n" for line in lines)


def read_runs(path: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """(run, its lines), as `append_lines` wrote them. Raises: InvalidArgument for a line that is neither, with its number."""
    found: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            line, got = None, f"no JSON document ({error})"
        else:
            got = "a document of another kind"
        kinds = (RUN, KIND) if found else (RUN,)
        if not isinstance(line, dict) or line.get("kind") not in kinds or line.get("schema") != SCHEMA:
            remedy = "Give the file that `mla-portable bench kernels --out FILE` wrote."
            expected = f"a line of kind {' or '.join(map(repr, kinds))}, schema {SCHEMA}"
            raise InvalidArgument(f"{path}:{number}", "line", got=got, expected=expected, remedy=remedy)
        if line["kind"] == RUN:
            found.append((line, []))
        else:
            found[-1][1].append(line)
    return found
