# SPDX-License-Identifier: Apache-2.0
"""Attention sinks (hy_v4): vLLM's own selection takes this backend for them, each call reads them, or the layer is refused."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm_engine import HEADS, assert_close, attend, check_step, expected, make_config, make_engine, make_step

from mla_portable.attention import UnsupportedRoute
from mla_portable.choose import Registry
from mla_portable.contracts import ContextShare, Implementation, InvalidArgument, Primitive, Support, hookimpl
from mla_portable.engines.vllm import compat, model
from mla_portable.engines.vllm.backend import MLAPortableBackend

STEPS = {
    "decodes": ([1] * 5, [1, 64, 65, 130, 256], {}),
    "prompts": ([7, 70, 3], [7, 70, 3], {}),
    "mixed": ([1, 1, 1, 9, 33], [100, 7, 256, 9, 90], {}),
    "padded": ([1, 1, 30], [70, 3, 200], {"padded_tokens": 40, "padded_reqs": 4}),
}
LOADED = torch.tensor([0.5, -1.0, -torch.inf, 4.0], dtype=torch.float32)


def parameter() -> torch.nn.Parameter:
    """As a model makes it before its weights are loaded."""
    return torch.nn.Parameter(torch.full((HEADS,), torch.nan, dtype=torch.float32), requires_grad=False)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "dtype, route",
    [("auto", "direct"), ("auto", "fused"), ("fp8", "direct"), ("fp8", "split"), ("fp8", "fused"), ("fp8", "upconvert")],
)
def test_every_token_attends_with_its_heads_sink(dtype: str, route: str, step: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLA_PORTABLE_VLLM_ROUTE", route)
    query_lens, seq_lens, padding = STEPS[step]
    engine = make_engine(dtype, sinks=parameter())
    engine.sinks.data.copy_(LOADED)  # weights are loaded after layers were built
    check_step(engine, query_lens, seq_lens, **padding)


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_drafts_attend_with_sinks(dtype: str):
    engine = make_engine(dtype, drafts=2, sinks=parameter())
    engine.sinks.data.copy_(LOADED)
    check_step(engine, [3, 3, 30], [20, 100, 90])


def test_layers_of_one_builder_have_sinks_of_their_own():
    """And a sink that is loaded again, as after sleeping, counts from the next call on."""
    engine = make_engine("auto", sinks=parameter())
    step = make_step(engine, [1, 1, 9], [100, 64, 30])
    metadata = engine.builder.build(0, step.common)
    outputs = []
    for values in (LOADED, LOADED.flip(0)):
        engine.sinks.data.copy_(values)
        out, _ = attend(engine, metadata, step.q)
        assert_close(out, expected(engine, step)[0], 11)
        outputs.append(out)
    assert not torch.equal(*outputs)
    other = parameter()
    other.data.copy_(LOADED)
    engine.impl.sinks = engine.sinks = other
    assert torch.equal(attend(engine, metadata, step.q)[0], outputs[0])


@pytest.mark.parametrize(
    "sinks, got",
    [
        (torch.zeros(HEADS + 1, dtype=torch.float32), r"sinks: got shape \[5\]"),
        (torch.zeros(HEADS, dtype=torch.bfloat16), "sinks: got torch.bfloat16"),
    ],
)
def test_sinks_of_another_shape_or_dtype_are_refused(sinks: torch.Tensor, got: str):
    with pytest.raises(InvalidArgument, match=got):
        make_engine("auto", sinks=sinks)


def test_a_layer_without_sinks_in_a_group_that_has_them_is_refused():
    engine = make_engine("auto", sinks=parameter())
    metadata = engine.builder.build(0, make_step(engine, [1], [30]).common)
    engine.impl.sinks = None
    with pytest.raises(InvalidArgument, match="attn_sink: got None"):
        attend(engine, metadata, torch.zeros(1, HEADS, 576))


class WithoutSinks:
    """A vendor whose attention has no sinks."""

    @hookimpl
    def mla_portable_register(self, registrar) -> None:
        for primitive in Primitive.all():
            support = Support(source="made up", device_types=("cpu",), kv_layouts=("bf16", "fp8_ds_mla"), attn_sink=False)
            registrar.add(Implementation("acme.v1", primitive, support, bind=lambda request: print))


@pytest.fixture
def without_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(plugins=[("acme", WithoutSinks())], environ={})
    decide = model.decide_route
    monkeypatch.setattr(
        model, "decide_route", lambda *given, **named: decide(*given, **{**named, "registry": registry, "probe": False})
    )


def test_a_layer_whose_implementations_have_no_sinks_is_refused_when_it_is_built(without_sinks: None):
    with pytest.raises(UnsupportedRoute, match="attn_sink"):
        make_engine("auto", sinks=parameter())
    config = make_config()
    with set_current_vllm_config(config):
        arguments = {**compat.selection_arguments(config), "kv_cache_dtype": "auto"}
        arguments["device_capability"] = DeviceCapability(8, 0)
        assert MLAPortableBackend.validate_configuration(**arguments) == []
        (reason,) = MLAPortableBackend.validate_configuration(**{**arguments, "has_sink": True})
    assert "attn_sink" in reason


def test_sinks_with_context_parallelism_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model, "context_share", lambda config: ContextShare(2, 0, 1))
    with pytest.raises(InvalidArgument, match=r"sinks: got attention sinks with decode context parallelism 2.*size=1"):
        make_engine("auto", sinks=parameter())


def test_graphs_are_decided_with_the_sinks_of_the_layers_that_are_built(monkeypatch: pytest.MonkeyPatch):
    seen: list[bool] = []
    resolve = model.resolve
    monkeypatch.setattr(model, "resolve", lambda *a, **named: (seen.append(named["attn_sink"]), resolve(*a, **named))[1])
    for sinks in (None, parameter()):
        engine = make_engine("auto", sinks=sinks)
        spec = engine.layer.get_kv_cache_spec(engine.config)
        seen.clear()
        type(engine.builder).get_cudagraph_support(engine.config, spec)
        assert seen == [sinks is not None]


def test_hy_v4_takes_this_backend_for_its_sinks(monkeypatch: pytest.MonkeyPatch):
    """Its own code, and the selection of vLLM's CUDA platform, as on an L40S with --attention-backend CUSTOM."""
    if find_spec("vllm.models") is None or find_spec("vllm.models.hy_v4") is None:
        return  # came with 0.29
    for name in ("vllm._C", "vllm._C_stable_libtorch"):  # compiled libraries, which a platform loads
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    hy_v4 = importlib.import_module("vllm.models.hy_v4.nvidia.attention")
    cuda = importlib.import_module("vllm.platforms.cuda").CudaPlatformBase
    monkeypatch.setattr(cuda, "get_device_capability", classmethod(lambda cls, device_id=0: DeviceCapability(8, 9)))
    monkeypatch.setattr("vllm.platforms._current_platform", cuda())
    layer = object.__new__(hy_v4.HYV4MLAAttention)
    layer.__dict__ |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "is_sparse": True, "num_local_heads": HEADS}
    config = make_config()
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    importlib.import_module("mla_portable.engines.vllm.plugin").register()
    with set_current_vllm_config(config):
        assert layer._resolve_sink_backend("auto") is MLAPortableBackend
    monkeypatch.setattr(MLAPortableBackend, "supports_sink", classmethod(lambda cls: False))
    with set_current_vllm_config(config):  # a backend that does not say so: the model would run without its sinks
        assert layer._resolve_sink_backend("auto") is None
