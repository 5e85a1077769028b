# SPDX-License-Identifier: Apache-2.0
"""Runs jobs as processes, several at a time, each with a deadline; a process leaves two files, its result and its log."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jobs

__all__ = ["Done", "run", "run_together"]

_ENGINE: Final = Path(__file__).with_name("engine.py")
_POLL: Final = 0.2
_TO_END: Final = 15.0
"""Seconds that an engine may take to shut down."""
_SERVES: Final = re.compile(r"mla_portable serves .*? by route (\S+): (.*?); cache")

_PREFIX: Final = re.compile(r"^(\([^)]*pid=\d+\) )?((ERROR|WARNING|INFO|DEBUG) \S+ \S+ \[[^\]]*\] ?)?")
"""What vLLM's log puts before a line."""


@dataclass(frozen=True)
class Done:
    """A job that ran: its result (None where it left none), what went wrong ("" where nothing did), who served, seconds."""

    job: jobs.Job
    result: dict[str, Any] | None
    error: str
    served: str
    seconds: float

    @property
    def runs(self) -> list[list[dict[str, Any]]]:
        """What was generated; empty where the process failed."""
        return (self.result or {}).get("runs", [])


def command(job: jobs.Job, out: Path, checkpoints: Path) -> list[str]:
    """How to start the engine of a job; its description goes into a file."""
    given = out / f"{job.name}.job"
    given.write_text(json.dumps(job.as_dict()))
    return [sys.executable, str(_ENGINE), str(given), str(out / f"{job.name}.json"), str(checkpoints)]


def environ(job: jobs.Job, out: Path) -> dict[str, str]:
    """Of the job's process. Few threads, because many run at once; nothing that asks the network."""
    mine = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",
        "MLA_PORTABLE_VLLM_SHADOW_FILE": str(out / f"{job.name}.shadow"),
    }
    _, who = jobs.WHO[job.who]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLA_PORTABLE_")}
    return {**kept, **mine, **who, **job.environ}


class _Running:
    def __init__(self, job: jobs.Job, out: Path, checkpoints: Path) -> None:
        self.job, self._out, self._begin = job, out, time.monotonic()
        self._result, self._wrote = out / f"{job.name}.json", 0.0
        self._log = (out / f"{job.name}.log").open("w")
        self._process = subprocess.Popen(
            command(job, out, checkpoints),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environ(job, out),
            start_new_session=True,  # so that its workers end with it
        )

    def finished(self, end: float) -> bool:
        """The process ended, or was ended because its time is over, or because it wrote its result and does not end."""
        now = time.monotonic()
        if not self._wrote and self._result.exists():
            self._wrote = now
        late = self._wrote and now > self._wrote + _TO_END
        if self._process.poll() is None and (late or now > min(end, self._begin + self.job.seconds)):
            self.kill()
        return self._process.poll() is not None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def done(self) -> Done:
        self._log.close()
        text = (self._out / f"{self.job.name}.log").read_text(errors="replace")
        found = json.loads(self._result.read_text()) if self._result.exists() else None
        status = self._process.returncode
        error = "" if found is not None else failure(text, "ran out of time" if status == -signal.SIGKILL else f"exit {status}")
        served = "; ".join(dict.fromkeys(f"{route}: {parts}" for route, parts in _SERVES.findall(text)))
        return Done(self.job, found, error, served, time.monotonic() - self._begin)


def failure(log: str, status: str) -> str:
    """How a process ended, and of its log the last frames and the message of the first error, and the message of the last."""
    lines = [_PREFIX.sub("", line) for line in log.splitlines()]
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not starts:
        return "\n".join([status, *lines[-6:]])
    first, last = (_message(lines, start) for start in (starts[0], starts[-1]))
    frames = [line.strip() for line in lines[starts[0] + 1 : first] if line.startswith("  File")]
    told = [status, *frames[-5:], lines[first][:800]]
    return "\n".join(told if last == first else [*told, f"... and at last: {lines[last][:800]}"])


def _message(lines: list[str], start: int) -> int:
    """The line after a traceback's frames."""
    after = (number for number in range(start + 1, len(lines)) if lines[number] and not lines[number][0].isspace())
    return next(after, len(lines) - 1)


def run(todo: Sequence[jobs.Job], out: Path, checkpoints: Path, *, parallel: int, end: float) -> list[Done]:
    """Every job that can be started before `end` (time.monotonic), `parallel` at a time; the others are left out."""
    waiting, running, found = list(todo), [], []
    while waiting or running:
        while waiting and len(running) < parallel and time.monotonic() < end:
            running.append(_Running(waiting.pop(0), out, checkpoints))
        if not running:
            break
        time.sleep(_POLL)
        for process in [process for process in running if process.finished(end)]:
            running.remove(process)
            found.append(process.done())
            _say(found[-1])
    return found


def run_together(todo: Sequence[jobs.Job], out: Path, checkpoints: Path, *, end: float) -> list[Done]:
    """All jobs at once; when all are up or gone, or half of the time is over, they may measure, one at a time."""
    begin, found = time.monotonic(), []
    running = [_Running(job, out, checkpoints) for job in todo]
    while running:
        time.sleep(_POLL)
        for process in [process for process in running if process.finished(end)]:
            running.remove(process)
            found.append(process.done())
            _say(found[-1])
        up = len(list(out.glob("*.ready"))) + sum(not (out / f"{done.job.name}.json").exists() for done in found)
        if not (out / "go").exists() and (up >= len(todo) or time.monotonic() > (begin + end) / 2):
            (out / "go").touch()
    return found


def _say(done: Done) -> None:
    print(f"{done.job.name:32} {done.seconds:5.0f} s  {done.error.splitlines()[0] if done.error else 'done'}", flush=True)
