# SPDX-License-Identifier: Apache-2.0
"""Times of a running engine: a decode step, the first token of prompts that start together, tokens a second of a mixed load.

Engines take turns, and none is timed while another one starts. One lock says whose turn it is, shared while an engine starts;
it ends with its process.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import statistics
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Final

import mixed_load
import torch
from checkpoint import SEED, prompts
from kernel_kinds import by_kind, launches

_STEPS: Final = 40
_TURNS: Final = 6
"""Of each engine, each _STEPS long; a prompt's tokens last for all of them and for the prefills of the others."""

_LOADS: Final = 4
"""Of each set of prompts; the shortest time counts, as nothing but disturbances makes one longer."""
_RANK_LOADS, _RANK_TURNS = 3, 3
"""The same of a rank of the whole model, whose first tokens and steps take the device's time."""


@contextmanager
def starting(where: Path) -> Generator[None, None, None]:
    """An engine starts: nothing is measured."""
    with (where / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


@contextmanager
def turn(where: Path, *, pinned: bool = True) -> Generator[None, None, None]:
    """Alone on the machine, on the one core that all take turns on; an engine that waits comes before our next turn.

    Cores of a shared machine differ by half, and it is the host's time that most of these times are.

    Args:
        pinned: False for an engine that is to have all its cores, as users' do.
    """
    allowed = os.sched_getaffinity(0)
    with (where / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if pinned:
            os.sched_setaffinity(0, {min(allowed)})
        try:
            yield
        finally:
            os.sched_setaffinity(0, allowed)
    time.sleep(0.1)


def _step_us(llm: Any, options: dict[str, Any], where: Path, turns: int = _TURNS) -> float:
    """A decode step of the engine: the median of turns that engines take one after the other."""
    from vllm import SamplingParams

    engine, batch = llm.llm_engine, options["batch"]
    wanted = SamplingParams(temperature=0, max_tokens=options["tokens"], ignore_eos=True, detokenize=False)
    names = [f"step-{number}" for number in range(batch)]
    with turn(where):
        for name, prompt in zip(names, prompts([options["prompt"]] * batch), strict=True):
            engine.add_request(name, prompt, wanted)
        waiting = set(names)
        while waiting:
            waiting -= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
    steps: list[float] = []
    for _ in range(turns):
        with turn(where):
            for _ in range(4):  # what the engines before us left in caches
                engine.step()
            begin = time.perf_counter()
            for _ in range(_STEPS):
                engine.step()
            steps.append((time.perf_counter() - begin) * 1e6 / _STEPS)
    unfinished = engine.get_num_unfinished_requests()
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    if unfinished != batch:
        raise RuntimeError(f"{batch - unfinished} of {batch} requests ended while their steps were timed")
    return round(statistics.median(steps), 1)


def _seconds(llm: Any, lengths: list[int], tokens: list[int], where: Path) -> float:
    """Until prompts that start together all have their tokens, in a turn of its own."""
    from vllm import SamplingParams

    wanted = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in tokens]
    with turn(where):
        begin = time.perf_counter()
        llm.generate(prompts(lengths), wanted, use_tqdm=False)
        return time.perf_counter() - begin


def _first_ms(llm: Any, first: Iterable[tuple[int, int]], where: Path, loads: int = _LOADS) -> dict[str, float]:
    """For each count and length of prompts, ms until all have a token."""
    sets = {f"{count} x {length}": ([length] * count, [1] * count) for count, length in first}
    for each in sets.values():
        _seconds(llm, *each, where)  # kernels are compiled
    return {name: round(1e3 * min(_seconds(llm, *each, where) for _ in range(loads)), 2) for name, each in sets.items()}


def load(llm: Any, options: dict[str, Any], where: Path) -> dict[str, Any]:
    """Times by turns. where: the folder of the lock that all engines share.

    Returns: first, ms until prompts that start together all have a token; tokens_s, of mixed requests; step_us, of decodes.
    """
    draw = random.Random(SEED)
    lengths = [draw.randint(*options["prompt"]) for _ in range(options["requests"])]
    tokens = [draw.randint(*options["tokens"]) for _ in lengths]
    first = _first_ms(llm, options["first"], where)
    tokens_s = round(max(sum(tokens) / _seconds(llm, lengths, tokens, where) for _ in range(2)), 1)
    return {"first": first, "tokens_s": tokens_s, "step_us": _step_us(llm, options["decodes"], where)}


def rank(llm: Any, options: dict[str, Any], where: Path) -> dict[str, Any]:
    """first: as of `load`. step_us: by the batch of a decode step. kernels: by profiled prompts, of `layer_kernels`. layers: of
    the model.

    Each part is printed when it is known, so that the log has it if the process runs out of time.
    """
    found: dict[str, Any] = {"first": _first_ms(llm, options["first"], where, _RANK_LOADS)}
    print(json.dumps(found), flush=True)
    found["kernels"] = layer_kernels(llm, options["profiled"], where)
    print(json.dumps(found["kernels"]), flush=True)
    found["step_us"] = {str(each["batch"]): _step_us(llm, each, where, _RANK_TURNS) for each in options["decodes"]}
    return {**found, "layers": llm.llm_engine.vllm_config.model_config.hf_config.num_hidden_layers}


def serve(llm: Any, options: dict[str, Any], where: Path) -> dict[str, Any]:
    """A mixed load at each rate of arrival, in turns. Before them one all at once, turn -1: it compiles what no warm-up did.

    Returns: loads, each with its rate, turn, what `mixed_load.measured` says, the kernels that it compiled, and which of them
    are ours. peak_mib: of the allocator. layers: of the model.
    """
    config = llm.llm_engine.vllm_config.model_config.hf_config
    loads: list[dict[str, Any]] = []
    for number, rate in [(-1, None), *product(range(options["repeats"]), options["rates"])]:
        requests = mixed_load.trace(options, rate, config.vocab_size)
        with turn(where, pinned=False), mixed_load.compilations() as compiled:
            llm.reset_prefix_cache()
            served = mixed_load.serve(llm.llm_engine, requests)
        loads.append(
            {
                "rate": rate,
                "turn": number,
                **mixed_load.measured(served),
                "compiled": dict(compiled.kernels),
                "ours": sorted(compiled.ours),
            }
        )
        print(json.dumps(loads[-1]), flush=True)
    peak = round(torch.accelerator.max_memory_allocated() / 2**20)
    return {"loads": loads, "peak_mib": peak, "layers": config.num_hidden_layers}


def layer_kernels(llm: Any, profiled: Iterable[tuple[int, int]], where: Path) -> dict[str, Any]:
    """For each count and length of prompts, microseconds a layer of the kernels until all have a token.

    Of several runs the one with the least time: at the GPU's power limit kernels take up to half as long again.

    Returns: of each `kinds`, by the kind of kernel, and `unknown`, by the names of those that have none.
    """
    from torch.profiler import ProfilerActivity

    layers = llm.llm_engine.vllm_config.model_config.hf_config.num_hidden_layers
    found: dict[str, Any] = {}
    for count, length in profiled:
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        runs = [launches(_profiled(llm, count, length, where, activities).events()) for _ in range(_RANK_LOADS)]
        several = [by_kind(run, layers) for run in runs]
        kinds, unknown = min(several, key=lambda each: sum(each[0].values()) + sum(each[1].values()))
        found[f"{count} x {length}"] = {"kinds": kinds, "unknown": unknown}
    return found


def _profiled(llm: Any, count: int, length: int, where: Path, activities: list[Any]) -> Any:
    """A profile of the steps until prompts that start together all have a token, in a turn of its own."""
    from torch.profiler import ProfilerActivity, profile
    from vllm import SamplingParams

    engine, wanted = llm.llm_engine, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    names = [f"prompt-{number}" for number in range(count)]
    with turn(where):
        for name, prompt in zip(names, prompts([length] * count), strict=True):
            engine.add_request(name, prompt, wanted)
        with profile(activities=activities, record_shapes=ProfilerActivity.CPU in activities) as found:
            while engine.has_unfinished_requests():
                engine.step()
            torch.accelerator.synchronize()
    return found


def gpu_time(llm: Any, first: Iterable[tuple[int, int]], where: Path) -> dict[str, dict[str, float]]:
    """For each count and length of prompts, microseconds of all kernels until all have a token, by the kernel's name.

    Of several runs the one with the least time. By the profiler: first tokens of a model of few layers are the host's time.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    def run(count: int, length: int) -> dict[str, float]:
        found = _profiled(llm, count, length, where, [ProfilerActivity.CUDA])
        kernels = (each for each in found.key_averages() if each.device_type == DeviceType.CUDA)
        return {each.key: round(each.self_device_time_total, 1) for each in kernels}

    several = {f"{count} x {length}": [run(count, length) for _ in range(_LOADS)] for count, length in first}
    return {name: min(runs, key=lambda run: sum(run.values())) for name, runs in several.items()}
