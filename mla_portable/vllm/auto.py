# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""A class path that decides late: stock's backend where it serves the device, else ours.

vLLM's registry holds paths, and imports them only when a model chooses its attention, in the process that runs it. So
`mla_portable.vllm.auto.FLASHMLA_SPARSE` costs nothing where it is registered, and looks at the device where there is one.
"""

from __future__ import annotations

from typing import Any, Final

from mla_portable.vllm.settings import logger

__all__ = ["PLACES", "stock_or_ours"]

PLACES: Final = ("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120")
"""Members of vLLM's registry that automatic selection tries for sparse MLA on CUDA devices: all but SM12x, and SM12x."""


def stock_or_ours(member: str) -> Any:
    """The backend class that serves `member` on the device of this process."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    reason = _against_stock(AttentionBackendEnum[member].value)
    if reason is None:
        return _resolve(AttentionBackendEnum[member].value)
    from mla_portable.vllm.backend import MLAPortableBackend

    logger.info("mla_portable stands in for %s: %s", member, reason)
    return MLAPortableBackend


def _resolve(path: str) -> Any:
    from importlib import import_module

    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _against_stock(path: str) -> str | None:
    """Why the stock backend cannot serve this device, None where it can."""
    from vllm.platforms import current_platform

    try:
        stock = _resolve(path)
    except (ImportError, AttributeError) as error:
        return f"it cannot be imported ({error})"
    capability = current_platform.get_device_capability()
    if capability is None:
        return "the platform names no compute capability"
    if not stock.supports_compute_capability(capability):
        return f"it does not support compute capability {capability.major}.{capability.minor}"
    if stock.get_name() == "FLASHMLA_SPARSE":
        from vllm.v1.attention.ops import flashmla

        built, why = flashmla.is_flashmla_sparse_supported()
        return None if built else str(why)
    return None


def __getattr__(name: str) -> Any:
    if name in PLACES:
        return stock_or_ours(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
