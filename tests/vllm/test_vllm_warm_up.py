# SPDX-License-Identifier: Apache-2.0
"""Warm-up within vLLM's own: after it no step of its real layer needs a compilation, and its worker's methods begin with it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch_keys import record_launches
from test_vllm_forward import BATCHES, SPECULATIVE
from test_vllm_prompts import LONG, SHORT, make_prompt_engine
from vllm_engine import HEADS, LATENT, NOPE, ROPE, Engine, make_config, make_engine, make_step, run_layer

from mla_portable.attention import SparseMLAAttention
from mla_portable.choose import get_registry, use
from mla_portable.engines.common import warm_up as warming
from mla_portable.engines.vllm import compat, plugin, warm_up

DRAFTS = 2


@pytest.fixture(autouse=True)
def nothing_is_warm() -> Iterator[None]:
    warm_up.warmed().clear()
    yield
    warm_up.warmed().clear()


def attend(engine: Engine, query_lens: list[int], seq_lens: list[int], **padding: Any) -> None:
    """A step by the implementation, as vLLM's layer calls it."""
    step = make_step(engine, query_lens, seq_lens, **padding)
    metadata = engine.builder.build(0, step.common)
    halves = step.q[..., :LATENT], step.q[..., LATENT:]
    engine.impl.forward_mqa(halves, engine.kv_cache, metadata, engine.layer)


CASES = [(dtype, route, 0) for dtype in ("auto", "fp8") for route in ("direct", "split", "fused", "upconvert")]


@pytest.mark.parametrize(("dtype", "route", "apart"), [*CASES, ("fp8", "direct", 1), ("fp8", "split", 1)])
def test_no_step_compiles_after_vllms_warm_up(dtype: str, route: str, apart: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLA_PORTABLE_VLLM_ROUTE", route)
    with use("triton"):
        warm_up.warmed().clear()
        engine = make_engine(dtype, drafts=DRAFTS, apart=apart)
        keys = record_launches(monkeypatch, runs=False)
        warm_up.warm_model(engine.config)
        made = set(keys.keys)
        assert {kernel for kernel, _ in made} >= {"cache_write_kernel", "convert_indices_kernel"}
        for query_lens, seq_lens, padding in (*BATCHES.values(), *SPECULATIVE.values()):
            attend(engine, query_lens, seq_lens, **padding)
    assert not set(keys.keys) - made, sorted(set(keys.keys) - made)


@pytest.mark.skipif(not compat.takes_prompts(), reason="this vLLM's layers compute no prompts apart")
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_no_prompt_over_keys_of_each_head_compiles_after_it(dtype: str, monkeypatch: pytest.MonkeyPatch):
    with use("triton"):
        warm_up.warmed().clear()
        engine = make_prompt_engine(monkeypatch, dtype)
        keys, projected = record_launches(monkeypatch, runs=False), list[int]()
        engine.layer.kv_b_proj.register_forward_hook(lambda module, given, result: projected.append(len(given[0])))
        warm_up.warm_model(engine.config)
        made = set(keys.keys)
        assert projected, "the layer's own up-projection was called"
        for query_lens, seq_lens, _ in (*SHORT, *LONG):
            step = make_step(engine, query_lens, seq_lens)
            metadata, tokens = engine.builder.build(0, step.common), sum(query_lens)
            engine.topk[:tokens] = step.topk[:tokens]
            rows = [torch.zeros((tokens, *shape)) for shape in ((HEADS, NOPE + ROPE), (LATENT,), (1, ROPE))]
            run_layer(engine, metadata, torch.full((tokens,), -1), *rows)
    assert not set(keys.keys) - made, sorted(set(keys.keys) - made)
    assert {"masked_prefill_kernel", "gather_upconvert_kernel", "merge_states_kernel"} <= {kernel for kernel, _ in made}


def test_a_kind_of_layer_is_warmed_once_before_there_is_a_cache_and_again_where_blocks_lie_apart(
    monkeypatch: pytest.MonkeyPatch,
):
    seen: list[tuple[SparseMLAAttention, int]] = []
    monkeypatch.setattr(
        warming, "warm_layer", lambda layer, config, *, kv_cache, writes: seen.append((layer, kv_cache.stride(0)))
    )
    engine = make_engine("fp8")
    whole, cache, layer = 64 * 656, engine.kv_cache, engine.layer
    attached, engine.impl._attention = engine.impl._attention, None  # as while memory is profiled
    layer.kv_cache = [torch.tensor([])] if isinstance(layer.kv_cache, list) else torch.tensor([])
    for _ in range(2):
        warm_up.warm_model(engine.config)
    assert [stride for _, stride in seen] == [whole] and seen[0][0] is not engine.builder.attention
    engine.impl._attention = attached
    layer.kv_cache = [cache] if isinstance(layer.kv_cache, list) else cache
    warm_up.warm_model(engine.config)
    assert len(seen) == 1, "the same kind, with blocks as they were taken to lie"
    apart = torch.zeros((4, 64 + 2, 656), dtype=torch.uint8)[:, :64]
    layer.kv_cache = [apart] if isinstance(layer.kv_cache, list) else apart
    warm_up.warm_model(engine.config)
    assert [stride for _, stride in seen] == [whole, 66 * 656] and seen[1][0] is engine.builder.attention
    assert len(warm_up.warmed()) == 2


def test_layers_that_are_not_ours_are_left_alone():
    config = make_config()
    config.compilation_config.static_forward_context["another"] = SimpleNamespace(impl=SimpleNamespace())
    config.compilation_config.static_forward_context["mamba"] = SimpleNamespace()
    warm_up.warm_model(config)
    assert not warm_up.warmed()


def test_an_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch):
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such kernel")

    engine = make_engine()
    monkeypatch.setattr(warming, "warm_layer", fails)
    with pytest.raises(RuntimeError, match="no such kernel"):
        warm_up.warm_model(engine.config)
    assert not warm_up.warmed()


def test_the_worker_warms_our_layers_before_it_measures_memory_and_before_it_captures(monkeypatch: pytest.MonkeyPatch):
    """vLLM's worker has both methods; here they return their arguments. Its module imports more than is installed."""
    found = find_spec(warm_up.WORKER_MODULE)
    assert found is not None and found.origin is not None
    source = ast.parse(Path(found.origin).read_text())
    (theirs,) = (node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "Worker")
    assert {node.name for node in theirs.body if isinstance(node, ast.FunctionDef)} > {*warm_up.METHODS, warm_up.BUILDS}

    called: list[str] = []
    names = (*warm_up.METHODS, warm_up.BUILDS)
    methods = {name: lambda self, *given, name=name: called.append(name) or given for name in names}
    module = SimpleNamespace(Worker=type("Worker", (), methods))
    warm_up.warm_worker(module)
    monkeypatch.setattr(warm_up, "warm_model", called.append)
    worker = module.Worker()
    worker.vllm_config = "the configuration"
    for name in warm_up.METHODS:
        assert getattr(worker, name)(1) == (1,)
    assert called == ["the configuration", warm_up.METHODS[0], "the configuration", warm_up.METHODS[1]]


def test_the_plugin_prepares_the_worker(monkeypatch: pytest.MonkeyPatch):
    prepared: list[tuple[Any, ...]] = []
    monkeypatch.setattr(warm_up, "when_imported", lambda *given: prepared.append(given))
    plugin.register()
    assert prepared == [(warm_up.WORKER_MODULE, warm_up.warm_worker)]


def test_what_was_warmed_belongs_to_the_registry():
    warm_up.warmed().add(("a kind",))
    assert get_registry().keep("vLLM's warmed layers", set) == {("a kind",)}
