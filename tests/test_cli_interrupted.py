# SPDX-License-Identifier: Apache-2.0
"""A command that Ctrl-C or SIGTERM ends: its exit code, a whole document or none, a line on stderr, what is kept.

Commands run in processes of their own, which say on stderr when they are in the middle of their work.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from fcntl import F_GETPIPE_SZ, fcntl, ioctl
from pathlib import Path
from termios import FIONREAD

import pytest

from mla_portable.capability.run import read_run
from mla_portable.cli import process
from mla_portable.judge.conformance import CaseResult

SECONDS = 300.0
"""In which a process starts or ends; on a busy machine torch alone takes long to import."""
BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, {handler})  # whatever the process of the tests was started with
{before}
if __name__ == "__main__":
    from mla_portable.cli import main
    sys.argv[0] = "mla-portable"
    main()
"""
SECOND_CALL_STAYS = """
import test_cli_interrupted as tests
import {module} as module
module.{function} = tests.first_call_returns(module.{function})
"""
WORKERS_STAY = """
import test_cli_interrupted as tests
import mla_portable.judge.conformance.runner as runner
real = runner.run_in_processes
runner.run_in_processes = lambda run, *others, **options: real(tests.first_case_passes, *others, **options)
"""
CONFORM = ["conform", "reference", "--device", "cpu", "--level", "smoke", "--primitive", "merge_states"]
BENCH = ["bench", "kernels", "--device", "cpu", "--backend", "reference", "--primitive", "cache_write", "--rows", "2,3"]
BENCH += ["--repeat", "1", "--no-baselines"]
WORK = {
    "conform": (CONFORM, "mla_portable.judge.conformance.runner", "run_case"),
    "bench": (BENCH, "mla_portable.bench.kernels", "time_candidates"),
}


def stay() -> None:
    """Say which process this is, and be busy for longer than the test lasts."""
    sys.stderr.write(f"busy {os.getpid()}\n")
    sys.stderr.flush()
    time.sleep(2 * SECONDS)


def first_call_returns(real: Callable[..., object]) -> Callable[..., object]:
    calls = list[int]()

    def call(*arguments: object, **options: object) -> object:
        calls.append(1)
        if len(calls) > 1:
            stay()
        return real(*arguments, **options)

    return call


def first_case_passes(case, device):
    """In a worker: a result for the first case of all, and for no other."""
    try:
        Path(os.environ["FIRST_CASE"]).touch(exist_ok=False)
    except FileExistsError:
        stay()
    return CaseResult(case, "passed", {}, {}, "", 0.0)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command. Its workers run the same script without the command."""
    processes = list[subprocess.Popen[str]]()

    def start(*words: str, before: str = "", handler: str = "signal.default_int_handler") -> subprocess.Popen[str]:
        script = tmp_path / "command.py"
        script.write_text(COMMAND.format(before=before, handler=handler))
        folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "FIRST_CASE": str(tmp_path / "first")}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen([sys.executable, str(script), *words], env=environ, **pipes))
        return processes[-1]

    yield start
    for each in processes:
        each.kill()
        each.communicate()


def wait_until_busy(command: subprocess.Popen[str], count: int = 1) -> list[int]:
    """Returns: the process ids of those that are."""
    pids, lines = list[int](), list[str]()
    while len(pids) < count:
        lines.append(command.stderr.readline())
        assert lines[-1], "".join(lines)
        pids += [int(lines[-1].split()[1])] if lines[-1].startswith("busy ") else []
    return pids


@BOTH
@pytest.mark.parametrize("work", WORK)
def test_an_interrupted_command_prints_no_part_of_a_document_and_keeps_what_ran(started, tmp_path, work, number):
    words, module, function = WORK[work]
    out = tmp_path / "run.json.gz"
    before = SECOND_CALL_STAYS.format(module=module, function=function)
    command = started(*words, "--json", "--out", str(out), before=before)
    wait_until_busy(command)
    command.send_signal(number)
    printed, said = command.communicate(timeout=SECONDS)
    assert (command.returncode, printed) == (128 + number, "")
    assert said.endswith(f"mla-portable: interrupted by {number.name}\n") and "Traceback" not in said
    run = read_run(out)
    assert (len(run.cases), len(run.times)) == ((1, 0) if work == "conform" else (0, 1))


@BOTH
def test_an_interrupted_suite_ends_its_workers_and_keeps_what_ran(started, tmp_path, number):
    """All of its processes hold its stderr, which ends when the last of them does."""
    out = tmp_path / "run.json.gz"
    command = started(*CONFORM, "--json", "--jobs", "2", "--out", str(out), before=WORKERS_STAY)
    workers = wait_until_busy(command, count=2)
    try:
        command.send_signal(number)
        printed, said = command.communicate(timeout=SECONDS)
        assert (command.returncode, printed) == (128 + number, "")
        assert said.endswith(f"mla-portable: interrupted by {number.name}\n")
        assert len(read_run(out).cases) == 1
    finally:
        for pid in workers:
            if Path(f"/proc/{pid}/cmdline").exists():
                os.kill(pid, signal.SIGKILL)


@BOTH
def test_a_document_that_has_begun_is_printed_to_its_end(started, number):
    command = started("matrix", "--json")
    pipe, waiting = command.stdout.fileno(), array("i", [0])
    while waiting[0] < fcntl(pipe, F_GETPIPE_SZ):  # it cannot write on before somebody reads
        assert command.poll() is None
        ioctl(pipe, FIONREAD, waiting)
        time.sleep(0.01)
    command.send_signal(number)
    printed, said = command.communicate(timeout=SECONDS)
    assert json.loads(printed)["ok"] is True
    assert (command.returncode, said) == (128 + number, f"mla-portable: interrupted by {number.name}\n")


def test_a_signal_that_is_ignored_from_the_start_stays_ignored(started):
    """As under nohup, and in the background of a script."""
    before = SECOND_CALL_STAYS.format(module="mla_portable.judge.conformance.runner", function="run_case")
    command = started(*CONFORM, "--json", before=before, handler="signal.SIG_IGN")
    wait_until_busy(command)
    command.send_signal(signal.SIGINT)
    command.send_signal(signal.SIGTERM)
    printed, said = command.communicate(timeout=SECONDS)
    assert (command.returncode, printed) == (143, "") and said.endswith("mla-portable: interrupted by SIGTERM\n")


def test_a_second_signal_ends_the_process_at_once_unless_it_is_the_same_one(monkeypatch):
    """`timeout` signals a process, and then its group, in which the process is."""
    now, codes, signals = [10.0], list[int](), process._Signals()
    monkeypatch.setattr(process.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(process.os, "_exit", codes.append)
    with pytest.raises(KeyboardInterrupt):
        signals.handle(signal.SIGTERM, None)
    signals.handle(signal.SIGTERM, None)
    assert codes == []
    now[0] += 2 * process._AGAIN
    signals.handle(signal.SIGINT, None)
    assert codes == [130] and signals.first == signal.SIGTERM
