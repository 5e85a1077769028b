# SPDX-License-Identifier: Apache-2.0
"""Prompts over keys of each head through vLLM's real layer, whose `forward_mha` is ours."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_vllm_forward import check_whole_layer
from torch import Tensor
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention import mla_attention
from vllm_engine import (
    CPU,
    HEADS,
    LATENT,
    NOPE,
    ROPE,
    SCALE,
    TOPK,
    V_DIM,
    Engine,
    KvBProj,
    PackedKvBProj,
    check_step,
    make_config,
    make_engine,
    make_step,
    run_layer,
)

from mla_portable.attention import HeadDims
from mla_portable.choose import Registry, get_registry, use
from mla_portable.contracts import ContextShare, InvalidArgument
from mla_portable.engines.common import prompt_route as shared
from mla_portable.engines.vllm import compat, prompts
from mla_portable.engines.vllm.metadata import MLAPortableMetadata
from mla_portable.times.prompts import PromptTimes

TOKEN = PromptTimes(0, 1000, 0, 0, 0, 0, 0, 0, 0, 0, 0)
"""By these the prompts of a step are faster over keys of each head from some new tokens on, whatever their contexts are."""
LEAST = 20

SHORT = [([9, 33], [9, 33], 0), ([1, 1, 33, 9], [100, 64, 33, 9], 2), ([1, 30], [2, 30], 1), ([9, 30], [20, 50], 0)]
LONG = [([70], [70], 0), ([1, 1, 90, 9], [100, 64, 90, 9], 2), ([40, 30], [200, 33], 0), ([1, 25, 25], [9, 250, 100], 1)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return make_prompt_engine(monkeypatch)


def favour_keys_of_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are built take prompts of LEAST new tokens over keys of each head."""
    monkeypatch.setattr(Registry, "prompt_times", lambda self, decision: TOKEN)
    monkeypatch.setattr(shared, "LEAST_SAVED", LEAST - 1.0)
    monkeypatch.setattr(prompts, "BESIDE_DECODES", 0.0)
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda config: Backend)
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=1, rank_in_group=0))


def make_prompt_engine(monkeypatch: pytest.MonkeyPatch, dtype: str = "auto", **engine: Any) -> Engine:
    favour_keys_of_each_head(monkeypatch)
    return make_engine(dtype, **engine)


class Backend:
    """What vLLM would compute dense prompts by. It must be there, and is not called."""

    def __init__(self, **more: Any) -> None: ...

    def get_name(self) -> str:
        return "not called"

    def supports_quant_output(self, key: Any) -> bool:
        return True


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """The tokens of every call that the layer makes."""
    calls: dict[str, list[int]] = {"forward_mqa": [], "forward_mha": []}

    def watched(name: str) -> Any:
        forward = getattr(engine.impl, name)

        def call(q: Any, *given: Any, **named: Any) -> Any:
            calls[name].append(len(q if isinstance(q, Tensor) else q[0]))
            return forward(q, *given, **named)

        return call

    for name in calls:
        monkeypatch.setattr(engine.impl, name, watched(name))
    return calls


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
@pytest.mark.parametrize(("query_lens", "seq_lens", "decodes"), [*SHORT, *LONG], ids=str)
def test_prompts_go_to_forward_mha_and_decodes_do_not(
    query_lens: list[int], seq_lens: list[int], decodes: int, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    engine = make_prompt_engine(monkeypatch, dtype)
    calls = watch(engine, monkeypatch)
    metadata = check_whole_layer(engine, query_lens, seq_lens)
    assert calls == {"forward_mha": [sum(query_lens[decodes:])], "forward_mqa": [decodes] * bool(decodes)}
    assert (metadata.num_decodes, metadata.num_prefills) == (decodes, len(query_lens) - decodes)
    assert metadata.prefill.plan.masked == (max(seq_lens[decodes:]) > TOPK) == (not metadata.prefill.use_dense_mha)


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_weights_of_four_bits_are_projected_by_their_own_method(dtype: str, monkeypatch: pytest.MonkeyPatch):
    """Decodes by the weights that vLLM's layer makes of `kv_b_proj`, prompts by calling it."""
    engine = make_prompt_engine(monkeypatch, dtype, kv_b_proj=PackedKvBProj)
    assert not hasattr(engine.layer.kv_b_proj, "weight") and engine.layer.kv_b_proj.weight_packed.dtype == torch.int32
    assert 0.01 < (engine.layer.kv_b_proj.plain() - KvBProj(7).plain()).norm() / KvBProj(7).plain().norm() < 0.2
    calls = watch(engine, monkeypatch)
    check_whole_layer(engine, [1, 1, 90, 9], [100, 64, 90, 9])
    assert calls == {"forward_mha": [99], "forward_mqa": [2]}


def test_drafts_are_verified_as_decodes_beside_prompts(monkeypatch: pytest.MonkeyPatch):
    metadata = check_whole_layer(make_prompt_engine(monkeypatch, drafts=2), [3, 3, 90], [50, 9, 90])
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (2, 6, 1)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([1, 1], [30, 40]), ([9, LEAST - 10], [9, 40])], ids=["decodes", "few tokens"]
)
def test_other_steps_are_sparse(query_lens: Sequence[int], seq_lens: Sequence[int], engine: Engine):
    metadata = engine.builder.build(0, make_step(engine, query_lens, seq_lens).common)
    assert metadata.prefill is None and metadata.num_decode_tokens == sum(query_lens) and metadata.num_prefills == 0


