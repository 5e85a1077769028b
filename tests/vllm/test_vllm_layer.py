# SPDX-License-Identifier: Apache-2.0
"""Our layer around attention beside vLLM's own, in modules of DeepSeek-V3.2 from vLLM's real classes with the same weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_vllm_prompts import favour_keys_of_each_head
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.model_executor import custom_op
from vllm_engine import HEADS, make_config
from vllm_indexer import without_kernels
from vllm_layer import (
    HIDDEN,
    INDEX,
    MLA,
    Module,
    fill_caches,
    make_inputs,
    make_module,
    on_the_cpu,
    run_step,
)

from mla_portable.choose import get_registry, reset_registry
from mla_portable.cli.doctor import reading
from mla_portable.contracts import InvalidArgument, UnsupportedRequest
from mla_portable.engines.vllm import compat, indexer_choice, indexer_seams, layer_choice, layer_parts, settings, warm_up

STEPS = {
    "decodes": ([1, 1, 1], [100, 64, 7], 0),
    "mixed": ([1, 1, 40], [100, 64, 90], 0),
    "padded decodes": ([1, 1], [33, 250], 3),
}
GLM = {"qk_nope_head_dim": 192, "v_head_dim": 256, "indexer_rope_interleave": True}
"""Widths of GLM-5, and how its indexer rotates."""
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32}
YARN |= {"beta_slow": 1, "original_max_position_embeddings": 64}


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(settings.ENV_INDEXER, "on")
    indexer_choice.forget()
    indexer_seams.install()
    without_kernels(monkeypatch)
    on_the_cpu(monkeypatch)
    layer_choice.log_stock.cache_clear()
    yield
    custom_op.op_registry_oot.pop(layer_choice.REPLACED, None)
    indexer_choice.forget()
    indexer_seams.set_functions(ours=False)


def make_ours(monkeypatch: pytest.MonkeyPatch, dtype: str = "auto", config: Any = None, **more: Any) -> Module:
    monkeypatch.setenv(settings.ENV_LAYER, "on")
    config = config or make_config(dtype)
    layer_choice.offer(config)
    module = make_module(config=config, **more)
    assert type(module.layer).__name__ == "MLAPortableLayer"
    return module


def both(monkeypatch: pytest.MonkeyPatch, dtype: str, **more: Any) -> tuple[Module, Module]:
    """vLLM's and ours, with the same caches."""
    modules = make_module(dtype, **more), make_ours(monkeypatch, dtype, **more)
    assert type(modules[0].layer).__name__ == layer_choice.REPLACED and modules[1].layer.reason == ""
    for module in modules:
        fill_caches(module)
    return modules


