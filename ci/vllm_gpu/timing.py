# SPDX-License-Identifier: Apache-2.0
"""Times inside of a running engine: a decode step, what building its metadata costs the host, and a layer's attention.

Ours and stock's are measured in the same process on the same inputs where that is possible: builders on batches that are made
up, layers as CUDA graphs over a cache of random tokens. A decode step is the whole engine's: engines time theirs by turns, and
none while another one starts. One lock says whose turn it is, shared while an engine starts; it ends with its process.
"""

from __future__ import annotations

import fcntl
import os
import random
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from checkpoint import SEED, prompts
from torch import Tensor

from mla_portable.tools.bench.timing import captured

_BATCHES: Final = {
    "256 decodes + 32 prefills": ([1] * 256, [64] * 32),
    "64 decodes + 4 prefills": ([1] * 64, [512] * 4),
    "32 prefills": ([], [128] * 32),
    "64 decodes": ([1] * 64, []),
    "128 decodes": ([1] * 128, []),
    "256 decodes": ([1] * 256, []),
}
"""Query lengths of decodes and of prefills."""
_EAGER: Final = ("64 decodes", "64 decodes + 4 prefills", "256 decodes + 32 prefills")
_BUILD_CONTEXT: Final = 1024  # all prefills together fit stock's workspace, as they mostly do
_BUILDS, _FORWARDS, _STEPS, _LAYERS = 200, 50, 40, 10
_TURNS: Final = 6
"""Of each engine, each _STEPS long; a prompt's tokens last for all of them and for the prefills of the others."""

_LOADS: Final = 4
"""Of each set of prompts; the shortest time counts, as nothing but disturbances makes one longer."""

_OF_THE_LAYER: Final = (
    *("num_heads", "head_size", "scale", "kv_cache_dtype", "indexer", "kv_b_proj", "kv_lora_rank", "q_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim"),
)
"""What a layer passes to its implementation as it has it."""

Sides = dict[str, Any]
"""Of "ours" and of "stock"."""


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