def test_a_step_without_lengths_on_the_host_is_sparse(engine: Engine):
    step = make_step(engine, [9, 33], [9, 33], host_lengths="")
    assert engine.builder.build(0, step.common).prefill is None


def test_layers_with_sinks_are_sparse(monkeypatch: pytest.MonkeyPatch):
    with_sinks = make_prompt_engine(monkeypatch, sinks=torch.full((HEADS,), 2.0, dtype=torch.float32))
    assert not with_sinks.impl.supports_dense_mha_prefill
    metadata = check_step(with_sinks, [1, 30, 66], [9, 30, 66])
    assert metadata.prefill is None and metadata.num_decode_tokens == 97


def test_a_device_without_vllms_own_kernels_is_sparse(monkeypatch: pytest.MonkeyPatch):
    """vLLM's layer looks at them before it asks the implementation."""
    engine = make_prompt_engine(monkeypatch)
    engine.layer.prefill_backend = None
    assert prompts.prompts(engine.builder._prompts._attention, [engine.layer], engine.config, 1) is None


def test_a_tensor_parallel_size_without_thresholds_masks_nothing(engine: Engine):
    engine.config.parallel_config.tensor_parallel_size = 3
    found = compat.takes_masked_prompts(engine.config, NOPE + ROPE, V_DIM)
    assert found == (not hasattr(mla_attention, "_use_masked_mha"))  # 0.26 and 0.27 have none
    own = prompts.prompts(engine.builder._prompts._attention, [engine.layer], engine.config, 1)
    assert own is not None
    lengths = np.array([70], dtype=np.int32)
    assert (own.build(lengths, lengths, torch.zeros((1, 4), dtype=torch.int32)) is not None) == found


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("widths", [(192, 128), (256, 256)])
def test_vllms_thresholds_let_prompts_through_at_usual_sizes(size: int, widths: tuple[int, int]):
    config = make_config()
    config.parallel_config.tensor_parallel_size = size
    assert compat.takes_masked_prompts(config, *widths)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [([40], [40]), ([33, 9], [33, 9]), ([1, 40], [60, 40]), ([9], [9]), ([70], [70]), ([40, 90], [40, 90]), ([40], [120])],
)
def test_who_leaves_out_the_indexers_scores_does_not_read_the_selection(
    query_lens: list[int], seq_lens: list[int], engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    """vLLM's own condition, as its indexer has it: then nothing must read the selection, which nobody wrote."""
    inputs = make_step(engine, query_lens, seq_lens)
    metadata = engine.builder.build(0, inputs.common)
    skipped = getattr(metadata.prefill, "use_dense_mha", False) and metadata.num_decode_tokens == 0
    calls, tokens = watch(engine, monkeypatch), sum(query_lens)
    if skipped:
        engine.topk[:] = 2**30
    out = run_layer(
        engine,
        metadata,
        torch.arange(64, 64 + tokens),
        torch.randn((tokens, HEADS, NOPE + ROPE)),
        torch.randn((tokens, LATENT)),
        torch.randn((tokens, 1, ROPE)),
    )
    assert bool(calls["forward_mha"]) == (metadata.prefill is not None)
    assert skipped == (metadata.prefill is not None and not metadata.prefill.plan.masked and not calls["forward_mqa"])
    assert torch.isfinite(out).all() and torch.count_nonzero(out.view(tokens, -1).abs().sum(1)) == tokens


def test_a_step_of_another_batch_is_refused(engine: Engine):
    step = make_step(engine, [70], [70])
    metadata = engine.builder.build(0, step.common)
    q, kv_c, k_pe = (torch.zeros(shape) for shape in ((70, HEADS, NOPE + ROPE), (70, LATENT), (70, 1, ROPE)))
    out = torch.zeros((70, HEADS * V_DIM))
    with pytest.raises(InvalidArgument, match="output_scale"):
        engine.impl.forward_mha(q, kv_c, k_pe, engine.kv_cache, metadata, torch.ones(()), out, torch.ones(()))
    metadata.prefill = None
    with pytest.raises(InvalidArgument, match="prompts False"):
        engine.impl.forward_mha(q, kv_c, k_pe, engine.kv_cache, metadata, torch.ones(()), out)


def test_vllm_profiles_the_memory_of_a_step_of_prompts(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """Where its profile reaches the implementation: in the cache's update, and from 0.33 on in a method for it."""
    sizes: list[int] = []
    empty = torch.empty

    def watched(*size: Any, **more: Any) -> Tensor:
        sizes.append(size[0] if isinstance(size[0], int) else 0)
        return empty(*size, **more)

    nothing = torch.empty(0)
    monkeypatch.setattr(torch, "empty", watched)
    engine.impl.do_kv_cache_update(nothing, nothing, nothing, nothing, "auto", nothing)
    engine.impl.reserve_workspace()
    assert sizes == [engine.builder._prompts._attention.scratch_bytes] * 2


def resolved(**spec: Any) -> Any:
    given = {"batch_invariant": False, "share": ContextShare(), "attn_sink": False, "rope_width": ROPE, **spec}
    return SimpleNamespace(spec=SimpleNamespace(**given), decision=SimpleNamespace(device=get_registry().facts(CPU)))


@pytest.mark.parametrize(
    "spec",
    [{"batch_invariant": True}, {"share": ContextShare(2)}, {"attn_sink": True}, {"rope_width": 0}],
    ids=lambda spec: next(iter(spec)),
)
def test_where_it_is_never_taken(spec: dict[str, Any], engine: Engine):
    assert prompts.attention(resolved(**spec), engine.config, HeadDims()) is None


def test_it_is_turned_off_by_vllms_switch_and_where_nothing_serves_or_times_are_missing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    found = engine.builder._prompts._attention
    resolved = SimpleNamespace(spec=found.spec, decision=SimpleNamespace(device=get_registry().facts(CPU)))
    assert prompts.attention(resolved, engine.config, found.head_dims) is not None
    with use(masked_prefill="nvidia"):
        assert prompts.attention(resolved, engine.config, found.head_dims) is None
    engine.config.attention_config.sparse_mla_force_mqa = True
    assert prompts.attention(resolved, engine.config, found.head_dims) is None
    engine.config.attention_config.sparse_mla_force_mqa = False
    monkeypatch.setattr(Registry, "prompt_times", lambda self, decision: None)
    assert prompts.attention(resolved, engine.config, found.head_dims) is None


def test_the_metadata_says_what_each_version_reads(engine: Engine):
    metadata: MLAPortableMetadata = engine.builder.build(0, make_step(engine, [70], [70]).common)
    if hasattr(mla_attention, "_use_masked_mha"):
        assert metadata.prefill_max_seq_len > metadata.topk_tokens and metadata.prefill.chunked_context is None
    else:
        assert metadata.prefill_max_seq_len <= metadata.topk_tokens and metadata.prefill.chunked_context is not None
    assert metadata.prefill.attention.spec.softmax_scale == SCALE
