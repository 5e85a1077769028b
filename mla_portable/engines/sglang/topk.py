# SPDX-License-Identifier: Apache-2.0
# pyright: basic
"""SGLang 0.5.16's top-k on GPUs without clusters of blocks, which are those below SM90.

Its newer kernel, which also maps positions to slots, is compiled when the first batch is planned, and declares clusters: nvcc
refuses that below SM90. The older kernels of the package sgl_kernel have code for SM80. SGLang's own variable chooses between
them. In 0.5.23 the newer kernel leaves clusters out below SM90.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from mla_portable.contracts import DeviceFacts
from mla_portable.engines.sglang import settings

_WITH_CLUSTERS: Final = "sglang.jit_kernel"
"""The package of that kernel; later versions have another."""
_VARIABLE: Final = "SGLANG_OPT_USE_TOPK_V2"


def avoid_clusters(facts: DeviceFacts) -> None:
    """Choose the older kernels in this process where the newer one cannot be compiled, unless the variable is set.

    With MLA_PORTABLE_SGLANG_INDEXER=off nothing is changed.
    """
    if facts.vendor != "nvidia" or not facts.arch.startswith("sm8") or settings.indexer() == "off":
        return
    if find_spec(_WITH_CLUSTERS) is None:
        return
    variable: Any = getattr(import_module("sglang.srt.environ").envs, _VARIABLE)
    if not variable.is_set():
        variable.set(False)
        text = "mla_portable sets %s=0 because the kernel that it chooses in this SGLang has clusters, which %s lacks"
        settings.logger.info(text, _VARIABLE, facts.arch)
