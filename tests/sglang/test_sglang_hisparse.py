# SPDX-License-Identifier: Apache-2.0
"""A KV cache in host memory (--enable-hisparse): SGLang's real backend and pool, with a stand-in for its coordinator.

The coordinator's kernels are for CUDA. The stand-in does what they do in plain torch: it moves the rows of a batch to host
memory, and copies those that a decode selects into slots of the device's buffer. What it leaves on the device is NaN.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from machines import A100, H200
from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseDSATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_kit import cases, compare, fixture, judging, kit, server_of, small
from sglang_version import FUSED
from test_sglang_plugin import pretend
from torch import Tensor

from mla_portable.contracts import InvalidArgument
from mla_portable.engines.sglang import model, prompts, serving, settings

CASES = cases()
TOPK = 16
DECODE = small(CASES["dsa_sparse_decode_ragged_prefix"])
HOT = 1024
"""Slots of the buffer, behind those of the pool's other rows."""


class Coordinator:
    """What the backend object asks of SGLang's HiSparseCoordinator.

    Attributes:
        host: logical location -> the bytes of a row. slots: what every call returned.
    """

    def __init__(self, runner: Any) -> None:
        self._pool, self._tokens = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
        self.host = dict[int, Tensor]()
        self.slots = list[Tensor]()

    def swap_in_selected_pages(self, requests: Tensor, lengths: Tensor, chosen: Tensor, layer: int) -> Tensor:
        """chosen [R, K] or, of drafts, [R, S, K]: positions, -1 for none. Returns: their slots, each at its place."""
        rows = self._pool.kv_buffer[layer].view(torch.uint8).flatten(1)
        mapping, free = self._pool.full_to_hisparse_device_index_mapping, iter(range(len(rows) - 1, len(rows) - HOT, -1))
        slots = torch.full(chosen.shape, -1, dtype=torch.int32)
        longest = lengths.view(len(requests), -1).amax(1)
        for request, length, own, found in zip(requests.tolist(), longest.tolist(), chosen, slots, strict=True):
            for location in self._tokens[request, :length].tolist():
                at = int(mapping[location])
                self.host[location] = rows[at].clone()
                rows[at] = 0xFF
            named = own[own >= 0].unique()
            hot = {int(position): next(free) for position in named}
            for position, slot in hot.items():
                rows[slot] = self.host[int(self._tokens[request, position])]
            found.copy_(torch.tensor([hot.get(each, -1) for each in own.flatten().tolist()]).view(own.shape))
        self.slots.append(slots)
        return slots


class Pool(HiSparseDSATokenToKVPool):
    """SGLang's pool, with HOT slots behind its rows, which lie in another order than their logical locations."""

    def __init__(self, *, size: int, page_size: int, **others: Any) -> None:
        super().__init__(size=size + HOT, page_size=page_size, **others)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(0)) + page_size
        self.register_mapping(torch.cat([torch.zeros(page_size, dtype=torch.int64), order, torch.tensor([-1])]))


@contextmanager
def hisparse() -> Iterator[None]:
    """In the block the kit's model runner has such a pool and a coordinator."""
    make = kit.DSAMockModelRunner.__init__

    def init(self: Any, **named: Any) -> None:
        make(self, **named)
        self.hisparse_coordinator = Coordinator(self)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(kit, "DSATokenToKVPool", Pool)
        patches.setattr(kit.DSAMockModelRunner, "__init__", init)
        yield


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.ENV_HISPARSE, "on")
    monkeypatch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0")


def output(built: Any) -> Tensor:
    """Judged by the oracle, and by the kit's reference, which reads the BF16 keys whatever the cache is."""
    results = list[Tensor]()
    run: Callable[..., Tensor] = kit.run_dsa_sparse_fixture_eager

    def keep(*arguments: Any) -> Tensor:
        results.append(run(*arguments))
        return results[0]

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(kit, "run_dsa_sparse_fixture_eager", keep)
        compare(built)
    return results[0]


def on_and_off(case: Any, **options: Any) -> tuple[Any, list[Tensor], Any]:
    """The fixture with a cache in host memory; the slots of a call with it and without it, whose results have the same bits;
    the kind of both calls."""
    options["index_topk"] = TOPK
    selects = case.forward_mode.is_decode() or case.forward_mode.is_target_verify()
    with judging() as judged:
        with hisparse():
            built = fixture(case, fused=FUSED and not selects, **options)
            on = output(built)
        off = output(fixture(case, **options))
    assert torch.equal(on, off) and on.isfinite().all()
    assert len(judged.calls) == 2 and judged.kinds[0] == judged.kinds[1]
    return built, [call["slots"] for _, call in judged.calls], judged.kinds[0]


KINDS = pytest.mark.parametrize(("impl", "fp8"), [("flashmla_sparse", False), ("flashmla_kv", True)])


@KINDS
def test_a_decode_reads_the_rows_that_were_swapped_in(impl: str, fp8: bool):
    built, (slots, elsewhere), kind = on_and_off(DECODE, dsa_decode_backend=impl, dsa_prefill_backend=impl, fp8_kv_cache=fp8)
    assert kind == ("decode fp8_ds_mla" if fp8 else "decode bf16")
    (swapped,) = built.runner.hisparse_coordinator.slots
    rows = len(built.runner.token_to_kv_pool.kv_buffer[0])
    assert torch.equal(slots, swapped) and (slots[slots >= 0] > rows - HOT).all()
    assert torch.equal(slots < 0, elsewhere < 0) and (slots < 0).any(), "every slot at the place of its position"
    assert len(built.runner.hisparse_coordinator.host) == sum(DECODE.seq_lens)


