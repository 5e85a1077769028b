# SPDX-License-Identifier: Apache-2.0
"""Whose indexer serves, by platform and configuration; and the changes of vLLM's modules that follow from it."""

from __future__ import annotations

import importlib
import inspect
import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_indexer
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform
from vllm_engine import make_config

from mla_portable import deep_gemm
from mla_portable.engines.vllm import imports, indexer, indexer_choice, indexer_seams, plugin, settings
from mla_portable.engines.vllm.indexer_choice import IndexerChoice


@pytest.fixture(autouse=True)
def forgotten():
    indexer_choice.forget()
    yield
    indexer_choice.forget()
    indexer_seams.set_functions(ours=False)


def platform(kind: str = "cuda", capability: tuple[int, int] | None = (8, 0), *, deep_gemm: bool = False) -> Any:
    version = capability and SimpleNamespace(major=capability[0], minor=capability[1])
    return SimpleNamespace(
        device_type=kind,
        is_cuda=lambda: kind == "cuda",
        is_cuda_alike=lambda: kind in ("cuda", "rocm"),
        is_out_of_tree=lambda: kind == "oot",
        support_deep_gemm=lambda: deep_gemm,
        get_device_capability=lambda: version,
    )


def use(monkeypatch: pytest.MonkeyPatch, mode: str, where: Any, *, importable: bool = True) -> None:
    monkeypatch.setenv(settings.ENV_INDEXER, mode)
    monkeypatch.setattr(indexer_choice, "current_platform", where)
    monkeypatch.setattr(importlib.import_module("vllm.utils.import_utils"), "has_deep_gemm", lambda: importable)


@pytest.mark.parametrize(
    "mode, where, importable, ours, reason",
    [
        ("auto", platform(), True, True, "DeepGEMM does not support compute capability 8.0"),
        ("auto", platform(capability=(8, 9)), True, True, "8.9"),
        ("auto", platform(capability=(9, 0), deep_gemm=True), True, False, "DeepGEMM serves compute capability 9.0"),
        ("auto", platform(capability=(9, 0), deep_gemm=True), False, True, "DeepGEMM cannot be imported"),
        ("auto", platform("oot", None), True, True, "DeepGEMM does not support platform oot"),
        ("auto", platform("rocm"), True, False, "does not use DeepGEMM for it on rocm"),
        ("auto", platform("cpu", None), True, False, "on cpu"),
        ("on", platform(capability=(9, 0), deep_gemm=True), True, True, "MLA_PORTABLE_VLLM_INDEXER=on"),
        ("off", platform(), True, False, "MLA_PORTABLE_VLLM_INDEXER=off"),
    ],
)
def test_whose_indexer_serves(mode: str, where: Any, importable: bool, ours: bool, reason: str, monkeypatch):
    use(monkeypatch, mode, where, importable=importable)
    found = indexer_choice.choose(make_config())
    assert (found.ours, found.fused) == (ours, ours)
    assert reason in found.reason
    assert indexer_choice.current() is found