def _common(runner: Any, decodes: list[int], prefills: list[int], context: int) -> Any:
    """A batch as the runner describes it: every request has blocks of its own."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    device = runner.device
    lens = torch.tensor(decodes + prefills, dtype=torch.int32)
    requests, tokens = len(lens), int(lens.sum())
    starts = torch.zeros(requests + 1, dtype=torch.int32)
    starts[1:] = lens.cumsum(0)
    columns = -(-context // 64)
    table = 1 + torch.arange(requests * columns, dtype=torch.int32).view(requests, columns)
    seq_lens = torch.full((requests,), context, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts.pin_memory(),
        seq_lens=seq_lens.to(device),
        seq_lens_cpu_upper_bound=seq_lens.pin_memory(),
        _seq_lens_cpu=seq_lens.pin_memory(),
        num_reqs=requests,
        num_actual_tokens=tokens,
        max_query_len=int(lens.max()),
        max_seq_len=context,
        block_table_tensor=table.to(device),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=device),
    )


def _host_us(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median microseconds until `call` returns, and until the device has done what it was given."""
    times: list[tuple[float, float]] = []
    for _ in range(repeats + 20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        middle = time.perf_counter()
        torch.cuda.synchronize()
        times.append((middle - begin, time.perf_counter() - begin))
    returned, finished = (round(statistics.median(column) * 1e6, 1) for column in zip(*times[20:], strict=True))
    return returned, finished


def _stock(llm: Any, runner: Any, ours: Any) -> tuple[Any, Any]:
    """Stock's builder for the layers of `ours`, and its implementation of the first of them."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
    from vllm.v1.worker.workspace import unlock_workspace

    config = llm.llm_engine.vllm_config
    layer = config.compilation_config.static_forward_context[ours.layer_names[0]]
    unlock_workspace()  # the engine's is as large as its own backend wants it
    copied = {name: getattr(layer, name) for name in _OF_THE_LAYER}
    absent = dict.fromkeys(("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name"))
    given = {"num_kv_heads": 1, "attn_type": "decoder", "topk_indices_buffer": layer.impl.topk_indices_buffer}
    with set_current_vllm_config(config):
        builder = FlashMLASparseBackend.get_builder_cls()(ours.kv_cache_spec, ours.layer_names, config, runner.device)
        return builder, FlashMLASparseBackend.get_impl_cls()(**copied, **absent, **given)


def _fill(layer: Any, blocks: int) -> None:
    """Random tokens in the first `blocks` blocks of the layer's cache."""
    device = layer.kv_cache.device
    for first in range(0, blocks, 256):
        slots = torch.arange(first * 64, min(first + 256, blocks) * 64, dtype=torch.int64, device=device)
        latent = torch.randn((len(slots), 512), dtype=torch.bfloat16, device=device)
        rope = torch.randn((len(slots), 1, 64), dtype=torch.bfloat16, device=device)
        one = torch.ones((), dtype=torch.float32, device=device)
        layer.impl.do_kv_cache_update(latent, rope, layer.kv_cache, slots, layer.kv_cache_dtype, one)


def _replay_us(build: Callable[[], Any], replay: Callable[[], Any]) -> float:
    """Microseconds a layer, with its share of the build that each replay follows."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(_STEPS + 5):
        if number == 5:
            torch.cuda.synchronize()
            begin.record()
        build()
        replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3 / (_STEPS * _LAYERS)


def _queries(layer: Any, tokens: int, context: int) -> tuple[Tensor, Tensor]:
    """q of `tokens` tokens as the engine has it; each has its selection of `context` positions in the indexer's buffer."""
    heads, buffer = layer.num_heads, layer.impl.topk_indices_buffer
    topk = min(buffer.shape[1], context)
    buffer[:tokens] = -1
    for row in range(tokens):
        buffer[row, :topk] = torch.randperm(context, device=buffer.device)[:topk].to(torch.int32)
    latent = torch.randn((heads, tokens, 512), dtype=torch.bfloat16, device=buffer.device).transpose(0, 1)
    return latent, torch.randn((tokens, heads, 64), dtype=torch.bfloat16, device=buffer.device)


def _apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def _forwards(runner: Any, builders: Sides, impls: Sides, layer: Any) -> dict[str, dict[str, Any]]:
    """A layer's attention called from Python, as steps that no graph holds call it: like `_builds`, and how far apart."""
    found: dict[str, dict[str, Any]] = {}
    for name in _EAGER:
        common = _common(runner, *_BATCHES[name], _BUILD_CONTEXT)
        q = _queries(layer, common.num_actual_tokens, _BUILD_CONTEXT)
        calls = {
            who: partial(impl.forward_mqa, q, layer.kv_cache, builders[who].build(0, common), layer)
            for who, impl in impls.items()
        }
        apart = _apart(*(calls[who]()[0] for who in ("ours", "stock")))
        found[name] = {who: _host_us(call, _FORWARDS) for who, call in calls.items()} | {"relative": apart}
    return found


def _layer(runner: Any, builders: Sides, impls: Sides, layer: Any, batch: int, context: int) -> dict[str, Any]:
    """A decode's attention in one layer, ours and stock's by turns."""
    common = _common(runner, [1] * batch, [], context)
    q = _queries(layer, batch, context)
    outs: dict[str, Tensor] = {}

    def attend(who: str, metadata: Any) -> None:
        outs[who] = impls[who].forward_mqa(q, layer.kv_cache, metadata, layer)[0]

    builds = {who: partial(builder.build, 0, common) for who, builder in builders.items()}
    replays = {who: captured(partial(attend, who, build()), runner.device, calls=_LAYERS) for who, build in builds.items()}
    rounds = [{who: _replay_us(builds[who], replay) for who, replay in replays.items()} for _ in range(5)]
    medians = {who: [statistics.median(each[who] for each in rounds)] for who in replays}
    return {"relative": _apart(outs["ours"], outs["stock"]), **medians}


def _steps(llm: Any, options: dict[str, Any], where: Path) -> dict[str, Any]:
    """A decode step of the engine: the median of turns that engines take one after the other."""
    from vllm import SamplingParams

    engine, batch = llm.llm_engine, max(options["batches"])
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
    return {"batch": batch, "step_us": round(statistics.median(steps), 1)}


def load(llm: Any, options: dict[str, Any], where: Path) -> dict[str, Any]:
    """first: ms until prompts that start together all have a token. tokens_s: of `requests` mixed requests. By turns."""
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
    return {"first": first, "tokens_s": round(max(sum(tokens) / seconds(lengths, tokens) for _ in range(2)), 1)}


def measure(llm: Any, options: dict[str, Any], where: Path) -> dict[str, Any]:
    """steps: of this engine. builds, forwards, layers: of ours and stock's, in an engine that ours serves.

    where: the folder of the lock that all engines share.
    """
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    groups = [group for several in runner.attn_groups for group in several]  # the other group is the indexer's
    ours = next(group for group in groups if group.backend.get_name() == "FLASHMLA_SPARSE").get_metadata_builder()
    found: dict[str, Any] = {"steps": _steps(llm, options, where)}
    if not hasattr(ours, "planner"):
        return found
    layer = llm.llm_engine.vllm_config.compilation_config.static_forward_context[ours.layer_names[0]]
    with turn(where), torch.inference_mode():
        builder, impl = _stock(llm, runner, ours)
        builders, impls = {"ours": ours, "stock": builder}, {"ours": layer.impl, "stock": impl}
        for name, lengths in _BATCHES.items():
            common = _common(runner, *lengths, _BUILD_CONTEXT)
            builds = {who: _host_us(partial(each.build, 0, common), _BUILDS) for who, each in builders.items()}
            found.setdefault("builds", {})[name] = builds
        _fill(layer, 1 + max(options["batches"]) * -(-options["context"] // 64))
        found["forwards"] = _forwards(runner, builders, impls, layer)
        found["layers"] = {
            batch: _layer(runner, builders, impls, layer, batch, options["context"]) for batch in options["batches"]
        }
    return found
