# SPDX-License-Identifier: Apache-2.0
"""The engines to start, as data: which model, which attention, how vLLM is configured, and what the process is to do.

A job is one process with one engine. Everything that differs between them is in the fields, so that judging needs no look
into a process, and a list can be checked without a GPU.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import rehearse

HEADS: Final = (64, 16, 128)
KV_DTYPES: Final = ("fp8_ds_mla", "auto")
TOPK: Final = 2048

WHO: Final[dict[str, tuple[str | None, dict[str, str]]]] = {
    "stock": ("FLASHMLA_SPARSE", {"MLA_PORTABLE_VLLM": "off"}),
    "plugin": ("CUSTOM", {"MLA_PORTABLE_VLLM": "custom"}),
    "triton": ("CUSTOM", {"MLA_PORTABLE_VLLM": "custom", "MLA_PORTABLE_BACKEND": "triton"}),
    "choice": (None, {"MLA_PORTABLE_VLLM": "off"}),
    "override": (None, {"MLA_PORTABLE_VLLM": "override"}),
    "untouched": (None, {"MLA_PORTABLE_VLLM": "auto"}),
    "sm80": (None, {"MLA_PORTABLE_VLLM": "auto"}),
    "sm80bare": (None, {"MLA_PORTABLE_VLLM": "auto"}),
    "sm89": (None, {"MLA_PORTABLE_VLLM": "auto"}),
    "bare": ("CUSTOM", {"MLA_PORTABLE_VLLM": "custom"}),
    "indexer": ("FLASHMLA_SPARSE", {"MLA_PORTABLE_VLLM": "auto", "MLA_PORTABLE_VLLM_INDEXER": "on"}),
}
"""The backend that vLLM is asked for (None: it chooses by itself), and the plugin's environment."""

REHEARSALS: Final[dict[str, dict[str, Any]]] = {
    "sm80": {"arch": "sm80", "refusing": ["deep_gemm"]},
    "sm80bare": {"arch": "sm80", "hidden": ["deep_gemm", "flashmla", "flash_attention_3"]},
    "sm89": {"arch": "sm89", "refusing": ["deep_gemm"]},
    "bare": {"hidden": ["deep_gemm", "flashmla"]},
    "indexer": {"refusing": ["deep_gemm"]},
}
"""By a key of WHO, arguments of `rehearse.install`. A bare process has packages missing. On an older GPU the DeepGEMM of
vLLM's wheel can be imported and refuses. So it does in `indexer`: there ours must serve on request, and a call of DeepGEMM's
is fatal."""

MODES: Final[dict[str, dict[str, Any]]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "default": {},
}
"""graphs: decode steps as CUDA graphs without torch.compile, which takes a minute. default: all that vLLM does by itself."""

_ENVIRON: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
}
"""Few threads, because many engines run at once; nothing that asks the network."""

_SEVERAL: Final = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
"""Of jobs on several GPUs: it wants NVLink multicast, which a node may have switched off."""

# Prompts that run together: a part of a block, less than top-k, more than it, more than a chunk of prefill.
_TEXTS: Final = {"lengths": (17, 300, 1000, 1900, 2500, 3500, 5000), "tokens": 24}

_DRAFTS: Final = {"speculative_config": {"method": "deepseek_mtp", "num_speculative_tokens": 2}}


