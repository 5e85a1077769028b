# SPDX-License-Identifier: Apache-2.0
"""Shadow mode around the plugin's own `forward_mha`: whole steps of prompts and decodes through vLLM's layer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import fake_stock
import pytest
import shadow
import torch
from test_vllm_shadow_prompts import MIXED, slots_of
from vllm.model_executor.layers.attention import mla_attention
from vllm_engine import HEADS, LATENT, NOPE, ROPE, Engine, make_engine, make_step, run_layer

from mla_portable.choose import Registry
from mla_portable.engines.vllm import compat
from mla_portable.engines.vllm.backend import MLAPortableBackend


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    file = tmp_path / "shadow.jsonl"
    for name in ("get_impl_cls", "get_builder_cls"):  # put back afterwards
        monkeypatch.setattr(MLAPortableBackend, name, staticmethod(getattr(MLAPortableBackend, name)))
    monkeypatch.setitem(fake_stock.ERROR, "relative", 0.0)
    shadow.install(file, "fake_stock.StockBackend")
    # every step with prompts has them over keys of each head
    always = SimpleNamespace(saves=lambda counts, masked: 1e6)
    monkeypatch.setattr(Registry, "prompt_times", lambda self, decision: always)
    monkeypatch.setattr(compat, "takes_masked_prompts", lambda *given: True)
    if hasattr(mla_attention, "_use_masked_mha"):
        monkeypatch.setattr(mla_attention, "_use_masked_mha", lambda *given, **named: True)
    backend = SimpleNamespace(supports_quant_output=lambda key: False, get_name=lambda: "none")
    backend.clone = lambda: backend
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda config: lambda **given: backend)
    return lambda: [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize(("query_lens", "seq_lens"), [MIXED, ([70], [140]), ([9, 40], [9, 40]), ([1, 70, 20], [99, 70, 230])])
def test_our_prompts_are_within_the_limit(
    query_lens: Sequence[int], seq_lens: Sequence[int], kv_cache_dtype: str, records, monkeypatch: pytest.MonkeyPatch
):
    decodes = sum(length == 1 for length in query_lens)
    if kv_cache_dtype == "fp8":  # the stand-in for stock reads BF16 rows
        zeros = torch.zeros(decodes, HEADS, LATENT)
        monkeypatch.setattr(fake_stock.StockImpl, "forward_mqa", lambda self, q, *given: (zeros, None))
    engine: Engine = make_engine(kv_cache_dtype)
    step = make_step(engine, query_lens, seq_lens)
    tokens, random = len(step.requests), torch.Generator().manual_seed(5)
    q = torch.randn((tokens, HEADS, NOPE + ROPE), generator=random)
    kv_c, k_pe = torch.randn((tokens, LATENT), generator=random), torch.randn((tokens, 1, ROPE), generator=random)
    metadata = engine.builder.build(0, step.common)
    assert metadata.num_prefills == len(query_lens) - decodes
    run_layer(engine, metadata, slots_of(step), q, kv_c, k_pe)
    found = {record["method"]: record for record in records()}
    assert found.keys() == ({"forward_mqa", "forward_mha"} if decodes else {"forward_mha"})
    assert found["forward_mha"]["relative"] < 5e-3 and found["forward_mha"]["rows"] >= 20
