# SPDX-License-Identifier: Apache-2.0
"""The conformance suite in several processes: every case has a result, in order, whatever becomes of the workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conformance_faults import CPU, Model

from mla_portable.choose import get_registry
from mla_portable.contracts import InvalidArgument
from mla_portable.judge.conformance import CaseResult, cases_for, run_suite
from mla_portable.judge.conformance.parallel import BLOCK, run_in_processes
from mla_portable.primitives import MERGE_STATES

CASES = cases_for(Model().implementation(MERGE_STATES), CPU, "quick")[: 2 * BLOCK + 2]
DIES, FAILS, UNREADABLE = 1, BLOCK + 1, 2 * BLOCK


def run(case, device):
    """In a worker: tells its process, prints, and ends some cases as a faulty kernel or driver might."""
    sys.stdout.write("what a worker prints\n")
    index = CASES.index(case)
    if index == DIES:
        os._exit(3)
    if index == UNREADABLE:
        return lambda: "cannot be sent back"
    status = "error" if index == FAILS else "passed"
    return CaseResult(case, status, {}, {}, f"{os.getpid()} {torch.get_num_threads()}", 0.0)


def test_a_worker_that_dies_is_the_error_of_its_case_alone(capfd):
    seen = []
    results = run_in_processes(run, CASES, torch.device("cpu"), jobs=2, progress=lambda *step: seen.append(step))
    assert [result.case for result in results] == list(CASES)
    bad = {index: result.message for index, result in enumerate(results) if result.status != "passed"}
    assert bad.keys() == {DIES, FAILS, UNREADABLE}
    assert "BrokenProcessPool" in bad[DIES] and "jobs=1" in bad[DIES] and "local object" in bad[UNREADABLE]
    assert [(done, total) for done, total, _ in seen] == [(i + 1, len(CASES)) for i in range(len(CASES))]
    assert {id(result) for _, _, result in seen} == {id(result) for result in results}
    process = {index: result.message.split()[0] for index, result in enumerate(results) if index not in (DIES, UNREADABLE)}
    assert str(os.getpid()) not in process.values()
    assert process[FAILS - 1] == process[FAILS] != process[FAILS + 1]  # what a fault leaves behind is not the next case's
    assert {result.message.split()[1] for index, result in enumerate(results) if index in process} == {"1"}
    printed = capfd.readouterr()
    assert "worker prints" in printed.err and not printed.out


def stays(case, device):
    """In a worker: tells which process it is, and is busy for longer than the test lasts."""
    sys.stderr.write(f"busy {os.getpid()}\n")
    time.sleep(120)
    return CaseResult(case, "passed", {}, {}, "", 0.0)


PARENT = """
import torch
from mla_portable.judge.conformance.parallel import run_in_processes
from test_conformance_jobs import CASES, stays

if __name__ == "__main__":
    run_in_processes(stays, CASES, torch.device("cpu"), jobs=2)
"""


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL], ids=lambda by: by.name)
def test_no_worker_outlives_the_process_that_started_it(by):
    """Schedulers signal that process alone. All of its processes hold its stderr, which ends when the last of them does."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    options = {"stderr": subprocess.PIPE, "text": True, "env": environment}
    workers = []
    with subprocess.Popen([sys.executable, "-c", PARENT], **options) as parent:
        try:
            while len(workers) < 2:
                line = parent.stderr.readline()
                assert line, "it ended before its workers had work"
                workers += [int(line.split()[1])] if line.startswith("busy ") else []
            parent.send_signal(by)
            parent.communicate(timeout=30)
        finally:
            for each in workers:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            parent.kill()
    assert parent.returncode == -by


def test_no_case_needs_no_process():
    assert run_in_processes(run, [], torch.device("cpu"), jobs=4) == []


@pytest.mark.parametrize(("registry", "jobs"), [(get_registry(), 0), (Model(), 2)])
def test_jobs_that_cannot_be(registry, jobs):
    with pytest.raises(InvalidArgument, match=f"jobs: got {jobs}"):
        run_suite(registry, "reference", device="cpu", jobs=jobs)
