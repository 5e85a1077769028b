# SPDX-License-Identifier: Apache-2.0
"""Benchmarks as evidence, and the times that the registry ranks by: both from lines of `bench kernels`, neither by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any, Final

from mla_portable.registry.costs import MeasuredTime
from mla_portable.tools.matrix.claims import Declarations
from mla_portable.tools.matrix.evidence import Evidence, without_folders
from mla_portable.tools.matrix.levels import Hashes
from mla_portable.tools.matrix.model import RecordError
from mla_portable.tools.matrix.profiles import Profile
from mla_portable.tools.matrix.record import Origin, common_fields, profile_of

Line = Mapping[str, Any]
_CASE: Final = ("recorded", "command", "primitive", "layout", "shape")
"""Fields that lines of one problem in one run share."""
_COPIED: Final = (
    *("recorded", "layout", "driver", "versions", "clocks", "shape", "rows", "overlap", "source_hash"),
    *("median_us", "p10_us", "p90_us", "runs"),
)


def benchmark_records(
    lines: Iterable[Line], declarations: Declarations, profiles: Mapping[str, Profile], origin: Origin
) -> tuple[list[dict[str, Any]], list[str]]:
    """One record per implementation and case that was timed beside a baseline.

    Args:
        lines: of `mla-portable bench kernels --out`. origin: of this checkout; each record keeps the time, the command and the
            source hash of the run it comes from.
    Returns: the records, and a line on everything that was left out.
    Raises: RecordError for a device without a profile and for an implementation that is not declared.
    """
    claims = {(claim.implementation, claim.primitive): claim for claim in declarations.claims}
    cases: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        cases.setdefault(tuple(line[name] for name in _CASE), []).append(line)
    records: list[dict[str, Any]] = []
    left_out: list[str] = []
    for case in cases.values():
        baselines = [line for line in case if line["role"] == "baseline" and line["median_us"] is not None]
        baseline = min(baselines, key=lambda line: line["median_us"], default=None)
        for line in (line for line in case if line["role"] != "baseline"):
            name = f"{line['name']} / {line['primitive']}, {line['shape']}"
            why = _unfit(line, baseline)
            if why:
                left_out.append(f"{name}: {why}")
                continue
            claim = claims.get((line["name"], line["primitive"]))
            if claim is None:
                raise RecordError(name, "no plugin here declares it; install the plugin, or remove the lines")
            assert baseline is not None, "an unfit line was left out above"
            name, arch = line["device"]["name"], line["device"]["arch"]
            ceilings = line["ceilings"]
            rates = ceilings["bytes_per_second"] / 1e12, ceilings["flops_per_second"] / 1e12
            bound = f"copy at {rates[0]:.3g} TB/s, bf16 product at {rates[1]:.3g} TFLOP/s"
            records.append(
                {
                    **common_fields(claim, origin, "benchmark", arch),
                    **{field: line[field] for field in _COPIED},
                    "command": without_folders(line["command"]),
                    "device": {"profile": profile_of(name, profiles).slug, "name": name, "arch": arch},
                    "heads": [line["heads"]] if line["heads"] else [],
                    "topk": [line["topk"]] if line["topk"] else [],
                    "floor": {"name": bound, "median_us": line["bound_us"]},
                    "rival": {"name": baseline["name"], "median_us": baseline["median_us"]},
                }
            )
    return records, left_out


def _unfit(line: Line, baseline: Line | None) -> str:
    """Why a line is no evidence; "" when it is."""
    if line["median_us"] is None:
        return line["failure"] or "; ".join(line["wrong"])
    if line["tuned"]:
        return "a table of the user's may have configured it, and the sources do not say how"
    if line["source_hash"] is None:
        return "it declares no sources that evidence could be bound to"
    return "" if baseline is not None else "no baseline was timed in the same run"


def measured_times(evidence: Sequence[Evidence], hashes: Hashes) -> list[MeasuredTime]:
    """The newest benchmark of each implementation, device and size: of today's sources, from a clean tree, without overlap."""
    newest: dict[tuple[Any, ...], MeasuredTime] = {}
    for each in evidence:
        data = each.data
        if each.kind != "benchmark" or "rows" not in data or data.get("overlap") or data["dirty"] or hashes.changed(each):
            continue
        time = MeasuredTime(
            device=data["device"]["name"],
            primitive=data["primitive"],
            layout=data["layout"],
            heads=next(iter(data["heads"]), None),
            topk=next(iter(data["topk"]), None),
            rows=data["rows"],
            implementation=data["implementation"],
            us=round(data["median_us"], 2),
            recorded=each.recorded.partition("T")[0],
            source_hash=data["source_hash"],
        )
        newest[astuple(replace(time, us=0, recorded="", source_hash=""))] = time
    return list(newest.values())
