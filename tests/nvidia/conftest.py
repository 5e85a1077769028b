# SPDX-License-Identifier: Apache-2.0
"""Stand-ins of vendors' kernels run on a CPU, between passes in torch."""

from __future__ import annotations

import pytest
from torch_passes import TorchPageLists, TorchPromptLse, TorchRowParts

from mla_portable_common.deep_gemm import index_pass_kernels
from mla_portable_common.deep_gemm.torch_passes import TorchIndexPasses
from mla_portable_common.flash_mla.torch_passes import TorchBoundary
from mla_portable_nvidia.fa3 import page_lists, prompt_lse
from mla_portable_nvidia.flashmla import row_parts
from mla_portable_nvidia.passes import boundary


@pytest.fixture(autouse=True)
def passes_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is bound has them; tests of the kernels have imported those before."""
    monkeypatch.setattr(boundary, "Boundary", TorchBoundary)
    monkeypatch.setattr(index_pass_kernels, "TritonIndexPasses", TorchIndexPasses)
    monkeypatch.setattr(page_lists, "PageLists", TorchPageLists)
    monkeypatch.setattr(prompt_lse, "PromptLse", TorchPromptLse)
    monkeypatch.setattr(row_parts, "RowParts", TorchRowParts)
