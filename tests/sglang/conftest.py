# SPDX-License-Identifier: Apache-2.0
"""These tests need SGLang itself (`ci/sglang` installs it and fails if any is missed); elsewhere they are not collected.

The plugin is loaded as SGLang loads it: by its entry point, in this process. SGLang's tensors lie on the CPU; its Triton
kernels run in the interpreter, and what only CUDA has is left out by its own variables.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

import pytest
import torch
from sglang_version import FUSED, SELECTORS, VERSION
from torch import Tensor


def allow_known_configs() -> None:
    """SGLang 0.5.16 registers configs that newer versions of transformers have by the same names."""
    from transformers import AutoConfig

    register = AutoConfig.register
    AutoConfig.register = staticmethod(lambda *args, **kwargs: register(*args, **{**kwargs, "exist_ok": True}))


def stand_in_for_torchvision() -> None:
    """SGLang's configs import it for models of images; its library needs the CUDA build of torch.

    After transformers, which would take it for the installed one.
    """
    for name in ("torchvision", "torchvision.io", "torchvision.transforms", "torchvision.transforms.functional"):
        module = MagicMock(name=name, __path__=[], __spec__=ModuleSpec(name, None, is_package=True))
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


if VERSION is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["SGLANG_DSA_FUSE_TOPK"] = str(int(FUSED))
    collect_ignore_glob = ["*_modules.py"] if SELECTORS else ["*_selectors.py", "*_nope.py", "*_key_pools.py"]
    os.environ["SGLANG_OPT_USE_TOPK_V2"] = "0"  # its plan is made by a CUDA kernel
    os.environ["MLA_PORTABLE_BACKEND"] = "reference"  # Triton's kernels have a test of their own
    allow_known_configs()
    stand_in_for_torchvision()


@pytest.fixture(autouse=True, scope="session")
def loaded_plugin() -> Iterator[None]:
    """SGLang with its plugins loaded, in front of whatever a test imports of it."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("torch.cuda.get_device_capability", lambda *args: (9, 0))
        from sglang.srt.plugins import load_plugins

        load_plugins()
        module = import_module("sglang.srt.layers.attention.dsa_backend")
        patches.setattr(module, "seqlens_expand_triton", expand_lengths)
        yield


def expand_lengths(extend_seq_lens: Tensor, seq_lens: Tensor, total_len: int, max_q_len: int) -> Tensor:
    """SGLang's function of this name, whose kernel is for CUDA tensors: the length that each query token sees."""
    pairs = zip(extend_seq_lens.tolist(), seq_lens.tolist(), strict=True)
    parts = [torch.arange(length - query + 1, length + 1) for query, length in pairs]
    return torch.cat(parts).clamp(min=0).to(torch.int32)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_portable.engines.sglang import index_codes, indexer, seams, serving

    for name in ("", "_INDEXER"):
        monkeypatch.delenv(f"MLA_PORTABLE_SGLANG{name}", raising=False)
    indexer.choice.cache_clear()
    serving._log_once.cache_clear()
    index_codes._log_once.cache_clear()
    for seam in seams.INDEX_KERNELS:  # what a test replaces is put back behind it
        module = sys.modules.get(seam.target.rpartition(".")[0])
        if module is not None and hasattr(module, seam.name):
            monkeypatch.setattr(module, seam.name, getattr(module, seam.name))
