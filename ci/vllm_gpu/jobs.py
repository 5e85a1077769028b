# SPDX-License-Identifier: Apache-2.0
"""The engines to start, as data: which model, who attends, how vLLM is configured, and what the process is to do.

A job is one process with one engine. Everything that differs between them is in the fields, so that judging needs no look
into a process, and a list can be checked without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any, Final

__all__ = ["HEADS", "KV_DTYPES", "LENGTHS", "TOKENS", "TOPK", "Job", "agreement", "cell", "speed", "tensor_parallel"]

HEADS: Final = (64, 16, 128)
KV_DTYPES: Final = ("fp8_ds_mla", "auto")
LENGTHS: Final = (17, 300, 1000, 1900, 2500, 3500, 5000)
"""Prompts that run together: a part of a block, less than top-k, more than it, more than a chunk of prefill."""
TOPK: Final = 2048
TOKENS: Final = 24

WHO: Final[dict[str, tuple[str | None, dict[str, str]]]] = {
    "stock": ("FLASHMLA_SPARSE", {"MLA_PORTABLE_VLLM": "off"}),
    "plugin": ("CUSTOM", {"MLA_PORTABLE_VLLM": "custom"}),
    "triton": ("CUSTOM", {"MLA_PORTABLE_VLLM": "custom", "MLA_PORTABLE_BACKEND": "triton"}),
    "override": (None, {"MLA_PORTABLE_VLLM": "override"}),
    "untouched": (None, {"MLA_PORTABLE_VLLM": "auto"}),
}
"""Who attends: the backend that vLLM is asked for (None: it chooses by itself), and the plugin's environment."""

MODES: Final[dict[str, dict[str, Any]]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "default": {},
}
"""graphs: decode steps as CUDA graphs without torch.compile, which takes a minute. default: all that vLLM does by itself."""


@dataclass(frozen=True)
class Job:
    """One process.

    Attributes:
        name: unique. task: generate, requests, speed or refuse, functions of `engine`. who: a key of WHO. kv, heads: the cache
            format, query heads of the checkpoint. mode: a key of MODES. gpus: tensor parallelism.
        arguments: more arguments of vllm.LLM. environ: more environment variables. options: of the task.
        seconds: it may take.
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
    seconds: int = 150

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def model(self) -> str:
        """The checkpoint's folder, below the one for all checkpoints."""
        return self.options.get("model", f"heads{self.heads}")


def cell(kv: str, heads: int) -> str:
    """How names say which cache format and head count it is."""
    return f"{'bf16' if kv == 'auto' else 'fp8'}-h{heads}"


def _generate(who: str, kv: str, heads: int, mode: str, **more: Any) -> Job:
    name = f"{who}-{cell(kv, heads)}-{mode}"
    options = {"repeats": 3 if (who, mode) == ("stock", "eager") else 1, "lengths": LENGTHS, "tokens": TOKENS}
    environ = {"MLA_PORTABLE_VLLM_SHADOW": "1"} if mode == "eager" and who not in ("stock", "untouched") else {}
    return Job(name, "generate", who, kv, heads, mode, environ=environ, options=options, **more)


def _rounded(kv: str, heads: int) -> Job:
    """Stock with its attention's output rounded once more: the effect of a difference that any two correct kernels have."""
    options = {"repeats": 1, "lengths": LENGTHS, "tokens": TOKENS, "rounds": True}
    return Job(f"rounded-{cell(kv, heads)}-eager", "generate", "stock", kv, heads, "eager", options=options)


def _requests() -> Iterator[Job]:
    """500 requests, in a cache that holds a third of those that run together, and one by one."""
    small = {"num_gpu_blocks_override": 100, "max_num_seqs": 64}
    for who, (way, arguments) in product(("plugin", "stock"), (("one", {"max_num_seqs": 1}), ("small", small))):
        limits = {"max_model_len": 1024, **arguments}
        options = {"count": 500, "prompt": (8, 600), "tokens": (8, 32)}
        yield Job(f"requests-{who}-{way}", "requests", who, mode="graphs", arguments=limits, options=options, seconds=240)


