# SPDX-License-Identifier: Apache-2.0
"""Before a model runs: registration, what vLLM's selection asks, scratch, refusals at start."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker import workspace
from vllm_engine import BLOCK, CPU, HEADS, KNOWN_LENGTHS, MAX_TOKENS, TOPK, attend, make_config, make_engine, make_step

from mla_portable.choose import Registry, use
from mla_portable.contracts import (
    DeviceFacts,
    Implementation,
    InvalidArgument,
    Primitive,
    Support,
    UnsupportedRequest,
    hookimpl,
)
from mla_portable.engines.vllm import auto, compat, model, plugin, settings
from mla_portable.engines.vllm.backend import MLAPortableBackend
from mla_portable.engines.vllm.status import vllm_status
from mla_portable.engines.vllm.writer import Writer

CUDA = torch.device("cuda")
PLACES = [name for name in auto.PLACES if name in AttentionBackendEnum.__members__]
SM80 = DeviceFacts(vendor="nvidia", name="NVIDIA A100", arch="sm80", num_sms=108)
COREX = DeviceFacts(vendor="iluvatar", name="Iluvatar BI-V150", arch="ivcore11", num_sms=16, graph_capture=False)


@pytest.fixture
def members():
    """vLLM's registry, put back afterwards."""
    touched = [AttentionBackendEnum.CUSTOM, *(AttentionBackendEnum[name] for name in PLACES)]
    for member in touched:
        member.clear_override()
    yield AttentionBackendEnum
    for member in touched:
        member.clear_override()