def test_fp4_and_mx_caches_stay_vllms(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    use(monkeypatch, "on", platform(capability=(10, 0), deep_gemm=True))
    config = make_config()
    config.attention_config.indexer_kv_dtype = "mxfp4"
    assert indexer_choice.choose(config) == IndexerChoice(False, False, "mla_portable does not read an indexer cache in FP4")
    functions = importlib.import_module("vllm.utils.deep_gemm")
    monkeypatch.setattr(functions, "mqa_logits_use_mx_scales", lambda: True, raising=False)
    assert "MX scales" in indexer_choice.choose(make_config()).reason


@pytest.mark.parametrize(
    "case, reason",
    [
        ("prefill", "prefill context parallelism 2"),
        ("compressed", "compress_ratios"),
    ],
)
def test_what_the_fused_path_cannot_do_is_served_by_the_functions(case: str, reason: str, monkeypatch: pytest.MonkeyPatch):
    use(monkeypatch, "auto", platform())
    config = make_config()
    if case == "compressed":
        config.model_config.hf_config = v4_config()
    else:
        setattr(config.parallel_config, f"{case}_context_parallel_size", 2)
    found = indexer_choice.choose(config)
    assert found.ours and not found.fused and reason in found.reason


def v4_config() -> Any:
    """DeepSeek-V4's, of the class by which vLLM reads it: its own up to 0.32, then transformers', without compress_ratios."""
    given = {"num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4], "index_topk": 512}
    own = getattr(importlib.import_module("vllm.transformers_utils.configs"), "DeepseekV4Config", None)
    config = own(**given) if own else importlib.import_module("transformers").DeepseekV4Config(**given)
    assert hasattr(config, "compress_ratios") == (own is not None)
    return config


def test_no_unused_server_is_bound_when_v4_is_profiled(monkeypatch: pytest.MonkeyPatch):
    use(monkeypatch, "on", platform(capability=(9, 0), deep_gemm=True))
    config = make_config()
    config.model_config.hf_config = v4_config()
    indexer_choice.choose(config)
    bound: list[Any] = []
    monkeypatch.setattr(indexer, "indexer_for", lambda *given, **named: bound.append(given))
    module = importlib.import_module(vllm_indexer.LAYER)
    stock = inspect.unwrap(module.SparseAttnIndexer.forward_cuda)
    serve = indexer_seams.operator(module, lambda *given, **named: "vLLM's")
    with set_forward_context(None, config):  # as in the profiling run
        assert serve(*[None] * len(inspect.signature(stock).parameters)) == "vLLM's"
    assert not bound


def test_before_a_model_is_built_the_platform_decides(monkeypatch: pytest.MonkeyPatch):
    use(monkeypatch, "auto", platform())
    assert indexer_choice.current().ours
    use(monkeypatch, "off", platform())
    assert not indexer_choice.current().ours


def test_the_plugin_imports_nothing_of_vllms_models(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    monkeypatch.setattr(indexer_seams, "when_imported", lambda name, action: asked.append(name))
    plugin.register()
    assert asked == list(indexer_seams.SEAMS)
    asked.clear()
    monkeypatch.setenv(settings.ENV_INDEXER, "off")
    plugin.register()
    monkeypatch.delenv(settings.ENV_INDEXER)
    monkeypatch.setenv(settings.ENV_MODE, "off")
    plugin.register()
    assert asked == []


def test_a_module_is_changed_as_soon_as_it_is_imported(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "seam_of_test.py").write_text("value = 1\n")
    (tmp_path / "user_of_seam.py").write_text("from seam_of_test import value\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(imports._finder, "actions", dict(imports._finder.actions))
    calls: list[ModuleType] = []

    def change(module: Any) -> None:
        calls.append(module)
        module.value += 1

    imports.when_imported("seam_of_test", change)
    assert "seam_of_test" not in sys.modules
    assert importlib.import_module("user_of_seam").value == 2
    assert sys.modules["seam_of_test"].__spec__.origin == str(tmp_path / "seam_of_test.py")
    imports.when_imported("seam_of_test", change)  # again: changes nothing
    assert len(calls) == 1
    imports.when_imported("seam_of_test", lambda module: calls.append(module))  # imported already: at once
    assert len(calls) == 2


def test_a_module_without_the_names_is_left_alone():
    module = ModuleType("changed")
    for seam in indexer_seams.SEAMS.values():
        if seam.needs:
            seam(module)
    assert not set(vars(module)) - set(vars(ModuleType("changed")))


@pytest.mark.parametrize("deep_gemm_runs", [False, True])
def test_deep_gemms_functions_follow_the_choice(deep_gemm_runs: bool, monkeypatch: pytest.MonkeyPatch):
    slots = [f"_{name}_impl" for name in ("fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits", "get_paged_mqa_logits_metadata")]
    module = SimpleNamespace(**dict.fromkeys(slots), other=None)

    def lazy_init() -> None:
        """As vLLM's: does nothing once a function is there."""
        if all(getattr(module, slot) is None for slot in slots):
            module.other = module._fp8_fp4_mqa_logits_impl = "DeepGEMM's"

    module._lazy_init = lazy_init
    monkeypatch.setattr(indexer_seams, "import_module", lambda name: module)
    monkeypatch.setattr(indexer_seams, "_theirs", {})
    monkeypatch.setattr(current_platform, "support_deep_gemm", lambda: deep_gemm_runs)
    indexer_seams.set_functions(ours=False)
    assert module.other is None and module._fp8_fp4_mqa_logits_impl is None  # nothing is changed or imported
    for _ in range(2):
        indexer_seams.set_functions(ours=True)
        assert [getattr(module, slot) for slot in slots] == [
            deep_gemm.fp8_fp4_mqa_logits,
            deep_gemm.fp8_fp4_paged_mqa_logits,
            deep_gemm.get_paged_mqa_logits_metadata,
        ]
        assert module.other == ("DeepGEMM's" if deep_gemm_runs else None)
    indexer_seams.set_functions(ours=False)
    assert [getattr(module, slot) for slot in slots] == [module.other, None, None]


def test_vllms_wrappers_reach_them(monkeypatch: pytest.MonkeyPatch):
    indexer_seams.set_functions(ours=True)
    wrappers = importlib.import_module("vllm.utils.deep_gemm")
    q = torch.randn((2, 3, 8, 128), dtype=torch.float32).to(torch.float8_e4m3fn)
    lengths, weights = torch.tensor([[3, 4, 5], [0, 1, 2]], dtype=torch.int32), torch.rand((6, 8), dtype=torch.float32)
    cache = torch.zeros((2, 64, 1, 132), dtype=torch.uint8)
    schedule = wrappers.get_paged_mqa_logits_metadata(lengths, 64, 7)
    buffer = torch.ones((8, 2), dtype=torch.int32)
    buffer[: schedule.shape[0]] = schedule
    table = torch.zeros((2, 1), dtype=torch.int32)
    paged = wrappers.fp8_fp4_paged_mqa_logits
    more = {"clean_logits": False} if "clean_logits" in inspect.signature(paged).parameters else {}
    found = paged((q, None), cache, weights, lengths, table, schedule, 70, **more)
    assert (found > -torch.inf).sum(dim=1).tolist() == [3, 4, 5, 0, 1, 2]
    ranges = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int32)
    keys = torch.zeros((4, 128)).to(torch.float8_e4m3fn), torch.ones(4, dtype=torch.float32)
    if more:
        dense = wrappers.fp8_fp4_mqa_logits((q[0, :2], None), keys, weights[:2], *ranges, **more)
        assert (dense > -torch.inf).tolist() == [[True, True, False, False], [False, True, True, False]]
    else:  # columns count from each row's first key
        dense = wrappers.fp8_fp4_mqa_logits((q[0, :2], None), keys, weights[:2], *ranges, 2)
        assert dense.shape == (2, 2) and (dense > -torch.inf).all()


@pytest.mark.parametrize(
    "mode, where, fused",
    [("auto", platform(), False), ("auto", platform(capability=(8, 9)), True), ("off", platform(), True)],
)
def test_queries_are_quantised_by_an_operator_that_compiles(mode: str, where: Any, fused: bool, monkeypatch):
    class Indexer:
        def __init__(self, config: Any) -> None:
            self.use_fused_indexer_q, self.vllm_config = True, config

    module = SimpleNamespace(Indexer=Indexer)
    indexer_seams.avoid_fused_query(module)
    use(monkeypatch, mode, where)
    config = make_config()
    assert module.Indexer(config).use_fused_indexer_q is fused
    assert (config.additional_config == {}) is fused  # hashed by vLLM, which keeps compiled models


@pytest.mark.parametrize(
    "mode, where, generic",
    [("auto", platform(), True), ("auto", platform(capability=(8, 9)), False), ("off", platform(), False)],
)
def test_models_whose_kernels_do_not_compile_are_replaced(mode: str, where: Any, generic: bool, monkeypatch):
    module = SimpleNamespace(DeepseekV32ForCausalLM="cuda's", GlmMoeDsaForCausalLM="cuda's", DeepseekV32MTP="cuda's")
    use(monkeypatch, mode, where)
    indexer_seams.choose_models(module)
    names = {name: getattr(found, "__name__", found) for name, found in vars(module).items()}
    if not generic:
        assert set(names.values()) == {"cuda's"}
        return
    assert names == {
        "DeepseekV32ForCausalLM": "DeepseekV3ForCausalLM",
        "GlmMoeDsaForCausalLM": "GlmMoeDsaForCausalLM",
        "DeepseekV32MTP": "DeepSeekMTP",
    }


def test_the_layer_is_built_without_deep_gemm_and_without_kernels_that_do_not_compile(monkeypatch: pytest.MonkeyPatch):
    """As on an A100 with an installation that lacks DeepGEMM: vLLM's own constructor refuses."""
    warmed: list[bool] = []

    monkeypatch.setattr(indexer_seams, "set_functions", lambda *, ours: None)
    monkeypatch.setattr(indexer_seams, "register_kernel", lambda serve: None)

    class Layer:
        def __init__(self, config: Any) -> None:
            warmed.append(config.kernel_config.enable_jit_warmup)

    indexer_seams._extend_layer(Layer, torch.empty)
    config = make_config()
    object.__setattr__(config, "kernel_config", SimpleNamespace(enable_jit_warmup=True))
    with set_current_vllm_config(config):
        for mode, capability in (("auto", (8, 0)), ("auto", (8, 9)), ("off", (8, 0))):
            use(monkeypatch, mode, platform(capability=capability), importable=False)
            Layer(config)
            assert config.kernel_config.enable_jit_warmup
    assert warmed == [False, True, True]


@pytest.mark.parametrize(
    "mode, layer, planned",
    [
        ("on", "SparseAttnIndexer", False),
        ("off", "SparseAttnIndexer", True),
        ("on", "SparseAttnIndexerKpool", False),
        ("off", "SparseAttnIndexerKpool", True),
        ("on", "of another model", True),
    ],
)
def test_schedules_are_planned_where_a_layer_calls_deep_gemm(mode: str, layer: str, planned: bool, monkeypatch):
    """vLLM's own builder on Hopper. A layer that calls DeepGEMM whatever the choice is must find a schedule: one that nobody
    makes would be uninitialised memory."""
    indexer_seams.install()
    layers, builder = (importlib.import_module(name) for name in (vllm_indexer.LAYER, vllm_indexer.BUILDER))
    vllm_indexer.without_kernels(monkeypatch)
    use(monkeypatch, mode, platform(capability=(9, 0), deep_gemm=True))
    has_module = importlib.import_module("vllm.utils.import_utils")._has_module
    monkeypatch.setattr("vllm.utils.import_utils._has_module", lambda name: name == "deep_gemm" or has_module(name))
    found = (lambda *given: None) if layer == "of another model" else getattr(layers, layer, None) or kpool_layer()
    if found is None:
        return  # came with 0.30
    engine = vllm_indexer.make_indexer(layer_class=found)
    engine.builder.scheduler_metadata_buffer.fill_(-7)  # as empty memory may be
    step = vllm_indexer.make_batch(engine, [1, 1], [40, 70])
    monkeypatch.setattr(builder, "current_platform", HOPPER)
    made = torch.full((engine.builder.num_sms + 1, 2), 123, dtype=torch.int32)
    monkeypatch.setattr(builder, "get_paged_mqa_logits_metadata", lambda *given, **named: made)
    schedule = engine.builder.build(0, step.common).decode.schedule_metadata
    assert (schedule == (123 if planned else -7)).all()


def kpool_layer() -> Any:
    """GLM-5.3-Flash's, None before 0.30."""
    package = find_spec("vllm.models.glm5next")
    if package is None:
        return None
    if package.name not in sys.modules:  # without its __init__, which imports a model of images and so torchvision
        sys.modules[package.name] = module_from_spec(package)
    return importlib.import_module("vllm.models.glm5next.nvidia.sparse_indexer").SparseAttnIndexerKpool


HOPPER = SimpleNamespace(
    is_cuda=lambda: True,
    is_rocm=lambda: False,
    is_xpu=lambda: False,
    is_device_capability_family=lambda family: family == 90,
)


@pytest.mark.parametrize("mode, capability, ours", [("auto", (8, 9), True), ("auto", (9, 0), False), ("on", (9, 0), True)])
def test_an_indexer_of_pooled_keys_calls_deep_gemms_functions(mode: str, capability: tuple[int, int], ours: bool, monkeypatch):
    """Ours where DeepGEMM has no kernels, or on request; the rest of its work stays vLLM's."""
    use(monkeypatch, mode, platform(capability=capability, deep_gemm=capability >= (9, 0)))
    config = make_config()
    config.model_config.hf_text_config = SimpleNamespace(**{**vars(config.model_config.hf_text_config), "index_kpool": 4})
    found = indexer_choice.choose(config)
    assert (found.ours, found.fused) == (ours, False)
    assert not ours or "pools of 4 keys" in found.reason


def test_the_layer_of_pooled_keys_is_built_without_deep_gemm(monkeypatch: pytest.MonkeyPatch):
    """vLLM's own refuses. Its functions are ours from then on, and its operator's kernel stays as it is."""
    indexer_seams.install()
    layer = kpool_layer()
    if layer is None:
        return  # came with 0.30
    vllm_indexer.without_kernels(monkeypatch)
    module = sys.modules[layer.__module__]
    for mode in ("off", "auto"):
        use(monkeypatch, mode, platform(capability=(8, 9)), importable=False)
        monkeypatch.setattr(module, "current_platform", platform(capability=(8, 9)))
        if mode == "off":
            with pytest.raises(RuntimeError, match="requires DeepGEMM"):
                vllm_indexer.make_indexer(layer_class=layer)
            assert not indexer_seams._functions_are_ours()
        else:
            vllm_indexer.make_indexer(layer_class=layer)
    wrappers = importlib.import_module("vllm.utils.deep_gemm")
    for name in indexer_seams._FUNCTIONS:
        assert getattr(wrappers, f"_{name}_impl") is getattr(deep_gemm, name)


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_vllms_layer_and_builder_ask_for_deep_gemm_only_where_it_serves(mode: str, monkeypatch: pytest.MonkeyPatch):
    """The constructor refuses without it; the builder plans for it."""
    layer, builder = (importlib.import_module(name) for name in (vllm_indexer.LAYER, vllm_indexer.BUILDER))
    indexer_seams.install()
    use(monkeypatch, mode, platform(), importable=False)
    assert layer.has_deep_gemm() == (mode == "auto")
    assert not builder.has_deep_gemm()
    monkeypatch.setattr(layer, "current_platform", platform())
    if mode == "auto":
        vllm_indexer.without_kernels(monkeypatch)
        assert vllm_indexer.make_indexer().layer.topk_tokens == vllm_indexer.TOPK
    else:
        with pytest.raises(RuntimeError, match="requires DeepGEMM support"):
            vllm_indexer.make_indexer()
