# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""Class paths that decide late: stock's backend or ours, for the device and the model of the process that asks.

vLLM's registry holds paths, and imports them only when a model chooses its attention, in the process that runs it. So
`mla_portable.engines.vllm.auto.FLASHMLA_SPARSE` costs nothing where it is registered, and looks at the device where there
is one.

    auto.<member>            mode auto: stock's class, ours where stock does not serve the device or the configuration
    auto.override_<member>   mode override: ours, stock's class where only stock serves the configuration
"""

from __future__ import annotations

import inspect
from pkgutil import resolve_name
from typing import Any, Final

from mla_portable.engines.vllm.settings import logger

PLACES: Final = ("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120")
"""Members of vLLM's registry that automatic selection tries for sparse MLA on CUDA devices: all but SM12x, and SM12x."""

OVERRIDE: Final = "override_"
"""Precedes the member's name in the paths of mode override."""


def stock_or_ours(member: str) -> Any:
    """The class for `member` in mode auto."""
    stock, reason = _stock(member)
    ours = _ours()
    if reason is None:
        reasons = _against_configuration(stock)
        if not reasons or _against_configuration(ours):
            return stock
        reason = "; ".join(reasons)
    logger.info("mla_portable serves in place of %s: %s", member, reason)
    return ours


def ours_or_stock(member: str) -> Any:
    """The class for `member` in mode override."""
    ours = _ours()
    reasons = _against_configuration(ours)
    stock, reason = _stock(member) if reasons else (None, None)
    if stock is None or reason is not None or _against_configuration(stock):
        return ours
    logger.warning("stock %s serves this model, mla_portable does not: %s", member, "; ".join(reasons))
    return stock


def _ours() -> Any:
    from mla_portable.engines.vllm.backend import MLAPortableBackend

    return MLAPortableBackend


def _stock(member: str) -> tuple[Any, str | None]:
    """The stock backend, and why it cannot serve this device, None where it can."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    try:
        stock: Any = resolve_name(":".join(AttentionBackendEnum[member].value.rsplit(".", 1)))
    except (ImportError, AttributeError) as error:
        return None, f"it cannot be imported ({error})"
    capability = current_platform.get_device_capability()
    if capability is None:
        return stock, "the platform names no compute capability"
    if not stock.supports_compute_capability(capability):
        return stock, f"it does not support compute capability {capability.major}.{capability.minor}"
    if stock.get_name() == "FLASHMLA_SPARSE":
        from vllm.v1.attention.ops import flashmla

        built, why = flashmla.is_flashmla_sparse_supported()
        return stock, None if built else str(why)
    return stock, None


def _against_configuration(backend: Any) -> list[str]:
    """Why `backend` cannot serve the sparse-MLA model of the configuration in force; empty where there is no such model."""
    from vllm.config import get_current_vllm_config_or_none

    from mla_portable.engines.vllm import compat

    config = get_current_vllm_config_or_none()
    if config is None or config.model_config is None or compat.topk(config) is None:
        return []
    known = inspect.signature(backend.validate_configuration).parameters
    given = {**compat.selection_arguments(config), "use_dcp": compat.context_ranks(config) > 1}
    arguments = {name: value for name, value in given.items() if name in known}
    try:
        reasons = list(backend.validate_configuration(**arguments))
        if (
            compat.context_ranks(config) > 1 and not backend.get_impl_cls().can_return_lse_for_decode
        ):  # 0.26 and 0.28 assert later
            reasons.append("it returns no lse, by which decode context parallelism merges")
        return reasons
    except ImportError as error:
        return [f"{type(error).__name__}: {error}"]


def __getattr__(name: str) -> Any:
    if name in PLACES:
        return stock_or_ours(name)
    if name.removeprefix(OVERRIDE) in PLACES:
        return ours_or_stock(name.removeprefix(OVERRIDE))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
