# SPDX-License-Identifier: Apache-2.0
"""Where DeepGEMM serves: the steps that go to the fused path all the same, by times on record, and those that stay vLLM's."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.forward_context import set_forward_context
from vllm_indexer import HEADS, LAYER, NAME, TOPK, check, make_batch, make_indexer, without_kernels

from mla_portable.choose import get_registry, reset_registry
from mla_portable.engines.vllm import compat, indexer, indexer_choice, indexer_seams, settings

FASTER, SLOWER = 5.0, 20.0
US = 10.0
"""Of vLLM's kernels."""


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch):
    """The plugin takes the CPU for a device that DeepGEMM supports."""
    capability = SimpleNamespace(major=9, minor=0)
    platform = SimpleNamespace(
        device_type="cuda",
        is_cuda=lambda: True,
        is_cuda_alike=lambda: True,
        is_out_of_tree=lambda: False,
        support_deep_gemm=lambda: True,
        get_device_capability=lambda: capability,
    )
    monkeypatch.setattr(indexer_choice, "current_platform", platform)
    monkeypatch.setattr(importlib.import_module("vllm.utils.import_utils"), "has_deep_gemm", lambda: True)
    monkeypatch.setattr(compat, "indexer_heads", lambda config: HEADS)
    monkeypatch.setattr(compat, "topk", lambda config: TOPK)
    monkeypatch.setenv(settings.ENV_INDEXER, "auto")
    indexer_choice.forget()
    indexer_seams.install()
    without_kernels(monkeypatch)
    yield
    indexer_choice.forget()
    indexer_seams.set_functions(ours=False)


def write_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, us: dict[int, dict[int, float]], device: str = "") -> None:
    """Ours take `us` by keys and rows, vLLM's `US`."""
    facts = get_registry().facts(torch.device("cpu"))

    def row(name: str, keys: int, by_rows: dict[int, float]) -> dict[str, Any]:
        sizes = {"primitive": "indexer_select", "layout": "index_fp8", "heads": HEADS, "topk": TOPK, "form": f"{keys} keys"}
        return {"implementation": name, **sizes, "us": {str(rows): value for rows, value in by_rows.items()}}

    document = {
        "device": device or facts.name,
        "times": [row("reference.torch", keys, by_rows) for keys, by_rows in us.items()],
        "baselines": [row("vllm.indexer", keys, dict.fromkeys(by_rows, US)) for keys, by_rows in us.items()],
    }
    (tmp_path / "times.json").write_text(json.dumps(document))
    monkeypatch.setenv("MLA_PORTABLE_TIMES", str(tmp_path))
    reset_registry()


@pytest.fixture
def times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_hopper: None):
    yield lambda us, **more: write_times(tmp_path, monkeypatch, us, **more)
    monkeypatch.undo()
    reset_registry()


def serves(engine: Any, step: Any, *, capture: bool = False) -> str:
    """Whose indexer serves a step; ours is checked."""
    build = engine.builder.build_for_cudagraph_capture if capture else lambda common: engine.builder.build(0, common)
    if calls_of_stock(engine, step, {NAME: build(step.common)}):
        return "vllm"
    check(engine, step)
    return "ours"


def calls_of_stock(engine: Any, step: Any, metadata: Any) -> int:
    """Call the operator's function over a stand-in of vLLM's."""
    module, called = importlib.import_module(LAYER), []

    def stock(*args: Any, **kwargs: Any) -> None:
        called.append(args)

    names = [argument.name for argument in torch.ops.vllm.sparse_attn_indexer.default._schema.arguments]
    stock.__signature__ = inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names])
    layer = engine.layer
    given = {
        "hidden_states": torch.zeros((len(step.q), 4), dtype=torch.bfloat16),
        "k_cache_prefix": NAME,
        "k": step.k,
        "kv_cache": engine.kv_cache,
        "q_quant": step.q,
        "q_scale": None,
        "weights": step.weights,
        **{name: getattr(layer, name) for name in ("quant_block_size", "scale_fmt", "topk_tokens", "head_dim")},
        "max_model_len": layer.max_model_len,
        "total_seq_lens": layer.max_total_seq_len,
        "topk_indices_buffer": engine.topk,
        "skip_k_cache_insert": False,
        "use_pcp": False,
    }
    with set_forward_context(metadata, engine.config):
        indexer_seams.operator(module, stock)(**given)
    return len(called)


EACH = [1, 1, 1]


def test_a_step_of_decodes_goes_to_the_faster_one(times: Any):
    times({64: {1: FASTER, 4: FASTER}, 256: {1: FASTER, 4: SLOWER}})
    engine = make_indexer()
    assert indexer_choice.current().fuses_some and not indexer_choice.current().ours
    assert serves(engine, make_batch(engine, EACH, [40, 5, 64])) == "ours"
    assert serves(engine, make_batch(engine, [1], [250])) == "ours"
    assert serves(engine, make_batch(engine, [1] * 4, [40, 5, 256, 9])) == "vllm"