@dataclass(frozen=True)
class Job:
    """One process.

    Attributes:
        name: unique. task: of `engine.TASKS`. who: a key of WHO.
        kv, heads: the cache format, query heads of the checkpoint. mode: a key of MODES. gpus: that it uses.
        arguments: more arguments of vllm.LLM. environ: more environment variables. options: of the task.
        rehearsal: arguments of `rehearse.install`, none for a process as it is. seconds: it may take.
    """

    name: str
    task: str
    who: str
    kv: str = "fp8_ds_mla"
    heads: int = 64
    mode: str = "eager"
    gpus: int = 1
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    environ: dict[str, str] = field(default_factory=dict[str, str])
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    rehearsal: dict[str, Any] = field(default_factory=dict[str, Any])
    seconds: int = 150

    @property
    def model(self) -> str:
        """The name of its checkpoint, as `named_models.write_model` has it."""
        return self.options.get("model", f"heads{self.heads}")

    def llm_arguments(self, checkpoints: Path) -> dict[str, Any]:
        """For vllm.LLM. The cache's size is given, so that the memory of a GPU that many processes share is not measured."""
        backend, _ = WHO[self.who]
        return {
            "model": str(checkpoints / self.model),
            "skip_tokenizer_init": True,
            "kv_cache_dtype": self.kv,
            "max_model_len": 8192,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 2048,
            "gpu_memory_utilization": 0.04,
            "kv_cache_memory_bytes": 1 << 30,
            "enable_prefix_caching": False,
            "seed": 0,
            **({"attention_backend": backend} if backend else {}),
            **MODES[self.mode],
            **self.arguments,
        }

    def process_environ(self, out: Path) -> dict[str, str]:
        """Of the job's process; nothing of this project in the caller's environment reaches it."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MLA_PORTABLE_")}
        older = rehearse.environ(self.rehearsal.get("arch", ""), out / "caches")
        # engines that start together would all take the first port that is free
        port = {"VLLM_PORT": str(20_000 + zlib.crc32(self.name.encode()) % 600 * 64)}
        return {**kept, **_ENVIRON, **port, **older, **WHO[self.who][1], **self.environ}


def with_layer(job: Job) -> Job:
    """The job with our layer around attention, where the plugin serves."""
    if WHO[job.who][1]["MLA_PORTABLE_VLLM"] == "off":
        return job
    return replace(job, environ={**job.environ, "MLA_PORTABLE_VLLM_LAYER": "on"})


def cell(kv: str, heads: int) -> str:
    """How names say which cache format and head count it is."""
    return f"{'bf16' if kv == 'auto' else 'fp8'}-h{heads}"


def _generate(who: str, kv: str, heads: int, mode: str, *, watch: bool = False, **more: Any) -> Job:
    shadow = mode == "eager" and who in ("plugin", "triton", "override")
    options = {**_TEXTS, "repeats": 3 if (who, mode) == ("stock", "eager") else 1, "watch": watch, "shadow": shadow}
    more |= {"options": options, "rehearsal": REHEARSALS.get(who, {})}
    return Job(f"{who}-{cell(kv, heads)}-{mode}", "generate", who, kv, heads, mode, **more)


def _requests() -> Iterator[Job]:
    """500 requests, in a cache that holds a third of those that run together, and one by one."""
    small = {"num_gpu_blocks_override": 100, "max_num_seqs": 64}
    for way, arguments in (("one", {"max_num_seqs": 1}), ("small", small)):
        limits = {"max_model_len": 1024, **arguments}
        options = {"count": 500, "prompt": (8, 600), "tokens": (8, 32)}
        yield Job(f"requests-plugin-{way}", "requests", "plugin", mode="graphs", arguments=limits, options=options, seconds=240)


def _refusals() -> Iterator[Job]:
    """Configurations that must not start, and what the message must say."""
    nobody = {"MLA_PORTABLE_DISABLE": "triton,nvidia,reference"}
    for name, says, changes in (
        ("dtype", "dtype not supported", {"arguments": {"dtype": "float16"}}),
        ("cache", "kv_cache_dtype", {"arguments": {"kv_cache_dtype": "fp8_e5m2"}}),
        ("block", "block_size", {"arguments": {"block_size": 16}}),
        ("dense", "non-sparse not supported", {"arguments": {"load_format": "dummy"}, "options": {"model": "dense"}}),
        ("nobody", "no route serves", {"environ": nobody}),
    ):
        options = {"says": says, **changes.pop("options", {})}
        yield Job(f"refuse-{name}", "refuse", "plugin", heads=16, options=options, **changes)


def agreement() -> list[Job]:
    """Everything whose results are compared; the first ones are of every kind, so that what fails is seen early."""
    first, *others = _requests()
    jobs = [first]
    jobs += [_generate(who, "fp8_ds_mla", 64, mode) for mode in ("eager", "graphs") for who in ("stock", "plugin", "triton")]
    jobs += [_generate("plugin", "fp8_ds_mla", 16, "default", seconds=240), *others]
    for heads, kv, who, mode in product(HEADS, KV_DTYPES, ("stock", "plugin", "triton"), ("eager", "graphs")):
        if (heads, kv) != (64, "fp8_ds_mla"):
            jobs.append(_generate(who, kv, heads, mode))
    # `fp8` is what users write for fp8_ds_mla, and what vLLM's automatic choice turns into it
    jobs += [_generate(who, "fp8", 64, "eager") for who in ("override", "untouched")]
    jobs += [_by_default(who, *each) for each in DEFAULTS for who in ("plugin", "stock")]
    return [*jobs, *_refusals()]


DEFAULTS: Final = (
    ("fp8_ds_mla", 16, "graphs", 2048, True),
    ("auto", 16, "eager", 8192, False),
    ("fp8_ds_mla", 128, "eager", 8192, False),
    ("auto", 128, "graphs", 2048, True),
)
"""Cache format, heads, mode, the most tokens of a step, and whether a layer drafts, of engines that are as by default."""


def _by_default(who: str, kv: str, heads: int, mode: str, step: int, drafts: bool) -> Job:
    """Where prompts may be computed over keys of each head: whole or in chunks, of any length, the second time from the cache.

    The plugin's eager engines run in shadow mode: their prompts are compared layer by layer, too.
    """
    lengths = (*_TEXTS["lengths"], 6000, 9000, 16_000)
    options: dict[str, Any] = {**_TEXTS, "lengths": lengths, "repeats": 2, "by_default": True}
    options |= {"shadow": (who, mode) == ("plugin", "eager"), **({"model": f"drafts{heads}"} if drafts else {})}
    arguments = {"enable_prefix_caching": True, "max_num_batched_tokens": step, "max_model_len": 16_384}
    arguments |= _DRAFTS if drafts else {}
    name = f"default-{who}-{cell(kv, heads)}"
    return Job(name, "generate", who, kv, heads, mode, arguments=arguments, options=options, seconds=240)


def indexer() -> list[Job]:
    """Engines with our indexer: on rehearsed older GPUs, without DeepGEMM and FlashMLA, on request; stock to compare with.

    The first ones are of every kind. Selections are watched where torch.compile leaves a module to watch.
    """
    cells = [(heads, kv, mode) for mode in ("eager", "graphs") for heads, kv in product((16, 128), KV_DTYPES)]
    apart = [(16, "fp8_ds_mla", "eager"), (128, "auto", "eager"), (16, "auto", "graphs"), (128, "fp8_ds_mla", "graphs")]
    sets = {"stock": cells, "sm80": cells, "sm89": cells, "bare": apart, "indexer": apart, "sm80bare": apart[1:3]}
    several = [(who, *several[0]) for who, several in sets.items()] + [("sm80", 16, "fp8_ds_mla", "default")]
    several += [(who, *cell) for who, some in sets.items() for cell in some[1:]]
    jobs = [_generate(who, kv, h, mode, watch=mode != "default", seconds=300) for who, h, kv, mode in several]
    return [*_rehearsed_refusals(), *jobs]


def _rehearsed_refusals() -> Iterator[Job]:
    """Stock's indexer on an A100: what users meet there, and a rehearsal must meet."""
    for who, says in (("sm80", "fp8e4nv"), ("sm80bare", "requires DeepGEMM")):
        more = {"environ": {"MLA_PORTABLE_VLLM_INDEXER": "off"}, "options": {"says": says}, "rehearsal": REHEARSALS[who]}
        yield Job(f"refuse-{who}-off", "refuse", who, heads=16, seconds=300, **more)


