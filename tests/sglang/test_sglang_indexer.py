# SPDX-License-Identifier: Apache-2.0
"""Whose functions score the indexer's keys, and why."""

from __future__ import annotations

import pytest
from machines import A100, H200
from sglang_kit import pretend_for_indexer

from mla_portable.engines.sglang import indexer, settings


@pytest.mark.parametrize(
    ("facts", "installed", "mode", "environ", "ours", "words"),
    [
        (A100, True, "auto", {}, True, "DeepGEMM does not support sm80"),
        (H200, True, "auto", {}, False, "DeepGEMM serves sm90"),
        (H200, False, "auto", {}, True, "DeepGEMM cannot be imported (No module named 'deep_gemm')"),
        (H200, True, "on", {}, True, "MLA_PORTABLE_SGLANG_INDEXER=on"),
        (A100, True, "off", {}, False, "MLA_PORTABLE_SGLANG_INDEXER=off"),
        (A100, True, "auto", {indexer.TORCH_FUNCTIONS: "1"}, False, "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH is set"),
    ],
)
def test_whose_functions_score(facts, installed, mode, environ, ours, words, monkeypatch: pytest.MonkeyPatch, caplog):
    caplog.set_level("INFO", logger=settings.logger.name)
    pretend_for_indexer(monkeypatch, facts, installed=installed)
    monkeypatch.setenv(settings.ENV_INDEXER, mode)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert indexer.choice() == (ours, words)
    assert f"scored by {'mla_portable' if ours else 'SGLang'}'s functions because {words}" in caplog.text
