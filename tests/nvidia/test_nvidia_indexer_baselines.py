# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM and vLLM's top-k operators called directly, against their stand-ins: right, and nothing prepared is timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from deepgemm_standins import BUILDS, Build, installed
from simulated_gpu import FACTS
from test_nvidia_baselines import timed, why
from torch import Tensor

from mla_portable.bench.candidates import baseline_candidates
from mla_portable.judge.problems.bench import BenchProblem, KernelCase, Workshop
from mla_portable.primitives import INDEXER_SELECT, TOPK_SELECT
from mla_portable_nvidia.baselines.indexer import indexer_baselines

CPU = torch.device("cpu")
DECODE = ("cooperative_topk", "persistent_topk", "top_k_per_row_decode")
OPERATORS = {
    "_C": (
        "top_k_per_row_prefill(Tensor logits, Tensor rowStarts, Tensor rowEnds, Tensor! indices, int numRows, int stride0, "
        "int stride1, int topK) -> ()",
        "top_k_per_row_decode(Tensor logits, int next_n, Tensor seq_lens, Tensor! indices, int numRows, int stride0, "
        "int stride1, int topK) -> ()",
        "persistent_topk(Tensor logits, Tensor lengths, Tensor! output, Tensor workspace, int k, int max_seq_len) -> ()",
        "cooperative_topk(Tensor logits, Tensor lengths, Tensor! output, Tensor workspace, int k, int max_seq_len) -> ()",
    ),
    "_C_cache_ops": (
        "cp_gather_indexer_k_quant_cache(Tensor kv_cache, Tensor! dst_k, Tensor! dst_scale, Tensor block_table, "
        "Tensor cu_seq_lens) -> ()",
    ),
}
"""Of vLLM 0.26's library."""


def need(fact: bool, what: str) -> None:
    if not fact:
        raise RuntimeError(f"stand-in of vLLM: {what}")


def choose(logits: Tensor, starts: Tensor, ends: Tensor, out: Tensor, topk: int) -> None:
    """The largest first; -1 behind them."""
    need(logits.dtype == torch.float32 and out.dtype == torch.int32 and tuple(out.shape) == (len(logits), topk), "dtypes")
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        best = logits[row, start:end].topk(min(topk, end - start)).indices
        out[row, : len(best)], out[row, len(best) :] = best.int(), -1


def prefill(logits, starts, ends, out, rows, stride0, stride1, topk):
    need((rows, stride0, stride1) == (len(logits), logits.stride(0), logits.stride(1)), "strides")
    choose(logits, starts, ends, out, topk)


def decode(logits, next_n, lens, out, rows, stride0, stride1, topk):
    need(next_n == 1, "next_n")
    prefill(logits, torch.zeros_like(lens), lens, out, rows, stride0, stride1, topk)


def radix(logits, lens, out, workspace, topk, longest):
    need(topk in (512, 1024, 2048) and workspace.dtype == torch.uint8 and workspace.numel() == 1 << 20, "workspace or k")
    need(int(lens.max()) <= longest, "max_seq_len")
    choose(logits, torch.zeros_like(lens), lens, out, topk)


def cooperative(logits, lens, *others):
    need(len(logits) <= 32 and logits.stride(0) % 4 == 0, "rows or alignment")
    radix(logits, lens, *others)


def gather(cache, keys, scales, table, bounds):
    length = int(bounds[1])
    need(len(table) == 1 and tuple(keys.shape) == (length, 128) and tuple(scales.shape) == (length, 4), "destination")
    pages = cache[table[0].long()].flatten(1)
    keys.copy_(pages[:, : 64 * 128].reshape(-1, 128)[:length].view(torch.float8_e4m3fn))
    scales.copy_(pages[:, 64 * 128 :].reshape(-1, 4)[:length])


FUNCTIONS = {
    "top_k_per_row_prefill": prefill,
    "top_k_per_row_decode": decode,
    "persistent_topk": radix,
    "cooperative_topk": cooperative,
    "cp_gather_indexer_k_quant_cache": gather,
}


@contextmanager
def vllm() -> Iterator[None]:
    libraries = []
    try:
        for namespace, schemas in OPERATORS.items():
            libraries.append(library := torch.library.Library(namespace, "FRAGMENT"))
            for schema in schemas:
                library.define(schema)
                library.impl(name := schema.partition("(")[0], FUNCTIONS[name], "CPU")
        yield
    finally:
        for library in libraries:
            library._destroy()


def problem(rows: int, *, topk: int = 512, primitive=INDEXER_SELECT, width: int = 600, arch: str = "sm90") -> BenchProblem:
    select = primitive is INDEXER_SELECT
    case = KernelCase(primitive, rows, "index_fp8" if select else None, 32 if select else None, topk, width)
    return Workshop(CPU, FACTS[arch]).make(case)


@pytest.mark.parametrize("name", BUILDS)
def test_decode_is_right_with_every_build(name):
    with installed(name), vllm():
        assert timed(problem(3)) == {f"deepgemm.{each}": [] for each in DECODE}
        assert timed(problem(33)) == {f"deepgemm.{each}": [] for each in DECODE[1:]}
        assert timed(problem(3, topk=64)) == {"deepgemm.top_k_per_row_decode": []}


@pytest.mark.parametrize("name", BUILDS)
def test_prefill_is_right_with_every_build(name):
    with installed(name), vllm():
        assert timed(problem(256)) == {"deepgemm.top_k_per_row_prefill": []}


def test_the_selection_alone():
    with vllm():
        alone = {f"vllm.{each}": [] for each in (*DECODE, "top_k_per_row_prefill")} | {"torch.topk": []}
        assert timed(problem(5, primitive=TOPK_SELECT)) == alone


def prepared(build: Build) -> tuple[int, int]:
    """Schedules made before the first run, and by two runs."""
    candidate = baseline_candidates(problem(3), list(indexer_baselines()))[0][0]
    run, _ = candidate.prepare()
    before = len(build.plans)
    run()
    run()
    return before, len(build.plans) - before


def test_decode_is_scheduled_before_it_is_timed():
    with installed("vllm 0.26") as build, vllm():
        before, while_timed = prepared(build)
        assert before > 0 and while_timed == 0


def test_a_baseline_that_is_not_here_says_why():
    reasons = why(problem(3))
    assert (
        "DeepGEMM not usable" in reasons["deepgemm.persistent_topk"] and "not registered" in reasons["deepgemm.persistent_topk"]
    )
    assert "tokens of one request" in reasons["deepgemm.top_k_per_row_prefill"]
    reasons = why(problem(33, primitive=TOPK_SELECT, topk=64))
    assert "at most 32" in reasons["vllm.cooperative_topk"] and "topk 64" in reasons["vllm.cooperative_topk"]
    older = problem(3, primitive=TOPK_SELECT)
    request = older.request.but(device=replace(FACTS["sm90"], arch="sm80"))
    (cooperative_reasons,) = (each for each in indexer_baselines() if each.name == "vllm.cooperative_topk")
    assert any("arch" in str(reason) for reason in cooperative_reasons.reasons(request))