OTHER_MODELS: Final = {"glm53": ("nope16", "choice"), "hyv4": ("sinks16", "stock")}
"""Name -> checkpoint, and the key of WHO for the stock engine: for head size 512 each version has another backend."""
_IN_TRITON: Final = {"additional_config": {"kda_prefill_backend": "triton"}}
"""GLM-5.3-Flash's linear attention by the same kernels on every GPU, so that engines differ in sparse attention alone."""


_WITH_SINKS: Final = "vllm.models.hy_v4.nvidia.flashmla_sparse.HYV4FlashMLASparseBackend"
"""hy_v4's own backend, which shadow mode runs beside the plugin's."""
_WITHOUT_WARMUP: Final = {"kernel_config": {"enable_jit_warmup": False}}
"""Kernels are compiled when they are called: GLM-5.3-Flash's warm-up imports TileLang, which a small installation lacks."""


def other_models() -> list[Job]:
    """GLM-5.3-Flash and hy_v4 (vLLM 0.30 and later): stock, the plugin, Triton alone, and as on older GPUs.

    Everything eagerly; in graphs the plugin with both caches, and each older GPU with one. Those that others are compared with
    come first. Stock has no cache of GLM-5.3-Flash in fp8_ds_mla before 0.32.
    """
    found: list[Job] = []
    eager = [(who, kv, "eager") for who in ("stock", "triton", "plugin", "sm89", "sm80") for kv in KV_DTYPES]
    graphs = [("plugin", kv, "graphs") for kv in KV_DTYPES]
    graphs += [("sm89", "fp8_ds_mla", "graphs"), ("sm80", "auto", "graphs")]
    for (role, kv, mode), (name, (model, stock)) in product((*eager, *graphs), OTHER_MODELS.items()):
        who = stock if role == "stock" else role
        if (name, role, kv) == ("glm53", "stock", "fp8_ds_mla"):
            continue
        repeats = 3 if role == "stock" else 1
        options = {**_TEXTS, "lengths": (*_TEXTS["lengths"], 6000), "repeats": repeats, "model": model, "waits": True}
        arguments = {**_WITHOUT_WARMUP, **(_IN_TRITON if name == "glm53" else {})}
        given: dict[str, Any] = {"arguments": arguments, "options": options, "seconds": 300}
        cell = f"{'bf16' if kv == 'auto' else 'fp8'}-{mode}"
        rehearsal = REHEARSALS.get(who, {})
        found.append(Job(f"{name}-{who}-{cell}", "generate", who, kv, 16, mode, rehearsal=rehearsal, **given))
    stop: dict[str, Any] = {"options": {"says": "fp8e4nv", "model": "nope16"}, "rehearsal": REHEARSALS["sm80"]}
    stop |= {"environ": {"MLA_PORTABLE_VLLM_INDEXER": "off"}, "arguments": {**_WITHOUT_WARMUP, **_IN_TRITON}, "seconds": 300}
    return [*found, Job("glm53-sm80-off", "refuse", "sm80", "auto", 16, **stop)]


