# SPDX-License-Identifier: Apache-2.0
"""Shadow mode of prompts over keys of each head: vLLM's real layer calls `forward_mha`, and a written-out one computes it.

The written-out one takes the other way to the same result, over latent rows in float64, and is off by what a test sets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_stock
import pytest
import shadow
import shadow_prompts
import torch
from torch import Tensor
from vllm_engine import BLOCK, HEADS, LATENT, NOPE, ROPE, SCALE, TOPK, V_DIM, Engine, Step, make_engine, make_step, run_layer

from mla_portable.contracts import InvalidArgument
from mla_portable.engines.vllm.backend import MLAPortableBackend
from mla_portable.engines.vllm.builder import MLAPortableMetadataBuilder
from mla_portable.engines.vllm.impl import MLAPortableImpl
from mla_portable.layouts import FP8_DS_MLA

MIXED = ([1, 1, 9, 33, 70], [100, 64, 9, 90, 140])
"""Decodes, a short prompt, one behind a cached context and one longer than the top-k: query and sequence lengths."""


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    file = tmp_path / "shadow.jsonl"
    for name in ("get_impl_cls", "get_builder_cls"):  # put back afterwards
        monkeypatch.setattr(MLAPortableBackend, name, staticmethod(getattr(MLAPortableBackend, name)))
    monkeypatch.setitem(fake_stock.ERROR, "relative", 0.0)
    shadow.install(file, "fake_stock.StockBackend")
    return lambda: [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Has every step with prompts split, and `forward_mha` written out; what it does wrong."""
    faults: dict[str, Any] = {"relative": 0.0, "ignores": ""}
    build = MLAPortableMetadataBuilder.build

    def split(self: Any, prefix: int, common: Any, fast: bool = False) -> Any:
        lens = common.query_start_loc_cpu.diff().tolist()
        first = next((r for r, length in enumerate(lens) if length > 1), len(lens))
        if first == len(lens):
            return build(self, prefix, common, fast)
        metadata = build(self, prefix, shadow_prompts.decodes_of(common, first), fast)
        return replace(
            metadata,
            **{name: getattr(common, name) for name in ("num_reqs", "num_actual_tokens", "query_start_loc", "seq_lens")},
            block_table=common.block_table_tensor,
            num_prefills=len(lens) - first,
            prefill=SimpleNamespace(use_dense_mha=True, max_query_len=max(lens), chunked_context=()),
        )

    def forward_mha(
        self: Any, q: Tensor, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, metadata: Any, *more: Any, output: Tensor
    ):
        cached = kv_cache.flatten(0, 1)
        cached = FP8_DS_MLA.unpack(cached, torch.float64) if cached.dtype == torch.uint8 else cached.double()
        w_k, w_v = faults["weight"].double().view(HEADS, NOPE + V_DIM, LATENT).split([NOPE, V_DIM], dim=1)
        starts, chosen = metadata.query_start_loc.tolist(), self.topk_indices_buffer
        for request in range(metadata.num_decodes, metadata.num_reqs):
            length, before = int(metadata.seq_lens[request]), metadata.num_decode_tokens
            context = length - (starts[request + 1] - starts[request])
            for row in range(starts[request], starts[request + 1]):
                position = context + row - starts[request]
                seen = set(range(position + 1)) if length <= TOPK else {p for p in chosen[row].tolist() if p >= 0}
                if faults["ignores"] == "selection":
                    seen = set(range(position + 1))
                own, old = sorted(p for p in seen if p >= context), sorted(p for p in seen if p < context)
                slots = [int(metadata.block_table[request, p // BLOCK]) * BLOCK + p % BLOCK for p in old]
                at = [starts[request] - before + p - context for p in own]
                new = torch.cat([kv_c[at], k_pe[at, 0]], dim=-1).double()
                rows = new if faults["ignores"] == "context" else torch.cat([cached[slots], new])
                absorbed = torch.einsum("hd,hdl->hl", q[row - before, :, :NOPE].double(), w_k)
                query = torch.cat([absorbed, q[row - before, :, NOPE:].double()], dim=-1)
                out = (SCALE * query @ rows.T).softmax(-1) @ rows[:, :LATENT]
                result = torch.einsum("hl,hvl->hv", out, w_v).flatten() * (1 + faults["relative"])
                output[row - before] = result.to(output.dtype)

    monkeypatch.setattr(MLAPortableMetadataBuilder, "build", split)
    monkeypatch.setattr(MLAPortableImpl, "forward_mha", forward_mha)
    return faults


def run(off: dict[str, Any], query_lens: Sequence[int], seq_lens: Sequence[int], kv_cache_dtype: str = "auto") -> None:
    """One step through vLLM's whole layer, with its cache write, projections and calls."""
    engine = make_engine(kv_cache_dtype)
    engine.layer.prefill_backend = SimpleNamespace(supports_quant_output=lambda key: False)
    engine.impl.supports_dense_mha_prefill = True
    off["weight"] = engine.layer.kv_b_proj.weight
    step = make_step(engine, query_lens, seq_lens)
    tokens, random = len(step.requests), torch.Generator().manual_seed(5)
    q = torch.randn((tokens, HEADS, NOPE + ROPE), generator=random)
    kv_c, k_pe = torch.randn((tokens, LATENT), generator=random), torch.randn((tokens, 1, ROPE), generator=random)
    run_layer(engine, engine.builder.build(0, step.common), slots_of(step), q, kv_c, k_pe)


def slots_of(step: Step) -> Tensor:
    starts, lengths = step.common.query_start_loc_cpu.tolist(), step.common.seq_lens.tolist()
    positions = [lengths[r] - starts[r + 1] + token for token, r in enumerate(step.requests)]
    return torch.tensor(
        [int(step.table[r, p // BLOCK]) * BLOCK + p % BLOCK for r, p in zip(step.requests, positions, strict=True)]
    )


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("error", [0.0, 0.05])
def test_prompts_and_decodes_of_a_step_are_compared(kv_cache_dtype: str, error: float, records, off, monkeypatch):
    if kv_cache_dtype == "fp8":  # the stand-in for stock reads BF16 rows
        monkeypatch.setattr(fake_stock.StockImpl, "forward_mqa", lambda self, q, *given: (torch.zeros(2, HEADS, LATENT), None))
    off["relative"] = error
    run(off, *MIXED, kv_cache_dtype)
    found = {record["method"]: record for record in records()}
    assert found.keys() == {"forward_mqa", "forward_mha"} and len(records()) == 2
    prompts, decodes = found["forward_mha"], found["forward_mqa"]
    assert (decodes["rows"], decodes["step"]) == (2, 1) and decodes["layer"] == prompts[
        "layer"
    ] == "model.layers.0.self_attn.attn"
    assert 24 <= prompts["rows"] <= 30 and prompts["step"] == 1
    assert prompts["relative"] == pytest.approx(error, abs=4e-3)
    assert (prompts["relative"] > shadow.LIMIT) == bool(error)
    if kv_cache_dtype == "auto":
        assert decodes["relative"] < 4e-3


@pytest.mark.parametrize(("query_lens", "seq_lens"), [([9, 40], [9, 40]), ([70], [140]), ([1, 3, 8], [99, 3, 108])])
def test_steps_of_prompts_alone_and_of_few_rows_are_compared(query_lens, seq_lens, records, off):
    run(off, query_lens, seq_lens)
    prompts = next(record for record in records() if record["method"] == "forward_mha")
    assert prompts["relative"] < 4e-3 and prompts["rows"] == min(sum(n for n in query_lens if n > 1), prompts["rows"])


@pytest.mark.parametrize("ignored", ["selection", "context"])
def test_what_leaves_keys_out_or_takes_too_many_is_found(ignored: str, records, off, caplog: pytest.LogCaptureFixture):
    off["ignores"] = ignored
    run(off, *MIXED)
    prompts = next(record for record in records() if record["method"] == "forward_mha")
    assert prompts["relative"] > 5 * shadow.LIMIT
    assert any("forward_mha of layer model.layers.0.self_attn.attn differs" in each.message for each in caplog.records)


def test_a_quantised_output_is_refused(records):
    engine: Engine = make_engine("auto")
    nothing = torch.zeros(0)
    with pytest.raises(InvalidArgument, match="output_scale"):
        engine.impl.forward_mha(nothing, nothing, nothing, nothing, None, nothing, nothing, output_scale=torch.ones(()))


def test_stocks_builder_takes_every_token_on_the_sparse_route(records, monkeypatch: pytest.MonkeyPatch):
    given: list[Any] = []
    build = fake_stock.StockBuilder.__init__
    monkeypatch.setattr(fake_stock.StockBuilder, "__init__", lambda self, *a: (given.append(a[2]), build(self, *a))[1])
    engine = make_engine("auto")
    assert [config.attention_config.sparse_mla_force_mqa for config in given] == [True]
    assert not engine.config.attention_config.sparse_mla_force_mqa, "the engine's own stays"


def test_first_and_last_tokens_of_many_prompts_are_among_the_sampled():
    one = shadow_prompts.Prompts([0, 5000], [9000], torch.zeros(1, 1))
    tokens = [token for _, token in one.sampled()]
    assert tokens[0] == 0 and tokens[-1] == 4999 and tokens == sorted(set(tokens)) and 24 <= len(tokens) <= 26
    many = shadow_prompts.Prompts(list(range(0, 64 * 7 + 1, 7)), [7] * 64, torch.zeros(64, 1))
    found = many.sampled()
    assert all(request == token // 7 for request, token in found) and len(found) <= 48
    assert {token % 7 for _, token in found} >= {0, 6}
    empty = shadow_prompts.Prompts([0, 0, 3], [5, 3], torch.zeros(2, 1))
    assert empty.sampled() == [(1, 0), (1, 1), (1, 2)]