@pytest.mark.parametrize("mode", ["auto", "custom", "override", "off"])
def test_registration_follows_the_mode_and_is_reentrant(mode: str, members, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(settings.ENV_MODE, mode)
    for _ in range(2):
        plugin.register()
    place = members.FLASHMLA_SPARSE
    assert members.CUSTOM.is_overridden() == (mode != "off")
    assert place.is_overridden() == (mode in ("auto", "override"))
    if mode != "off":
        assert members.CUSTOM.get_class() is MLAPortableBackend
    if mode == "override":
        assert place.get_class() is MLAPortableBackend


@pytest.mark.parametrize("name", ["MODE", "ROUTE", "SCALES", "WRITER"])
def test_a_value_that_is_not_allowed_is_refused_when_vllm_loads_the_plugin(name: str, members, monkeypatch: pytest.MonkeyPatch):
    variable = getattr(settings, f"ENV_{name}")
    monkeypatch.setenv(variable, "foo")
    with pytest.raises(InvalidArgument, match=f"{variable}: got 'foo', expected (one of auto, |1, 0)"):
        plugin.register()
    assert not members.CUSTOM.is_overridden()


def test_what_another_plugin_registered_is_left_alone(members, caplog: pytest.LogCaptureFixture):
    register_backend(members.CUSTOM, "somebody.else.Backend")
    plugin.register()
    assert members.CUSTOM.get_path() == "somebody.else.Backend"
    assert "somebody.else.Backend was registered for it before" in caplog.text


def on_device(monkeypatch: pytest.MonkeyPatch, *capability: int, flashmla: tuple[bool, str | None] = (True, None)) -> None:
    """vLLM runs on a CUDA device of this capability, with or without FlashMLA."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.ops import flashmla as stock

    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *a, **k: DeviceCapability(*capability))
    monkeypatch.setattr(stock, "is_flashmla_sparse_supported", lambda: flashmla)


@pytest.mark.parametrize("capability, ours", [((8, 0), True), ((8, 9), True), ((9, 0), False), ((10, 0), False)])
def test_auto_stands_in_where_stock_does_not_serve(capability, ours: bool, members, monkeypatch: pytest.MonkeyPatch):
    on_device(monkeypatch, *capability)
    plugin.register()
    chosen = members.FLASHMLA_SPARSE.get_class()
    assert (chosen is MLAPortableBackend) == ours
    assert chosen.get_name() == "FLASHMLA_SPARSE"
    on_device(monkeypatch, *capability, flashmla=(False, "not built"))
    assert members.FLASHMLA_SPARSE.get_class() is MLAPortableBackend


def choose(members, member: str, config):
    """As vLLM's selection does: the class of a member, under the configuration in force."""
    with set_current_vllm_config(config):
        return members[member].get_class()


def stock_serves(monkeypatch: pytest.MonkeyPatch, member: str, refuses: str | None) -> type:
    """The stock class of a member, made to serve every configuration or to refuse with a reason."""
    stock = auto._stock(member)[0]
    reasons = [refuses] if refuses else []
    # vLLM's own signature, so that what is passed is checked against it.
    check = functools.wraps(stock.validate_configuration.__func__)
    bind = inspect.signature(stock.validate_configuration).bind
    answer = check(lambda cls, *args, **named: (bind(*args, **named), reasons)[1])
    monkeypatch.setattr(stock, "validate_configuration", classmethod(answer))
    return stock


@pytest.mark.parametrize("refused", [None, "head_size", "context parallelism"])
def test_override_leaves_to_stock_what_only_stock_serves(refused: str | None, members, monkeypatch: pytest.MonkeyPatch):
    on_device(monkeypatch, 9, 0)
    monkeypatch.setenv(settings.ENV_MODE, "override")
    plugin.register()
    config = make_config(**({"get_head_size": lambda: 544} if refused == "head_size" else {}))
    if refused == "context parallelism":
        config.parallel_config.prefill_context_parallel_size = 2
    stock = stock_serves(monkeypatch, "FLASHMLA_SPARSE", None)
    assert choose(members, "FLASHMLA_SPARSE", config) is (stock if refused else MLAPortableBackend)
    stock_serves(monkeypatch, "FLASHMLA_SPARSE", "neither does stock")
    assert choose(members, "FLASHMLA_SPARSE", config) is MLAPortableBackend  # whose reasons vLLM then reports


@pytest.mark.parametrize("member", PLACES)
@pytest.mark.parametrize("refuses", [None, "requires FlashInfer"])
def test_auto_asks_whether_stock_serves_the_configuration(member: str, refuses, members, monkeypatch: pytest.MonkeyPatch):
    on_device(monkeypatch, 9 if member == "FLASHMLA_SPARSE" else 12, 0)
    plugin.register()
    stock = stock_serves(monkeypatch, member, refuses)
    assert choose(members, member, make_config()) is (MLAPortableBackend if refuses else stock)
    neither = make_config(get_head_size=lambda: 544)
    assert choose(members, member, neither) is stock
    assert members[member].get_class() is stock  # no model: the device decides


def validate(config, *, capability: tuple[int, int] = (8, 0), **changes):
    with set_current_vllm_config(config):
        arguments = {**compat.selection_arguments(config), "kv_cache_dtype": "auto"}
        arguments["device_capability"] = DeviceCapability(*capability)
        return MLAPortableBackend.validate_configuration(**{**arguments, **changes})


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "fp8", "fp8_ds_mla"])
def test_every_cache_format_is_accepted(dtype: str):
    assert validate(make_config(), kv_cache_dtype=dtype) == []


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": torch.float16}, "dtype not supported"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"block_size": 48}, "block_size 48 (supports multiples of 64): start vLLM with --block-size 64"),
        ({"use_sparse": False}, "non-sparse not supported"),
        ({"head_size": 544}, "head_size 544 (supports 512, 576"),
        ({"use_adaptive_verification": True}, "device-cpu query lens mismatch not supported"),
        ({"use_pcp": True}, "PCP not supported"),
    ],
)
def test_refusals_name_the_reason(changes, reason: str):
    if not changes.keys() <= inspect.signature(MLAPortableBackend.validate_configuration).parameters.keys():
        return  # asked by later versions alone
    assert reason in " | ".join(validate(make_config(), **changes))


def test_selection_computes_nothing(monkeypatch: pytest.MonkeyPatch):
    """vLLM asks every candidate; whoever is not chosen must have left no trace on the device."""

    class Untouched:
        @hookimpl
        def mla_portable_register(self, registrar) -> None:
            def run(*arguments, **named):
                raise AssertionError("a kernel was run")

            support = Support(source="made up", device_types=("cpu",), kv_layouts=("bf16", "fp8_ds_mla"))
            for primitive in Primitive.all():
                registrar.add(Implementation("acme.v1", primitive, support, bind=lambda request: run))

    registry = Registry(plugins=[("acme", Untouched())], environ={})
    monkeypatch.setattr(model, "get_registry", lambda: registry)
    monkeypatch.setattr(model, "choose_writer", lambda *given: pytest.fail("the cache's operator was tried"))
    for dtype in ("auto", "fp8"):
        assert validate(make_config(), kv_cache_dtype=dtype) == []