TRUTHS: Final = {"auto": ("",), "fp8_ds_mla": ("pow2", "amax")}
"""By the cache, how the scales of its truths are made: which of the two an engine makes depends on vLLM's version."""
HELD_AGAINST_TRANSFORMERS: Final = {"v32": "heads16", "glm5": "shares16"}
"""Name -> checkpoint. Not hy_v4: vLLM rotates neighbouring pairs where transformers rotates halves, so logits differ."""


def transformers() -> list[Job]:
    """Engines, stock and the plugin, beside transformers in float32; and our attention function in transformers, in BF16.

    All attend over the cache, so that one truth serves for prompts and decodes. The truths come first.
    """
    texts = {**_TEXTS, "lengths": (17, 300, 1000, 1900, 2500, 3500), "tokens": 16}
    exact = {**texts, "attention": "eager", "dtype": "float32"}
    found: list[Job] = []
    for (name, model), (kv, formats) in product(HELD_AGAINST_TRANSFORMERS.items(), TRUTHS.items()):
        for fp8 in formats:
            options = {**exact, "fp8": fp8, "model": model}
            found.append(Job(f"{name}-truth-{fp8 or 'exact'}", "truth", "stock", kv, 16, options=options, seconds=400))
    for name, model in HELD_AGAINST_TRANSFORMERS.items():
        options = {**exact, "dtype": "bfloat16", "attention": "mla_portable", "fp8": "", "model": model}
        found.append(Job(f"{name}-function-bf16", "truth", "plugin", "auto", 16, options=options, seconds=400))
        for who, kv in product(("stock", "plugin"), KV_DTYPES):
            options = {**texts, "repeats": 1, "model": model}
            label = f"{name}-{who}-{'bf16' if kv == 'auto' else 'fp8'}"
            found.append(Job(label, "generate", who, kv, 16, "eager", options=options, seconds=300))
    return found


