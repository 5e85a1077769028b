# SPDX-License-Identifier: Apache-2.0
"""One process, one engine: does what a job says and writes what came of it as JSON.

    python engine.py JOB.json RESULT.json CHECKPOINTS

The engine runs inside of this process, so its scheduler and layers can be looked at; with tensor parallelism its workers are
processes of their own, and only what it generates is.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import drawn_weights
import faults
import rehearse
from checkpoint import SEED, prompts
from jobs import Job
from selections import Watch

_GREEDY: Final[dict[str, Any]] = {"temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": 20}


def arguments(job: Job, checkpoints: Path) -> dict[str, Any]:
    """Of the engine. Where vLLM may send short prompts to dense attention, it is configured to send all to the backend.

    But not where a job asks for stock as it is by default, as one that times it does.
    """
    from vllm.config.attention import AttentionConfig

    given = job.llm_arguments(checkpoints)
    if hasattr(AttentionConfig, "sparse_mla_force_mqa") and not job.options.get("by_default"):
        given["attention_config"] = {"sparse_mla_force_mqa": True}
    return given


def start(job: Job, checkpoints: Path) -> Any:
    """The engine."""
    from vllm import LLM

    connect_without_tilelang()
    if job.options.get("waits"):
        wait_for_selections()
    if job.arguments.get("load_format") == "dummy":
        drawn_weights.install()
    return LLM(**arguments(job, checkpoints))


def connect_without_tilelang() -> bool:
    """Let hyper-connections (GLM-5.3-Flash) run in plain torch where TileLang is missing, as vLLM does on another platform.

    On CUDA vLLM has no such way: it stops at the first step. Returns: whether that was changed.
    """
    try:
        from vllm.model_executor.layers import mhc
        from vllm.utils.import_utils import has_tilelang
    except ImportError:  # vLLM before it had either
        return False
    if has_tilelang():
        return False
    for operator in (mhc.MHCPreOp, mhc.MHCPostOp, mhc.MHCFusedPostPreOp):
        operator.forward_cuda = operator.forward_hip
    return True


def wait_for_selections() -> bool:
    """Let vLLM's own backends (0.30 and later) convert positions to slots behind everything that was enqueued before them.

    They convert decodes on a stream of their own, which waits for an event that a model's layer records behind its indexer.
    hy_v4's layer of 0.30 records none, and an event that was never recorded holds nothing back: what is converted may be the
    selection of the step before, which lacks the newest token. 0.33's layer records it. Returns: whether vLLM converts so.
    """
    try:
        from vllm.v1.attention.backends.mla.index_group import SparseMLAIndexGroup as Group
    except ImportError:
        return False
    convert: Callable[..., Any] = Group._convert_once

    def behind(self: Any, layer_index: int, *given: Any, **named: Any) -> Any:
        self.set_logical_topk_ready(layer_index)
        return convert(self, layer_index, *given, **named)

    Group._convert_once = behind
    return True


def run_prompts(llm: Any, lengths: list[int], tokens: list[int]) -> list[dict[str, Any]]:
    """All prompts together, greedily. Of each its length, its tokens, and at each the likeliest with log-probabilities."""
    from vllm import SamplingParams

    outputs = llm.generate(prompts(lengths), [SamplingParams(max_tokens=n, **_GREEDY) for n in tokens], use_tqdm=False)
    return [_described(output) for output in outputs]


def _described(output: Any) -> dict[str, Any]:
    text = output.outputs[0]
    likeliest = [{str(token): round(entry.logprob, 5) for token, entry in at.items()} for at in text.logprobs]
    found = {"length": len(output.prompt_token_ids), "tokens": list(text.token_ids), "logprobs": likeliest}
    return {**found, "cached": output.num_cached_tokens}


def _loads(llm: Any) -> list[int]:
    """Tokens of the requests that are loaded through a KV connector from now on."""
    connector, found = llm.llm_engine.engine_core.engine_core.scheduler.connector, list[int]()
    if connector is not None:
        update: Callable[..., Any] = connector.update_state_after_alloc

        def noted(request: Any, blocks: Any, num_external_tokens: int) -> Any:
            found.append(num_external_tokens)
            return update(request, blocks, num_external_tokens)

        connector.update_state_after_alloc = noted
    return found


def _per_head(layers: Iterable[Any]) -> list[int]:
    """Tokens that layers hand to `forward_mha` of their implementations from now on."""
    found: list[int] = []

    def noted(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(q: Any, *given: Any, **named: Any) -> Any:
            found.append(len(q))
            return forward(q, *given, **named)

        return call

    for layer in layers:
        forward = getattr(getattr(layer, "impl", None), "forward_mha", None)
        if forward is not None:
            layer.impl.forward_mha = noted(forward)
    return found


def generate(job: Job, checkpoints: Path, where: Path) -> dict[str, Any]:
    """All prompts together, as often as the job says; the selections of the first time where it says so."""
    llm, options = start(job, checkpoints), job.options
    lengths, found = list(options["lengths"]), dict[str, Any]()
    tokens = [options["tokens"]] * len(lengths)
    outside = _loads(llm)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    per_head = _per_head(layers) if options.get("by_default") else []
    watch = Watch(llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()) if options.get("watch") else None
    runs = [run_prompts(llm, lengths, tokens)]
    if watch is not None:
        found["watch"] = watch.end(where / f"{job.name}.selections")
    for _ in range(options["repeats"] - 1):
        if options.get("sleeps"):
            llm.sleep(level=1)
            llm.wake_up()
        runs.append(run_prompts(llm, lengths, tokens))
    if job.rehearsal.get("arch"):
        found["rehearsed"] = rehearse.state(where / f"{job.name}.kernels")
    found |= {"outside": sum(outside), "per_head": sum(per_head)}
    impl = sorted({type(layer.impl).__qualname__ for layer in layers if hasattr(layer, "impl")})
    config = llm.llm_engine.vllm_config
    cache, ranks = config.cache_config, config.parallel_config.decode_context_parallel_size
    return {"runs": runs, "impl": impl, "pool": cache.num_gpu_blocks * cache.block_size * ranks, **found}


def score(job: Job, checkpoints: Path, where: Path) -> dict[str, Any]:
    """The prompts that lie beside a checkpoint: what the engine makes of each of their tokens, and how it goes on.

    A job may have a fault planted (`faults`), to show that its judge sees it.
    """
    from vllm import SamplingParams

    given = json.loads((checkpoints / job.model / job.options["prompts"]).read_text())["prompts"]
    fault = job.options.get("fault")
    if fault:
        faults.plant(fault)
    llm = start(job, checkpoints)
    if fault:
        faults.turn(fault, llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model())
    layers = list(llm.llm_engine.vllm_config.compilation_config.static_forward_context.values())
    per_head = _per_head(layers)
    wanted = SamplingParams(**{**_GREEDY, "logprobs": 0, "prompt_logprobs": 0, "max_tokens": job.options["tokens"]})
    outputs = llm.generate([{"prompt_token_ids": each["tokens"]} for each in given], wanted, use_tqdm=False)
    found: dict[str, Any] = {"prompts": [_scored(output) for output in outputs], "per_head": sum(per_head)}
    if job.rehearsal.get("arch"):
        found["rehearsed"] = rehearse.state(where / f"{job.name}.kernels")
    return {**found, "impl": sorted({type(layer.impl).__qualname__ for layer in layers if hasattr(layer, "impl")})}


def _scored(output: Any) -> dict[str, Any]:
    """logprobs: of each token of the prompt behind the first. tokens: that follow it, and their log-probabilities."""
    text, prompt = output.outputs[0], output.prompt_token_ids
    own = [round(at[token].logprob, 5) for token, at in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
    ids = list(text.token_ids)
    decoded = [round(at[token].logprob, 5) for token, at in zip(ids, text.logprobs, strict=True)]
    return {"logprobs": own, "tokens": ids, "decoded": decoded}


def ranks(job: Job, checkpoints: Path, where: Path) -> dict[str, Any]:
    """All prompts dealt out to the two engines of data parallelism, then all to the first: the other has dummy batches."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.distributed.device_communicators import all2all
    from vllm.v1.engine.async_llm import AsyncLLM

    all2all.has_deep_ep = lambda: True  # DBO asks for it; a model without experts never calls it
    lengths, wanted = list(job.options["lengths"]), SamplingParams(max_tokens=job.options["tokens"], **_GREEDY)

    async def text(engine: Any, name: str, prompt: Any, rank: int) -> dict[str, Any]:
        return _described([output async for output in engine.generate(prompt, wanted, name, data_parallel_rank=rank)][-1])

    async def run() -> list[list[dict[str, Any]]]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments(job, checkpoints)))
        return [
            await asyncio.gather(*(text(engine, f"{n} of {size}", p, n % size) for n, p in enumerate(prompts(lengths))))
            for size in (2, 1)
        ]

    return {"runs": asyncio.run(run())}