def test_batch_invariance_is_served(monkeypatch: pytest.MonkeyPatch):
    """A row's bits are the same alone and in company."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    if not compat.wants_batch_invariance():
        return  # vLLM before 0.20
    with use("triton"):  # plain torch promises nothing
        assert validate(make_config(), use_batch_invariant=True) == []
        engine = make_engine("fp8")
    assert engine.builder.attention.spec.batch_invariant
    step = make_step(engine, [1, 1, 1], [100, 64, 256])
    together, _ = attend(engine, engine.builder.build(0, step.common), step.q)
    names = "seq_lens", "block_table_tensor", KNOWN_LENGTHS[0]
    for row in range(3):
        engine.topk[0] = step.topk[row]
        alone = replace(
            step.common,
            query_start_loc=step.common.query_start_loc[:2],
            query_start_loc_cpu=step.common.query_start_loc_cpu[:2],
            num_reqs=1,
            num_actual_tokens=1,
            **{name: getattr(step.common, name)[row : row + 1] for name in names},
        )
        out, _ = attend(engine, engine.builder.build(0, alone), step.q[row : row + 1])
        assert torch.equal(out[0], together[row])


def test_batch_invariance_that_nobody_promises_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compat, "wants_batch_invariance", lambda: True)
    simulate(monkeypatch, SM80, Vendor("nvidia", "sm80"))
    (reason,) = validate(make_config())
    assert "batch_invariant" in reason


@pytest.mark.parametrize("given", ["config", "both"])
def test_additional_config_is_read(given: str, monkeypatch: pytest.MonkeyPatch):
    """What the environment says goes first; a configuration without the key goes by the defaults again."""
    config = make_config("fp8")
    config.additional_config = {"mla_portable": {"route": "split", "cache_scales": "amax"}}
    if given == "both":
        monkeypatch.setenv(settings.ENV_ROUTE, "upconvert")
    resolved = model.resolve(config, CPU, kv_cache_dtype="fp8")
    assert resolved.decision.chosen == ("split" if given == "config" else "upconvert")
    assert resolved.writer.scale_format == "amax"
    monkeypatch.delenv(settings.ENV_ROUTE, raising=False)
    model.resolve(make_config("fp8"), CPU, kv_cache_dtype="fp8")
    assert (settings.route(), settings.scale_format()) == ("auto", None)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"rout": "split"}, "got 'rout', expected keys among route, cache_writer"),
        ({"mode": "off"}, "MLA_PORTABLE_VLLM is read before there is a configuration"),
        ({"route": "fast"}, "MLA_PORTABLE_VLLM_ROUTE: got 'fast'"),
        ("split", "got 'split', expected a mapping"),
    ],
)
def test_additional_config_that_means_nothing_is_refused(given, said: str):
    config = make_config()
    config.additional_config = {"mla_portable": given}
    (reason,) = validate(config)
    assert said in reason


def test_what_no_layer_here_can_do_is_refused():
    plain = SimpleNamespace(qk_nope_head_dim=128, qk_rope_head_dim=64)
    assert "index_topk" in validate(make_config(hf_config=plain, hf_text_config=plain))[0]
    config = make_config()
    config.parallel_config.prefill_context_parallel_size = 2
    config.attention_config = SimpleNamespace(hisparse_config=object())  # a cache in host memory, from 0.30 on
    config.speculative_config = SimpleNamespace(num_speculative_tokens=2, enable_adaptive_verification=True)
    (said,) = validate(config)
    assert "adaptive verification (supports steps whose query lengths the host knows): set" in said
    assert "prefill context parallelism 2 (supports 1: " in said and "set prefill_context_parallel_size=1" in said
    assert "HiSparse" in said and "leave hisparse_config and HiSparseConnector out" in said


class Vendor:
    """A vendor whose kernels take bf16 caches and up to 8 heads of one device."""

    def __init__(self, vendor: str, arch: str, *, max_heads: int = 8, graph: bool = True) -> None:
        self.support = Support(
            source="made up", vendors=(vendor,), archs=(arch,), kv_layouts=("bf16",), max_heads=max_heads, graph=graph
        )

    @hookimpl
    def mla_portable_register(self, registrar) -> None:
        for primitive in Primitive.all():
            registrar.add(Implementation("acme.v1", primitive, self.support, bind=lambda request: print))


def simulate(monkeypatch: pytest.MonkeyPatch, facts: DeviceFacts, vendor: Vendor) -> None:
    registry = Registry(plugins=[("acme", vendor)], facts={"cuda": facts}, environ={})
    monkeypatch.setattr(model, "get_registry", lambda: registry)
    monkeypatch.setattr(compat, "device", lambda: CUDA)
    monkeypatch.setattr(model, "choose_writer", lambda layout, device, config, *, nope: Writer("vllm", None))


@pytest.mark.parametrize("device, ops", [(False, True), (True, False), (True, True)])
def test_a_corex_device_is_accepted_whatever_its_capability(device: bool, ops: bool, monkeypatch: pytest.MonkeyPatch):
    """Graphs follow what the device and its ops can do."""
    simulate(monkeypatch, replace(COREX, graph_capture=device), Vendor("iluvatar", "ivcore11", graph=ops))
    for capability in ((7, 0), (7, 5), (8, 0), (12, 0)):
        assert validate(make_config(), capability=capability) == []
    spec, config = SimpleNamespace(cache_dtype_str="auto", block_size=BLOCK), make_config()
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    support = MLAPortableBackend.get_builder_cls().get_cudagraph_support(config, spec)
    assert support is (AttentionCGSupport.UNIFORM_BATCH if device and ops else AttentionCGSupport.NEVER)


def test_vllms_defaults_for_new_tensors_do_not_reach_the_implementations(monkeypatch: pytest.MonkeyPatch):
    """vLLM builds models under the model's dtype and device, and profiles under inference mode."""
    seen = set()

    class Curious:
        @hookimpl
        def mla_portable_register(self, registrar) -> None:
            def check(facts: DeviceFacts):
                new = torch.zeros(1)
                seen.add((new.dtype, new.device.type, new.is_inference()))
                return ()

            support = Support(source="made up", device_types=("cpu",), kv_layouts=("bf16", "fp8_ds_mla"))
            for primitive in Primitive.all():
                registrar.add(Implementation("acme.v1", primitive, support, bind=lambda request: print, check=check))

    registry = Registry(plugins=[("acme", Curious())], environ={}, probe=False)
    monkeypatch.setattr(model, "get_registry", lambda: registry)
    with torch.device("meta"), torch.inference_mode():
        assert validate(make_config()) == []
        assert torch.zeros(1).dtype == torch.bfloat16 and torch.zeros(1).is_meta
    assert seen == {(torch.float32, "cpu", False)}


