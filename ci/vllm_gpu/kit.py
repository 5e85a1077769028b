# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin in real engines on a GPU: runs the jobs, judges what they left, prints a line for each comparison.

    ci/gpu_vllm [FOLDER] [--indexer | --other-models | --four-bits | --transformers | --features | --load | --prompts | --rank |
                --rank-long | --rank-flash | --serve | --tensor-parallel | --context-parallel GPUS]
                [--layer] [--only TEXT] [--parallel N] [--budget SECONDS] [--record FILE [--who NAME] [--commit COMMIT]]

FOLDER (default: vllm-report) gets every process's result and log, and `report.txt`. Exit status 1 where a line says FAIL.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

import judge
import named_models
from jobs import (
    CONTEXT_PARALLEL,
    Job,
    agreement,
    context_parallel,
    features,
    four_bits,
    indexer,
    load,
    other_models,
    prompts,
    rank,
    rank_flash,
    rank_long,
    serve,
    sinks,
    tensor_parallel,
    transformers,
    with_layer,
)
from judge import Done
from run_logged import run_logged

from mla_portable.capability.run import Comparison, EngineLoad, EngineTime
from mla_portable.choose import get_registry
from mla_portable.choose.facts import resolve_device
from mla_portable.cli.recording import recorder

ENGINE: Final = Path(__file__).with_name("engine.py")
ROOT: Final = Path(__file__).parents[2]
_SERVES: Final = re.compile(r"mla_portable serves .*? by route (\S+: .*?); cache")
_INDEXER: Final = re.compile(r"(?:mla_portable serves the DSA indexer on|the DSA indexer is) (.*)")
_ERROR: Final = re.compile(r"^(?:.*\] )?([\w.]+(?:Error|Exception|Argument|Request|Route|Mismatch): .{0,800})", re.MULTILINE)


def run_job(job: Job, out: Path, checkpoints: Path, end: float) -> Done | None:
    """One process, until its time is over or `end` (time.monotonic) comes; None where that is past already."""
    seconds = min(job.seconds, end - time.monotonic())
    if seconds <= 0:
        return None
    given, result, log = (out / f"{job.name}.{kind}" for kind in ("job", "json", "log"))
    given.write_text(json.dumps(asdict(job)))
    command = [sys.executable, str(ENGINE), str(given), str(result), str(checkpoints)]
    begin, environ = time.monotonic(), job.process_environ(out)
    status = run_logged(command, log, environ, seconds)
    print(f"{job.name:32} {time.monotonic() - begin:5.0f} s  {status}", flush=True)
    return left_by(job, out, status)


def left_by(job: Job, out: Path, status: str) -> Done:
    """What the process of a job left in the folder `out`. status: how it ended, as `run_logged` says it."""
    result = out / f"{job.name}.json"
    text = (out / f"{job.name}.log").read_text(errors="replace")
    served, indexer = ("; ".join(dict.fromkeys(pattern.findall(text))) for pattern in (_SERVES, _INDEXER))
    error = "" if status == "exit 0" and result.exists() else "\n".join([status, *errors_of(text)])
    return Done(job, {} if error else json.loads(result.read_text()), error, served, indexer)


def errors_of(log: str) -> list[str]:
    """The first error that a log names and the last, or its last lines."""
    found = _ERROR.findall(log)
    return list(dict.fromkeys([found[0], found[-1]])) if found else log.splitlines()[-6:]


def run(todo: Sequence[Job], out: Path, checkpoints: Path, *, parallel: int, end: float) -> dict[str, Done]:
    """Every job that can be started before `end`, `parallel` at a time; the others are left out."""
    with ThreadPoolExecutor(max(1, parallel)) as pool:
        several = pool.map(lambda job: run_job(job, out, checkpoints, end), todo)
        return {done.job.name: done for done in several if done is not None}


def comparisons(engine: str, suite: str, lines: Iterable[judge.Line]) -> list[Comparison]:
    """As a run keeps them. Lines of one name have numbers, because a file keeps one of each. engine: name and version."""
    seen = Counter[str]()
    compared: list[Comparison] = []
    for line in lines:
        seen[line.name] += 1
        name = line.name if seen[line.name] == 1 else f"{line.name} {seen[line.name]}"
        compared.append(Comparison(engine=engine, suite=suite, name=name, passed=line.passed, text=line.found))
    return compared