SINKS: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "stock": ("stock", {}, {"repeats": 3, "waits": True}),
    "released": ("stock", {}, {"repeats": 3}),
    "alone": ("stock", {"max_num_seqs": 1}, {"repeats": 2, "waits": True}),
    "plugin": ("plugin", {}, {"repeats": 3}),
    "pluginalone": ("plugin", {"max_num_seqs": 1}, {"repeats": 1}),
    "shadow": ("plugin", {}, {"repeats": 1, "waits": True, "shadow": True, "stock": _WITH_SINKS}),
}
"""Engines of hy_v4: a key of WHO, arguments and options. `released`: as vLLM is, where decodes may not wait for their selection
(engine.wait_for_selections). `alone`, `pluginalone`: one sequence at a time."""


def sinks() -> list[Job]:
    """hy_v4 eagerly: stock beside itself, as released, one sequence at a time; the plugin likewise, and layer by layer."""
    found: list[Job] = []
    for kv, (name, (who, arguments, own)) in product(KV_DTYPES, SINKS.items()):
        options = {**_TEXTS, "lengths": (*_TEXTS["lengths"], 6000), "model": "sinks16", **own}
        given: dict[str, Any] = {"arguments": {**_WITHOUT_WARMUP, **arguments}, "options": options, "seconds": 300}
        label = f"sinks-{name}-{'bf16' if kv == 'auto' else 'fp8'}-eager"
        found.append(Job(label, "generate", who, kv, 16, "eager", **given))
    return found


FOUR_BITS: Final = {"packed": ("packed16", "stock"), "awq": ("awq16", "stock")}
"""As OTHER_MODELS: DeepSeek-V3.2 with weights of 4 bits, as compressed-tensors (W4A16) and AWQ store them."""


def four_bits() -> list[Job]:
    """Weights of 4 bits: stock, the plugin, and as SM80, whose GPUs are those that such weights are for; as by default.

    Prompts may go over keys of each head, so that `kv_b_proj` is called, beside what vLLM's layer makes of it for decodes. Not
    stock's: vLLM 0.26 asks `kv_b_proj` for its `weight` in a prompt with context, which these have not.
    """
    cells = [(who, kv, "eager") for who in ("stock", "plugin", "sm80") for kv in KV_DTYPES]
    cells += [("plugin", kv, "graphs") for kv in KV_DTYPES]
    found: list[Job] = []
    for (who, kv, mode), (name, (model, _)) in product(cells, FOUR_BITS.items()):
        options = {**_TEXTS, "lengths": (*_TEXTS["lengths"], 6000), "repeats": 3 if who == "stock" else 1}
        options |= {"model": model, "by_default": who != "stock"}
        rehearsal = REHEARSALS.get(who, {})
        label = f"{name}-{who}-{'bf16' if kv == 'auto' else 'fp8'}-{mode}"
        found.append(Job(label, "generate", who, kv, 16, mode, rehearsal=rehearsal, options=options, seconds=300))
    return found