def _refusals() -> Iterator[Job]:
    """Configurations that must not start, and what the message must say."""
    cases: dict[str, tuple[str, dict[str, Any], dict[str, str], dict[str, Any]]] = {
        "dtype": ("dtype not supported", {"dtype": "float16"}, {}, {}),
        "cache": ("kv_cache_dtype", {"kv_cache_dtype": "fp8_e5m2"}, {}, {}),
        "block": ("block_size", {"block_size": 16}, {}, {}),
        "dense": ("non-sparse not supported", {"load_format": "dummy"}, {}, {"model": "dense"}),
        "nobody": ("no route serves", {}, {"MLA_PORTABLE_DISABLE": "triton,nvidia,reference"}, {}),
    }
    for name, (text, arguments, environ, options) in cases.items():
        yield Job(
            f"refuse-{name}",
            "refuse",
            "plugin",
            heads=16,
            arguments=arguments,
            environ=environ,
            options={"says": text, **options},
        )


def agreement() -> list[Job]:
    """Everything whose results are compared; the first ones are of every kind, so that what fails is seen early."""
    jobs = list(_requests())[:1]
    jobs += [
        _generate(who, "fp8_ds_mla", 64, mode) for mode, who in product(("eager", "graphs"), ("stock", "plugin", "triton"))
    ]
    jobs += [_rounded(kv, heads) for heads, kv in product(HEADS, KV_DTYPES)]
    jobs += [_generate("plugin", "fp8_ds_mla", 16, "default", seconds=240)]
    jobs += list(_requests())[1:]
    for heads, kv, who, mode in product(HEADS, KV_DTYPES, ("stock", "plugin", "triton"), ("eager", "graphs")):
        if (heads, kv) != (64, "fp8_ds_mla"):
            jobs.append(_generate(who, kv, heads, mode))
    # `fp8` is what users write for fp8_ds_mla, and what vLLM's automatic choice turns into it
    jobs += [_generate(who, "fp8", 64, "eager") for who in ("override", "untouched")]
    return [*jobs, *_refusals()]


def speed() -> list[Job]:
    """Engines that take turns to time their steps, on a machine that does nothing else."""
    arguments = {"max_num_seqs": 512, "max_num_batched_tokens": 8192, "kv_cache_memory_bytes": 6 << 30}
    sizes = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 64, 128, 256]}
    fp8 = [("plugin", 64), ("stock", 64), ("plugin", 128), ("stock", 128), ("plugin", 16), ("stock", 16), ("triton", 16)]
    order = [(who, heads, "fp8_ds_mla") for who, heads in fp8] + [("plugin", 64, "auto"), ("stock", 64, "auto")]
    return [
        Job(
            f"speed-{who}-{cell(kv, heads)}",
            "speed",
            who,
            kv,
            heads,
            mode="graphs",
            arguments={**arguments, "compilation_config": sizes},
            options={"batches": (64, 128), "context": 4096, "prompt": 2100, "tokens": 512},
            seconds=200,
        )
        for who, heads, kv in order
    ]


def tensor_parallel() -> list[Job]:
    """32 heads on one GPU and on two, 16 a rank, by the plugin and by stock."""
    jobs: list[Job] = []
    for who, gpus in product(("plugin", "stock"), (1, 2)):
        arguments = {"tensor_parallel_size": gpus, "distributed_executor_backend": "mp"} if gpus > 1 else {}
        environ = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}  # it wants NVLink multicast, which a node may have switched off
        options = {"repeats": 3 if who == "stock" else 1, "lengths": LENGTHS, "tokens": TOKENS}
        name = f"tp{gpus}-{who}"
        jobs.append(
            Job(
                name,
                "generate",
                who,
                heads=32,
                mode="graphs",
                gpus=gpus,
                arguments=arguments,
                environ=environ,
                options=options,
                seconds=300,
            )
        )
    return jobs
