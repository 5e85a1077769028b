# SPDX-License-Identifier: Apache-2.0
"""What a benchmark of kernels found: as documents for `--json`, and as the times of a run's file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from mla_portable.bench.kernels import CaseTimes, KernelReport, KernelTime
from mla_portable.bench.timing import Timing
from mla_portable.capability.profiles import Profile
from mla_portable.capability.run import Baseline, Run, Time
from mla_portable.judge.problems.bench import CHUNK_ROWS, KernelCase
from mla_portable.primitives import INDEXER_SELECT
from mla_portable.times.records import MeasuredTime, Measurement
from mla_portable.times.selection import form_of

_DIGITS: Final = 3
"""After the point of a microsecond; a clock of the device is no finer."""
_NO_LIBRARY: Final = ("python", "mla_portable")


def kernel_run(report: KernelReport) -> dict[str, Any]:
    """What the lines of a run share."""
    facts = {name: value for name, value in asdict(report.facts).items() if name != "libraries"}
    return {"device": facts, "ceilings": asdict(report.ceilings), **asdict(report.machine)}


def kernel_lines(report: KernelReport) -> list[dict[str, Any]]:
    """A document for each candidate that ran or was refused a time.

    `median_us` is null where the result was wrong or the run failed.
    """
    return [_of_case(case) | _of_candidate(each) | _figures(each.timing) for case in report.cases for each in case.times]


def selection_of(case: KernelCase) -> str:
    """Whose lists, or whose indexer's inputs, were used; "" for random ones."""
    return "" if case.selection is None else str(case.selection)


def _of_case(times: CaseTimes) -> dict[str, Any]:
    case = times.case
    return {
        "primitive": str(case.primitive),
        "layout": case.kv_layout,
        "heads": case.num_heads,
        **{name: getattr(case, name) for name in ("topk", "form", "rows", "width", "overlap", "shape")},
        "selection": selection_of(case),
        "bytes": times.bytes_moved,
        "flops": times.flops,
        "bound_us": times.bound_us,
    }


def _of_candidate(each: KernelTime) -> dict[str, Any]:
    return {
        "name": each.name,
        "role": "baseline" if each.implementation is None else "implementation",
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


def times_of(cases: Iterable[CaseTimes]) -> list[Time]:
    """The times of implementations, each beside the fastest baseline of its case."""
    found: list[Time] = []
    for times in cases:
        case = times.case
        timed = [each for each in times.times if each.implementation is None and each.median_us is not None]
        fastest = min(timed, key=lambda each: each.median_us or math.inf, default=None)
        baseline = fastest and Baseline(name=fastest.name, us=round(fastest.median_us or 0.0, _DIGITS))
        for each in times.times:
            if each.implementation is None or each.timing is None:
                continue
            us = {name: round(1e3 * getattr(each.timing, f"{name}_ms"), _DIGITS) for name in ("median", "p10", "p90")}
            found.append(
                Time(
                    implementation=each.name,
                    primitive=str(case.primitive),
                    layout=case.kv_layout,
                    heads=case.num_heads,
                    topk=case.topk,
                    form=case.form,
                    rows=case.rows,
                    width=case.width,
                    overlap=case.overlap,
                    selection=selection_of(case),
                    us=us["median"],
                    p10=us["p10"],
                    p90=us["p90"],
                    bound=round(times.bound_us, _DIGITS),
                    baseline=baseline,
                )
            )
    return found


def measured_times(run: Run, profiles: Mapping[str, Profile], backend: str | None = None) -> list[MeasuredTime]:
    """The times of a run that can rank implementations, for `times_text`: of several widths the largest.

    Left out: times with an overlap or of a model's selections, and those of disturbed problems.

    Args:
        profiles: the device is called as its profile, where there is one. backend: whose; None for all.
    """
    measurement = _measurement(run, profiles)
    found: dict[tuple[Any, ...], MeasuredTime] = {}
    disturbed = run.disturbed
    for time in sorted(run.times, key=lambda time: time.width):
        if not time.random or time.problem in disturbed or backend not in (None, time.implementation.partition(".")[0]):
            continue
        topk = None if time.form else time.topk  # a request states the form instead
        size = time.implementation, time.primitive, time.layout, time.heads, topk, time.rows
        found[(*size, time.form)] = MeasuredTime(*size, round(time.us, 2), measurement, time.form)
    return list(found.values())


def selection_records(
    run: Run, profiles: Mapping[str, Profile], engine: str, backend: str | None = None
) -> tuple[list[MeasuredTime], list[MeasuredTime]]:
    """Times of indexer_select by the keys of a request, for `selection_times`: ours, and the fastest baseline's as `engine`.

    Left out: rows that are tokens of one request, a model's inputs, problems without a baseline, and disturbed ones.
    """
    measurement, disturbed = _measurement(run, profiles), run.disturbed
    ours: list[MeasuredTime] = []
    theirs: dict[tuple[Any, ...], MeasuredTime] = {}
    for time in run.times:
        if time.primitive != str(INDEXER_SELECT) or time.rows >= CHUNK_ROWS or time.baseline is None:
            continue
        if not time.random or time.problem in disturbed or backend not in (None, time.implementation.partition(".")[0]):
            continue
        own = MeasuredTime(
            *(time.implementation, time.primitive, time.layout, time.heads, time.topk, time.rows, round(time.us, 2)),
            measurement,
            form_of(time.width),
        )
        ours.append(own)
        theirs[time.problem] = replace(own, implementation=engine, us=round(time.baseline.us, 2))
    return ours, list(theirs.values())


def _measurement(run: Run, profiles: Mapping[str, Profile]) -> Measurement:
    """Where the times of a run come from; the device is called as its profile, where there is one."""
    names = [profile.name for profile in profiles.values() if profile.matches(run.device_name)]
    versions = tuple(sorted((name, version) for name, version in run.versions.items() if name not in _NO_LIBRARY))
    device = names[0] if len(names) == 1 else run.device_name
    return Measurement(device, (run.device_name,), run.date, run.release, versions)