def load() -> list[Job]:
    """Engines that take turns to be timed from outside: the plugin, and stock as it is by default."""
    first = ((32, 128), (16, 512), (8, 1024), (8, 2000), (4, 4096))
    decodes = {"batch": 128, "prompt": 2100, "tokens": 512}
    options = {"by_default": True, "first": first, "requests": 200, "prompt": (8, 4000), "tokens": (8, 64), "decodes": decodes}
    arguments = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "kv_cache_memory_bytes": 3 << 30}
    more: dict[str, Any] = {"arguments": arguments, "options": options, "seconds": 300}
    return [
        Job(f"load-{who}-{cell(kv, heads)}-{mode}", "load", who, kv, heads, mode, **more)
        for heads, kv, mode, who in product((16, 128), KV_DTYPES, ("eager", "graphs"), ("plugin", "stock"))
    ]


def prompts() -> list[Job]:
    """Engines whose steps of prompts are profiled: the plugin, and stock as it is by default, two layers each."""
    options = {"by_default": True, "first": ((16, 128), (8, 1000), (4, 2000))}
    arguments = {"max_num_batched_tokens": 8192}
    more: dict[str, Any] = {"arguments": arguments, "options": options, "seconds": 200}
    return [
        Job(f"prompts-{who}-{cell('fp8_ds_mla', heads)}", "gpu_time", who, "fp8_ds_mla", heads, "graphs", **more)
        for heads, who in product((8, 16, 64, 128), ("plugin", "stock"))
    ]


RANK_HEADS: Final = (16, 128)
"""Of a GPU under tensor parallelism and under data parallelism of 8."""


def rank() -> list[Job]:
    """One GPU's share of DeepSeek-V3.2 on eight, half of its layers, as vLLM starts by default: the plugin and stock in turns.

    Of half the depth both fit on a GPU of 141 GB, so that neither is measured while the GPU has another clock.
    """
    return [job for heads in RANK_HEADS for job in _ranks(f"rank{heads}", heads, "fp8_ds_mla", "stock", _RANK, f"half{heads}")]


def rank_long() -> list[Job]:
    """The same with 16 heads behind 64,000 tokens, eight steps of prompts; decodes have a context of 60,000."""
    decodes = [{"batch": batch, "prompt": 60_000, "tokens": 200} for batch in (1, 4)]
    options = {"first": ((1, 16_000), (1, 64_000)), "profiled": (), "decodes": decodes}
    return _ranks("ranklong16", 16, "fp8_ds_mla", "stock", {**_RANK, "max_model_len": 65_536}, **options)


def rank_flash() -> list[Job]:
    """One GPU's share of GLM-5.3-Flash on four (vLLM 0.30 and later), 45 layers of which 11 are sparse MLA, BF16 cache.

    Stock chooses its backend, which differs between versions. Sequences may not be longer than those of the other ranks.
    """
    arguments = {**_RANK, **_WITHOUT_WARMUP}
    return _ranks("rankflash16", 16, "auto", "choice", arguments)


_RANK: Final[dict[str, Any]] = {
    "load_format": "dummy",
    "max_model_len": 16_384,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 8192,
    "kv_cache_memory_bytes": 12 << 30,
}


