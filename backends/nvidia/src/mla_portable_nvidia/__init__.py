# SPDX-License-Identifier: Apache-2.0
"""FlashMLA on NVIDIA Hopper and Blackwell for mla_portable: the plugin.

Importing it and registering look for no library and touch no device; `check` and `bind` do, when they are called.
"""

from __future__ import annotations

from mla_portable.contracts import Registrar, hookimpl
from mla_portable_nvidia.attention import attention_implementations
from mla_portable_nvidia.vllm_ops import data_implementations

__all__ = ["mla_portable_register"]


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    """Offer FlashMLA's attention for SM90 and SM100, and vLLM's operators for the data around it."""
    for implementation in (*attention_implementations(), *data_implementations()):
        registrar.add(implementation)