def requests(job: Job, checkpoints: Path, where: Path) -> dict[str, Any]:
    """Many requests of random lengths at once, and how often one was preempted."""
    llm, options, preempted = start(job, checkpoints), job.options, 0
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt: Callable[..., Any] = scheduler._preempt_request

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal preempted
        preempted += 1
        return preempt(*given, **named)

    scheduler._preempt_request = counted
    draw = random.Random(SEED)
    lengths = [draw.randint(*options["prompt"]) for _ in range(options["count"])]
    tokens = [draw.randint(*options["tokens"]) for _ in range(options["count"])]
    return {"runs": [run_prompts(llm, lengths, tokens)], "wanted": tokens, "preempted": preempted}


def refuse(job: Job, checkpoints: Path, where: Path) -> dict[str, Any]:
    """Start what must not start; the messages of the error and of those behind it."""
    messages: list[str] = []
    try:
        start(job, checkpoints)
    except Exception as error:
        link: BaseException | None = error
        while link is not None:
            messages.append(f"{type(link).__name__}: {link}")
            link = link.__cause__ or link.__context__
    return {"refused": messages}


def load(job: Job, checkpoints: Path, where: Path) -> dict[str, Any]:
    """Times of steps, of first tokens and of many mixed requests, alone on the machine."""
    import timing

    with timing.starting(where):
        llm = start(job, checkpoints)
    return timing.load(llm, job.options, where)