def record(
    path: Path,
    suite: str,
    lines: Iterable[judge.Line],
    times: Iterable[EngineTime],
    loads: Iterable[EngineLoad] = (),
    *,
    who: str | None,
    commit: str | None,
) -> None:
    """Add what was judged and timed to the file of a run."""
    device, version = resolve_device(get_registry().default_device()), metadata.version("vllm")
    file = recorder(path, get_registry(), device, who=who, commit=commit, versions={"vllm": version})
    file.add(compared=comparisons(f"vllm {version}", suite, lines), engine_times=times, engine_loads=loads)


def rank_times(ran: Mapping[str, Done], engine: str) -> list[EngineTime]:
    """The times of ranks of a whole model that finished, as a run keeps them. engine: name and version."""
    found: list[EngineTime] = []

    def add(done: Done, quantity: Literal["first_token", "decode", "layer"], step: str, us: float, kernels: str = "") -> None:
        requests, tokens = map(int, step.split(" x "))
        given = {"quantity": quantity, "requests": requests, "tokens": tokens, "kernels": kernels, "us": round(us, 2)}
        backend = "plugin" if done.job.who == "plugin" else "stock"
        given |= {"mode": done.job.mode, "layers": done.result["layers"], "heads": done.job.heads}
        found.append(EngineTime.model_validate({"engine": engine, "backend": backend, **given}))

    for done in ran.values():
        if done.job.task != "rank" or not done.result:
            continue
        for step, ms in done.result["first"].items():
            add(done, "first_token", step, ms * 1e3)
        context = {str(each["batch"]): each["prompt"] for each in done.job.options["decodes"]}
        for batch, us in done.result["step_us"].items():
            add(done, "decode", f"{batch} x {context[batch]}", us)
        for step, kernels in done.result["kernels"].items():
            for kind, us in kernels["kinds"].items():
                add(done, "layer", step, us, kind)
    return found


