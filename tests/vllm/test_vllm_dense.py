# SPDX-License-Identifier: Apache-2.0
"""Short prompts as dense attention through vLLM's real layer, builder and `forward_mha`; only its kernel is written out."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_vllm_forward import check_whole_layer
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention import mla_attention
from vllm_engine import CPU, HEADS, TOPK, Engine, check_step, make_config, make_engine, make_step

from mla_portable.contracts import ContextShare
from mla_portable.registry import get_registry
from mla_portable.vllm import dense, model, settings

SHORTEST = 20


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
    monkeypatch.setattr(dense, "FASTER", {get_registry().facts(CPU).arch: (HEADS, SHORTEST)})
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


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [([1, 1], [30, 40]), ([9, SHORTEST - 1], [9, SHORTEST - 1]), ([1, 30, 66], [9, 30, TOPK + 2]), ([1, 20], [9, TOPK + 1])],
    ids=["decodes", "shorter", "one longer than the top-k", "its context is longer"],
)
def test_other_steps_are_sparse(query_lens: Sequence[int], seq_lens: Sequence[int], engine: Engine):
    metadata = engine.builder.build(0, make_step(engine, query_lens, seq_lens).common)
    assert metadata.prefill is None and metadata.num_decode_tokens == sum(query_lens) and metadata.num_prefills == 0


def test_a_step_without_lengths_on_the_host_is_sparse(engine: Engine):
    step = make_step(engine, [9, 33], [9, 33], host_lengths="")
    assert engine.builder.build(0, step.common).prefill is None


def resolved(**spec: Any) -> Any:
    given = {"num_heads": 128, "batch_invariant": False, "share": ContextShare(), "attn_sink": False, **spec}
    device = SimpleNamespace(arch=given.pop("arch", "sm90"))
    return SimpleNamespace(spec=SimpleNamespace(**given), decision=SimpleNamespace(device=device))


@pytest.mark.parametrize(
    "spec", [{"num_heads": 64}, {"batch_invariant": True}, {"share": ContextShare(2)}, {"arch": "sm80"}, {"attn_sink": True}]
)
def test_where_it_is_never_taken(spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dense, "FASTER", {"sm90": (128, 768)})
    config = make_config()
    assert dense.shortest(resolved(), config) == 768
    assert dense.shortest(resolved(**spec), config) is None
    config.attention_config.sparse_mla_force_mqa = True
    assert dense.shortest(resolved(), config) is None
    config.attention_config.sparse_mla_force_mqa = False
    monkeypatch.setenv(settings.ENV_SHADOW, "1")
    assert dense.shortest(resolved(), config) is None


def test_a_device_without_vllms_kernels_is_served_as_before(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    engine.layer.prefill_backend = None
    with set_current_vllm_config(engine.config):
        found = model.resolve(engine.config, CPU, kv_cache_dtype="auto")
        spec = engine.layer.get_kv_cache_spec(engine.config)
    assert dense.shortest(found, engine.config) == SHORTEST
    assert dense.prefills(found, spec, [engine.layer.layer_name], engine.config, CPU, 1) is None
