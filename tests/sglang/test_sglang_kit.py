# SPDX-License-Identifier: Apache-2.0
"""SGLang's own cases of its DSA backend, through its real classes: every implementation, phase and cache that is hooked."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_kit import CASE, cases, fixture, judging, kit, run, server_of, small

from mla_portable.choose import Registry
from mla_portable.engines.common.routing import served_by
from mla_portable.engines.sglang import serving

CASES = cases()
TOPK = 16
PREFILLS = [name for name, case in CASES.items() if case.forward_mode.is_extend()]
DECODES = [name for name, case in CASES.items() if case.forward_mode.is_decode()]


@pytest.fixture(autouse=True)
def no_dense_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0")


@pytest.mark.parametrize("impl", ["flashmla_sparse", "flashmla_kv", "fa3"])
@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_bf16(name: str, impl: str):
    with judging() as judged:
        run(CASES[name], dsa_prefill_backend=impl)
    assert judged.kinds == ["prefill bf16" if max(CASES[name].extend_lens) > 1 else "decode bf16"]


@pytest.mark.parametrize("impl", ["flashmla_sparse", "flashmla_kv", "fa3"])
@pytest.mark.parametrize("name", DECODES)
def test_decode_bf16(name: str, impl: str):
    with judging() as judged:
        run(CASES[name], dsa_decode_backend=impl)
    assert judged.kinds == ["decode bf16"]


@pytest.mark.parametrize(
    ("impl", "layout"), [("flashmla_kv", "fp8_ds_mla"), ("flashmla_auto", "fp8_ds_mla"), ("flashmla_sparse", "bf16")]
)
def test_prefill_fp8(impl: str, layout: str):
    """With `flashmla_sparse` SGLang gathers rows in BF16, and slots are rows of those: of one request, its positions."""
    with judging() as judged:
        run(small(CASES["dsa_sparse_prefill_long_extend"]), dsa_prefill_backend=impl, fp8_kv_cache=True, index_topk=TOPK)
    assert judged.kinds == [f"prefill {layout}"]
    assert (judged.calls[0][1]["kv"].shape[0] == 13) == (impl == "flashmla_sparse")


@pytest.mark.parametrize("name", ["dsa_sparse_decode_flashmla_kv_topk", "dsa_sparse_decode_ragged_prefix"])
def test_decode_fp8(name: str):
    with judging() as judged:
        run(small(CASES[name]), dsa_decode_backend="flashmla_kv", fp8_kv_cache=True, index_topk=TOPK)
    assert judged.kinds == ["decode fp8_ds_mla"]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("mode", ["TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_speculative_decoding(mode: str, fp8: bool):
    case = replace(
        small(CASES["dsa_sparse_decode_ragged_prefix"]),
        name=f"dsa_sparse_{mode.lower()}",
        forward_mode=ForwardMode[mode],
        extend_lens=(3, 3, 3),
    )
    with judging() as judged:
        run(case, dsa_decode_backend="flashmla_kv", fp8_kv_cache=fp8, index_topk=TOPK)
    assert judged.kinds == ["decode fp8_ds_mla" if fp8 else "decode bf16"]
    assert judged.calls[0][1]["q"].shape[0] == 9


def test_lengths_are_given_where_sglang_knows_them():
    case = CASES["dsa_sparse_decode_ragged_prefix"]
    with judging() as judged:
        run(case, dsa_decode_backend="flashmla_kv")
    assert judged.calls[0][1]["lengths"].tolist() == [min(prefix + 1, 128) for prefix in case.prefix_lens]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_triton_s_kernels_serve(fp8: bool, monkeypatch: pytest.MonkeyPatch):
    registry = Registry(environ={"MLA_PORTABLE_BACKEND": "triton"}, probe=False)
    monkeypatch.setattr("mla_portable.attention.layer_registry.get_registry", lambda: registry)
    monkeypatch.setattr(serving, "_shared", functools.cache(dict))
    built = fixture(small(CASES["dsa_sparse_decode_short_prefix_padding"]), fp8_kv_cache=fp8, index_topk=TOPK)
    served = [served_by(each.route_decision) for each in server_of(built.backend).attentions]
    assert all(each == "sparse_decode triton.portable, sparse_prefill triton.portable" for each in served)
    with judging() as judged:
        kit.run_dsa_sparse_fixture_eager(built, CASE)
    assert judged.kinds == ["decode fp8_ds_mla" if fp8 else "decode bf16"]
