# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportMissingImports=false
"""Which attention class a DeepSeek-V4 model is given.

vLLM asks no backend for these models, so there is nothing to register: `_select_dsv4_attn_cls` in the model's module names a
class, and that function is replaced. It still decides first. Where it names vLLM's FlashMLA class, and this plugin is asked
for, the model gets a class that is derived from the named one; nothing else of vLLM is changed.

Asked for: `--attention-backend CUSTOM` (or MLA_PORTABLE), and mode override unless another backend is named. Mode auto leaves
these models to vLLM: layers were compared and timed, no engine has run with them.
"""

from __future__ import annotations

import functools
import types
from typing import Any, Final

from mla_portable.contracts import InvalidArgument
from mla_portable.engines.vllm import settings
from mla_portable.engines.vllm.imports import when_imported

MODULES: Final = ("vllm.models.deepseek_v4.nvidia.model", "vllm.models.deepseek_v41.nvidia.model")
SELECT: Final = "_select_dsv4_attn_cls"
STOCK: Final = "DeepseekV4FlashMLAAttention"
OURS: Final = ("CUSTOM", "MLA_PORTABLE")
"""Members of vLLM's registry of backends that this plugin registers."""
AS_FAR_AS: Final = "vLLM serves DeepSeek-V4 here, as far as it can"
BELOW_SM90: Final = (
    "beside attention four parts of the model need compute capability 9.0: the broadcast of the hyper-connections "
    "(mhc_pre_broadcast_tilelang, DeepGEMM), the output projection (o_proj: fused_inv_rope_fp8_quant and fp8_einsum), the "
    "compressor (CuTeDSL) and the queries of the indexer (CuTeDSL)"
)
ON_SM12X: Final = f"vLLM takes its class on FlashInfer, ours takes the place of {STOCK} alone"
FORK: Final = "A fork that replaces these calls mla_portable.flash_mla for attention (docs/flash_mla.md)."


def install() -> None:
    """Prepare the replacement; calling it again changes nothing."""
    for name in MODULES:
        when_imported(name, replace_selection)


def replace_selection(module: Any) -> None:
    """Let the module's function choose between vLLM's classes and ours. A module without it is left alone, with a warning."""
    missing = [name for name in (SELECT, STOCK) if not hasattr(module, name)]
    if missing:
        text = "mla_portable leaves DeepSeek-V4 to vLLM: %s has no %s"
        settings.logger.warning(text, module.__name__, ", ".join(missing))
        return
    select = getattr(module, SELECT)

    @functools.wraps(select)
    def select_class(vllm_config: Any) -> Any:
        return choose(select(vllm_config), getattr(module, STOCK), vllm_config)

    setattr(module, SELECT, select_class)


def choose(named: Any, flash_mla: Any, vllm_config: Any) -> Any:
    """The class for a model.

    Args:
        named: what vLLM chose. flash_mla: its class on FlashMLA, the one that ours can be derived from.
    Raises: InvalidArgument where the plugin was asked for by name and cannot serve.
    """
    from mla_portable.engines.vllm import indexer_choice

    settings.adopt(vllm_config.additional_config)
    asked, too_old = asked_for(vllm_config), below_sm90(indexer_choice.capability())
    if asked is None:
        if too_old:
            _log_once(f"{AS_FAR_AS}: {BELOW_SM90}")
        return named
    reasons = obstacles(named, flash_mla, vllm_config)
    if not reasons:
        return derived(named)
    if asked in OURS:
        got, expected = f"{asked} for DeepSeek-V4: {'; '.join(reasons)}", "a configuration that mla_portable serves"
        raise InvalidArgument("vLLM", "attention_backend", got=got, expected=expected, remedy=FORK if too_old else "")
    _log_once(f"vLLM's {named.__name__} serves DeepSeek-V4, mla_portable does not: {'; '.join(reasons)}")
    return named


def asked_for(vllm_config: Any) -> str | None:
    """By what the plugin is asked to serve: the backend's name, or "override"; None where it is not."""
    backend = vllm_config.attention_config.backend
    if backend is not None and backend.name in OURS:
        return backend.name if backend.get_path().startswith("mla_portable.") else None
    replaced = backend is None or backend.name == "FLASHMLA_SPARSE"
    return "override" if replaced and settings.mode() == "override" else None


def obstacles(named: Any, flash_mla: Any, vllm_config: Any) -> list[str]:
    """Every reason why the plugin cannot serve a model for which vLLM chose `named`."""
    from mla_portable.engines.vllm import compat, indexer_choice

    found = against_device(indexer_choice.capability(), v41=".deepseek_v41." in flash_mla.__module__)
    if named is not flash_mla:
        found.append(f"vLLM chose {named.__name__}, ours takes the place of {STOCK} alone")
    if compat.runs_microbatches(vllm_config):
        found.append("microbatches (--enable-dbo): layers share their scratch")
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(vllm_config.parallel_config, name, 1) or 1
        if size > 1:
            found.append(f"{name} {size} (supports 1)")
    return found + against_route(settings.route())


def against_device(capability: tuple[int, int] | None, *, v41: bool) -> list[str]:
    """Every reason against GPUs of a CUDA compute capability, None where there is none. v41: for V4.1."""
    found: list[str] = []
    if below_sm90(capability):
        found.append(BELOW_SM90)
    if v41 and capability is not None and capability[0] == 10:
        found.append("V4.1's rows of 528 and 288 bytes on SM100 have no layout here")
    return found


def against_route(route: str) -> list[str]:
    """Why a route that was asked for cannot be taken."""
    return [] if route in ROUTES else [f"{settings.ENV_ROUTE}={route} (supports {', '.join(ROUTES)})"]


ROUTES: Final = ("auto", "direct", "split")
"""Of prompts: auto, in place, or gathered into BF16 rows by vLLM's own method."""


@functools.cache
def derived(stock: Any) -> Any:
    """The class for a model that would otherwise get `stock`."""
    from mla_portable.engines.vllm.v4.layer import ServedLayer

    name = f"MLAPortable{stock.__name__}"
    return types.new_class(name, (ServedLayer, stock), exec_body=lambda body: body.update(__module__=__name__))


def below_sm90(capability: tuple[int, int] | None) -> bool:
    """More than attention of DeepSeek-V4 does not run. capability: of CUDA, None where there is none."""
    return capability is not None and capability < (9, 0)


@functools.cache
def _log_once(line: str) -> None:
    """Each layer asks."""
    settings.logger.warning("%s", line)