def round_once(stock: Module) -> None:
    """Let vLLM's module round where a fused kernel does: behind a norm and behind a rotation, and nowhere else."""

    def norm(layer: Any) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            wide = x.float()
            normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + layer.variance_epsilon)
            return (normed * layer.weight.float()).to(x.dtype)

        return forward

    def rotary(layer: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        def turn(x: Tensor, positions: Tensor) -> Tensor:
            cos, sin = layer.cos_sin_cache[positions].float().unsqueeze(1).chunk(2, dim=-1)
            wide = x.float()
            if layer.is_neox_style:
                a, b = wide.chunk(2, dim=-1)
                return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
            a, b = wide[..., ::2], wide[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)

        return lambda positions, query, key: (turn(query, positions), turn(key, positions))

    layer = stock.layer
    for each in (layer.q_a_layernorm, layer.kv_a_layernorm):
        each.forward = norm(each)
    for each in (layer.rotary_emb, layer.indexer_rope_emb):
        if each is not None:
            each.forward = rotary(each)


def assert_same(stock: Module, ours: Module, step: Any) -> None:
    out, wanted = run_step(ours, step), run_step(stock, step)
    tokens = step.common.num_actual_tokens
    assert torch.equal(ours.topk[:tokens], stock.topk[:tokens])
    for name, cache in stock.caches.items():
        assert torch.equal(ours.caches[name].view(torch.uint8), cache.view(torch.uint8)), name
    assert wanted[:tokens].abs().amax(dim=1).min() > 0.05
    assert torch.equal(out[:tokens], wanted[:tokens])


@pytest.mark.parametrize("model", [None, GLM, {"rope_parameters": YARN}], ids=["V3.2", "GLM-5", "YaRN"])
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_all_that_a_step_leaves_is_what_vllms_layer_leaves(
    dtype: str, model: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
):
    """Result, selection and every byte of both caches, where the same numbers are rounded."""
    stock, ours = both(monkeypatch, dtype, hf=model)
    round_once(stock)
    for seed, (query_lens, seq_lens, padding) in enumerate(STEPS.values()):
        assert_same(stock, ours, make_inputs(query_lens, seq_lens, padding=padding, seed=seed))


def test_a_layer_that_reads_anothers_selection(monkeypatch: pytest.MonkeyPatch):
    stock, ours = both(monkeypatch, "fp8", hf={"index_topk_pattern": "S"})
    assert ours.layer.indexer is None
    round_once(stock)
    for module in (stock, ours):
        module.topk[:] = torch.arange(module.topk.shape[1], dtype=torch.int32) % 7
    assert_same(stock, ours, make_inputs([1, 1, 5], [100, 64, 30]))


def test_caches_with_slots_of_their_own(monkeypatch: pytest.MonkeyPatch):
    """From 0.30 or so on the two may belong to groups of layers with tables of their own."""
    stock, ours = both(monkeypatch, "fp8")
    round_once(stock)
    step = make_inputs([1, 1], [100, 64])
    elsewhere = step.slots + 3
    calls = watch(ours.layer.mla_attn.mla_portable_parts, monkeypatch)
    for module in (stock, ours):
        build = module.builders[INDEX].build

        def built(prefix: int, common: Any, build: Any = build) -> Any:
            metadata = build(prefix, common)
            metadata.slot_mapping = elsewhere
            return metadata

        module.builders[INDEX].build = built
        run_step(module, step, index_slots=elsewhere)
    assert [(q is None, kv is None, index is None) for q, kv, index in calls] == [(False, False, True), (True, True, False)]
    for name, cache in stock.caches.items():
        assert torch.equal(ours.caches[name].view(torch.uint8), cache.view(torch.uint8)), name


def watch(parts: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, Any]]:
    """(q_a, kv_cache, index_cache) of every call of norm_rope_write."""
    calls: list[tuple[Any, Any, Any]] = []
    find = type(parts)._writer

    def found(self: Any, *caches: Any) -> Any:
        write = find(self, *caches)

        def call(q_a: Any, *given: Any, **named: Any) -> None:
            calls.append((q_a, named["kv_cache"], named.get("index_cache")))
            write(q_a, *given, **named)

        return call

    monkeypatch.setattr(type(parts), "_writer", found)
    return calls


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_vllms_own_roundings_differ_in_last_bits(dtype: str, monkeypatch: pytest.MonkeyPatch):
    stock, ours = both(monkeypatch, dtype)
    step = make_inputs([1, 1, 40], [60, 64, 50])  # all that is seen is selected
    wanted, out = run_step(stock, step), run_step(ours, step)
    assert torch.equal(ours.topk[:42], stock.topk[:42])
    assert (out - wanted).norm() < (2**-7 if dtype == "auto" else 2**-6) * wanted.norm()
    if dtype == "auto":
        rows = [module.caches[MLA].flatten(0, 1)[step.slots].view(torch.int16).int() for module in (stock, ours)]
        assert 0 < (rows[0] - rows[1]).abs().max() <= 2  # bf16 numbers of one sign, two roundings apart


def test_prompts_over_keys_of_each_head_get_the_rotated_query(monkeypatch: pytest.MonkeyPatch):
    favour_keys_of_each_head(monkeypatch)
    stock, ours = both(monkeypatch, "fp8")
    round_once(stock)
    step = make_inputs([1, 1, 40, 30], [100, 64, 90, 30])
    metadata = ours.builders[MLA].build(0, step.common)
    assert metadata.prefill is not None and metadata.num_decode_tokens == 2
    assert_same(stock, ours, step)


