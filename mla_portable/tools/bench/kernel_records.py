# SPDX-License-Identifier: Apache-2.0
"""A line of JSON for each (case, candidate) of a kernel benchmark: everything needed to compare it with another run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from mla_portable.contracts import InvalidArgument
from mla_portable.registry.tuned import TunedConfigurations
from mla_portable.sources import source_hash
from mla_portable.tools.bench.kernels import CaseTimes, KernelReport, KernelTime

__all__ = ["KIND", "append_lines", "kernel_lines", "read_lines"]

KIND: Final = "kernel_time"
SCHEMA: Final = 2


def kernel_lines(report: KernelReport, command: str) -> list[dict[str, Any]]:
    """One document per candidate that ran or was refused a time; those of one run share `recorded` and `command`.

    `tuned` is true where a user's table may have configured the kernels; `median_us` is null where the result was wrong or the
    run failed. Sources are hashed now: call this in the process that ran.
    """
    recorded = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    common: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": KIND,
        "recorded": recorded,
        "command": command,
        "device": {"name": report.facts.name, "arch": report.facts.arch, "vendor": report.facts.vendor},
        "ceilings": report.ceilings.as_dict(),
        **report.machine.as_dict(),
        "tuned": bool(TunedConfigurations.read(os.environ).entries),
    }
    return [
        {**common, **_of_case(case), **_of_candidate(each, report.facts.arch)} for case in report.cases for each in case.times
    ]


def _of_case(times: CaseTimes) -> dict[str, Any]:
    case = times.case
    return {
        "primitive": str(case.primitive),
        "layout": case.kv_layout,
        "heads": case.num_heads,
        "topk": case.topk,
        "rows": case.rows,
        "width": case.width,
        "overlap": case.overlap,
        "shape": case.shape,
        "bytes": times.bytes_moved,
        "flops": times.flops,
        "bound_us": times.bound_us,
    }


def _of_candidate(each: KernelTime, arch: str) -> dict[str, Any]:
    implementation, timing = each.implementation, each.timing
    sources = () if implementation is None else implementation.sources
    figures = {"median_us": None, "p10_us": None, "p90_us": None, "runs": 0, "clock": None, "cold_l2": None}
    if timing is not None:
        figures = {
            "median_us": 1e3 * timing.median_ms,
            "p10_us": 1e3 * timing.p10_ms,
            "p90_us": 1e3 * timing.p90_ms,
            "runs": timing.n,
            "clock": timing.clock,
            "cold_l2": timing.cold_l2,
        }
    return {
        "name": each.name,
        "role": "baseline" if implementation is None else "implementation",
        "source_hash": source_hash(sources, arch) if sources else None,
        "remark": each.remark,
        "errors": {quantity: _finite(error) for quantity, error in each.errors.items()},
        "wrong": list(each.wrong),
        "failure": each.failure,
        **figures,
    }


def _finite(value: float) -> float | str:
    return value if abs(value) != float("inf") and value == value else str(value)


def append_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Add documents to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, sort_keys=True, allow_nan=False) + "\n" for line in lines)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What `append_lines` wrote. Raises: InvalidArgument for a line that is none of it, with its number."""
    found: list[dict[str, Any]] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise _foreign(path, number, f"no JSON document ({error})") from error
        if not isinstance(line, dict) or line.get("kind") != KIND or line.get("schema") != SCHEMA:
            raise _foreign(path, number, "a document of another kind")
        found.append(line)
    return found


def _foreign(path: Path, number: int, got: str) -> InvalidArgument:
    remedy = "Give the file that `mla-portable bench kernels --out FILE` wrote."
    expected = f"a line of kind {KIND!r}, schema {SCHEMA}"
    return InvalidArgument(f"{path}:{number}", "line", got=got, expected=expected, remedy=remedy)
