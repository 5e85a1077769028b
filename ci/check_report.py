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

_REPORT_FIELDS = ("backend", "level", "ok", "device", "versions", "totals", "implementations", "unavailable", "cases")
_CASE_FIELDS = ("id", "implementation", "primitive", "status", "errors", "tolerances")

Served = tuple[str, str]
"""(implementation, primitive)."""


def served(entry: dict[str, Any]) -> Served:
    return entry["implementation"], entry["primitive"]


def check_report(report: Any, vendor: str | None = None, rejected: frozenset[Served] = frozenset()) -> Iterator[str]:
    """Every reason against one report of `conform --record`.

    Args:
        rejected: what the probe refuses on that machine: it serves nobody there, so its cases may fail.
    """
    if not isinstance(report, dict) or (missing := [name for name in _REPORT_FIELDS if name not in report]):
        yield f"no report of `conform --record`: {', '.join(missing) if isinstance(report, dict) else 'no object'} missing"
        return
    device, versions = report["device"], report["versions"]
    if device.get("device_type") == "cpu":
        yield f"the device is a CPU ({device.get('name')}): this is no run on hardware"
    if vendor is not None and device.get("vendor") != vendor:
        yield f"the device is {device.get('vendor')}'s ({device.get('name')}), expected {vendor}'s"
    if "simulated" in str(device.get("name")).lower():
        yield "the device is simulated"
    if absent := [name for name in ("mla_portable", "python", "torch") if not versions.get(name)]:
        yield f"versions of {', '.join(absent)} are not given"
    if report["level"] not in ("quick", "full"):
        yield f"level {report['level']!r} proves too little: run quick or full"
    if absent := {name for case in report["cases"] for name in _CASE_FIELDS if name not in case}:
        yield f"a case lacks {', '.join(sorted(absent))}"
    else:
        yield from _cases(report, rejected)
    for each in report["unavailable"]:
        if not each.get("reasons"):
            yield f"{each.get('implementation')} / {each.get('primitive')} was not run, and no reason is given"


def rejected_by(doctor: Any) -> frozenset[Served]:
    """What doctor says does not work on its machine."""
    return frozenset(served(each) for each in doctor.get("examined", ()) if each["reasons"])


def _cases(report: dict[str, Any], rejected: frozenset[Served]) -> Iterator[str]:
    """The cases passed, each once, within their tolerances, and totals and summary count them."""
    cases, backend = report["cases"], report["backend"]
    passed = [case for case in cases if case["status"] == "passed"]
    bad = [case for case in cases if case["status"] != "passed"]
    for found, what in (
        ([name for name, count in Counter(c["id"] for c in cases).items() if count > 1], "cases appear twice"),
        (
            [c["id"] for c in cases if backend not in (c["implementation"], c["implementation"].partition(".")[0])],
            f"cases are of another backend than {backend}",
        ),
        ([case["id"] for case in bad if served(case) not in rejected], "cases did not pass"),
    ):
        if found:
            yield f"{len(found)} {what}, {found[0]} first"
    if not passed:
        yield "no case passed" if cases else "no case ran"
    for name, count in {"cases": len(cases), "passed": len(passed), "failed": len(bad), "skipped": 0}.items():
        if report["totals"].get(name) != count:
            yield f"totals say {report['totals'].get(name)} {name}, the cases say {count}"
    if report["ok"] is not (bool(cases) and not bad):
        yield f"the report says ok={report['ok']}, its cases do not"
    ran = Counter(map(served, cases))
    if ran != {served(row): sum(v for v in row.values() if isinstance(v, int)) for row in report["implementations"]}:
        yield "the summary by implementation does not agree with the cases"
    for each in report["unavailable"]:
        if served(each) in ran:
            yield f"{' / '.join(served(each))} is called unavailable, yet it has cases"
    for case in passed:
        for quantity, error in case["errors"].items():
            limit = case["tolerances"].get(quantity)
            if limit is None or not float(error) <= float(limit):  # NaN is beyond any limit
                yield f"{case['id']}: {quantity} is off by {error}, allowed {limit}, and the case is called passed"


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
    failed = {served(case) for case in report["cases"] if case["status"] != "passed"}
    passed = set(map(served, report["cases"])) - failed
    for each in sorted(passed & rejected_by(doctor)):
        yield f"{' / '.join(each)} passed the suite, but its probe fails"


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
    lines = [line for line in options.report.read_text(encoding="utf-8").splitlines() if line.strip()]
    doctor = json.loads(options.doctor.read_text(encoding="utf-8")) if options.doctor else None
    if not lines:
        print("the report is empty")
    wrong = not lines
    for number, report in enumerate(map(json.loads, lines), start=1):
        reasons = list(check_report(report, options.vendor, rejected_by(doctor or {})))
        if options.doctor and not reasons:
            reasons += check_doctor(doctor, report)
        for said in reasons or [summary(report)]:
            print(f"line {number}: {said}")
        wrong |= bool(reasons)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
