# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""What SGLang's own kernels can serve: by the device, and by the libraries that are there."""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from mla_portable.contracts import DeviceFacts
from mla_portable.engines.common.scorer import DEEP_GEMM_ARCHS
from mla_portable.engines.sglang.seams import FA3, KV, SPARSE

_FLASHMLA_ARCHS: Final = ("sm90", "sm10")
"""FlashMLA: "only supported on SM90a and SM100f"."""
_FA3_ARCHS: Final = ("sm90",)
"""FlashAttention 3 in sgl-kernel."""


def against_attention(method: str, facts: DeviceFacts, num_heads: int, *, pools: bool = False, fp8: bool = False) -> str | None:
    """Why SGLang's own `method` cannot serve layers of so many heads on a device, None where it can.

    pools: the indexer scores pools of keys. `_check_kpool_tail_backend` refuses FlashMLA then, but in the place of
    flashmla_sparse it calls FlashAttention 3 on SM90 and TRT-LLM on SM10x, which read no FP8 rows with scales.
    fp8: the cache has such rows.
    """
    if pools and method == KV:
        return "SGLang does not let flashmla_kv serve an indexer that scores pools of keys"
    if pools and method == SPARSE and _is(facts, _FLASHMLA_ARCHS):
        return "what SGLang calls for an indexer that scores pools of keys reads no FP8 rows with scales" if fp8 else None
    if method == FA3:
        return None if _is(facts, _FA3_ARCHS) else f"FlashAttention 3 does not support {facts.arch}"
    if not _is(facts, _FLASHMLA_ARCHS):
        return f"FlashMLA does not support {facts.arch}"
    missing = _import_error(_flashmla_module())
    if missing is not None:
        return f"FlashMLA cannot be imported ({missing})"
    padded = 128 if facts.arch.startswith("sm10") else 64
    if method == SPARSE and num_heads % padded and padded % num_heads:
        return f"FlashMLA pads heads to {padded}, which {num_heads} do not divide"
    return None


def against_e4m3_in_triton(facts: DeviceFacts) -> str | None:
    """Why SGLang's Triton kernels cannot convert e4m3 on a device, None where they can.

    They write and gather the rows of an FP8 cache, and quantise for the indexer.
    """
    if facts.vendor == "nvidia" and not facts.has_fp8_conversion:
        return f"Triton does not convert e4m3 on {facts.arch}"
    return None


def against_deep_gemm(facts: DeviceFacts) -> str | None:
    """Why DeepGEMM cannot score the indexer's keys on a device, None where it can."""
    if not _is(facts, DEEP_GEMM_ARCHS):
        return f"DeepGEMM does not support {facts.arch}"
    missing = _import_error("deep_gemm")
    return None if missing is None else f"DeepGEMM cannot be imported ({missing})"


def _is(facts: DeviceFacts, archs: tuple[str, ...]) -> bool:
    return facts.vendor == "nvidia" and facts.arch.startswith(archs)


def _flashmla_module() -> str:
    """What SGLang takes FlashMLA from: a module of its own over sgl-flash-mla, sgl_kernel's up to 0.5.16."""
    name = "sglang.kernels.ops.attention.flash_mla_interface"
    try:
        return name if find_spec(name) is not None else "sgl_kernel.flash_mla"
    except ModuleNotFoundError:  # of a package above it
        return "sgl_kernel.flash_mla"


@functools.cache
def _import_error(module: str) -> str | None:
    try:
        import_module(module)
    except (ImportError, OSError) as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return None
