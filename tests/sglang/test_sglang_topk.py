# SPDX-License-Identifier: Apache-2.0
"""Whether SGLang's newer top-k is used where its kernel has clusters and the GPU has none."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from pathlib import Path

import pytest
import sglang
from machines import A100, H200, RTX_4090
from sglang_version import SELECTORS

from mla_portable.contracts import DeviceFacts
from mla_portable.engines.sglang import settings, topk

VARIABLE = "SGLANG_OPT_USE_TOPK_V2"
SOURCES = Path(sglang.__file__).parent / ("kernels/jit" if SELECTORS else "jit_kernel")


def uses_newer() -> bool:
    return getattr(import_module("sglang.srt.environ").envs, VARIABLE).get()


@pytest.mark.parametrize(
    ("facts", "given", "mode", "newer"),
    [
        (A100, None, "auto", SELECTORS),
        (RTX_4090, None, "auto", SELECTORS),
        (H200, None, "auto", True),
        (A100, "1", "auto", True),
        (A100, "0", "auto", False),
        (A100, None, "off", True),
    ],
)
def test_choice(facts: DeviceFacts, given: str | None, mode: str, newer: bool, monkeypatch: pytest.MonkeyPatch, caplog):
    caplog.set_level(logging.INFO, logger=settings.logger.name)
    monkeypatch.setenv(VARIABLE, given or "1")  # restored behind the test
    if given is None:
        del os.environ[VARIABLE]
    monkeypatch.setenv(settings.ENV_INDEXER, mode)
    topk.avoid_clusters(facts)
    assert uses_newer() is newer
    said = f"sets {VARIABLE}=0 because the kernel that it chooses in this SGLang has clusters, which {facts.arch} lacks"
    assert (said in caplog.text) == (not newer and given is None)


def test_the_kernel_s_clusters_are_where_the_choice_expects_them():
    """Declared for every architecture in 0.5.16, behind a condition later."""
    source = (SOURCES / "csrc" / "deepseek_v4" / "topk_v2.cuh").read_text()
    assert "__cluster_dims__" in source and ("SUPPORT_CLUSTER" in source) == SELECTORS
