# SPDX-License-Identifier: Apache-2.0
"""The conformance suite in several processes: every case has a result, in order, whatever becomes of the workers."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from conformance_faults import CPU, Model

from mla_portable.conformance import CaseResult, cases_for, run_suite
from mla_portable.conformance.parallel import BLOCK, run_in_processes
from mla_portable.contracts import InvalidArgument
from mla_portable.primitives import MERGE_STATES
from mla_portable.registry import get_registry

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


def test_no_case_needs_no_process():
    assert run_in_processes(run, [], torch.device("cpu"), jobs=4) == []


@pytest.mark.parametrize(("registry", "jobs"), [(get_registry(), 0), (Model(), 2)])
def test_jobs_that_cannot_be(registry, jobs):
    with pytest.raises(InvalidArgument, match=f"jobs: got {jobs}"):
        run_suite(registry, "reference", device="cpu", jobs=jobs)
