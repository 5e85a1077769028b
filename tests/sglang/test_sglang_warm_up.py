# SPDX-License-Identifier: Apache-2.0
"""What SGLang's steps need is made when its backend object is built: no step behind that needs a compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch_keys import record_launches
from sglang_kit import cases, fixture
from test_sglang_prompts import build

from mla_portable import use
from mla_portable.engines.common.routing import bind_for
from mla_portable.engines.sglang import model, pool_rows, prompts, serving
from mla_portable.layouts import FP8_DS_MLA
from mla_portable.times.prompts import PromptTimes

STEPS = ("dsa_sparse_decode_short_prefix_padding", "dsa_sparse_decode_ragged_prefix", "dsa_sparse_prefill_long_extend")


@pytest.mark.parametrize("impl", ["flashmla_kv", "flashmla_sparse"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_no_step_compiles_after_the_backend_is_built(impl: str, fp8: bool, monkeypatch: pytest.MonkeyPatch):
    options: dict[str, Any] = {"fp8_kv_cache": fp8, "dsa_decode_backend": impl, "dsa_prefill_backend": impl}
    with use("triton"):
        steps = [fixture(cases()[name], **options) for name in STEPS]  # implementations are tried
        keys, made = record_launches(monkeypatch, runs=False), set[tuple[str, str]]()
        serving._shared().clear()
        for built in steps:
            serving.attach(built.backend, built.runner)
        made = set(keys.keys)
        assert {kernel for kernel, _ in made} & {"sparse_attention_kernel", "sparse_attention_fp8_kernel"}
        for built in steps:
            with torch.no_grad():
                backend = built.backend
                layers = getattr(backend, serving.LAYERS)
                for method in layers.methods:
                    layout = model.layouts_of(method, backend)
                    attention = layers.attention(layout, attn_sink=False)
                    rows = torch.zeros((128, attention.spec.layout.row_width), dtype=attention.spec.layout.dtype)
                    rows = rows.view(2, 64, -1) if attention.spec.layout.is_quantized else rows
                    for count in (1, 2, 3, 5, 30):
                        query = torch.zeros((count, attention.spec.num_heads, 576), dtype=torch.bfloat16)
                        slots = torch.zeros((count + 1, attention.spec.topk), dtype=torch.int32)[1:]
                        for lengths in (None, torch.ones(count + 1, dtype=torch.int32)[1:]):
                            for decodes in (True, False):
                                more: dict[str, Any] = {"decodes": decodes, "lengths": lengths}
                                attention.forward(query, rows, slots, softmax_scale=0.1, **more)
    assert not set(keys.keys) - made, sorted(set(keys.keys) - made)


def test_layers_of_a_kind_are_warmed_once(monkeypatch: pytest.MonkeyPatch):
    warmed: list[object] = []
    monkeypatch.setattr(serving, "warm_slots", warmed.append)
    serving._shared().clear()
    case = cases()[STEPS[0]]
    kept = [fixture(case, dsa_decode_backend="flashmla_sparse") for _ in range(2)]
    assert warmed and len(warmed) == len({id(each) for each in warmed}) == len(serving._shared())
    assert len(kept) == 2


def test_prompts_of_a_kind_are_warmed_once(monkeypatch: pytest.MonkeyPatch):
    warmed: list[object] = []
    monkeypatch.setattr(prompts, "warm_prompts", warmed.append)
    monkeypatch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0")
    prompts.get_registry().keep("SGLang's warmed prompts", set).clear()
    for _ in range(2):
        build(monkeypatch, PromptTimes(0, 1000, 0, 0, 0, 0, 0, 0, 0, 0, 0))
    assert len(warmed) == 1


def test_rows_of_fp8_caches_are_written_and_gathered_once_where_they_are_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool_rows, "bind_for", lambda *requests, graph: bind_for(*requests, graph=False))  # a CPU has none
    with use("triton"):
        pool_rows.PoolRows(torch.device("cpu"), FP8_DS_MLA)  # implementations are tried
        keys = record_launches(monkeypatch, runs=False)
        found = pool_rows.PoolRows(torch.device("cpu"), FP8_DS_MLA)
        made = set(keys.keys)
        assert {kernel for kernel, _ in made} == {"cache_write_kernel", "gather_upconvert_kernel"}
        for count in (1, 2, 7, 16, 33):
            latent = torch.zeros((count, 576), dtype=torch.bfloat16)
            rows = found.quantise(latent[:, :512], latent[:, 512:])
            found.gather(rows, torch.zeros(count + 1, dtype=torch.int64)[1:])
    assert not set(keys.keys) - made, sorted(set(keys.keys) - made)
