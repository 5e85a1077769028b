# SPDX-License-Identifier: Apache-2.0
"""One process, one engine: does what a job says and writes what came of it as JSON.

    python engine.py JOB.json RESULT.json CHECKPOINTS

The engine runs inside of this process, so its builders and layers can be looked at; with tensor parallelism its workers are
processes of their own, and only what it generates is.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jobs

SEED: Final = 20261
LOGPROBS: Final = 5
VOCAB: Final = 4096
_FIRST_TOKEN: Final = 2  # 0 and 1 begin and end a text


def prompts(lengths: list[int], seed: int = SEED) -> list[dict[str, list[int]]]:
    """Random token ids, the same for every engine."""
    draw = random.Random(seed)
    return [{"prompt_token_ids": [draw.randrange(_FIRST_TOKEN, VOCAB) for _ in range(length)]} for length in lengths]


def arguments(job: dict[str, Any], checkpoints: Path) -> dict[str, Any]:
    """For vllm.LLM. The cache's size is given, so that nobody measures the memory of a GPU that many processes share."""
    backend, _ = jobs.WHO[job["who"]]
    found: dict[str, Any] = {
        "model": str(checkpoints / job["options"].get("model", f"heads{job['heads']}")),
        "skip_tokenizer_init": True,
        "kv_cache_dtype": job["kv"],
        "max_model_len": 8192,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": 0.04,
        "kv_cache_memory_bytes": 1 << 30,
        "enable_prefix_caching": False,
        "seed": 0,
        **jobs.MODES[job["mode"]],
        **job["arguments"],
    }
    if backend is not None:
        found["attention_backend"] = backend
    return found


def start(job: dict[str, Any], checkpoints: Path) -> Any:
    """The engine. Where vLLM may send short prompts to dense attention, it is configured to send all to the backend."""
    from vllm import LLM
    from vllm.config.attention import AttentionConfig

    given = arguments(job, checkpoints)
    if hasattr(AttentionConfig, "sparse_mla_force_mqa"):
        given["attention_config"] = {"sparse_mla_force_mqa": True}
    return LLM(**given)


def sampling(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=LOGPROBS)


def outcome(output: Any) -> dict[str, Any]:
    """Of one request: its prompt's length, its tokens, and at each the log-probabilities of the likeliest."""
    completion = output.outputs[0]
    likeliest = [{str(token): round(entry.logprob, 5) for token, entry in at.items()} for at in completion.logprobs]
    return {"length": len(output.prompt_token_ids), "tokens": list(completion.token_ids), "logprobs": likeliest}


def implementations(llm: Any) -> list[str]:
    """The classes that implement attention in this process's layers."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return sorted({type(layer.impl).__qualname__ for layer in layers if hasattr(layer, "impl")})


def round_anew(llm: Any) -> None:
    """Every element of every layer's attention times 1 + u * 2**-8, u uniform in [-1, 1]: at most one unit of bfloat16."""
    import torch

    for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values():
        impl = getattr(layer, "impl", None)
        if impl is None or not hasattr(impl, "forward_mqa"):
            continue

        def rounded(*given: Any, _forward: Callable[..., Any] = impl.forward_mqa, **named: Any) -> Any:
            out, lse = _forward(*given, **named)
            noise = torch.rand(out.shape, device=out.device).mul_(2.0**-7).sub_(2.0**-8)
            return (out.float() * (1.0 + noise)).to(out.dtype), lse

        impl.forward_mqa = rounded


def generate(job: dict[str, Any], checkpoints: Path, where: Path) -> dict[str, Any]:
    """All prompts together, greedily; as often as the job says."""
    begin = time.perf_counter()
    llm = start(job, checkpoints)
    ready = time.perf_counter()
    options = job["options"]
    if options.get("rounds"):
        round_anew(llm)
    requests = prompts(list(options["lengths"]))
    runs: list[list[dict[str, Any]]] = []
    for _ in range(options["repeats"]):
        outputs = llm.generate(requests, sampling(options["tokens"]), use_tqdm=False)
        runs.append([outcome(output) for output in outputs])
    done = time.perf_counter()
    return {"runs": runs, "impl": implementations(llm), "start_s": ready - begin, "work_s": done - ready}


def requests(job: dict[str, Any], checkpoints: Path, where: Path) -> dict[str, Any]:
    """Many requests of random lengths at once, and how often one was preempted."""
    begin = time.perf_counter()
    llm = start(job, checkpoints)
    ready = time.perf_counter()
    scheduler, preempted = llm.llm_engine.engine_core.engine_core.scheduler, 0
    preempt: Callable[..., Any] = scheduler._preempt_request

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal preempted
        preempted += 1
        return preempt(*given, **named)

    scheduler._preempt_request = counted
    options, draw = job["options"], random.Random(SEED)
    lengths = [draw.randint(*options["prompt"]) for _ in range(options["count"])]
    tokens = [draw.randint(*options["tokens"]) for _ in range(options["count"])]
    outputs = llm.generate(prompts(lengths), [sampling(count) for count in tokens], use_tqdm=False)
    done = time.perf_counter()
    return {
        "runs": [[outcome(output) for output in outputs]],
        "wanted": tokens,
        "preempted": preempted,
        "impl": implementations(llm),
        "start_s": ready - begin,
        "work_s": done - ready,
    }


def refuse(job: dict[str, Any], checkpoints: Path, where: Path) -> dict[str, Any]:
    """Start what must not start; the messages of the error and of those behind it."""
    begin = time.perf_counter()
    try:
        start(job, checkpoints)
    except Exception as error:
        messages, link = [], error
        while link is not None:
            messages.append(f"{type(link).__name__}: {link}")
            link = link.__cause__ or link.__context__
        return {"refused": messages, "start_s": time.perf_counter() - begin}
    return {"refused": [], "start_s": time.perf_counter() - begin}


def speed(job: dict[str, Any], checkpoints: Path, where: Path) -> dict[str, Any]:
    """Time steps, builders and layers, alone on the machine."""
    import timing

    begin = time.perf_counter()
    llm = start(job, checkpoints)
    ready = time.perf_counter()
    found = timing.measure(llm, job["options"], timing.Turns(where))
    return {**found, "impl": implementations(llm), "start_s": ready - begin, "work_s": time.perf_counter() - ready}


TASKS: Final = {"generate": generate, "requests": requests, "refuse": refuse, "speed": speed}


def main() -> None:
    given, result, checkpoints = (Path(word) for word in sys.argv[1:])
    job = json.loads(given.read_text())
    found = TASKS[job["task"]](job, checkpoints, result.parent)
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    partial.rename(result)  # whoever waits for it finds all of it


if __name__ == "__main__":
    main()
