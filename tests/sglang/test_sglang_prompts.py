# SPDX-License-Identifier: Apache-2.0
"""Extends over keys of each head: SGLang's backend, cache and layer methods, judged in float64; what is refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang_kit import cases, fixture, server_of
from torch import Tensor

from mla_portable.attention import HeadDims
from mla_portable.choose import Registry, get_registry
from mla_portable.contracts import ContextShare
from mla_portable.engines.common import prompt_route as shared
from mla_portable.engines.sglang import model, prompts, seams, settings
from mla_portable.layouts import LAYOUTS
from mla_portable.times.prompts import PromptTimes

HEADS, Q_RANK = 4, 32
DIMS = HeadDims(128, 64, 128)
METHODS = import_module(seams.LAYER_MODULE)
CASE = replace(
    cases()["dsa_sparse_prefill_multi_request"], name="prompts", num_heads=HEADS, prefix_lens=(9, 0), extend_lens=(5, 21)
)
FASTER = PromptTimes(0, 1e6, 0, 0, 0, 0, 0, 0, 0, 0, 0)
SLOWER = PromptTimes(0, 0, 0, 1e6, 0, 0, 1e6, 0, 0, 0, 0)


class Layer(METHODS.DeepseekMLAForwardMixin):
    """A layer's projections and what of its attributes the methods read; a real one needs a distributed group."""

    def __init__(self, built: Any, topk: int) -> None:
        generator = torch.Generator().manual_seed(7)

        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).div(shape[-1] ** 0.5).bfloat16()

        self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim = Q_RANK, 512, DIMS.rope
        self.qk_nope_head_dim, self.qk_head_dim, self.v_head_dim = DIMS.nope, DIMS.query, DIMS.value
        self.num_local_heads, self.layer_id, self.use_dsa = HEADS, 0, True
        self.skip_topk, self.next_skip_topk, self.is_nextn = False, True, False
        self.w_q, self.w_kv = weights(HEADS * DIMS.query, Q_RANK), weights(HEADS * (DIMS.nope + DIMS.value), 512)
        self.q_a_layernorm = self.kv_a_layernorm = lambda rows: rows.contiguous()
        self.q_b_proj = lambda rows: (rows @ self.w_q.T, None)
        self.kv_b_proj = lambda rows: (rows @ self.w_kv.T, None)
        self.o_proj = lambda rows: (rows, None)
        self.rotary_emb = lambda positions, q_pe, k_pe: (-q_pe, -k_pe)
        self.attn_mqa = built.actual_module.attn
        self.built, self.asked = built, []
        lengths = [p + i + 1 for p, n in zip(CASE.prefix_lens, CASE.extend_lens, strict=True) for i in range(n)]
        self.selected = torch.full((len(lengths), topk), -1, dtype=torch.int32)
        for row, length in enumerate(lengths):
            chosen = torch.randperm(length, generator=generator)[:topk]
            self.selected[row, : len(chosen)] = chosen.to(torch.int32)
        self.latent = weights(len(lengths), Q_RANK + 576).mul(8)

    def indexer(self, *, forward_batch: Any, layer_id: int, **more: Any) -> Tensor:
        """Positions, as SGLang's indexer returns where its metadata say so."""
        metadata = self.built.backend.get_indexer_metadata(layer_id, forward_batch)
        self.asked.append(metadata.force_unfused_topk)
        return self.selected


@pytest.fixture(autouse=True)
def no_dense_prompts_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0")


def build(monkeypatch: pytest.MonkeyPatch, times: PromptTimes, *, topk: int = 16, **options: Any) -> Any:
    """A backend with prompts beside its server, as `attach` makes them of a model's config."""
    monkeypatch.setattr(Registry, "prompt_times", lambda self, decision: times)
    built = fixture(CASE, index_topk=topk, dsa_prefill_backend="flashmla_kv", **options)
    config = built.runner.model_config
    config.qk_nope_head_dim, config.v_head_dim, config.scaling = DIMS.nope, DIMS.value, 0.5
    from mla_portable.engines.sglang import serving

    server = serving.attach(built.backend, built.runner)
    assert server is not None and server is server_of(built.backend) and server.prompts is not None
    return built


