# SPDX-License-Identifier: Apache-2.0
"""The layer of Iluvatar's vLLM 0.17 on stand-ins of the vendor's ops: implementations, weights, detection.

`ci/vllm` runs every other test of this folder in this form as well.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import iluvatar_layer
import pytest
import torch
from test_vllm_forward import BATCHES, check_whole_layer
from vllm.model_executor.layers.attention import mla_attention
from vllm_engine import HEADS, LATENT, NOPE, V_DIM, KvBProj, PackedKvBProj, check_step, make_engine

from mla_portable.contracts import InvalidArgument
from mla_portable.engines.vllm import compat, settings
from mla_portable.engines.vllm.backend import MLAPortableBackend
from mla_portable.engines.vllm.impl import MLAPortableImpl
from mla_portable.engines.vllm.projecting import ProjectingImpl


@pytest.fixture(params=["reference", "vendor's ops"])
def served_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    with iluvatar_layer.layer():
        if request.param == "reference":
            yield None
        else:
            with iluvatar_layer.device():
                yield "iluvatar"


def parts(engine: Any) -> dict[str, str]:
    return {part.role: part.decision.chosen for part in engine.builder.attention.route_decision.verdict.parts}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_every_batch_is_served(dtype: str, batch: str, served_by: str | None, monkeypatch: pytest.MonkeyPatch):
    """A bf16 cache by the vendor's ops throughout, an FP8 cache by way of the bf16 workspace (`upconvert`)."""
    if dtype == "fp8":
        monkeypatch.setenv(settings.ENV_ROUTE, "upconvert")
    query_lens, seq_lens, padding = BATCHES[batch]
    engine = make_engine(dtype)
    assert type(engine.impl) is ProjectingImpl
    if served_by:
        kernels = {"convert": "iluvatar.dsa_convert", "prefill": "iluvatar.fork_sparse_prefill"}
        if dtype == "auto":
            assert parts(engine) == {**kernels, "decode": "iluvatar.fork_sparse_prefill"}
        else:  # no workspace in the old convert op
            assert parts(engine) == {"convert": "reference.torch", "prefill": kernels["prefill"], "gather": "reference.torch"}
    check_step(engine, query_lens, seq_lens, **padding)


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_the_layer_is_dense_attention_over_the_chosen_tokens(dtype: str, served_by: str | None):
    check_whole_layer(make_engine(dtype))


def loaded(kv_b_proj: Any) -> ProjectingImpl:
    with iluvatar_layer.layer():
        impl = make_engine("auto").impl
    impl.kv_b_proj = kv_b_proj
    impl.process_weights_after_loading(torch.bfloat16)
    return impl


@pytest.mark.parametrize("make", [KvBProj, PackedKvBProj])
def test_weights_are_those_of_kv_b_proj(make: type):
    kv_b_proj = make(3)
    impl = loaded(kv_b_proj)
    by_head = kv_b_proj.plain().view(HEADS, NOPE + V_DIM, LATENT)
    assert torch.equal(impl.W_UK, by_head[:, :NOPE].permute(2, 0, 1))
    assert torch.equal(impl.W_UV, by_head[:, NOPE:].permute(2, 0, 1))
    own = next(kv_b_proj.parameters()).untyped_storage().data_ptr()
    assert (impl.W_UK.untyped_storage().data_ptr() == own) == (make is KvBProj)  # what is not quantised is not copied
    q, x = torch.randn(5, HEADS, NOPE), torch.randn(5, HEADS, LATENT)
    ql, v = impl._k_up_proj(q), impl._v_up_proj(x)
    assert ql.is_contiguous() and v.is_contiguous()
    assert torch.allclose(
        ql.double(), torch.einsum("thp,hpl->thl", q.double(), by_head[:, :NOPE].double()), rtol=0.02, atol=0.02
    )
    assert torch.allclose(
        v.double(), torch.einsum("thl,hvl->thv", x.double(), by_head[:, NOPE:].double()), rtol=0.02, atol=0.02
    )


def test_weights_of_another_shape_are_refused():
    short = KvBProj(1)
    short.weight = torch.nn.Parameter(short.weight[:-1])
    with pytest.raises(InvalidArgument, match=r"kv_b_proj: got a weight of \[1023, 512\], expected \[1024, 512\]: 4 heads"):
        loaded(short)


def test_the_form_is_told_by_what_vllm_brings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compat, "_stock", lambda: SimpleNamespace(FlashMLASparseImpl=object))
    assert MLAPortableBackend.get_impl_cls() is MLAPortableImpl
    monkeypatch.setattr(compat, "_stock", lambda: None)
    assert MLAPortableBackend.get_impl_cls() is MLAPortableImpl
    monkeypatch.setattr(compat, "_stock", lambda: iluvatar_layer)
    assert MLAPortableBackend.get_impl_cls() is ProjectingImpl
    monkeypatch.setattr(mla_attention, "MLAAttention", iluvatar_layer.IluvatarMLAAttention.__mro__[1])
    assert compat.layer_takes_lse()  # upstream's own source
    monkeypatch.setattr(mla_attention, "MLAAttention", iluvatar_layer.IluvatarMLAAttention)
    assert not compat.layer_takes_lse()
    monkeypatch.setattr(mla_attention, "MLAAttention", type("Compiled", (), {}))
    assert not compat.layer_takes_lse()


def test_a_buffer_under_its_old_name_is_read():
    buffer = torch.zeros((4, 64), dtype=torch.int32)
    with iluvatar_layer.layer():
        arguments = {"kv_b_proj": KvBProj(1), "qk_nope_head_dim": NOPE, "v_head_dim": V_DIM, "attn_type": "decoder"}
        arguments |= {"num_heads": HEADS, "num_kv_heads": 1, "head_size": 576, "scale": 0.1, "kv_cache_dtype": "auto"}
        assert ProjectingImpl(**arguments, topk_indice_buffer=buffer).topk_indices_buffer is buffer
