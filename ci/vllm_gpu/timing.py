# SPDX-License-Identifier: Apache-2.0
"""Times of a running engine: a decode step, the first token of prompts that start together, tokens a second of a mixed load.

Engines take turns, and none is timed while another one starts. One lock says whose turn it is, shared while an engine starts;
it ends with its process.
"""

from __future__ import annotations

import fcntl
import os
import random
import statistics
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from checkpoint import SEED, prompts

_STEPS: Final = 40
_TURNS: Final = 6
"""Of each engine, each _STEPS long; a prompt's tokens last for all of them and for the prefills of the others."""

_LOADS: Final = 4
"""Of each set of prompts; the shortest time counts, as nothing but disturbances makes one longer."""


@contextmanager
def starting(where: Path) -> Generator[None, None, None]:
    """An engine starts: nothing is measured."""
    with (where / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


@contextmanager
def turn(where: Path) -> Generator[None, None, None]:
    """Alone on the machine, on the one core that all take turns on; an engine that waits comes before our next turn.

    Cores of a shared machine differ by half, and it is the host's time that most of these times are.
    """
    allowed = os.sched_getaffinity(0)
    with (where / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.sched_setaffinity(0, {min(allowed)})
        try:
            yield
        finally:
            os.sched_setaffinity(0, allowed)
    time.sleep(0.1)


def _step_us(llm: Any, options: dict[str, Any], where: Path) -> float:
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
    for _ in range(_TURNS):
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


def load(llm: Any, options: dict[str, Any], where: Path) -> dict[str, Any]:
    """Times by turns. where: the folder of the lock that all engines share.

    Returns: first, ms until prompts that start together all have a token; tokens_s, of mixed requests; step_us, of decodes.
    """
    from vllm import SamplingParams

    def seconds(lengths: list[int], tokens: list[int]) -> float:
        wanted = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in tokens]
        with turn(where):
            begin = time.perf_counter()
            llm.generate(prompts(lengths), wanted, use_tqdm=False)
            return time.perf_counter() - begin

    draw = random.Random(SEED)
    lengths = [draw.randint(*options["prompt"]) for _ in range(options["requests"])]
    tokens = [draw.randint(*options["tokens"]) for _ in lengths]
    sets = {f"{count} x {length}": ([length] * count, [1] * count) for count, length in options["first"]}
    for each in sets.values():
        seconds(*each)  # kernels are compiled
    first = {name: round(1e3 * min(seconds(*each) for _ in range(_LOADS)), 2) for name, each in sets.items()}
    tokens_s = round(max(sum(tokens) / seconds(lengths, tokens) for _ in range(2)), 1)
    return {"first": first, "tokens_s": tokens_s, "step_us": _step_us(llm, options["decodes"], where)}
