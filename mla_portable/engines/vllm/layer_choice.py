# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""Whose layer stands around attention: vLLM's MultiHeadLatentAttentionWrapper, or ours in its place.

vLLM's PluggableLayer has a table of classes that take the place of its own. The worker enters ours right before it builds a
model, when every plugin has been loaded: an entry that another plugin or the platform made is left alone, and none of them
finds ours in its way. Nothing of vLLM is imported here before that.

Mode auto is vLLM's layer until times of both are on record.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, Final

from mla_portable.engines.vllm import settings

LAYER_PATH: Final = "mla_portable.engines.vllm.layer:MLAPortableLayer"
REPLACED: Final = "MultiHeadLatentAttentionWrapper"
TABLE: Final = "vllm.model_executor.custom_op"
NEEDS: Final = {
    TABLE: ("PluggableLayer", "op_registry_oot"),
    "vllm.model_executor.layers.mla": (REPLACED,),
    "vllm.model_executor.layers.attention.attention": ("get_attention_context",),
    "vllm.compilation.breakable_cudagraph": ("eager_break_during_capture",),
    "vllm.utils.torch_utils": ("LayerNameType", "_encode_layer_name", "_resolve_layer_name"),
}
"""Names without which our layer cannot be built; 0.26 to 0.33 have all of them. `doctor` looks for them."""
OWN_LAYER: Final = ("vllm.models.deepseek_v32.__init__", ("GlmMoeDsaForCausalLM",))
"""In 0.30 and later the models of DeepSeek-V3.2 and GLM-5 for CUDA are these, whose layer is no PluggableLayer. 0.28 has the
module, without this name, and serves the generic models."""
FUSED: Final = "vLLM's models of DeepSeek-V3.2 and GLM-5 for CUDA have a layer of their own here, which fuses the same steps"
NOT_TIMED: Final = "no times on record of both layers"
STOCK: Final = "vLLM's own layer around attention runs"


def against_mode(environ: Mapping[str, str] | None = None) -> str:
    """Why vLLM's layer is asked for, "" where ours is."""
    mode = settings.layer(environ)
    return "" if mode == "on" else f"{settings.ENV_LAYER}={mode}" + (f": {NOT_TIMED}" if mode == "auto" else "")


def lacks(missing: Iterable[str]) -> str:
    """In words, what keeps our layer out of an older vLLM."""
    return f"this vLLM lacks {', '.join(missing)} (0.26 and later have them)"


def offer(vllm_config: Any) -> None:
    """Enter our layer into vLLM's table where it is asked for; calling it again changes nothing."""
    settings.adopt(vllm_config.additional_config)
    if against_mode():
        return
    missing = [f"{module}.{name}" for module, names in NEEDS.items() for name in names if not _has(module, name)]
    if missing:
        log_stock(lacks(missing))
        return
    table: Any = import_module(TABLE)
    there = table.op_registry_oot.get(REPLACED)
    ours = getattr(there, "__module__", "").startswith("mla_portable.")
    if there is not None and not ours:
        log_stock(f"{there.__module__}.{there.__qualname__} was registered in its place")
    elif there is None:
        table.PluggableLayer.register_oot(name=REPLACED)(resolve_name(LAYER_PATH))


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(import_module(module), name)
    except ImportError:
        return False


@functools.cache
def log_stock(reason: str) -> None:
    """Say once for each reason that vLLM's layer runs. `doctor --engine` looks for the line."""
    settings.logger.warning("%s: %s", STOCK, reason)
