# SPDX-License-Identifier: Apache-2.0
"""Models without a rotary part (GLM-5.3-Flash): rows of 528 bytes and of BF16; an indexer that scores pools of keys."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from functools import partialmethod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_kit import cases, compare, fixture, judging, kit, run, server_of, small, without_rope

from mla_portable.choose import Registry
from mla_portable.engines.common.routing import served_by
from mla_portable.engines.sglang import seams, serving

CASES = {name: small(case) for name, case in cases().items()}
DECODE, EXTEND = CASES["dsa_sparse_decode_ragged_prefix"], CASES["dsa_sparse_prefill_long_extend"]
TOPK = 16


@pytest.fixture(autouse=True)
def nope(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0")
    with without_rope():
        yield


def test_the_pool_has_the_rows_of_the_layout():
    built = fixture(DECODE, fp8_kv_cache=True, index_topk=TOPK)
    assert built.runner.token_to_kv_pool.kv_buffer[0].shape[1:] == (1, 528)
    assert {each.spec.kv_layout for each in server_of(built.backend).attentions} == {"bf16_nope", "fp8_nope"}
    assert built.backend.flashmla_kv_format == "V32_NO_ROPE"


@pytest.mark.parametrize(
    ("impl", "fp8", "layout"),
    [
        ("flashmla_kv", True, "fp8_nope"),
        ("flashmla_auto", True, "fp8_nope"),
        ("flashmla_sparse", True, "bf16_nope"),
        ("flashmla_sparse", False, "bf16_nope"),
        ("flashmla_kv", False, "bf16_nope"),
        ("fa3", False, "bf16_nope"),
    ],
)
def test_extend(impl: str, fp8: bool, layout: str):
    """With `flashmla_sparse` and an FP8 pool SGLang gathers rows in BF16; slots are rows of those."""
    with judging() as judged:
        run(EXTEND, dsa_prefill_backend=impl, fp8_kv_cache=fp8, index_topk=TOPK)
    assert judged.kinds == [f"prefill {layout}"] and judged.calls[0][1]["q"].shape[-1] == 512
    assert (judged.calls[0][1]["kv"].shape[0] == 13) == (impl == "flashmla_sparse" and fp8)


@pytest.mark.parametrize(
    ("impl", "fp8"), [("flashmla_kv", True), ("flashmla_kv", False), ("flashmla_sparse", False), ("fa3", False)]
)
def test_decode(impl: str, fp8: bool):
    with judging() as judged:
        run(DECODE, dsa_decode_backend=impl, fp8_kv_cache=fp8, index_topk=TOPK)
    assert judged.kinds == [f"decode {'fp8' if fp8 else 'bf16'}_nope"]


@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_speculative_decoding(mode: str):
    case = replace(DECODE, name=f"dsa_sparse_{mode.lower()}", forward_mode=ForwardMode[mode], extend_lens=(3, 3, 3))
    with judging() as judged:
        run(case, dsa_decode_backend="flashmla_kv", fp8_kv_cache=True, index_topk=TOPK)
    assert judged.kinds == ["decode fp8_nope"] and judged.calls[0][1]["q"].shape == (9, 4, 512)


def test_triton_s_kernels_serve(monkeypatch: pytest.MonkeyPatch):
    registry = Registry(environ={"MLA_PORTABLE_BACKEND": "triton"}, probe=False)
    monkeypatch.setattr("mla_portable.attention.layer_registry.get_registry", lambda: registry)
    monkeypatch.setattr(serving, "_shared", functools.cache(dict))
    for case, kind in ((DECODE, "decode"), (EXTEND, "prefill")):
        built = fixture(case, fp8_kv_cache=True, index_topk=TOPK)
        served = [served_by(each.route_decision) for each in server_of(built.backend).attentions]
        assert all(each == "sparse_decode triton.portable, sparse_prefill triton.portable" for each in served)
        with judging() as judged:
            compare(built)
        assert judged.kinds == [f"{kind} fp8_nope"]


def test_prompts_take_the_sparse_route():
    assert server_of(fixture(EXTEND, fp8_kv_cache=True, index_topk=TOPK).backend).prompts is None


POOL = 4
"""Keys of which the indexer scores one mean."""


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's indexer scores pools of keys: lists have the keys behind the last whole pool beside the top-k."""
    config, rows = kit.TinyDSAModelConfig.__init__, kit._make_dsa_sparse_topk_rows

    def with_pools(self: Any, **named: Any) -> None:
        config(self, **named)
        self.hf_config.index_kpool = POOL

    monkeypatch.setattr(kit.TinyDSAModelConfig, "__init__", with_pools)
    monkeypatch.setattr(
        kit, "_make_dsa_sparse_topk_rows", lambda case, index_topk, pattern: rows(case, index_topk=index_topk + POOL - 1)
    )
    tensor = torch.tensor  # of plans, pinned, for which a CPU alone has no allocator
    monkeypatch.setattr(torch, "tensor", lambda *given, pin_memory=False, **named: tensor(*given, **named))
    monkeypatch.setattr(kit.DSATokenToKVPool, "__init__", partialmethod(kit.DSATokenToKVPool.__init__, index_kpool=POOL))


@pytest.mark.parametrize("case", [DECODE, EXTEND], ids=["decode", "extend"])
def test_lists_of_pools_of_keys(pooled: None, case: Any):
    """SGLang refuses flashmla_kv here; the lists are 3 slots wider than the top-k, and so are the schedules."""
    built = fixture(replace(case, page_size=64 * POOL), fp8_kv_cache=True, index_topk=TOPK)
    with judging() as judged:
        compare(built)
    kind = "prefill" if case is EXTEND else "decode"
    assert judged.kinds == [f"{kind} fp8_nope"] and judged.calls[0][1]["slots"].shape[1] == TOPK + POOL - 1
    setattr(built.backend, serving.LAYERS, None)
    with pytest.raises(NotImplementedError, match="index_kpool > 1 appends tail tokens"):
        built.backend._check_kpool_tail_backend(built.topk_indices, "flashmla_kv", "decode")


def test_methods_that_are_served_take_the_lists_of_an_indexer_of_pools(monkeypatch: pytest.MonkeyPatch):
    """Others are rerouted or refused by SGLang, as ever."""
    backend = fixture(DECODE, dsa_prefill_backend="flashmla_kv", dsa_decode_backend="flashmla_kv").backend
    monkeypatch.setattr(backend, "dsa_index_kpool", 4)
    monkeypatch.setattr(backend, "device_sm_major", 9)
    topk = torch.zeros(1, 19, dtype=torch.int32)
    assert server_of(backend).methods == {seams.KV}
    backend._check_kpool_tail_backend(topk, "flashmla_kv", "decode")
    assert backend._resolve_kpool_tail_backend(topk, "flashmla_sparse") == "fa3"
    with pytest.raises(NotImplementedError, match="index_kpool > 1"):
        backend._check_kpool_tail_backend(topk, "flashmla_sparse", "prefill")
    monkeypatch.setattr(backend, serving.LAYERS, SimpleNamespace(methods=frozenset({seams.SPARSE})))
    assert backend._resolve_kpool_tail_backend(topk, "flashmla_sparse") == "flashmla_sparse"
    backend._check_kpool_tail_backend(topk, "flashmla_sparse", "prefill")
    with pytest.raises(NotImplementedError, match="index_kpool > 1"):
        backend._check_kpool_tail_backend(topk, "flashmla_kv", "prefill")
