# SPDX-License-Identifier: Apache-2.0
"""Is a report from somebody's hardware whole and consistent? For reviewers of a pull request that brings one.

    mla-portable conform iluvatar --level full --record report.jsonl      # on the device
    mla-portable doctor --json > doctor.json                              # on the device
    python3 ci/check_report.py report.jsonl --doctor doctor.json --vendor iluvatar

Reads JSON alone: neither torch nor a device is needed. What it refuses: a run on a CPU (a stand-in proves nothing about a
device), another vendor's device, cases that failed, raised or were left out, totals that its own cases contradict, errors
beyond their tolerances, a doctor's report of another device or other versions. Every reason is printed. An implementation that
the probe refuses there as well may fail: it serves nobody, and is named as not whole.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["check_doctor", "check_report", "rejected_by", "summary"]

_REPORT_FIELDS = ("backend", "level", "ok", "device", "versions", "totals", "implementations", "unavailable", "cases")
_CASE_FIELDS = ("id", "implementation", "primitive", "status", "errors", "tolerances")
_NEEDED_VERSIONS = ("mla_portable", "python", "torch")
_LEVELS = ("quick", "full")


Served = tuple[str, str]
"""(implementation, primitive)."""


def check_report(report: Any, vendor: str | None = None, rejected: frozenset[Served] = frozenset()) -> Iterator[str]:
    """Every reason against one report of `conform --record`.

    Args:
        rejected: what the probe refuses on that machine: it serves nobody there, so its cases may fail.
    """
    if not isinstance(report, dict) or (missing := [name for name in _REPORT_FIELDS if name not in report]):
        yield f"no report of `conform --record`: {', '.join(missing) if isinstance(report, dict) else 'no object'} missing"
        return
    yield from _device(report["device"], vendor)
    absent = [name for name in _NEEDED_VERSIONS if not report["versions"].get(name)]
    if absent:
        yield f"versions of {', '.join(absent)} are not given"
    if report["level"] not in _LEVELS:
        yield f"level {report['level']!r} proves too little: run quick or full"
    yield from _cases(report, rejected)
    for each in report["unavailable"]:
        if not each.get("reasons"):
            yield f"{each.get('implementation')} / {each.get('primitive')} was not run, and no reason is given"


def _device(device: Any, vendor: str | None) -> Iterator[str]:
    if device.get("device_type") == "cpu":
        yield f"the device is a CPU ({device.get('name')}): this is no run on hardware"
    if vendor is not None and device.get("vendor") != vendor:
        yield f"the device is {device.get('vendor')}'s ({device.get('name')}), expected {vendor}'s"
    if "simulated" in str(device.get("name", "")).lower():
        yield "the device is simulated"


def rejected_by(doctor: Any) -> frozenset[Served]:
    """What doctor says does not work on its machine."""
    return frozenset((each["implementation"], each["primitive"]) for each in doctor.get("examined", ()) if each["reasons"])


def _cases(report: dict[str, Any], rejected: frozenset[Served]) -> Iterator[str]:
    cases = report["cases"]
    for case in cases:
        absent = [name for name in _CASE_FIELDS if name not in case]
        if absent:
            yield f"a case lacks {', '.join(absent)}"
            return
    twice = [name for name, count in Counter(case["id"] for case in cases).items() if count > 1]
    if twice:
        yield f"{len(twice)} cases appear twice, {twice[0]} first"
    backend = report["backend"]
    foreign = [c["id"] for c in cases if backend not in (c["implementation"], c["implementation"].partition(".")[0])]
    if foreign:
        yield f"{len(foreign)} cases are of another backend than {backend}, {foreign[0]} first"
    ends = Counter(case["status"] for case in cases)
    bad = [case["id"] for case in cases if case["status"] != "passed"]
    serious = [c["id"] for c in cases if c["status"] != "passed" and (c["implementation"], c["primitive"]) not in rejected]
    if serious:
        yield f"{len(serious)} cases did not pass, {serious[0]} first"
    if not ends["passed"]:
        yield "no case passed" if cases else "no case ran"
    totals = report["totals"]
    counted = {"cases": len(cases), "passed": ends["passed"], "failed": len(bad), "skipped": 0}
    for name, count in counted.items():
        if totals.get(name) != count:
            yield f"totals say {totals.get(name)} {name}, the cases say {count}"
    if report["ok"] is not (bool(cases) and not bad):
        yield f"the report says ok={report['ok']}, its cases do not"
    yield from _listed(report)
    for case in cases:
        if case["status"] != "passed":
            continue
        for quantity, error in case["errors"].items():
            limit = case["tolerances"].get(quantity)
            if limit is None or not float(error) <= float(limit):  # NaN is beyond any limit
                yield f"{case['id']}: {quantity} is off by {error}, allowed {limit}, and the case is called {case['status']}"


def _listed(report: dict[str, Any]) -> Iterator[str]:
    """The summary by implementation agrees with the cases; none is both run and left out."""
    ran = Counter((case["implementation"], case["primitive"]) for case in report["cases"])
    said = {
        (row["implementation"], row["primitive"]): sum(v for k, v in row.items() if isinstance(v, int))
        for row in report["implementations"]
    }
    if ran != said:
        yield "the summary by implementation does not agree with the cases"
    both = ran.keys() & {(each.get("implementation"), each.get("primitive")) for each in report["unavailable"]}
    for implementation, primitive in sorted(both):
        yield f"{implementation} / {primitive} is called unavailable, yet it has cases"


def check_doctor(doctor: Any, report: dict[str, Any]) -> Iterator[str]:
    """Every reason against the doctor's report that belongs to a report of the suite."""
    if not isinstance(doctor, dict) or "devices" not in doctor or "examined" not in doctor:
        yield "no report of `doctor --json`"
        return
    seen = [facts.get("name") for _, facts in doctor["devices"]]
    if report["device"].get("name") not in seen:
        yield f"doctor saw {', '.join(map(str, seen))}, the suite ran on {report['device'].get('name')}"
    versions = dict(doctor.get("versions", ()))
    for name in ("mla_portable", "torch"):
        ours = report["versions"].get(name)
        if versions.get(name) and ours and versions[name].partition("+")[0] != ours.partition("+")[0]:
            yield f"{name} is {versions[name]} in doctor's report, {ours} in the suite's"
    failed = {(c["implementation"], c["primitive"]) for c in report["cases"] if c["status"] != "passed"}
    passed = {(c["implementation"], c["primitive"]) for c in report["cases"]} - failed
    for implementation, primitive in sorted(passed & rejected_by(doctor)):
        yield f"{implementation} / {primitive} passed the suite, but its probe fails"


