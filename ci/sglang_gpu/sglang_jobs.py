# SPDX-License-Identifier: Apache-2.0
"""The SGLang plugin on a GPU: runs the processes, gathers what they tell, prints a line for each thing that was tried.

    ci/gpu_sglang [FOLDER] [--only TEXT] [--engine] [--budget SECONDS]

FOLDER (default: sglang-report) gets each process's report and log, and `report.txt`. Exit status 1 where a line says FAIL,
where a process did not finish, and where a rehearsal loaded no kernel of the older GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm_gpu"))

from judge import compare
from run_logged import run_logged

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Job:
    """A process.

    Attributes:
        arch: the older GPU that it rehearses. mode: MLA_PORTABLE_SGLANG. alone: it is timed, so nothing runs beside it.
        slots: SGLang's top-k is fused, so it names slots; else positions in a request.
    """

    program: str
    arch: str = ""
    mode: str = "on"
    arguments: tuple[str, ...] = ()
    seconds: float = 300
    alone: bool = False
    slots: bool = True

    @property
    def name(self) -> str:
        return "-".join((Path(self.program).stem, *self.arguments, *([self.arch] if self.arch else [])))


JOBS = (
    Job("times.py", alone=True, seconds=200),
    Job("fused.py"),
    Job("variants.py", slots=False),
    Job("fused.py", "sm80", "auto"),
    Job("fused.py", "sm89", "auto"),
    Job("variants.py", "sm80", "auto", slots=False),
    Job("variants.py", "sm89", "auto", slots=False),
)
CACHES = ("fp8_e4m3", "bfloat16")
CELLS = tuple((model, cache) for model in ("v32", "glm5") for cache in CACHES)
"""Models of sglang_engine.py, with caches."""
ENGINES = tuple(
    Job("sglang_engine.py", mode=mode, arguments=(mode, cache, model), alone=True, seconds=240)
    for model, cache in CELLS
    for mode in ("off", "on")
)


def run(job: Job, out: Path, end: float) -> str:
    """How the process ended."""
    seconds = min(job.seconds, end - time.monotonic())
    if seconds <= 1:
        return "left out: the budget is spent"
    caches = {"TRITON_CACHE_DIR": str(out / "caches" / (job.arch or "here"))}
    told = {"MLA_GPU_SGLANG_OUT": str(out / f"{job.name}.jsonl"), "MLA_GPU_SGLANG_KERNELS": str(out / f"{job.name}.kernels")}
    mine = {"MLA_PORTABLE_SGLANG": job.mode, "MLA_GPU_SGLANG_ARCH": job.arch, "PYTHONUNBUFFERED": "1"}
    mine |= {"SGLANG_DSA_FUSE_TOPK": str(int(job.slots)), "SGLANG_OPT_USE_TOPK_V2": "0", "MLA_TEST_SGLANG_DEVICE": "cuda"}
    if job.slots:
        mine["SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"] = "0"
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    begin = time.monotonic()
    first = [] if job in ENGINES else [str(HERE / "process.py")]
    command = [sys.executable, *first, str(HERE / job.program), *job.arguments]
    environ = {**os.environ, **caches, **told, **mine, "PYTHONPATH": path}
    status = run_logged(command, out / f"{job.name}.log", environ, seconds)
    print(f"{job.name:32} {time.monotonic() - begin:5.0f} s  {status}", flush=True)
    return status


def told(job: Job, out: Path) -> list[dict[str, Any]]:
    file = out / f"{job.name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def words(found: dict[str, Any]) -> str:
    """What a line of the report says behind its name."""
    left_out = {"name", "arch", "passed", "run"}
    return "  ".join(
        f"{key} {value:.2g}"
        if isinstance(value, float) and key.startswith(("from", "stock_from"))
        else f"{key.replace('not_run', 'not run:')} {value}"
        for key, value in found.items()
        if key not in left_out
    )


def judge(cells: Iterable[tuple[str, str]], lines: Iterable[Mapping[str, Any]]) -> Iterator[tuple[bool, str]]:
    """A line for each model with a cache: the plugin's engine beside stock's, as vLLM's engines are judged."""
    found = {line["name"]: line for line in lines}
    for model, cache in cells:
        stock, ours = (found.get(f"engine {model} {mode} {cache}", {}) for mode in ("off", "on"))
        if "run" not in stock or "run" not in ours:
            yield False, f"engine {model} {cache}: {'stock' if 'run' not in stock else 'the plugin'} gave no tokens"
            continue
        compared = compare(stock["run"], ours["run"])
        speeds = f"{stock.get('tokens_per_second')} tokens/s stock, {ours.get('tokens_per_second')} with the plugin"
        yield compared.is_close, f"engine {model} {cache}: {compared}; {speeds}"


def main() -> int:
    """Raises: SystemExit where --only names nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("sglang-report"))
    parser.add_argument("--only", default="", help="processes whose name has this text")
    parser.add_argument("--engine", action="store_true", help="the offline engine, in place of the kit")
    parser.add_argument("--budget", type=float, default=560, help="seconds for everything")
    args = parser.parse_args()
    offered = ENGINES if args.engine else JOBS
    jobs = [job for job in offered if args.only in job.name]
    if not jobs:
        raise SystemExit(f"--only {args.only}: expected text of one of {', '.join(job.name for job in offered)}")
    out: Path = args.folder.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.budget
    for job in jobs:
        (out / f"{job.name}.jsonl").unlink(missing_ok=True)
        (out / f"{job.name}.kernels").unlink(missing_ok=True)
    ended = {job.name: run(job, out, end) for job in jobs if job.alone}
    beside = [job for job in jobs if not job.alone]
    with ThreadPoolExecutor(max(1, len(beside))) as pool:
        ended |= dict(zip((job.name for job in beside), pool.map(lambda job: run(job, out, end), beside), strict=True))
    lines: list[str] = []
    failed = not_run = 0
    for job in jobs:
        found = told(job, out)
        kernels = out / f"{job.name}.kernels"
        loaded = len(kernels.read_text().splitlines()) if kernels.exists() else 0
        missed = f"; {loaded} kernels as {job.arch}" if job.arch else ""
        wrong = ended[job.name] != "exit 0" or not found or (bool(job.arch) and not loaded)
        failed += wrong
        lines.append(f"== {job.name}: {ended[job.name]}{missed}{' FAIL' if wrong else ''}")
        for each in found:
            word = {True: "ok  ", False: "FAIL", None: "    "}[each["passed"]]
            failed += each["passed"] is False
            not_run += "not_run" in each
            lines.append(f"{word} {each['name']:58} {words(each)}")
    if args.engine:
        cells = [cell for cell in CELLS if any({*cell} <= {*job.arguments} for job in jobs)]
        for passed, line in judge(cells, (each for job in jobs for each in told(job, out))):
            failed += not passed
            lines.append(f"{'ok  ' if passed else 'FAIL'} {line}")
    lines.append(f"{failed} failed, {not_run} not run")
    text = "\n".join(lines)
    (out / "report.txt").write_text(text + "\n")
    print(text)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
