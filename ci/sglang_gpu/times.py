# SPDX-License-Identifier: Apache-2.0
"""Microseconds of a layer's attention as SGLang calls it, captured in a CUDA graph: the plugin's and SGLang's own method.

The top-k is 2,048 and every row selects as many keys at random from 8,192 tokens of its request. Results are compared with
SGLang's own; where that is not available, those of a few rows with the oracle.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, Final

import oracle
import stock
import torch
from process import ARCH, DEVICE, trying
from sglang.test.kits.attention_unittest.attention_methods import dsa_attention as kit

from mla_portable.bench.timing import captured, measure
from mla_portable.engines.sglang import seams
from mla_portable.layouts import FP8_DS_MLA

TOPK: Final = 2048
CONTEXT: Final = 8192
HEADS: Final = (8, 16, 64, 128)
TOLERANCE: Final = 8e-3
"""Of a result from the oracle's, as in the tests of the kit."""
CASES = {case.name: case for case in kit.make_dsa_sparse_cases("dsa")}
DECODE = CASES["dsa_sparse_decode_ragged_prefix"]
EXTEND = CASES["dsa_sparse_prefill_long_extend"]


def fixture(case: Any, method: str, fp8: bool) -> Any:
    impl = {seams.SPARSE: "flashmla_sparse", seams.KV: "flashmla_kv", seams.FA3: "fa3"}[method]
    built = kit.build_dsa_sparse_attention_fixture(
        unittest.TestCase(),
        case,
        device=DEVICE,
        max_context_len=CONTEXT,
        dsa_prefill_backend=impl,
        dsa_decode_backend=impl,
        fp8_kv_cache=fp8,
        index_topk=TOPK,
    )
    built.backend.init_forward_metadata(built.forward_batch)
    return built


def call_of(built: Any, method: str, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a method, for rows that select TOPK keys of their own request each."""
    backend, module = built.backend, built.actual_module
    pool = built.runner.token_to_kv_pool
    pool.get_key_buffer(0).view(torch.uint8).zero_()
    for begin in range(0, pool.size - 64, 1 << 16):
        count = min(1 << 16, pool.size - 64 - begin)
        slots = torch.arange(64 + begin, 64 + begin + count, device=DEVICE)
        k = torch.randn(count, 1, 576, device=DEVICE, dtype=torch.bfloat16)
        pool.set_mla_kv_buffer(module.attn, slots, k[..., :512].contiguous(), k[..., 512:].contiguous())
    requests = built.case.batch_size
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    of_row = torch.arange(rows, device=DEVICE) % requests
    chosen = torch.rand(rows, CONTEXT - 64, device=DEVICE, generator=generator).topk(TOPK).indices
    table = (64 + of_row[:, None] * CONTEXT + chosen).to(torch.int32)
    heads = module.num_heads
    q = torch.randn(rows, heads, 576, device=DEVICE, dtype=torch.bfloat16)
    metadata = backend.forward_metadata
    metadata.dsa_cache_seqlens_int32.fill_(TOPK)
    cache, scale = pool.get_key_buffer(0), module.attn.scaling
    common: dict[str, Any] = {"kv_cache": cache, "v_head_dim": 512, "sm_scale": scale}
    lengths = torch.full((rows,), TOPK, dtype=torch.int32, device=DEVICE)
    if method == seams.KV:
        metadata = replace(metadata, dsa_cache_seqlens_int32=lengths)
        return (), {**common, "q_all": q, "layer": module.attn, "metadata": metadata, "page_table_1": table}
    if method == seams.SPARSE:
        return (), {**common, "q_all": q, "page_table_1": table, "topk_length": lengths}
    each = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
    named = {**common, "q_rope": q[..., 512:], "q_nope": q[..., :512], "page_table": table, "cache_seqlens": lengths}
    return (), {
        **named,
        "cu_seqlens_q": each,
        "cu_seqlens_k": each * TOPK,
        "max_seqlen_q": 1,
        "logit_cap": 0.0,
        "page_size": 1,
    }


def median_us(call: Callable[[], object]) -> float:
    """Microseconds of a call that is captured once and replayed: the median of 30 replays with a cold L2."""
    device = torch.device(DEVICE)
    return round(measure(captured(call, device), device=device, repeat=30).median_ms * 1e3, 1)


def from_oracle(named: dict[str, Any], out: torch.Tensor) -> float:
    """The greatest difference of three rows of a result from the oracle's."""
    table = named["page_table"] if "page_table" in named else named["page_table_1"]
    rows = torch.tensor(sorted({0, len(table) // 2, len(table) - 1}), device=DEVICE)
    q = named["q_all"] if "q_all" in named else torch.cat((named["q_nope"], named["q_rope"]), dim=-1)
    cache = named["kv_cache"].squeeze(1)
    if cache.element_size() == 1:
        keys = cache.view(torch.uint8)[table[rows].flatten().long()].view(-1, 64, FP8_DS_MLA.row_width)
    else:
        keys = cache[table[rows].flatten().long()]
    slots = torch.arange(table[rows].numel()).view(len(rows), -1)
    wanted, _ = oracle.sparse_prefill(q[rows].cpu(), keys.cpu(), slots, softmax_scale=named["sm_scale"])
    return float((out.view(q.shape[0], q.shape[1], -1)[rows].double().cpu() - wanted).abs().max())


@torch.no_grad()
def timed(name: str, case: Any, method: str, rows: int, fp8: bool) -> None:
    found: dict[str, Any] = {}
    with trying(f"time: {name}", found):
        built = fixture(case, method, fp8)
        backend = built.backend
        arguments, named = call_of(built, method, rows)
        hooked = getattr(stock.backend_class(), method)
        found["ours_us"] = median_us(lambda: hooked(backend, *arguments, **named))
        ours = hooked(backend, *arguments, **named)
        found["passed"] = None
        if ARCH:
            found["stock"] = "not run"
        else:
            try:
                theirs = stock.stock_call(backend, method, arguments, named)
                found["from_stock"] = float((theirs().double() - ours.double()).abs().max())
                found["stock_us"] = median_us(theirs)
            except stock.StockNotAvailable as reason:
                found["stock"] = f"not available: {reason}"
            except Exception as error:  # a shape that it refuses: said in the report
                found["stock"] = f"{type(error).__name__}: {error}"[:200]
        if "from_stock" not in found:
            found["from_oracle"] = from_oracle(named, ours)
            assert found["from_oracle"] < TOLERANCE, "not the oracle's"


def main() -> None:
    for heads, batch in product(HEADS, (1, 16, 64)):
        case = replace(DECODE, num_heads=heads, prefix_lens=(64,) * batch)
        for method, fp8 in ((seams.KV, True), (seams.SPARSE, False), (seams.FA3, False), (seams.KV, False)):
            if method == seams.KV and not fp8 and (heads, batch) != (16, 16):
                continue  # SGLang quantises the whole cache there: once is enough to show it
            timed(f"decode {method} {'fp8' if fp8 else 'bf16'} {heads} heads {batch} rows", case, method, batch, fp8)
    for heads, fp8 in product(HEADS, (True, False)):
        case = replace(EXTEND, num_heads=heads, prefix_lens=(64,), extend_lens=(2048,))
        method = seams.KV if fp8 else seams.SPARSE
        timed(f"prefill {method} {'fp8' if fp8 else 'bf16'} {heads} heads 2048 tokens", case, method, 2048, fp8)


if __name__ == "__main__":
    main()