def summary(report: dict[str, Any]) -> str:
    """One line for the pull request."""
    device, totals = report["device"], report["totals"]
    failed = {case["implementation"] for case in report["cases"] if case["status"] != "passed"}
    who = sorted({case["implementation"] for case in report["cases"]} - failed)
    rest = f"; refused by the probe too: {', '.join(sorted(failed))}" if failed else ""
    where = f"{device['name']} ({device['arch']}), level {report['level']}"
    return f"{where}: {totals['passed']} of {totals['cases']} cases passed; whole: {', '.join(who)}{rest}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="what `mla-portable conform --record` wrote")
    parser.add_argument("--doctor", type=Path, help="what `mla-portable doctor --json` printed on the same machine")
    parser.add_argument("--vendor", help="the vendor that the device must be of")
    options = parser.parse_args()
    wrong = 0
    lines = [line for line in options.report.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        print("the report is empty")
        return 1
    doctor = json.loads(options.doctor.read_text(encoding="utf-8")) if options.doctor else None
    for number, line in enumerate(lines, start=1):
        report = json.loads(line)
        reasons = list(check_report(report, options.vendor, rejected_by(doctor) if doctor else frozenset()))
        if options.doctor and not reasons:
            reasons += check_doctor(doctor, report)
        print(*(f"line {number}: {reason}" for reason in reasons), sep="\n", end="\n" if reasons else "")
        if not reasons:
            print(f"line {number}: {summary(report)}")
        wrong += bool(reasons)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