def run(built: Any, layer: Layer, monkeypatch: pytest.MonkeyPatch) -> Any:
    context = SimpleNamespace(fetch_qkv_latent=lambda: layer.latent)
    monkeypatch.setattr(METHODS, "get_attn_tp_context", lambda: context)
    batch, backend = built.forward_batch, built.backend
    with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
        backend.init_forward_metadata(batch)
        state = layer.forward_absorb_prepare(batch.positions, built.input_hidden, batch, None)
        return layer.forward_absorb_core(*state)


def rows_of(built: Any, request: int, count: int) -> Tensor:
    """The first rows of a request as its cache has them, in float64."""
    layout = LAYOUTS[model.pool_layout(built.backend)]
    slots = built.runner.req_to_token_pool.req_to_token[built.forward_batch.req_pool_indices[request], :count].long()
    rows = built.runner.token_to_kv_pool.get_key_buffer(0)[slots].flatten(1)
    return rows.double() if layout.name == "bf16" else layout.unpack(rows.view(torch.uint8), torch.float64)


def wanted(built: Any, layer: Layer) -> Tensor:
    """Attention to the selected keys in float64: the context as cached, new tokens as the layer made them."""
    q = (layer.latent[:, :Q_RANK] @ layer.w_q.T).double().view(-1, HEADS, DIMS.query)
    q[..., DIMS.nope :] *= -1
    new = layer.latent[:, Q_RANK:].double()
    new[:, 512:] *= -1
    w = layer.w_kv.double().view(HEADS, DIMS.nope + DIMS.value, 512)
    found, row = [], 0
    for request, (before, count) in enumerate(zip(CASE.prefix_lens, CASE.extend_lens, strict=True)):
        rows = torch.cat([rows_of(built, request, before), new[row : row + count]])
        own = torch.einsum("nc,hdc->nhd", rows[:, :512], w[:, : DIMS.nope])
        keys = torch.cat([own, rows[:, None, 512:].expand(-1, HEADS, -1)], dim=-1)
        values = torch.einsum("nc,hdc->nhd", rows[:, :512], w[:, DIMS.nope :])
        for _ in range(count):
            chosen = layer.selected[row][layer.selected[row] >= 0].long()
            weights = torch.softmax(torch.einsum("hd,nhd->hn", q[row], keys[chosen]) * layer.attn_mqa.scaling, dim=-1)
            found.append(torch.einsum("hn,nhd->hd", weights, values[chosen]).flatten())
            row += 1
    return torch.stack(found)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("topk", [16, 32], ids=["masked", "dense"])
def test_prompts_over_keys_of_each_head(topk: int, fp8: bool, monkeypatch: pytest.MonkeyPatch):
    built = build(monkeypatch, FASTER, topk=topk, fp8_kv_cache=fp8)
    layer = Layer(built, topk)
    out, selected = run(built, layer, monkeypatch)
    step = server_of(built.backend).prompts.step
    assert step is not None and step.masked == (topk == 16)
    assert layer.asked == [True] and selected is layer.selected
    torch.testing.assert_close(out.double(), wanted(built, layer), rtol=2e-2, atol=2e-2)
    assert not server_of(built.backend).prompts.asks_for_positions
    assert rows_of(built, 1, 21)[:, 512:].eq(-layer.latent[5:, Q_RANK + 512 :].double()).all()  # the cache has them


def test_the_log_names_what_attends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", logger=settings.logger.name)
    build(monkeypatch, FASTER)
    assert "prompts over keys of each head: masked_prefill reference.torch" in caplog.text