def test_attention_gets_one_tensor_and_the_key_is_written_once(monkeypatch: pytest.MonkeyPatch):
    """No halves that would be joined, no second write of either cache."""
    monkeypatch.setattr("mla_portable.engines.vllm.compat.query_joiner", lambda: pytest.fail)
    ours = make_ours(monkeypatch, "fp8")
    fill_caches(ours)
    impl, seen = ours.layer.mla_attn.impl, []
    forward = impl.forward_mqa
    monkeypatch.setattr(impl, "forward_mqa", lambda q, *given: seen.append(q) or forward(q, *given))
    monkeypatch.setattr(impl, "do_kv_cache_update", lambda *given: pytest.fail("a second write of the cache"))
    monkeypatch.setattr(
        "mla_portable.engines.vllm.indexer.BoundIndexer.write_keys", lambda *given: pytest.fail("a second write of a key")
    )
    calls = watch(ours.layer.mla_attn.mla_portable_parts, monkeypatch)
    run_step(ours, make_inputs([1, 1], [100, 64]))
    assert [type(q) for q in seen] == [Tensor] and seen[0].shape == (2, HEADS, 576) and seen[0].is_contiguous()
    assert len(calls) == 1 and all(each is not None for each in calls[0])


def test_the_write_is_made_before_the_first_step(monkeypatch: pytest.MonkeyPatch):
    """A call without a slot, with both caches as they lie; the calls without a cache are made while vLLM profiles."""
    ours = make_ours(monkeypatch, "fp8", gap=2)
    fill_caches(ours)
    before = {name: cache.clone() for name, cache in ours.caches.items()}
    calls = watch(ours.layer.mla_attn.mla_portable_parts, monkeypatch)
    monkeypatch.setattr(type(ours.layer.mla_attn.impl), "warm_up", lambda self, config, cache: None)
    warm_up.warm_model(ours.config)
    assert [call[1:] for call in calls] == [(ours.caches[MLA], ours.caches[INDEX])]
    assert all(torch.equal(cache, before[name]) for name, cache in ours.caches.items())
    made = dict(ours.layer.mla_attn.mla_portable_parts._writers)
    run_step(ours, make_inputs([1, 1], [100, 64]))
    assert ours.layer.mla_attn.mla_portable_parts._writers == made


def test_vllms_profiling_run_writes_nothing(monkeypatch: pytest.MonkeyPatch):
    """Neither metadata nor slots; before there is a cache, and when there is one."""
    ours = make_ours(monkeypatch, "fp8")
    fill_caches(ours)
    before = {name: cache.clone() for name, cache in ours.caches.items()}
    reserved: list[bool] = []
    monkeypatch.setattr(ours.layer.mla_attn.impl, "reserve_workspace", lambda: reserved.append(True))
    step = make_inputs([9], [9])
    layers = ours.config.compilation_config.static_forward_context
    for empty in (False, True):
        if empty:
            for name in ours.caches:
                layers[name].kv_cache = torch.tensor([])
        with set_forward_context(None, ours.config), torch.inference_mode():
            out = ours.module(step.positions, step.hidden, None)
        assert out.shape == (9, HIDDEN) and not out.any() and reserved  # which vLLM's profile of memory is to see
        reserved.clear()
    assert all(torch.equal(cache, before[name]) for name, cache in ours.caches.items())


def test_slots_are_those_of_the_tokens():
    slots = torch.tensor([7, 8])
    assert layer_parts.slots_of({"a": slots}, "a", 2) is slots
    assert layer_parts.slots_of({"a": slots}, "a", 4).tolist() == [7, 8, -1, -1]  # rows of padding
    assert layer_parts.slots_of({"a": slots}, "a", 1).tolist() == [7]
    assert layer_parts.slots_of({"a": slots}, "b", 2) is None
    with pytest.raises(InvalidArgument, match="slot_mapping: got list, expected a dict, by layer"):
        layer_parts.slots_of([{"a": slots}], "a", 2)


@pytest.mark.parametrize("captured", [False, True])
def test_torch_compile_sees_three_operators(captured: bool, monkeypatch: pytest.MonkeyPatch):
    """One graph without a break, by their fakes; what runs is what runs without it."""
    ours = make_ours(monkeypatch, "fp8")
    fill_caches(ours)
    step = make_inputs([1, 1], [100, 64])
    wanted = run_step(ours, step)
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if "mla_portable" in str(node.target))
        return graph

    compiler: Any = "aot_eager" if captured else backend
    torch._dynamo.reset()
    compiled = torch.compile(ours.module, backend=compiler, fullgraph=True, dynamic=captured)
    assert torch.equal(run_step(ours, step, forward=compiled), wanted)
    if not captured:
        names = [f"mla_portable.vllm_{name}" for name in ("norm_rope_write", "rope_queries", "attention")]
        assert [name.removesuffix(".default") for name in called] == names