@KINDS
def test_an_extend_reads_the_rows_of_the_device(impl: str, fp8: bool):
    """SGLang translates its table for it; no row is swapped in."""
    case = small(CASES["dsa_sparse_prefill_long_extend"])
    built, (slots, elsewhere), kind = on_and_off(case, dsa_decode_backend=impl, dsa_prefill_backend=impl, fp8_kv_cache=fp8)
    assert kind == ("prefill fp8_ds_mla" if fp8 else "prefill bf16") and not built.runner.hisparse_coordinator.slots
    mapping = built.runner.token_to_kv_pool.full_to_hisparse_device_index_mapping
    assert torch.equal(slots, mapping[elsewhere.long()].to(torch.int32)) and not torch.equal(slots, elsewhere)


@KINDS
def test_drafts_are_verified_over_swapped_rows(impl: str, fp8: bool):
    case = replace(DECODE, name="dsa_sparse_target_verify", forward_mode=ForwardMode.TARGET_VERIFY, extend_lens=(3, 3, 3))
    built, (slots, _), _ = on_and_off(case, dsa_decode_backend=impl, dsa_prefill_backend=impl, fp8_kv_cache=fp8)
    (swapped,) = built.runner.hisparse_coordinator.slots
    assert swapped.shape == (3, 3, TOPK) and torch.equal(slots, swapped.view(9, TOPK))


SPARSE = {"dsa_decode_backend": "flashmla_sparse", "dsa_prefill_backend": "flashmla_sparse"}


def test_padded_rows_promise_nothing():
    """A graph is replayed with rows of no request: a length, and no slot. A promise of slots up to a length would be broken."""
    with hisparse():
        on = server_of(fixture(DECODE, fused=False, **SPARSE).backend)
    off = server_of(fixture(DECODE, **SPARSE).backend)
    promised = [part.decision.request.clean_indices for part in off.attentions[0].route_decision.verdict.parts]
    assert any(promised) and on.attentions[0] is not off.attentions[0]
    assert not any(part.decision.request.clean_indices for part in on.attentions[0].route_decision.verdict.parts)


def test_prompts_over_keys_of_each_head_stay_off(monkeypatch: pytest.MonkeyPatch):
    """They read the pool by SGLang's page tables, whose locations are logical ones."""
    asked = list[object]()
    monkeypatch.setattr(prompts, "prompt_attention", lambda *arguments: asked.append(arguments))
    config = {"scaling": 0.1, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    backend = SimpleNamespace(dsa_index_kpool=1, hisparse_coordinator=None)
    spec = server_of(fixture(DECODE).backend)._spec("bf16", attn_sink=False)
    runner = SimpleNamespace(model_config=SimpleNamespace(**config), device="cpu", server_args=None)
    assert prompts.prompts(backend, runner, spec, H200) is None and len(asked) == 1
    backend.hisparse_coordinator = object()
    assert prompts.prompts(backend, runner, spec, H200) is None and len(asked) == 1


@pytest.mark.parametrize(
    ("setting", "prefill", "decode", "fp8", "pools", "words"),
    [
        ("", "flashmla_kv", "flashmla_kv", True, 1, "(experimental: MLA_PORTABLE_SGLANG_HISPARSE=on has it served)"),
        ("off", "flashmla_kv", "flashmla_kv", True, 1, "(experimental: MLA_PORTABLE_SGLANG_HISPARSE=on has it served)"),
        (
            "on",
            "flashmla_sparse",
            "flashmla_kv",
            True,
            1,
            "with an FP8 cache and flashmla_sparse (supports flashmla_kv with FP8",
        ),
        ("on", "flashmla_sparse", "flashmla_kv", False, 1, "with a BF16 cache and flashmla_kv (supports flashmla_kv with FP8"),
        ("on", "flashmla_auto", "fa3", False, 1, "with a BF16 cache and flashmla_auto, fa3 (supports flashmla_kv with FP8"),
        ("on", "flashmla_kv", "flashmla_kv", True, 4, "with an indexer that scores pools of keys"),
    ],
)
def test_what_is_not_combined_is_refused_in_words(
    setting: str, prefill: str, decode: str, fp8: bool, pools: int, words: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    monkeypatch.setenv(settings.ENV_HISPARSE, setting)
    caplog.set_level(logging.INFO, logger=settings.logger.name)
    built = fixture(DECODE)
    monkeypatch.setattr(built.backend, "hisparse_coordinator", object())
    for name, value in (("dsa_prefill_impl", prefill), ("dsa_decode_impl", decode), ("dsa_kv_cache_store_fp8", fp8)):
        monkeypatch.setattr(built.backend, name, value)
    monkeypatch.setattr(built.backend, "dsa_index_kpool", pools, raising=False)
    (found,) = model.refusals(built.backend, built.runner)
    assert found.startswith("HiSparse, a KV cache in host memory") and words in found
    with pytest.raises(InvalidArgument, match="SGLang: configuration: got HiSparse"):
        serving.attach(built.backend, built.runner)  # on a CPU nothing of SGLang's serves either
    if pools > 1:
        return  # SGLang's own do not serve them anywhere
    pretend(monkeypatch, H200)
    monkeypatch.setenv(settings.ENV_MODE, "on")
    assert serving.attach(built.backend, built.runner) is None and "SGLang's own kernels serve this model" in caplog.text


def test_the_log_says_that_it_is_experimental(monkeypatch: pytest.MonkeyPatch, caplog: Any):
    caplog.set_level(logging.INFO, logger=settings.logger.name)
    pretend(monkeypatch, A100)
    with hisparse():
        server = server_of(fixture(DECODE, fused=False, **SPARSE).backend)
    assert server is not None and server.prompts is None and "; HiSparse, experimental" in caplog.text