def gpu_time(job: Job, checkpoints: Path, where: Path) -> dict[str, Any]:
    """GPU time of steps of prompts, alone on the machine."""
    import timing

    with timing.starting(where):
        llm = start(job, checkpoints)
    return {"first": timing.gpu_time(llm, job.options["first"], where)}


def rank(job: Job, checkpoints: Path, where: Path) -> dict[str, Any]:
    """First tokens and decode steps of one GPU's share of a whole model."""
    import timing

    with timing.starting(where):
        llm = start(job, checkpoints)
    return timing.rank(llm, job.options, where)


def serve(job: Job, checkpoints: Path, where: Path) -> dict[str, Any]:
    """A mixed load on one GPU's share of a model."""
    import timing

    with timing.starting(where):
        llm = start(job, checkpoints)
    return timing.serve(llm, job.options, where)


def truth(job: Job, checkpoints: Path, where: Path) -> dict[str, Any]:
    """What transformers generates, without an engine."""
    import transformers_truth

    return transformers_truth.generate(job, checkpoints, where)


TASKS: Final = {
    "generate": generate,
    "score": score,
    "truth": truth,
    "ranks": ranks,
    "requests": requests,
    "refuse": refuse,
    "load": load,
    "gpu_time": gpu_time,
    "rank": rank,
    "serve": serve,
}


def main() -> None:
    given, result, checkpoints = (Path(word) for word in sys.argv[1:])
    job = Job(**json.loads(given.read_text()))
    if job.rehearsal:
        rehearse.install(result.parent / f"{job.name}.kernels", **job.rehearsal)
    if job.options.get("shadow"):
        import shadow

        stock = job.options.get("stock", shadow.STOCK)
        shadow.install(result.parent / f"{job.name}.shadow", stock)
    result.write_text(json.dumps(TASKS[job.task](job, checkpoints, result.parent)))
    sys.stdout.flush()
    os._exit(0)  # an engine may take long to shut down, or not end at all


if __name__ == "__main__":
    main()
