# SPDX-License-Identifier: Apache-2.0
"""Short prompts as dense attention through vLLM's real layer, builder and `forward_mha`; only its kernel is written out."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_vllm_forward import check_whole_layer
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention import mla_attention
from vllm_engine import (
    CPU,
    HEADS,
    LATENT,
    NOPE,
    ROPE,
    TOPK,
    Engine,
    check_step,
    make_config,
    make_engine,
    make_step,
    run_layer,
)

from mla_portable.contracts import ContextShare
from mla_portable.registry import get_registry
from mla_portable.vllm import dense, model

TOKEN = dense.LayerTimes(dense_key=0, dense_pair=0, sparse_token=1000, sparse_pair=0)
"""By these a step's prefills are faster as dense attention from some tokens on, whatever their contexts are."""
LEAST = 20


class Kernel:
    """What FlashAttention does for vLLM: new tokens alone, each request causal."""

    def __init__(self, *, scale: float, **more: Any) -> None:
        self.scale, self.calls, self.starts = scale, list[int](), list[int]()

    def clone(self) -> Kernel:
        return self

    def get_name(self) -> str:
        return "written out"

    def supports_quant_output(self, key: Any) -> bool:
        return False

    def supports_out(self) -> bool:
        return False

    def prepare_metadata(self, prefill: Any) -> None:
        self.starts = prefill.query_start_loc.tolist()

    def run_prefill_new_tokens(self, q: Tensor, k: Tensor, v: Tensor, return_softmax_lse: bool, **more: Any) -> Tensor:
        assert not return_softmax_lse
        self.calls.append(len(q))
        out = torch.empty_like(v)
        for first, last in zip(self.starts[:-1], self.starts[1:], strict=True):
            rows = slice(first, last)
            scores = self.scale * torch.einsum("qhd,khd->hqk", q[rows].float(), k[rows].float())
            later = torch.ones_like(scores[0]).triu(1).bool()
            weights = scores.masked_fill(later, -torch.inf).softmax(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, v[rows].float()).to(v.dtype)
        return out


def test_layers_with_sinks_are_sparse(engine: Engine):
    """vLLM's dense attention has none."""
    plain, with_sinks = engine, make_engine("auto", sinks=torch.full((HEADS,), 2.0, dtype=torch.float32))
    assert plain.impl.supports_dense_mha_prefill and not with_sinks.impl.supports_dense_mha_prefill
    metadata = check_step(with_sinks, [1, 30, 66], [9, 30, 66])
    assert metadata.prefill is None and metadata.num_decode_tokens == 97


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(dense, "VENDORS", (get_registry().facts(CPU).vendor,))
    monkeypatch.setattr(dense, "TIMES", {HEADS: TOKEN})
    monkeypatch.setattr(dense, "LEAST_SAVED", LEAST - 1.0)
    monkeypatch.setattr(dense, "MORE_KERNELS", 0.0)
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda config: Kernel)
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=1, rank_in_group=0))
    for name in ("vllm.utils.torch_utils", "vllm.model_executor.layers.attention.sparse_mla_attention"):
        monkeypatch.setattr(f"{name}.PIN_MEMORY", False, raising=False)
    return make_engine("auto")


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "decodes"), [([9, 33], [9, 33], 0), ([1, 1, 33, 9], [100, 64, 33, 9], 2), ([1, 30], [2, 30], 1)]
)
def test_short_prompts_are_dense_and_decodes_are_not(
    query_lens: list[int], seq_lens: list[int], decodes: int, engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    sparse: list[int] = []
    forward = engine.impl.forward_mqa

    def watched(q: Any, *arguments: Any) -> Any:
        sparse.append(len(q if isinstance(q, Tensor) else q[0]))
        return forward(q, *arguments)

    monkeypatch.setattr(engine.impl, "forward_mqa", watched)
    metadata = check_whole_layer(engine, query_lens, seq_lens)
    assert engine.layer.prefill_backend.calls == [sum(query_lens[decodes:])] and sparse == [decodes] * bool(decodes)
    assert (metadata.num_decodes, metadata.num_prefills) == (decodes, len(query_lens) - decodes)
    assert metadata.prefill_max_seq_len == max(seq_lens[decodes:])


def test_drafts_are_verified_as_decodes_beside_dense_prompts(engine: Engine):
    """`engine` for its patches. A prompt's first step with a draft model is an ordinary one of its own layers."""
    metadata = check_whole_layer(make_engine("auto", drafts=2), [3, 3, 40], [50, 9, 40])
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (2, 6, 1)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [([1, 1], [30, 40]), ([9, LEAST - 10], [9, 40]), ([1, 30, 66], [9, 30, TOPK + 2]), ([1, 20], [9, TOPK + 1])],
    ids=["decodes", "few tokens", "one longer than the top-k", "its context is longer"],
)
def test_other_steps_are_sparse(query_lens: Sequence[int], seq_lens: Sequence[int], engine: Engine):
    metadata = engine.builder.build(0, make_step(engine, query_lens, seq_lens).common)
    assert metadata.prefill is None and metadata.num_decode_tokens == sum(query_lens) and metadata.num_prefills == 0


def test_a_step_without_lengths_on_the_host_is_sparse(engine: Engine):
    step = make_step(engine, [9, 33], [9, 33], host_lengths="")
    assert engine.builder.build(0, step.common).prefill is None


