# SPDX-License-Identifier: Apache-2.0
"""A mixed load: a seeded trace of requests served by an engine, and what an operator buys of it.

Prompts are log-normal in length, and some are the next turn of an earlier conversation, so that the prefix cache serves a part
of them. Requests come all at once, or by a Poisson process. The engine is stepped in this process, as fast as it can.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from checkpoint import FIRST_TOKEN, SEED

_OURS: Final = "mla_portable"
"""What names of modules begin with, of the core and of the plugins."""
_SPREAD: Final = 1.0
"""Standard deviation of the logarithm of a prompt's length."""


@dataclass(frozen=True)
class Request:
    """A request. at: seconds after the first one. prompt: token ids. tokens: that it generates."""

    at: float
    prompt: list[int]
    tokens: int


def trace(options: Mapping[str, Any], rate: float | None, vocab: int) -> list[Request]:
    """The requests of a load, in the order in which they come; prompts are the same for every rate.

    Args:
        options: requests, how many; median, lengths: of prompts, lengths being the least and the most; turns, the share that
            continues an earlier prompt; tokens, the least and the most that a request generates.
        rate: requests a second, None for all at once. vocab: token ids are below it.
    """
    draw, clock = random.Random(SEED), random.Random(SEED + 1)
    least, most = options["lengths"]
    found: list[Request] = []
    at = 0.0
    for _ in range(options["requests"]):
        length = round(math.exp(draw.gauss(math.log(options["median"]), _SPREAD)))
        prompt = [draw.randrange(FIRST_TOKEN, vocab) for _ in range(min(max(length, least), most))]
        earlier = draw.choice(found) if found and draw.random() < options["turns"] else None
        if earlier is not None and len(earlier.prompt) + least <= most:  # the answer between them is a part of what is new
            prompt = [*earlier.prompt, *prompt][:most]
        found.append(Request(at, prompt, draw.randint(*options["tokens"])))
        at += clock.expovariate(rate) if rate else 0.0
    return found


@dataclass
class Progress:
    """One request as it is served: seconds of its arrival, and of each of its tokens."""

    arrived: float
    tokens: list[float]


def serve(engine: Any, requests: Sequence[Request], clock: Callable[[], float] = time.perf_counter) -> list[Progress]:
    """Serve a trace. engine: vLLM's LLMEngine, without requests. Returns: what became of each, in order."""
    from vllm import SamplingParams

    todo = list(enumerate(requests))
    found = [Progress(request.at, []) for request in requests]
    begin = clock()
    while todo or engine.has_unfinished_requests():
        now = clock() - begin
        while todo and todo[0][1].at <= now:
            number, request = todo.pop(0)
            wanted = SamplingParams(temperature=0, max_tokens=request.tokens, ignore_eos=True, detokenize=False)
            engine.add_request(str(number), {"prompt_token_ids": request.prompt}, wanted)
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, todo[0][1].at - (clock() - begin)))
            continue
        outputs = engine.step()
        now = clock() - begin
        for output in outputs:
            progress = found[int(output.request_id)]
            new, last = len(output.outputs[0].token_ids) - len(progress.tokens), (progress.tokens or [None])[-1]
            # several tokens of one step, of which the engine accepted drafts, share its time
            progress.tokens += [now if last is None else last + (now - last) * (n + 1) / new for n in range(new)]
    return found


def measured(found: Sequence[Progress]) -> dict[str, Any]:
    """Of a load that was served: output tokens a second, and ms to first tokens and between tokens (mean, p50, p99)."""
    first = [1e3 * (each.tokens[0] - each.arrived) for each in found]
    between = [1e3 * (after - before) for each in found for before, after in zip(each.tokens, each.tokens[1:], strict=False)]
    seconds = max(each.tokens[-1] for each in found)
    tokens = sum(len(each.tokens) for each in found)
    return {
        "seconds": round(seconds, 3),
        "tokens_s": round(tokens / seconds, 1),
        "first_ms": _summary(first),
        "between_ms": _summary(between),
    }


def _summary(values: Sequence[float]) -> dict[str, float]:
    hundredths = statistics.quantiles(values, n=100, method="inclusive")
    several = {"mean": statistics.fmean(values), "p50": hundredths[49], "p99": hundredths[98]}
    return {name: round(value, 3) for name, value in several.items()}


def by_rate(loads: Sequence[Mapping[str, Any]]) -> dict[float | None, dict[str, float]]:
    """Of each rate the median over its turns, from turn 0 on, of each figure, by a name such as "first_ms p99"."""
    loads = [load for load in loads if load["turn"] >= 0]
    rates = dict.fromkeys(load["rate"] for load in loads)

    def flat(load: Mapping[str, Any]) -> dict[str, float]:
        waits = {f"{kind} {which}": load[kind][which] for kind in ("first_ms", "between_ms") for which in load[kind]}
        return {"tokens_s": load["tokens_s"], **waits}

    turns = {rate: [flat(load) for load in loads if load["rate"] == rate] for rate in rates}
    return {
        rate: {key: statistics.median(each[key] for each in several) for key in several[0]} for rate, several in turns.items()
    }


@dataclass
class Compilations:
    """kernels: of Triton by name, how often each was compiled. ours: names of those that packages of mla_portable define."""

    kernels: Counter[str]
    ours: set[str]


@contextmanager
def compilations() -> Iterator[Compilations]:
    """The Triton kernels that are compiled meanwhile, with those that are read from the cache on disk.

    A request waits for either. vLLM's monitor (`jit_monitor`) hears of the same; with its mode "error" a kernel of vLLM's own
    would end the engine, too.
    """
    from triton import knobs

    found, before = Compilations(Counter(), set()), knobs.runtime.jit_post_compile_hook

    def heard(**given: Any) -> Any:
        function = given.get("fn")
        name = str(getattr(function, "name", "?")).rpartition(".")[2]
        found.kernels[name] += 1
        if str(getattr(function, "module", "")).startswith(_OURS):
            found.ours.add(name)
        return None if before is None else before(**given)

    knobs.runtime.jit_post_compile_hook = heard
    try:
        yield found
    finally:
        knobs.runtime.jit_post_compile_hook = before