@pytest.mark.parametrize("capability, served", [((8, 0), True), ((8, 6), False), ((9, 0), False)])
def test_capabilities_follow_the_registry(capability, served: bool, monkeypatch: pytest.MonkeyPatch):
    simulate(monkeypatch, SM80, Vendor("nvidia", "sm80"))
    reasons = validate(make_config(), capability=capability)
    assert ("compute capability not supported" in reasons) == (not served)


@pytest.mark.parametrize("graph", [True, False])
def test_graphs_are_offered_where_the_route_can_be_captured(graph: bool, monkeypatch: pytest.MonkeyPatch):
    simulate(monkeypatch, SM80, Vendor("nvidia", "sm80", graph=graph))
    spec = SimpleNamespace(cache_dtype_str="auto", block_size=BLOCK)
    config = make_config()
    builder = MLAPortableBackend.get_builder_cls()
    assert builder.get_cudagraph_support(config, spec) is AttentionCGSupport.NEVER  # on a CPU vLLM wants none
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    support = builder.get_cudagraph_support(config, spec)
    assert support is (AttentionCGSupport.UNIFORM_BATCH if graph else AttentionCGSupport.NEVER)


def test_what_nobody_serves_fails_at_start_with_every_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    simulate(monkeypatch, SM80, Vendor("nvidia", "sm80", max_heads=2))
    (reason,) = validate(make_config())
    for words in ("no route serves sparse attention of 4 heads", "direct", "split", "acme.v1", "num_heads 4 (supports 1 to 2)"):
        assert words in reason
    assert "\n" not in reason and "change tensor parallelism" in reason
    assert "mla_portable cannot serve this model" in caplog.text
    (fp8,) = validate(make_config(max_model_len=256), kv_cache_dtype="fp8")
    assert "kv_layout fp8_ds_mla (supports bf16)" in fp8


