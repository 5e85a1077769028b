# SPDX-License-Identifier: Apache-2.0
"""SGLang 0.5.16 calls DeepGEMM by its module's name."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
from machines import A100, H200
from sglang_kit import pretend_for_indexer

from mla_portable import deep_gemm
from mla_portable.engines.sglang import indexer, seams


def test_modules_that_call_deep_gemm_by_its_name(monkeypatch: pytest.MonkeyPatch):
    for name in seams.DEEP_GEMM_USERS:
        module = import_module(name)
        assert isinstance(module.deep_gemm, indexer.LateDeepGemm)
        indexer.choice.cache_clear()
        pretend_for_indexer(monkeypatch, A100)
        assert module.deep_gemm.fp8_mqa_logits is deep_gemm.fp8_mqa_logits
        assert module.deep_gemm.get_num_sms() == deep_gemm.get_num_sms()
        indexer.choice.cache_clear()
        pretend_for_indexer(monkeypatch, H200)
        monkeypatch.setattr(module.deep_gemm, "_theirs", SimpleNamespace(fp8_mqa_logits="stock", other="other"))
        assert module.deep_gemm.fp8_mqa_logits == "stock" and module.deep_gemm.other == "other"
    indexer.replace_modules(seams.DEEP_GEMM_USERS)
    assert not isinstance(module.deep_gemm._theirs, indexer.LateDeepGemm)
