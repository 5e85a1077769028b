# SPDX-License-Identifier: Apache-2.0
"""FlashMLA and FlashAttention 3 called directly, against their stand-ins: right results, and all that can be prepared is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import fa3_standins
import pytest
import torch
from flashmla_standins import GENERATIONS, Library, installed, modules
from simulated_gpu import FACTS

import mla_portable_nvidia
from mla_portable.bench.candidates import baseline_candidates
from mla_portable.choose import Registry
from mla_portable.contracts import Primitive
from mla_portable.judge.problems.bench import BenchProblem, KernelCase, Workshop
from mla_portable.primitives import SPARSE_DECODE, SPARSE_PREFILL
from mla_portable_nvidia.baselines.attention import fa3_function

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Every test has modules of its own."""
    fa3_function.cache_clear()
    yield
    fa3_function.cache_clear()


def baselines():
    found = Registry(plugins=[("nvidia", mla_portable_nvidia)], environ={}).baselines()
    assert not found.failures
    return found.found


def test_baselines_are_imported_when_they_are_asked_for():
    script = (
        "import sys, mla_portable_nvidia\n"
        "from mla_portable.choose import Registry\n"
        "registry = Registry(plugins=[('nvidia', mla_portable_nvidia)], environ={})\n"
        "before = 'mla_portable_nvidia.baselines' in sys.modules\n"
        "print(before, len(registry.baselines().found) > 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False True", done.stderr


def problem(primitive: Primitive, layout: str, *, heads: int, topk: int = 128):
    case = KernelCase(primitive, 3, layout, heads, topk, 512, scale_format="pow2")
    return Workshop(CPU, FACTS["sm90"]).make(case)


def timed(made: BenchProblem) -> dict[str, Any]:
    """Baseline -> what is wrong with its result, for those that are here."""
    found, _ = baseline_candidates(made, baselines())
    verdicts: dict[str, Any] = {}
    for candidate in found:
        made.poison()
        run, result = candidate.prepare()
        run()
        verdicts[candidate.name] = [finding.message for finding in made.check(result()) if finding.message]
    return verdicts


def why(made: BenchProblem) -> dict[str, str]:
    return {each.name: "; ".join(map(str, each.reasons)) for each in baseline_candidates(made, baselines())[1]}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_decode_is_right_on_padded_heads_with_every_generation(generation):
    with installed(generation):
        assert timed(problem(SPARSE_DECODE, "fp8_ds_mla", heads=16)) == {"flashmla.decode": []}
        assert timed(problem(SPARSE_PREFILL, "fp8_ds_mla", heads=128)) == {"flashmla.decode": []}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_prefill_is_right_padded_and_native_with_every_generation(generation):
    with installed(generation) as lib:
        expected = {"flashmla.prefill": []} | ({"flashmla.prefill_native": []} if 16 in lib.native else {})
        assert timed(problem(SPARSE_PREFILL, "bf16", heads=16)) == expected
        assert timed(problem(SPARSE_DECODE, "bf16", heads=16)) == expected
        assert timed(problem(SPARSE_PREFILL, "bf16", heads=64)) == {"flashmla.prefill": []}


def prepared_decode(lib: Library) -> tuple[int, int]:
    """Plans made before the first run, and plans made by two runs."""
    made = problem(SPARSE_DECODE, "fp8_ds_mla", heads=16)
    (candidate,), _ = baseline_candidates(made, baselines())
    run, _ = candidate.prepare()
    before = lib.plans
    run()
    run()
    return before, lib.plans - before


def test_decode_is_planned_and_padded_before_it_is_timed():
    with installed("vllm 0.33") as lib:
        before, while_timed = prepared_decode(lib)
        assert before > 0 and while_timed == 0
        assert {heads for _, _, heads, _ in lib.calls[-2:]} == {64}, "what is timed; learning about the kernel took others"


def test_a_baseline_that_is_not_here_says_why():
    from mla_portable_nvidia.flashmla import discovery

    discovery.forget()
    reasons = why(problem(SPARSE_DECODE, "fp8_ds_mla", heads=16))
    assert "provider flash_mla not usable" in reasons["flashmla.decode"]
    assert "supports bf16" in reasons["flashmla.prefill"]
    reasons = why(problem(SPARSE_PREFILL, "bf16", heads=16, topk=96))
    assert "topk 96 (a multiple of 128)" in reasons["flashmla.prefill"]
    assert "No module named 'vllm" in reasons["vllm.flash_attention3"]


def flash_attn_varlen_func(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k=None, q_v=None, softmax_scale=None, causal=False,
    return_softmax_lse=False, block_table=None, fa_version=2, num_splits=0,
):  # fmt: skip
    """vLLM's function, as far as it is used: what it does on SM90 with fa_version 3."""
    assert fa_version == 3 and return_softmax_lse
    out, lse, _, _ = torch.ops._vllm_fa3_C.fwd(
        q, k, v, None, None, q_v, None, cu_seqlens_q, None, None, None, seqused_k, max_seqlen_q, max_seqlen_k, block_table,
        None, None, None, None, None, None, None, None, softmax_scale, causal, -1, -1, 0.0, True, None, num_splits, None, 0,
        None, 1, 0, None,
    )  # fmt: skip
    return out, lse


@pytest.mark.parametrize("primitive", [SPARSE_DECODE, SPARSE_PREFILL])
def test_flash_attention_3_is_called_as_vllm_calls_it(primitive: Primitive):
    made = problem(primitive, "bf16", heads=40)
    assert "No module named 'vllm" in why(made)["vllm.flash_attention3"]
    fa3_function.cache_clear()
    module = ModuleType("vllm.vllm_flash_attn.flash_attn_interface")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    with modules(vllm__vllm_flash_attn__flash_attn_interface=module):
        assert "not registered" in why(made)["vllm.flash_attention3"]
        with fa3_standins.installed() as library:
            assert timed(made)["vllm.flash_attention3"] == []
            assert library.calls == [(3, 40, 128, 0)]
    assert "supports bf16" in why(problem(primitive, "fp8_ds_mla", heads=40))["vllm.flash_attention3"]
