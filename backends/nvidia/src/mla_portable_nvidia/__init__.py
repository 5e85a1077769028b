# SPDX-License-Identifier: Apache-2.0
"""FlashMLA, FlashAttention 3 and DeepGEMM on NVIDIA Hopper and Blackwell for mla_portable: the plugin.

Importing it and registering look for no library and touch no device; `check` and `bind` do, when they are called.
"""

from __future__ import annotations

from importlib import resources

from mla_portable.contracts import Baseline, Registrar, Variable, hookimpl
from mla_portable_nvidia.deepgemm.implementations import deepgemm_implementations, select_implementations
from mla_portable_nvidia.fa3.masked_prefill import prompt_implementations
from mla_portable_nvidia.fa3.sparse_attention import fa3_implementations
from mla_portable_nvidia.flashmla.attention import attention_implementations
from mla_portable_nvidia.flashmla.discovery import LIBRARY_VARIABLE, PROVIDERS
from mla_portable_nvidia.flashmla.flat_decode import flat_implementations
from mla_portable_nvidia.flashmla.support import TRUNCATION_VARIABLE
from mla_portable_nvidia.machine import PROVIDER_VARIABLE
from mla_portable_nvidia.native.attention_sm80 import sm80_implementations
from mla_portable_nvidia.native.attention_sm90 import native_implementations
from mla_portable_nvidia.native.indexer_logits import indexer_implementations
from mla_portable_nvidia.native.masked_prefill import masked_prefill_implementations
from mla_portable_nvidia.native.pack_selection import pack_implementations
from mla_portable_nvidia.native.runtime.images import VARIABLE as CACHE_VARIABLE
from mla_portable_nvidia.native.topk_select import topk_implementations

__all__ = ["mla_portable_register"]


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    """Offer attention of FlashMLA and FlashAttention 3, the native kernels, DeepGEMM's scores."""
    for implementation in (
        *attention_implementations(),
        *flat_implementations(),
        *fa3_implementations(),
        *prompt_implementations(),
        *native_implementations(),
        *sm80_implementations(),
        *topk_implementations(),
        *indexer_implementations(),
        *pack_implementations(),
        *masked_prefill_implementations(),
        *deepgemm_implementations(),
        *select_implementations(),
    ):
        registrar.add(implementation)
    registrar.add_costs(resources.files(__name__) / "costs")
    registrar.add_baselines(_baselines)
    registrar.add_variable(Variable(PROVIDER_VARIABLE, f"one of {', '.join(PROVIDERS)}", lambda value: value in PROVIDERS))
    registrar.add_variable(Variable(LIBRARY_VARIABLE, "the path of a shared library"))
    registrar.add_variable(Variable.choice(TRUNCATION_VARIABLE, "allow"))
    registrar.add_variable(Variable(CACHE_VARIABLE, "the path of a folder, or off"))


def _baselines() -> list[Baseline]:
    """FlashMLA, FlashAttention 3, DeepGEMM and vLLM's top-k, called directly."""
    from mla_portable_nvidia.baselines.attention import baselines
    from mla_portable_nvidia.baselines.indexer import indexer_baselines

    return [*baselines(), *indexer_baselines()]