def served_loads(ran: Mapping[str, Done], engine: str) -> list[EngineLoad]:
    """The mixed loads that engines served to the end, as a run keeps them, but for those that warm an engine up."""
    found: list[EngineLoad] = []
    for done in ran.values():
        if done.job.task != "serve" or not done.result:
            continue
        job = done.job
        mode = f"{job.mode}, drafts" if "speculative_config" in job.arguments else job.mode
        backend = "plugin" if job.who == "plugin" else "stock"
        same = {"engine": engine, "backend": backend, "heads": job.heads, "layers": done.result["layers"], "mode": mode}
        for one in done.result["loads"]:
            if one["turn"] >= 0:
                given = {key: value for key, value in one.items() if key not in ("seconds", "ours")}
                found.append(EngineLoad.model_validate({**same, "requests": job.options["requests"], **given}))
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Raises: SystemExit when --only names nothing, or the folder holds an earlier run."""
    parser = argparse.ArgumentParser(prog="ci/gpu_vllm", description="The vLLM plugin in real engines on a GPU.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("vllm-report"), help="for results and logs")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--indexer", action="store_true", help="the indexer, also on rehearsed older GPUs, and nothing else")
    other.add_argument(
        "--sinks", action="store_true", help="hy_v4 beside stock that waits for its selections, layer by layer too"
    )
    other.add_argument("--other-models", action="store_true", help="GLM-5.3-Flash and hy_v4, from 0.30 on, and nothing else")
    other.add_argument("--four-bits", action="store_true", help="weights of 4 bits beside stock, and nothing else")
    other.add_argument(
        "--transformers", action="store_true", help="beside Hugging Face transformers in float32, and nothing else"
    )
    other.add_argument("--features", action="store_true", help="what deployments switch on, and nothing else")
    other.add_argument(
        "--load", action="store_true", help="the plugin and stock by default, timed from outside, and nothing else"
    )
    other.add_argument("--prompts", action="store_true", help="GPU time of prompts beside stock by default, and nothing else")
    other.add_argument(
        "--rank",
        action="store_true",
        help="one GPU's share of the model, half of its layers, beside stock by default; --only rank16 for one head count",
    )
    other.add_argument("--rank-long", action="store_true", help="the same with 64,000 tokens of context, 16 heads")
    other.add_argument("--rank-flash", action="store_true", help="the same of GLM-5.3-Flash (86 GB), from 0.30 on")
    other.add_argument(
        "--serve",
        action="store_true",
        help="a mixed load beside stock, half of the model's depth; --only serve16- for a head count",
    )
    other.add_argument("--tensor-parallel", action="store_true", help="two GPUs against one, and nothing else")
    other.add_argument(
        "--context-parallel", type=int, choices=CONTEXT_PARALLEL, metavar="GPUS", help="GPUs that share sequences against one"
    )
    parser.add_argument("--layer", action="store_true", help="with our layer around attention, MLA_PORTABLE_VLLM_LAYER=on")
    parser.add_argument("--only", default="", help="jobs whose name contains one of these, comma-separated")
    parser.add_argument("--parallel", type=int, default=10, help="processes at a time on the GPU")
    parser.add_argument("--budget", type=int, default=500, help="seconds for all of it")
    parser.add_argument("--record", type=Path, metavar="FILE", help="add the results to a run (docs/dev/evidence.md)")
    parser.add_argument("--who", metavar="NAME", help="who runs this, for --record; default: git's user.name, or the login")
    parser.add_argument("--commit", help="of the code that runs, for --record where git is not there to say it")
    args, begin = parser.parse_args(words), time.monotonic()
    out, end = args.folder.resolve(), begin + args.budget
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} is not empty: name another folder, so that no earlier result passes for one of this run")
    out.mkdir(parents=True, exist_ok=True)

    suites: dict[str, tuple[Callable[[], list[Job]], Callable[[dict[str, Done]], Iterable[judge.Line]]]] = {
        "tensor_parallel": (tensor_parallel, judge.tensor_parallel),
        "indexer": (indexer, lambda done: judge.agreement(done, todo, out)),
        "features": (features, judge.features),
        "other_models": (other_models, lambda done: judge.other_models(done, todo)),
        "sinks": (sinks, lambda done: judge.sinks(done, todo, out)),
        "four_bits": (four_bits, lambda done: judge.other_models(done, todo)),
        "transformers": (transformers, lambda done: judge.transformers(done, todo)),
        "context_parallel": (
            lambda: context_parallel(args.context_parallel),
            lambda done: judge.context_parallel(done, todo),
        ),
        "load": (load, judge.load),
        "prompts": (prompts, judge.prompts),
        "rank": (rank, judge.rank),
        "rank_long": (rank_long, judge.rank),
        "rank_flash": (rank_flash, judge.rank),
        "serve": (serve, judge.serve),
        "agreement": (agreement, lambda done: judge.agreement(done, todo, out)),
    }
    asked = next((name for name in suites if getattr(args, name, None)), "agreement")
    jobs_of, judged = suites[asked]
    todo = [job for job in jobs_of() if any(text in job.name for text in args.only.split(","))]
    todo = [with_layer(job) for job in todo] if args.layer else todo
    if not todo:
        raise SystemExit(f"--only {args.only}: no job has that in its name")
    checkpoints = out / "checkpoints"
    for model in {job.model for job in todo}:
        named_models.write_model(checkpoints, model)

    parallel = len(todo) if asked in ("load", "prompts") else args.parallel  # what is timed takes turns
    if asked in ("rank_long", "rank_flash"):
        parallel = 1  # a GPU holds one
    if asked in ("rank", "serve"):
        parallel = 2  # a GPU holds the plugin and stock, which take turns
    ran = run(todo, out, checkpoints, parallel=parallel, end=end)
    lines = list(judged(ran))
    left_out = [job.name for job in todo if job.name not in ran]
    report = [f"{name}: {done.error}\n" for name, done in ran.items() if done.error]
    report += [" ".join(f"{name} {metadata.version(name)}" for name in ("vllm", "torch")), *map(str, lines)]
    failed = sum(line.passed is False for line in lines)
    report += [f"{len(lines)} lines, {failed} failed; no time for: {', '.join(left_out) or 'none'}"]
    text = "\n".join(report)
    (out / "report.txt").write_text(f"{text}\n")
    print(f"\n{text}", flush=True)
    if args.record:
        suite = asked.replace("_", " ") + (f" {args.context_parallel}" if args.context_parallel else "")
        model = {"rank": ", 31 of 61 layers", "rank_flash": ", GLM-5.3-Flash", "rank_long": ", long contexts"}.get(asked, "")
        times = rank_times(ran, f"vllm {metadata.version('vllm')}{model}")
        suite += ", our layer" * args.layer
        if args.only:
            suite += f", only {args.only}"
        loads = served_loads(ran, f"vllm {metadata.version('vllm')}")
        record(args.record, suite, lines, times, loads, who=args.who, commit=args.commit)
    return int(bool(failed or left_out))


if __name__ == "__main__":
    sys.exit(main())