def test_graphs_are_split_at_attention(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(settings.ENV_LAYER, "on")
    config = make_config("fp8")
    config.compilation_config.splitting_ops = ["vllm::unified_mla_attention_with_output"]
    config.additional_config = {}
    layer_choice.offer(config)
    make_module(config=config)
    assert config.compilation_config.splitting_ops[1:] == ["mla_portable::vllm_attention"]
    assert "mla_portable_layer" in config.additional_config  # which is in the hash of what was compiled
    settings.adopt(config.additional_config)


AGAINST: dict[str, tuple[Callable[[Module], tuple[Any, str, Any]], str]] = {
    "lora": (lambda m: (m.config, "lora_config", object()), "LoRA"),
    "dcp": (lambda m: (m.config.parallel_config, "decode_context_parallel_size", 2), "decode context parallelism 2"),
    "qrep": (lambda m: (m.layer, "dcp_q_replicate", True), "queries replicated over ranks"),
    "gate": (lambda m: (m.layer, "g_proj", torch.nn.Identity()), "a gate on the output"),
    "dense": (lambda m: (m.layer, "is_sparse", False), "attention is dense"),
    "nope": (lambda m: (m.layer, "qk_rope_head_dim", 0), "widths of the query, latent and rope (64, 512, 0)"),
    "backend": (lambda m: (m.layer.mla_attn, "impl", SimpleNamespace()), "attention is SimpleNamespace's"),
    "scales": (lambda m: (m.layer.mla_attn, "calculate_kv_scales", True), "measured while serving"),
    "hisparse": (lambda m: (m.layer.mla_attn, "hisparse_cache", object()), "HiSparse"),
    "norm": (lambda m: (m.layer, "kv_a_layernorm", torch.nn.LayerNorm(512)), "kv_a_layernorm is a LayerNorm"),
    "eps": (lambda m: (m.layer.q_a_layernorm, "variance_epsilon", 0.5), "norms of different eps"),
    "rotary": (lambda m: (m.layer, "rotary_emb", torch.nn.Identity()), "rotary embedding Identity"),
    "table": (lambda m: (m.layer.indexer_rope_emb, "base", 7), "the indexer's rotary embedding"),
    "indexer": (lambda m: (m.layer, "indexer", torch.nn.Identity()), "indexer Identity"),
    "scale_fmt": (lambda m: (m.layer.indexer, "scale_fmt", None), "scales None"),
    "batch": (lambda m: (compat, "wants_batch_invariance", lambda: True), "VLLM_BATCH_INVARIANT"),
    "fp4": (lambda m: (indexer_choice, "other_formats", lambda config: "an indexer cache in FP4"), "in FP4"),
    "llama": (lambda m: (m.config.model_config, "hf_config", SimpleNamespace(llama_4_scaling={})), "llama_4_scaling"),
    "off": (lambda m: (settings, "layer", lambda environ=None: "off"), "MLA_PORTABLE_VLLM_LAYER=off"),
    "auto": (lambda m: (settings, "layer", lambda environ=None: "auto"), "=auto: no times on record of both layers"),
}


def test_what_ours_cannot_do_is_named(monkeypatch: pytest.MonkeyPatch):
    from mla_portable.engines.vllm.layer import against

    ours = make_ours(monkeypatch)
    assert against(ours.layer, ours.config) == ""
    for name, (change, words) in AGAINST.items():
        with monkeypatch.context() as changed:
            owner, attribute, value = change(ours)
            if isinstance(owner, torch.nn.Module) and attribute in owner._modules:
                changed.setitem(owner._modules, attribute, value)
            else:
                changed.setattr(owner, attribute, value, raising=False)
            reason = against(ours.layer, ours.config)
        assert words in reason, name


def test_a_layer_that_cannot_be_served_is_vllms(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """Its forward, its writes and its reason in the log, once for all layers."""
    caplog.set_level(logging.WARNING, logger=settings.logger.name)
    stock = make_module("fp8")
    config = make_config("fp8")
    config.lora_config = SimpleNamespace()
    ours = make_ours(monkeypatch, config=config)
    fill_caches(stock)
    fill_caches(ours)
    assert ours.layer.reason == "LoRA" and not ours.layer.indexer.indexer_op.skip_k_cache_insert
    assert_same(stock, ours, make_inputs([1, 1, 9], [100, 64, 30]))
    lines = [record.getMessage() for record in caplog.records if layer_choice.STOCK in record.getMessage()]
    assert lines == [f"{layer_choice.STOCK}: LoRA"] == list(reading.in_log(lines).refusals)


def test_what_serves_is_read_from_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger=settings.logger.name)
    resolve_name("mla_portable.engines.vllm.layer:_log_served").cache_clear()
    make_ours(monkeypatch, "fp8")
    served = {(each.primitive, each.implementation) for each in reading.in_log(caplog.text.splitlines()).served}
    assert served >= {(name, "reference.torch") for name in ("norm_rope_write", "rope_quantize_queries")}


def test_kernels_that_are_not_there_are_a_reason(monkeypatch: pytest.MonkeyPatch):
    def refuse(request: Any, *others: Any) -> None:
        raise UnsupportedRequest(get_registry().decide(request.but(graph=True)))  # which the reference is not

    monkeypatch.setattr(layer_parts, "bind_for", refuse)
    ours = make_ours(monkeypatch, "fp8")
    assert "norm_rope_write" in ours.layer.reason and "reference.torch: " in ours.layer.reason
    assert not ours.layer.indexer.indexer_op.skip_k_cache_insert


def test_queries_scaled_by_position_are_refused_where_the_key_is_ours(monkeypatch: pytest.MonkeyPatch):
    ours = make_ours(monkeypatch)
    step = make_inputs([1], [9])
    with pytest.raises(InvalidArgument, match="llama_4_scaling"):
        run_step(ours, step, forward=lambda positions, hidden, scaling: ours.layer(positions, hidden, torch.ones(1)))


@pytest.mark.parametrize("mode", ["off", "auto", ""])
def test_vllms_layer_is_built_where_ours_is_not_asked_for(mode: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(settings.ENV_LAYER, mode)
    layer_choice.offer(make_config())
    assert layer_choice.REPLACED not in custom_op.op_registry_oot


def test_anothers_layer_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv(settings.ENV_LAYER, "on")
    theirs = type("TheirLayer", (torch.nn.Module,), {"__module__": "their.plugin"})
    custom_op.PluggableLayer.register_oot(name=layer_choice.REPLACED)(theirs)
    layer_choice.offer(make_config())
    assert custom_op.op_registry_oot[layer_choice.REPLACED] is theirs
    assert f"{layer_choice.STOCK}: their.plugin.TheirLayer was registered in its place" in caplog.text


def test_the_configuration_asks_for_it_too(monkeypatch: pytest.MonkeyPatch):
    config = make_config()
    config.additional_config = {"mla_portable": {"layer": "on"}}
    layer_choice.offer(config)
    layer_choice.offer(config)  # as each model of a process does
    assert custom_op.op_registry_oot[layer_choice.REPLACED].__name__ == "MLAPortableLayer"
    settings.adopt({})


def test_the_worker_offers_it_before_it_builds_the_model(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    methods = {name: lambda self, name=name: order.append(name) for name in (*warm_up.METHODS, warm_up.BUILDS)}
    module = SimpleNamespace(Worker=type("Worker", (), methods))
    monkeypatch.setattr(layer_choice, "offer", lambda config: order.append("offered"))
    warm_up.warm_worker(module)
    worker = module.Worker()
    worker.vllm_config = None
    worker.load_model()
    assert order == ["offered", "load_model"]


def test_portable_kernels_serve_it(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """Triton's, in its interpreter, between the projections; attention and the indexer stay the quick ones."""
    stock = make_module("fp8")
    for name in ("NORM_ROPE_WRITE", "ROPE_QUANTIZE_QUERIES"):
        monkeypatch.setenv(f"MLA_PORTABLE_BACKEND_{name}", "triton")
    request.addfinalizer(reset_registry)
    reset_registry()
    served: list[Any] = []
    resolve_name("mla_portable.engines.vllm.layer:MLAPortableLayer")
    monkeypatch.setattr("mla_portable.engines.vllm.layer.publish", lambda device, pairs, logger: served.extend(pairs))
    ours = make_ours(monkeypatch, "fp8")
    assert served == [(name, "triton.portable") for name in ("norm_rope_write", "rope_quantize_queries")]
    for module in (stock, ours):
        fill_caches(module)
    round_once(stock)
    assert_same(stock, ours, make_inputs([1, 2], [40, 9]))