def test_rows_that_sglang_pads_are_zeros(monkeypatch: pytest.MonkeyPatch):
    built = build(monkeypatch, FASTER)
    layer = Layer(built, 16)
    layer.latent = torch.cat([layer.latent, layer.latent[:3]])
    batch = built.forward_batch
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, batch.out_cache_loc.new_zeros(3)])
    out, _ = run(built, layer, monkeypatch)
    assert out.shape[0] == 29 and out[26:].eq(0).all() and out[:26].ne(0).any(dim=1).all()


def taken(built: Any) -> bool:
    built.backend.init_forward_metadata(built.forward_batch)
    return server_of(built.backend).prompts.step is not None


def test_steps_that_take_the_sparse_route(monkeypatch: pytest.MonkeyPatch):
    built = build(monkeypatch, FASTER)
    found = server_of(built.backend).prompts
    assert taken(built)
    found._times = SLOWER
    assert not taken(built)
    found._times = FASTER
    built.forward_batch.spec_info = SimpleNamespace(dsa_seed_topk_capture=torch.zeros(2, 16))
    assert not taken(built)
    built.forward_batch.spec_info = None
    found._context_parallel = lambda: True
    assert not taken(built)
    found._context_parallel = lambda: False
    monkeypatch.setattr(prompts, "_in_graph", lambda: True)
    assert not taken(built)
    monkeypatch.setattr(prompts, "_in_graph", lambda: False)
    object.__setattr__(found._attention, "spec", replace(found._attention.spec, max_num_tokens=25))
    assert not taken(built)


def test_a_step_behind_a_planned_one_has_its_own_plan_or_none(monkeypatch: pytest.MonkeyPatch):
    """SGLang says that it computes a step densely itself; a decode follows an extend."""
    built = build(monkeypatch, FASTER)
    found, backend, batch = server_of(built.backend).prompts, built.backend, built.forward_batch
    assert taken(built)
    backend.use_mha = True
    found.plan(backend, batch)
    assert found.step is None
    assert taken(built) and not backend.use_mha
    batch.forward_mode = ForwardMode.DECODE
    found.plan(backend, batch)
    assert found.step is None


@pytest.mark.parametrize("name", [*prompts.PLAIN, "set_lora", "q_lora_rank", "llama_4_scaling"])
def test_layers_that_do_more_reach_sglang_s_own_method(name: str, monkeypatch: pytest.MonkeyPatch):
    built = build(monkeypatch, FASTER)
    assert taken(built)
    layer = Layer(built, 16)
    if name == "set_lora":
        layer.kv_b_proj = SimpleNamespace(set_lora=True)
    elif name != "llama_4_scaling":
        setattr(layer, name, None if name == "q_lora_rank" else True)
    from mla_portable.engines.sglang import hooks

    (seam,) = [each for each in seams.PROMPTS if each.name == "forward_absorb_prepare"]
    scaling = torch.ones(1) if name == "llama_4_scaling" else None
    with forward_context(ForwardContext(attn_backend=built.backend)):
        assert hooks.hook_of(seam)(lambda *args: "stock", layer, None, None, built.forward_batch, None, scaling) == "stock"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"share": ContextShare(2), "need_lse": True}, "each of 2 ranks has a share of the context"),
        ({"attn_sink": True}, "has no sinks"),
        ({"batch_invariant": True}, "must not depend on the batch"),
    ],
    ids=["context parallelism", "sinks", "batch invariance"],
)
def test_refusals_in_words(change: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, caplog):
    built = build(monkeypatch, FASTER)
    facts, log = get_registry().facts("cpu"), logging.getLogger("prompts")
    caplog.set_level("INFO", logger="prompts")
    spec = server_of(built.backend).prompts._attention.spec
    assert shared.prompt_attention(replace(spec, **change), DIMS, facts, torch.device("cpu"), log) is None
    assert words in caplog.text and "prompts take the sparse route" in caplog.text
