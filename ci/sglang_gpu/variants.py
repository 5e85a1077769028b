# SPDX-License-Identifier: Apache-2.0
"""The kit's own functions with its own tolerances, as SGLang's test of its DSA backend calls them, with the plugin serving.

Positions in a request are mapped to slots by SGLang (SGLANG_DSA_FUSE_TOPK=0). Implementations that the GPU lacks skip with
SGLang's words; prompts as dense attention, and `fa3` where the plugin does not serve, need FlashAttention 3.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import sglang_indexer
import sglang_kit
import stock
from process import ARCH, refused, tell, trying
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.kits.attention_unittest.attention_methods import dsa_attention as kit
from sglang.test.kits.attention_unittest.runner_modes import cuda_graph_decode_runner, speculative_draft_runner

CASE = unittest.TestCase()
CASES = {case.name: case for case in kit.make_dsa_sparse_cases("dsa")}
EXTEND = CASES["dsa_sparse_prefill_flashmla_sparse_topk"]
DECODE = CASES["dsa_sparse_decode_flashmla_kv_topk"]
LONG = CASES["dsa_sparse_decode_long_prefix"]
SERVED = ("flashmla_sparse", "flashmla_kv", "fa3")


def run(name: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    found: dict[str, Any] = {}
    with trying(f"kit: {name}", found), stock.beside_stock(also_stock=False) as beside:
        call(CASE, *arguments, **named)
        found["calls_served"] = len(beside.methods)


def run_refused(name: str, words: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    found: dict[str, Any] = {}
    with trying(f"kit: {name}", found), refused(words, found):
        call(CASE, *arguments, **named)


def run_indexer(case: Any, fused_store: bool) -> None:
    """SGLang's real `Indexer`; what it quantises, writes and chooses is held against its rules.

    Below compute capability 8.9 its Triton kernels need the plugin.
    """
    found: dict[str, Any] = {}
    with trying(f"indexer {case.name}, keys by {'CUDA' if fused_store else 'Triton'}", found):
        options = {"dsa_decode_backend": "flashmla_kv", "dsa_prefill_backend": "flashmla_kv"}
        found["chosen_otherwise"] = sglang_indexer.run(
            case, topk=64, fused_store=fused_store, device=sglang_kit.DEVICE, fp8_kv_cache=True, **options
        )


def allow_older_gpus() -> None:
    """The kit skips FlashMLA's implementations below SM90; the plugin serves them there."""
    asked = kit.dsa_impl_capability
    kit.dsa_impl_capability = lambda impl: (True, "") if impl in (*SERVED, "flashmla_auto") else asked(impl)


def main() -> None:
    allow_older_gpus()
    tell("kit", passed=None, arch_rehearsed=ARCH)
    for name, case in CASES.items():
        run(f"sparse {name}", kit.run_dsa_sparse_attention_case, case)
    for pattern in ("strided", "head_tail"):
        run(f"indices {pattern}", kit.run_dsa_sparse_attention_case, LONG, index_pattern=pattern)
    run("pages interleaved", kit.run_dsa_sparse_attention_case, LONG, loc_layout="interleaved_pages")
    for impl in SERVED:
        run(f"prefill {impl}", kit.run_dsa_sparse_prefill_impl_variant_case, EXTEND, impl)
        run(f"decode {impl}", kit.run_dsa_sparse_decode_impl_variant_case, DECODE, impl)
        run(f"graph decode {impl}", kit.run_dsa_sparse_cuda_graph_decode_impl_variant_case, DECODE, impl)
    for impl in ("flashmla_sparse", "flashmla_kv", "flashmla_auto"):
        run(f"fp8 prefill {impl}", kit.run_dsa_sparse_fp8_prefill_case, EXTEND, dsa_prefill_backend=impl)
    fp8_decode = kit.run_dsa_sparse_fp8_decode_case
    run("fp8 decode flashmla_kv", fp8_decode, DECODE, dsa_decode_backend="flashmla_kv")
    # `flashmla_auto` becomes one of the others in extends alone, although the kit lists it for decode
    run_refused("fp8 decode flashmla_auto", "Unsupported dsa_impl", fp8_decode, DECODE, dsa_decode_backend="flashmla_auto")
    for mode in ("TARGET_VERIFY", "DRAFT_EXTEND_V2"):
        case = replace(LONG, name=mode.lower(), forward_mode=ForwardMode[mode], prefix_lens=(128,), extend_lens=(3,))
        for impl in SERVED:
            run(f"{mode} {impl}", kit.run_dsa_sparse_speculative_forward_mode_case, case, dsa_decode_backend=impl)
    graphs = cuda_graph_decode_runner.run_dsa_sparse_cuda_graph_decode_case
    run("graph replay bf16", graphs, DECODE)
    run("graph replay fp8", graphs, DECODE, dsa_decode_backend="flashmla_kv", fp8_kv_cache=True)
    chain = replace(DECODE, name="draft", prefix_lens=(128, 192))
    run("draft's graph runner", speculative_draft_runner.run_dsa_eagle_draft_cuda_graph_runner_case, chain)
    verify = replace(LONG, name="target_verify", forward_mode=ForwardMode.TARGET_VERIFY, prefix_lens=(128,), extend_lens=(3,))
    for case, fused_store in product((LONG, verify, CASES["dsa_sparse_prefill_long_extend"]), (True, False)):
        run_indexer(case, fused_store)


if __name__ == "__main__":
    main()
