# SPDX-License-Identifier: Apache-2.0
"""What reviewers check of a report from somebody's hardware: a real report passes, each kind of doctored one does not."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from corex_machine import NEWEST, installed, registry

from mla_portable.primitives import CONVERT_INDICES
from mla_portable.tools.cli.diagnosis import diagnose
from mla_portable.tools.cli.output import plain
from mla_portable.tools.conformance import run_suite

SCRIPT = Path(__file__).parents[2] / "ci" / "check_report.py"
spec = importlib.util.spec_from_file_location("check_report", SCRIPT)
checks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(checks)


@pytest.fixture(scope="module")
def documents():
    """A real run on the stand-ins, with the device called what it would be called on the hardware; and doctor's report."""
    with installed({place: op for place, op in NEWEST.items() if "map_" in place}):
        machine = registry()
        report = run_suite(machine, "iluvatar", device="cpu", level="quick", primitives=[CONVERT_INDICES])
        doctor = plain(diagnose(machine, torch.device("cpu")).as_dict())
    document = json.loads(json.dumps(plain(report.as_dict())))
    assert document["totals"]["passed"] > 50
    document["device"]["device_type"] = "cuda"
    return document, json.loads(json.dumps(doctor))


def test_a_whole_report_is_accepted(documents):
    report, doctor = documents
    assert list(checks.check_report(report, "iluvatar")) == []
    assert list(checks.check_doctor(doctor, report)) == []
    assert "iluvatar.map_prefill" in checks.summary(report)


def lose_a_case(report):
    del report["cases"][3]


def fail_a_case(report):
    report["cases"][0]["status"] = "failed"


def hide_a_failure(report):
    report["cases"][0]["status"] = "failed"
    report["totals"].update(passed=report["totals"]["passed"] - 1, failed=1)


def repeat_a_case(report):
    report["cases"][1] = report["cases"][0]


def exceed_a_tolerance(report):
    report["cases"][0].update(errors={"out": 2.0}, tolerances={"out": 1.0})


def be_nan(report):
    report["cases"][0].update(errors={"out": "nan"}, tolerances={"out": 1.0})


def run_nothing(report):
    report.update(cases=[], implementations=[], ok=False, totals={"cases": 0, "passed": 0, "failed": 0, "skipped": 0})


DOCTORED = {
    "a CPU": (lambda report: report["device"].update(device_type="cpu"), "no run on hardware"),
    "another vendor": (lambda report: report["device"].update(vendor="nvidia"), "expected iluvatar's"),
    "a lost case": (lose_a_case, "the cases say"),
    "a failed case": (fail_a_case, "did not pass"),
    "a failure behind right totals": (hide_a_failure, "says ok=True"),
    "a case twice": (repeat_a_case, "appear twice"),
    "skipped cases": (lambda report: report["totals"].update(skipped=2), "totals say 2 skipped"),
    "an error beyond its tolerance": (exceed_a_tolerance, "is off by 2.0"),
    "an error that is no number": (be_nan, "is off by nan"),
    "nothing ran": (run_nothing, "no case ran"),
    "the smallest level": (lambda report: report.update(level="smoke"), "proves too little"),
    "no version of torch": (lambda report: report["versions"].pop("torch"), "versions of torch"),
    "another backend": (lambda report: report.update(backend="triton"), "another backend"),
    "left out without a reason": (lambda report: report["unavailable"][0].update(reasons=[]), "no reason is given"),
    "no report at all": (lambda report: report.clear(), "no report of"),
    "a summary of other cases": (lambda report: report["implementations"].pop(), "does not agree"),
}


@pytest.mark.parametrize("name", DOCTORED)
def test_a_doctored_report_is_refused(documents, name):
    change, reason = DOCTORED[name]
    report = copy.deepcopy(documents[0])
    change(report)
    found = list(checks.check_report(report, "iluvatar"))
    assert any(reason in text for text in found), found


def test_a_doctors_report_of_another_machine_is_refused(documents):
    report, doctor = copy.deepcopy(documents)
    report["device"]["name"] = "MR-V100"
    assert any("the suite ran on MR-V100" in text for text in checks.check_doctor(doctor, report))
    report, doctor = copy.deepcopy(documents)
    report["versions"]["torch"] = "1.0"
    assert any("torch is" in text for text in checks.check_doctor(doctor, report))
    report, doctor = copy.deepcopy(documents)
    next(each for each in doctor["examined"] if each["implementation"] == "iluvatar.map_prefill")["reasons"] = ["slow"]
    assert any("its probe fails" in text for text in checks.check_doctor(doctor, report))


def test_an_implementation_that_the_probe_refuses_too_may_fail(documents):
    report, doctor = copy.deepcopy(documents)
    hide_a_failure(report)
    report["ok"] = False
    implementation = report["cases"][0]["implementation"]
    assert any("did not pass" in text for text in checks.check_report(report, "iluvatar", checks.rejected_by(doctor)))
    for each in doctor["examined"]:
        if each["implementation"] == implementation:
            each["reasons"] = ["wrong values"]
    assert list(checks.check_report(report, "iluvatar", checks.rejected_by(doctor))) == []
    assert list(checks.check_doctor(doctor, report)) == []
    assert f"refused by the probe too: {implementation}" in checks.summary(report)


@pytest.mark.parametrize(("device_type", "code"), [("cuda", 0), ("cpu", 1)])
def test_the_script_says_so_with_its_exit_code(documents, tmp_path, device_type, code):
    report = copy.deepcopy(documents[0])
    report["device"]["device_type"] = device_type
    (tmp_path / "report.jsonl").write_text(json.dumps(report) + "\n")
    (tmp_path / "doctor.json").write_text(json.dumps(documents[1]))
    command = [sys.executable, str(SCRIPT), "report.jsonl", "--doctor", "doctor.json", "--vendor", "iluvatar"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("no run on hardware" in done.stdout) == (code == 1)