def test_building_a_layer_fails_too(monkeypatch: pytest.MonkeyPatch):
    from mla_portable.engines.vllm.impl import MLAPortableImpl

    simulate(monkeypatch, SM80, Vendor("nvidia", "sm80", max_heads=2))
    none = dict.fromkeys(("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name"))
    arguments = {"num_heads": HEADS, "head_size": 576, "scale": 0.1, "num_kv_heads": 1, "kv_cache_dtype": "auto", **none}
    arguments["attn_type"] = "decoder"
    with set_current_vllm_config(make_config()):
        with pytest.raises(UnsupportedRequest, match="supports 1 to 2"):
            MLAPortableImpl(**arguments)
        with pytest.raises(InvalidArgument, match="sliding_window"):
            MLAPortableImpl(**{**arguments, "sliding_window": 128})
    with pytest.raises(InvalidArgument, match="--dtype bfloat16"):
        MLAPortableImpl(**arguments).process_weights_after_loading(torch.float16)


@pytest.mark.parametrize("route", ["direct", "split"])
def test_scratch_comes_from_vllms_workspace(route: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(settings.ENV_ROUTE, route)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # asked for by vLLM; a CPU build has none
    workspace.init_workspace_manager(CPU)
    try:
        engine = make_engine("fp8")
        buffers = engine.builder.attention.buffers
        pool = workspace.current_workspace_manager().get_simultaneous(((1,), torch.uint8))[0].untyped_storage()
        held = [buffers.indices, buffers.query, buffers.lse, *([buffers.workspace] if route == "split" else [])]
        assert all(t.untyped_storage().data_ptr() == pool.data_ptr() for t in held)
        assert buffers.indices.shape == (MAX_TOKENS, TOPK)
        assert (buffers.workspace is not None) == (route == "split")
    finally:
        workspace.reset_workspace_manager()
    assert make_engine("fp8").builder.attention.buffers.indices.untyped_storage().data_ptr() != pool.data_ptr()


def test_status_tells_what_vllm_will_find(monkeypatch: pytest.MonkeyPatch):
    registry = Registry(environ={"MLA_PORTABLE_BACKEND": "reference"})
    found = vllm_status(registry, CPU, environ={})
    assert found.version and found.registered and found.mode == "auto"
    assert [(layout, heads) for layout, heads, *_ in found.choices] == [
        (k, h) for k in ("fp8_ds_mla", "bf16") for h in (16, 128)
    ]
    assert all(route and "sparse_decode" in served for *_, route, served in found.choices)
    assert not vllm_status(registry, CPU, environ={settings.ENV_MODE: "off"}).registered
    assert "VLLM_PLUGINS=other" in vllm_status(registry, CPU, environ={"VLLM_PLUGINS": "other"}).note
    for variable in (settings.ENV_MODE, settings.ENV_ROUTE, settings.ENV_SCALES, settings.ENV_INDEXER):
        bad = vllm_status(registry, CPU, environ={variable: "always"})
        assert variable in bad.note and not bad.registered and not bad.choices


@pytest.mark.parametrize(
    "arch, mode, ours",
    [
        ("sm80", "auto", True),
        ("sm89", "auto", True),
        ("sm90", "auto", False),
        ("sm120", "auto", False),
        ("sm90", "on", True),
        ("sm80", "off", False),
    ],
)
def test_status_tells_whose_indexer_runs(arch: str, mode: str, ours: bool, monkeypatch: pytest.MonkeyPatch):
    registry = Registry(environ={"MLA_PORTABLE_BACKEND": "reference"})
    here = replace(registry.facts(CPU), vendor="nvidia", device_type="cuda", arch=arch, name="a GPU")
    monkeypatch.setattr(registry, "facts", lambda device: here)
    monkeypatch.setattr("mla_portable.engines.vllm.status._lacking", lambda module, names: [])  # before 0.24 it is vLLM's
    found = vllm_status(registry, CPU, environ={settings.ENV_INDEXER: mode}).indexer
    assert found.startswith("mla_portable's (indexer_select" if ours else "vLLM's")
    assert mode == "auto" or f"{settings.ENV_INDEXER}={mode}" in found
    assert mode != "auto" or arch in found