def _ranks(name: str, heads: int, kv: str, stock: str, arguments: dict[str, Any], half: str = "", **others: Any) -> list[Job]:
    """A prompt of 16,000 tokens takes two steps, all others one. Decodes have a context of 3,000 tokens.

    Args:
        half: the model, of half the depth, in engines as by default; "" for the whole depth, without torch.compile.
        others: options.
    """
    first = ((16, 128), (8, 1000), (4, 2000), (2, 4000), (1, 8000), (1, 16_000))
    decodes = [{"batch": batch, "prompt": 3000, "tokens": 200} for batch in (1, 16, 64)]
    profiled = ((16, 128), (1, 8000), (4, 2000))
    options = {"by_default": True, "first": first, "profiled": profiled, "decodes": decodes, "model": half or name, **others}
    more: dict[str, Any] = {"heads": heads, "mode": "default" if half else "graphs", "arguments": arguments}
    more |= {"seconds": 560 if half else 240, "options": options}
    return [Job(f"{name}-{role}", "rank", who, kv, **more) for role, who in (("plugin", "plugin"), ("stock", stock))]


_SERVED: Final[dict[str, Any]] = {
    "requests": 72,
    "median": 1340,
    "lengths": (48, 12_000),
    "turns": 0.3,
    "tokens": (48, 255),
    "rates": (None, 4.0, 7.0),
    "repeats": 2,
}
"""Of `mixed_load.trace`, with the rates of arrival, and how often each load is served."""


def serve() -> list[Job]:
    """A mixed load on one GPU's share of DeepSeek-V3.2 of half its depth, so that the plugin and stock fit beside each other.

    As vLLM is started by default, with torch.compile and piecewise graphs, and without torch.compile; with one draft token.
    """
    arguments = {**_RANK, "enable_prefix_caching": True}
    drafts = {"speculative_config": {"method": "deepseek_mtp", "num_speculative_tokens": 1}}
    found: list[Job] = []
    for heads, mode, model, more in (
        (16, "default", "half", {}),
        (128, "default", "half", {}),
        (16, "graphs", "half", {}),
        (128, "graphs", "half", {}),
        (16, "default", "halfdrafts", drafts),
    ):
        options = {**_SERVED, "by_default": True, "model": f"{model}{heads}"}
        given: dict[str, Any] = {"arguments": {**arguments, **more}, "options": options, "seconds": 580}
        what = mode if model == "half" else f"{mode}-drafts"
        found += [
            Job(f"serve{heads}-{who}-{what}", "serve", who, "fp8_ds_mla", heads, mode, **given) for who in ("plugin", "stock")
        ]
    return found


