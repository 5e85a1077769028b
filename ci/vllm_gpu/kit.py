# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin in real engines on a GPU: runs the jobs, judges what they left, prints a line for each comparison.

    ci/gpu_vllm [FOLDER] [--tensor-parallel] [--only TEXT] [--parallel N] [--budget SECONDS]

FOLDER (default: vllm-report) gets every process's result and log, and `report.txt`. Exit status 1 where a line says FAIL.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import checkpoint
import jobs
import pool
import report
import torch

_FOR_TIMES: Final = 0.35
"""Share of the budget that is kept for what is timed, which runs last."""
_MOST_OF_FAILURES: Final = 3000


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ci/gpu_vllm", description="The vLLM plugin in real engines on a GPU.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("vllm-report"), help="for results and logs")
    parser.add_argument("--tensor-parallel", action="store_true", help="two GPUs against one, and nothing else")
    parser.add_argument("--only", default="", help="jobs whose name contains one of these, comma-separated")
    parser.add_argument("--parallel", type=int, default=10, help="processes at a time on the GPU")
    parser.add_argument("--budget", type=int, default=500, help="seconds for all of it")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Raises: SystemExit when --only names nothing, or the folder holds an earlier run."""
    args = _parse(words)
    begin = time.monotonic()
    out = args.folder.resolve()
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} is not empty: name another folder, so that no earlier result passes for one of this run")
    out.mkdir(parents=True, exist_ok=True)

    def chosen(several: list[jobs.Job]) -> list[jobs.Job]:
        texts = args.only.split(",")
        return [job for job in several if any(text in job.name for text in texts)]

    compared = chosen(jobs.tensor_parallel() if args.tensor_parallel else jobs.agreement())
    timed = [] if args.tensor_parallel else chosen(jobs.speed())
    if not compared and not timed:
        raise SystemExit(f"--only {args.only}: no job has that in its name")
    checkpoints = out / "checkpoints"
    for heads in {job.heads for job in (*compared, *timed)}:
        checkpoint.write(checkpoints / f"heads{heads}", heads)
    checkpoint.write_dense_config(checkpoints / "dense")

    end = begin + args.budget
    ran = {
        done.job.name: done
        for done in pool.run(
            compared, out, checkpoints, parallel=args.parallel, end=end - (_FOR_TIMES * args.budget if timed else 0)
        )
    }
    times = {done.job.name: done for done in pool.run_together(timed, out, checkpoints, end=end)}
    lines = [*(report.tensor_parallel(ran, out) if args.tensor_parallel else report.agreement(ran, compared, out))]
    lines += report.speed(times)
    left_out = [job.name for job in compared if job.name not in ran]
    text = "\n".join([_machine(), *map(str, lines)])
    errors = "\n\n".join(report.failures({**ran, **times}))
    if len(errors) > _MOST_OF_FAILURES:
        errors = f"{errors[:_MOST_OF_FAILURES]}\n[cut; the logs hold all]"
    summary = f"{sum(line.passed is True for line in lines)} as they must be, {sum(line.passed is False for line in lines)} not"
    if left_out:
        summary += f"; no time for {', '.join(left_out)}"
    whole = "\n\n".join(part for part in (errors, text, f"{summary}; {time.monotonic() - begin:.0f} s") if part)
    (out / "report.txt").write_text(f"{whole}\n")
    print(f"\n{whole}", flush=True)
    return int(any(line.passed is False for line in lines) or bool(left_out))


def _machine() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    try:
        vllm = version("vllm")
    except PackageNotFoundError:
        vllm = "none"
    return f"vLLM {vllm}, torch {torch.__version__}, {device}"


if __name__ == "__main__":
    sys.exit(main())
