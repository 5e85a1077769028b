# SPDX-License-Identifier: Apache-2.0
"""Run cases in several processes on one device: compiling kernels and the float64 oracle keep the CPU busy, not the device.

A worker is given blocks of neighbouring cases, which tend to share a kernel. Whatever ends a worker is the error of the case
that it ran, and of no other: a fresh worker goes on. A worker ends with the run that it works for, and with the process that
started it, however these end.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from mla_portable.accelerator import accelerator
from mla_portable.judge.conformance.report import CaseResult, Progress
from mla_portable.judge.problems.base import Case

BLOCK: Final = 4
"""Neighbouring cases for a worker: few enough that all end at about the same time."""

RunOne = Callable[[Case, torch.device], CaseResult]
"""Runs a case, in a worker: a function that can be imported, for it is sent by its name."""


def run_in_processes(
    run: RunOne, cases: Sequence[Case], device: torch.device, *, jobs: int, progress: Progress | None = None
) -> list[CaseResult]:
    """Run every case in one of `jobs` processes, each with one thread of torch's and the device as its current one.

    Args:
        progress: called in this process after each case, in the order in which they end.
    Returns: the results in the order of `cases`; status "error" where a worker ended without a result.
    """
    blocks = deque(deque(range(i, min(i + BLOCK, len(cases)))) for i in range(0, len(cases), BLOCK))
    results: dict[int, CaseResult] = {}
    running: dict[Future[CaseResult], tuple[int, ProcessPoolExecutor, deque[int]]] = {}
    spawn = multiprocessing.get_context("spawn")  # a forked child cannot use its parent's device
    with ExitStack() as workers:
        theirs, ours = map(workers.enter_context, spawn.Pipe(duplex=False))

        def start() -> ProcessPoolExecutor:
            pool = ProcessPoolExecutor(1, mp_context=spawn, initializer=_start_worker, initargs=(theirs,))
            return workers.enter_context(pool)

        def occupy(worker: ProcessPoolExecutor, block: deque[int]) -> None:
            """Give a worker the next case of its block, or of another when that is done."""
            if not block and blocks:
                block = blocks.popleft()
            if block:
                index = block.popleft()
                running[worker.submit(_run_alone, run, cases[index], device)] = index, worker, block

        try:
            for _ in range(min(jobs, len(blocks))):
                occupy(start(), deque())
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    index, worker, block = running.pop(future)
                    try:
                        result = future.result()
                    except Exception as error:
                        remedy = "jobs=1 runs the case in the calling process"
                        message = f"its worker process gave no result: {type(error).__name__}: {error} ({remedy})"
                        result = CaseResult(cases[index], "error", {}, {}, message, 0.0)
                    results[index] = result
                    if progress is not None:
                        progress(len(results), len(cases), result)
                    if result.status == "error" and (block or blocks):  # a fault of the device outlives its case in a process
                        worker.shutdown(wait=False)
                        worker = start()
                    occupy(worker, block)
        except BaseException:  # an interrupt, or an error of `progress`: nobody waits for what they still run
            ours.close()
            raise
    return [results[index] for index in range(len(cases))]


def _start_worker(connection: Connection[Any, Any]) -> None:
    """What a worker prints goes to stderr: stdout is for the results of the process that started it."""
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the process that started it, too, which ends it
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()


def _end_with(connection: Connection[Any, Any]) -> None:
    """End this process when the other end of the connection is closed, by the run or by the end of its process: a worker would
    wait for work, and keep the device's memory."""
    with suppress(EOFError, OSError):
        connection.recv_bytes()
    os._exit(1)  # whatever the main thread does: nobody is left to take its result


def _run_alone(run: RunOne, case: Case, device: torch.device) -> CaseResult:
    """In a worker: leave CPU cores and device memory to the others."""
    torch.set_num_threads(1)
    where = accelerator(device)
    where.make_current()
    try:
        return run(case, device)
    finally:
        where.empty_cache()