def features() -> list[Job]:
    """What deployments switch on: each must generate as without it (`feature-none`), and many requests with all together."""
    prefixes = {"enable_prefix_caching": True}
    # The cache is smaller than the prompts together, so the second time they come from the host. ExampleConnector, which moves
    # files, leaves the indexer's keys out, for any backend.
    host = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
    host |= {"kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30}}
    connector = {**prefixes, "num_gpu_blocks_override": 140, "kv_transfer_config": host}
    more = {"heads": 16, "mode": "graphs", "seconds": 240}

    def one(name: str, arguments: dict[str, Any], *, repeats: int = 2, **options: Any) -> Job:
        options = {**_TEXTS, "repeats": repeats, **options}
        return Job(f"feature-{name}", "generate", "plugin", arguments=arguments, options=options, **more)

    model = {"model": "drafts16"}
    several = {"num_gpu_blocks_override": 100, "max_num_seqs": 64, "max_model_len": 1024}
    many = {"count": 500, "prompt": (8, 600), "tokens": (8, 32), **model}
    return [
        one("none", {}, repeats=3),
        one("prefixes", prefixes),
        one("drafts", _DRAFTS, **model),
        one("sleep", {"enable_sleep_mode": True}, sleeps=True),
        one("connector", connector),
        Job("feature-all-one", "requests", "plugin", arguments={**several, "max_num_seqs": 1}, options=many, **more),
        Job("feature-all-small", "requests", "plugin", arguments={**several, **prefixes, **_DRAFTS}, options=many, **more),
    ]


def tensor_parallel() -> list[Job]:
    """32 heads on one GPU and on two, 16 a rank; also with a layer on each of two.

    And with the whole model on each of two (data parallelism), also with batches cut in two (DBO): no layer
    has experts here, so the kernels that DBO asks for are never called. It must not take SMs from DeepGEMM, whose schedules of
    the indexer it would make wrong.
    """
    more = {"heads": 32, "mode": "graphs", "environ": _SEVERAL, "seconds": 300}
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    apart = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    jobs = [
        Job(name, "generate", "plugin", gpus=gpus, arguments=arguments, options={**_TEXTS, "repeats": 1}, **more)
        for name, gpus, arguments in (("tp1-plugin", 1, {}), ("tp2-plugin", 2, two), ("pp2-plugin", 2, apart))
    ]
    dealt = {"data_parallel_size": 2}
    cut = {"enable_dbo": True, "all2all_backend": "deepep_low_latency"}
    cut |= {"dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 16}
    for name, mode, arguments in (("dp2", "graphs", dealt), ("dbo2", "eager", {**dealt, **cut})):
        environ = {**_SEVERAL, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_DBO_COMM_SMS": "0"}
        more |= {"mode": mode, "options": _TEXTS, "environ": environ}
        jobs.append(Job(f"{name}-plugin", "ranks", "plugin", gpus=2, arguments=arguments, **more))
    return jobs


CONTEXT_PARALLEL: Final = {2: ((2, 2),), 4: ((4, 4), (4, 2))}
"""GPUs -> (tensor parallelism, decode context parallelism) of the engines that are compared with one GPU's."""
CONTEXT_CELLS: Final = (("fp8_ds_mla", 64), ("auto", 128), ("fp8_ds_mla", 16), ("auto", 64))


def context_parallel(gpus: int) -> list[Job]:
    """Sequences shared by GPUs against one that holds everything: texts, preemption, tokens that the cache holds.

    All have our indexer, by the kernels that serve ranks: others round scores differently, and near-ties flip.
    """
    environ = {**_SEVERAL, "MLA_PORTABLE_VLLM_INDEXER": "on", "MLA_PORTABLE_BACKEND_INDEXER_SELECT": "triton"}
    lengths = {"max_model_len": 24_576}
    texts = {**_TEXTS, "lengths": (*_TEXTS["lengths"], 20_000), "repeats": 1}
    more: dict[str, Any] = {"environ": environ, "seconds": 300}
    jobs: list[Job] = []
    for kv, heads in CONTEXT_CELLS:
        name = f"dcp1-plugin-{cell(kv, heads)}"
        jobs.append(Job(name, "generate", "plugin", kv, heads, "graphs", arguments=lengths, options=texts, **more))
        for (tensor, context), mode in product(CONTEXT_PARALLEL[gpus], ("graphs", "eager")):
            way = "a2a" if (mode == "graphs") == (kv == "auto") else "ag_rs"  # vLLM has two to merge outputs
            arguments = {**lengths, **_shared(tensor, context), "dcp_comm_backend": way}
            name = f"tp{tensor}dcp{context}-{cell(kv, heads)}-{mode}"
            jobs.append(Job(name, "generate", "plugin", kv, heads, mode, tensor, arguments, options=texts, **more))
    options = {"count": 100, "prompt": (8, 600), "tokens": (8, 32)}
    tensor, context = CONTEXT_PARALLEL[gpus][0]
    for way, limits in (("one", {"max_num_seqs": 1}), ("small", {"num_gpu_blocks_override": 24, "max_num_seqs": 64})):
        arguments = {"max_model_len": 1024, **limits, **_shared(tensor, context)}
        name = f"requests-tp{tensor}dcp{context}-{way}"
        jobs.append(Job(name, "requests", "plugin", mode="graphs", gpus=tensor, arguments=arguments, options=options, **more))
    return jobs


def _shared(tensor: int, context: int) -> dict[str, Any]:
    sizes = {"tensor_parallel_size": tensor, "decode_context_parallel_size": context}
    return {**sizes, "distributed_executor_backend": "mp"}