def step(heads: int, prompts: int, tokens: int, *, context: int = 0, decodes: int = 0) -> bool:
    """The decision for a step of prompts with a cached context each, behind decodes."""
    query_lens = np.array([1] * decodes + [tokens] * prompts, dtype=np.int32)
    lengths = np.array([1500] * decodes + [context + tokens] * prompts, dtype=np.int32)
    found = dense.DensePrefills(Described(), dense.TIMES[heads], 2048, 1)
    return found.build(SimpleNamespace(seq_lens_cpu_upper_bound=lengths), query_lens, lengths) is not None


class Described:
    """vLLM's builder, which describes every step as dense attention."""

    def build(self, common_prefix_len: int, common: Any) -> Any:
        return SimpleNamespace(prefill=SimpleNamespace(use_dense_mha=True))


@pytest.mark.parametrize("heads", dense.TIMES)
def test_at_every_head_count_prompts_are_dense_and_what_would_not_gain_is_sparse(heads: int):
    assert all(step(heads, prompts, tokens) for prompts, tokens in ((1, 512), (16, 128), (8, 1000), (4, 2000), (1, 2048)))
    assert all(step(heads, 4, 1000, decodes=decodes) for decodes in (1, 64))
    assert step(heads, 4, 1000, context=1000)  # the second half of a prompt in chunks
    assert not step(heads, 1, 32) and not step(heads, 1, 2049) and not step(heads, 4, 1000, context=1049)
    assert not step(heads, 1, 48, decodes=64)  # a few tokens beside decodes
    assert not step(heads, 8, 16, context=2000)  # keys of the whole context would be computed for a few tokens


def test_the_times_favour_dense_attention_by_less_when_the_context_is_cached():
    for times in dense.TIMES.values():
        gains = [times.saved(256, 256 + context, 256 * (context + 128)) / (256 * (context + 128)) for context in (0, 500, 1700)]
        assert gains == sorted(gains, reverse=True)
        assert times.saved(1000, 1000, 500_000) > 0


def test_a_step_that_vllm_does_not_describe_as_dense_is_sparse(engine: Engine):
    """The layer would take the sparse route, with a plan for the decodes alone."""
    if engine.builder.build(0, make_step(engine, [40], [40]).common).prefill.__dict__.get("use_dense_mha") is None:
        return  # said from 0.28 on
    engine.config.attention_config.sparse_mla_force_mqa = True  # as a model may set it while its layers are built
    metadata = check_step(engine, [1, 40], [9, 40])
    assert metadata.prefill is None and metadata.num_decode_tokens == 41


@pytest.mark.parametrize(
    "query_lens, seq_lens", [([40], [40]), ([33, 9], [33, 9]), ([1, 40], [60, 40]), ([9], [9]), ([70], [70])]
)
def test_who_leaves_out_the_indexers_scores_computes_dense_attention(
    query_lens: list[int], seq_lens: list[int], engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    """vLLM's own condition, as its indexer has it: then the layer must not read the selection, which nobody wrote."""
    inputs = make_step(engine, query_lens, seq_lens)
    metadata = engine.builder.build(0, inputs.common)
    skipped = getattr(metadata.prefill, "use_dense_mha", False) and metadata.num_decode_tokens == 0
    sparse: list[int] = []
    forward = engine.impl.forward_mqa
    monkeypatch.setattr(engine.impl, "forward_mqa", lambda q, *given: (sparse.append(1), forward(q, *given))[1])
    tokens = sum(query_lens)
    run_layer(
        engine,
        metadata,
        torch.arange(64, 64 + tokens),
        torch.randn((tokens, HEADS, NOPE + ROPE)),
        torch.randn((tokens, LATENT)),
        torch.randn((tokens, 1, ROPE)),
    )
    assert not (skipped and sparse)
    assert bool(engine.layer.prefill_backend.calls) == (metadata.prefill is not None)
    if hasattr(metadata.prefill, "use_dense_mha"):
        assert skipped == (not sparse)


def resolved(**spec: Any) -> Any:
    given = {"num_heads": 128, "batch_invariant": False, "share": ContextShare(), "attn_sink": False, **spec}
    device = SimpleNamespace(vendor=given.pop("vendor", "nvidia"))
    return SimpleNamespace(spec=SimpleNamespace(**given), decision=SimpleNamespace(device=device))


@pytest.mark.parametrize(
    "heads, row", [(1, 8), (8, 8), (12, 16), (16, 16), (24, 32), (64, 64), (96, 128), (128, 128), (256, 128)]
)
def test_times_are_those_of_the_next_head_count(heads: int, row: int):
    assert dense.times(resolved(num_heads=heads), make_config()) is dense.TIMES[row]


@pytest.mark.parametrize(
    "spec", [{"batch_invariant": True}, {"share": ContextShare(2)}, {"vendor": "iluvatar"}, {"attn_sink": True}]
)
def test_where_it_is_never_taken(spec: dict[str, Any]):
    config = make_config()
    assert dense.times(resolved(), config) is not None
    assert dense.times(resolved(**spec), config) is None
    config.attention_config.sparse_mla_force_mqa = True
    assert dense.times(resolved(), config) is None


def test_a_device_without_vllms_kernels_is_served_as_before(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    engine.layer.prefill_backend = None
    with set_current_vllm_config(engine.config):
        found = model.resolve(engine.config, CPU, kv_cache_dtype="auto")
        spec = engine.layer.get_kv_cache_spec(engine.config)
    assert dense.times(found, engine.config) is TOKEN
    assert dense.prefills(found, spec, [engine.layer.layer_name], engine.config, CPU, 1) is None
