# SPDX-License-Identifier: Apache-2.0
"""SGLang's real `Indexer` where Triton has no e4m3: it quantises, writes and chooses as its rules say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_indexer
import torch
from interpreter_rounding import round_ties_to_even
from machines import A100
from sglang.srt.layers.attention.dsa import dsa_indexer
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.state_capturer import base, indexer_topk
from sglang_kit import cases, pretend_for_indexer, small
from sglang_version import FUSED

from mla_portable.choose import Registry
from mla_portable.dispatch import serving as serving_by
from mla_portable.engines.common.e4m3_stores import StandIn
from mla_portable.engines.sglang import index_codes, serving, stock

DECODE = small(cases()["dsa_sparse_decode_ragged_prefix"])
VERIFY = replace(DECODE, name="dsa_sparse_target_verify", forward_mode=ForwardMode.TARGET_VERIFY, extend_lens=(3, 3, 3))


class Fails:
    """A kernel of SGLang's with pointers to e4m3, as Triton compiles it below compute capability 8.9; others run."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.arg_names = kernel, kernel.arg_names

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **named: Any) -> None:
            if any("float8" in str(getattr(each, "dtype", "")) for each in (*args, *named.values())):
                raise ValueError("type fp8e4nv not supported in this architecture")
            self.kernel[grid](*args, **named)

        return launch


@pytest.fixture(autouse=True)
def a100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from test_sglang_index_codes import KERNELS

    round_ties_to_even(monkeypatch)
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Fails(getattr(module, name)))
    monkeypatch.setattr(
        serving, "get_registry", lambda: SimpleNamespace(facts=lambda device: A100, keep=lambda key, make: make())
    )
    pretend_for_indexer(monkeypatch, A100)
    monkeypatch.setattr(stock, "_import_error", lambda module: None)
    with sglang_indexer.on_the_cpu():
        yield


STEPS = pytest.mark.parametrize("case", [DECODE, VERIFY], ids=lambda case: case.forward_mode.name.lower())


@STEPS
def test_a_step(case: Any, monkeypatch: pytest.MonkeyPatch):
    if FUSED:
        monkeypatch.setenv("SGLANG_DSA_FUSE_TOPK", "0")  # positions, by torch: the fused kernels are CUDA's
    worst = sglang_indexer.run(case, topk=16, fused_store=False, device="cpu", dsa_decode_backend="tilelang")
    assert worst == 0
    assert isinstance(sglang_indexer.QUANT._act_quant_kernel, StandIn)


def test_without_the_plugin_it_stops(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index_codes, "serve", lambda facts, pools: None)
    with pytest.raises(ValueError, match="fp8e4nv not supported"):
        sglang_indexer.run(DECODE, topk=16, fused_store=False, device="cpu", dsa_decode_backend="tilelang")


def capturer_without_pinned_memory(topk: int) -> Any:
    """SGLang's own, of one layer, for 4,096 slots and steps of at most 64 tokens."""
    zeros = torch.zeros
    with pytest.MonkeyPatch.context() as patches:
        pageable = {"cpu": lambda shape, dtype, **named: torch.empty(shape, dtype=dtype)}
        patches.setattr(base, "ALLOC_MEMORY_FUNCS", pageable, raising=False)  # 0.5.16 asks torch.zeros to pin
        patches.setattr(torch, "zeros", lambda *shape, pin_memory=False, **named: zeros(*shape, **named))
        return base.BaseTopkCapturer(4096, max_batch_size=64, num_layers=1, topk_size=topk, device="cpu", name="indexer_topk")


@STEPS
def test_the_selection_that_sglang_returns_is_ours(case: Any, monkeypatch: pytest.MonkeyPatch):
    """`--enable-return-indexer-topk`: SGLang's capturer keeps what a step chose, and answers with it for each token."""
    if FUSED:
        monkeypatch.setenv("SGLANG_DSA_FUSE_TOPK", "0")
    make, forward, steps = sglang_indexer.fixture, dsa_indexer.Indexer.forward_cuda, list[Any]()

    def built(*args: Any, **named: Any) -> Any:
        steps.append(make(*args, **named))
        return steps[-1]

    def chosen(*args: Any, **named: Any) -> Any:
        steps.append(forward(*args, **named))
        return steps[-1]

    monkeypatch.setattr(sglang_indexer, "fixture", built)
    monkeypatch.setattr(dsa_indexer.Indexer, "forward_cuda", chosen)
    capturer = capturer_without_pinned_memory(topk=16)
    monkeypatch.setattr(indexer_topk, "get_global_indexer_capturer", lambda: capturer)
    scores = Registry(plugins=[("reference", "mla_portable.reference")], environ={})
    with serving_by(scores):
        assert sglang_indexer.run(case, topk=16, fused_store=False, device="cpu", dsa_decode_backend="tilelang") == 0
    assert {each.name for each in scores.dispatched.values()}, "SGLang scored by itself"
    made, result = steps
    capturer.on_forward_end(made.forward_batch, False, None)
    rows = result.split(list(case.input_lens))
    for request, length in enumerate(case.prefix_lens):
        whole = length + case.input_lens[request] + 1  # the newest token of an answer has no selection yet
        pool = made.forward_batch.req_pool_indices[request]
        returned = capturer.get_topk(pool, whole, made.runner.req_to_token_pool, start_len=length)
        assert torch.equal(returned[:, 0], rows[request].int()) and (returned >= 0).any()
