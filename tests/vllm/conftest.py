# SPDX-License-Identifier: Apache-2.0
"""These tests need vLLM itself (`ci/vllm` installs it and fails if any of them is missed); elsewhere they are not collected."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "ci" / "vllm_gpu"))  # shadow mode, the GPU kit's

FORM = os.environ.get("MLA_TEST_VLLM_FORM", "upstream")
"""`iluvatar`: layers as in that vendor's 0.17. `iluvatar-ops`: on stand-ins of its ops as well."""

try:
    metadata.version("vllm")
except metadata.PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True, scope="package")
def quick_backend() -> Iterator[None]:
    """What the plugin does with any backend is shown on the quick one; Triton's kernels have a test of their own."""
    from mla_portable.choose import reset_registry

    with ExitStack() as patches:
        if FORM != "iluvatar-ops":
            patches.enter_context(pytest.MonkeyPatch.context()).setenv("MLA_PORTABLE_BACKEND", "reference")
        reset_registry()
        if FORM != "upstream":
            import iluvatar_layer

            patches.enter_context(iluvatar_layer.layer())
        if FORM == "iluvatar-ops":
            patches.enter_context(iluvatar_layer.device())
        yield
    reset_registry()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch):
    for name in ("", "_CACHE_SCALES", "_CACHE_WRITER", "_INDEXER", "_LAYER", "_ROUTE"):
        monkeypatch.delenv(f"MLA_PORTABLE_VLLM{name}", raising=False)


@pytest.fixture(autouse=True)
def bf16_by_default():
    """As in vLLM's worker, where layers are built under the model's dtype."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)