@pytest.mark.parametrize("query_lens", [[1, 9], [9], [1, 1, 1, 1, 1]])
def test_prompts_and_sizes_that_were_not_timed_stay_vllms(query_lens: list[int], times: Any):
    times({64: {1: FASTER, 4: FASTER}, 256: {1: FASTER, 4: FASTER}})
    engine = make_indexer()
    assert serves(engine, make_batch(engine, query_lens, [40] * len(query_lens))) == "vllm"


def test_drafts_stay_vllms(times: Any):
    times({64: {1: FASTER, 64: FASTER}, 256: {1: FASTER, 64: FASTER}})
    engine = make_indexer(drafts=1)
    assert serves(engine, make_batch(engine, [2, 2], [40, 9])) == "vllm"


@pytest.mark.parametrize(("long", "server"), [(14.0, "ours"), (16.0, "vllm")])
def test_a_graph_goes_to_whom_all_lengths_take_less_time(long: float, server: str, times: Any):
    """Its later steps have sequences of other lengths: 5 and 14, or 5 and 16, beside twice 10."""
    times({64: {1: FASTER, 4: FASTER}, 256: {1: long, 4: long}})
    engine = make_indexer()
    step = make_batch(engine, EACH, [40, 5, 64])
    step.common.max_seq_len = 1 << 20  # as vLLM describes a step that is captured
    assert serves(engine, step, capture=True) == server
    assert serves(engine, step) == "vllm"  # without a graph, one as long as that was not timed


def test_what_a_graph_may_hold_is_bound_before_it_is_captured(times: Any, monkeypatch: pytest.MonkeyPatch):
    """vLLM runs a shape before it captures it; that step may be vLLM's."""
    times({64: {1: 11.0, 4: 11.0}, 256: {1: FASTER, 4: FASTER}})
    engine = make_indexer()
    step = make_batch(engine, EACH, [40, 5, 64])
    assert serves(engine, step) == "vllm"

    def nothing_else(*given: Any) -> None:
        raise AssertionError("bound while a graph is captured")

    monkeypatch.setattr(indexer, "_bind", nothing_else)
    step.common.max_seq_len = 1 << 20
    assert serves(engine, step, capture=True) == "ours"


def test_without_times_of_the_device_vllms_serves(times: Any):
    times({64: {1: FASTER}}, device="another device")
    make_indexer()
    found = indexer_choice.current()
    assert not found.fuses_some and found.times is None and "DeepGEMM serves" in found.reason


@pytest.mark.parametrize("mode", ["off", "on"])
def test_times_count_in_mode_auto_alone(mode: str, times: Any, monkeypatch: pytest.MonkeyPatch):
    times({64: {1: FASTER}, 256: {1: FASTER}})
    monkeypatch.setenv(settings.ENV_INDEXER, mode)
    indexer_choice.forget()
    make_indexer()
    found = indexer_choice.current()
    assert found.times is None and found.fused == (mode == "on")


def test_what_the_fused_path_cannot_serve_is_not_chosen_by_times(times: Any, monkeypatch: pytest.MonkeyPatch):
    times({64: {1: FASTER}, 256: {1: FASTER}})
    monkeypatch.setattr(indexer_choice, "_beyond_fused", lambda config: "pools")
    make_indexer()
    assert not indexer_choice.current().fuses_some
    indexer_choice.forget()
    monkeypatch.setattr(indexer_choice, "other_formats", lambda config: "an indexer cache in FP4")
    make_indexer()
    assert not indexer_choice.current().fuses_some


def test_a_batch_must_not_change_a_bit(on_hopper: None, monkeypatch: pytest.MonkeyPatch):
    """vLLM's scores and top-k do not promise it; ours serves all steps then."""
    monkeypatch.setattr(compat, "wants_batch_invariance", lambda: True)
    engine = make_indexer()
    found = indexer_choice.current()
    assert found.ours and found.fused and "VLLM_BATCH_INVARIANT" in found.reason
    for query_lens in ([1, 1, 1], [1, 9]):
        assert serves(engine, make_batch(engine, query_lens, [40] * len(query_lens))) == "ours"


def test_vllms_top_k_stays_where_the_fused_path_cannot_serve(on_hopper: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compat, "wants_batch_invariance", lambda: True)
    monkeypatch.setattr(indexer_choice, "_beyond_fused", lambda config: "pools")
    make_indexer()
    assert not indexer_choice.current().ours


def test_profiling_shows_the_memory_of_both(times: Any, monkeypatch: pytest.MonkeyPatch):
    times({64: {1: FASTER}, 256: {1: FASTER}})
    engine, bound = make_indexer(), []
    indexer_for = indexer.indexer_for
    monkeypatch.setattr(indexer, "indexer_for", lambda *given, **named: bound.append(indexer_for(*given, **named)) or bound[-1])
    assert calls_of_stock(engine, make_batch(engine, [1], [40]), None) == len(bound) == 1


def test_a_step_of_vllms_is_no_surprise(times: Any, caplog: pytest.LogCaptureFixture):
    """It is no step whose metadata are unknown, which a warning would say."""
    times({64: {1: SLOWER}, 256: {1: SLOWER}})
    engine = make_indexer()
    caplog.clear()
    assert serves(engine, make_batch(engine, [1], [40])) == "vllm"
    assert not caplog.records
