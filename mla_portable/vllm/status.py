# SPDX-License-Identifier: Apache-2.0
"""The plugin's state without importing vLLM: vLLM's version, whether the plugin is registered, what it would choose."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Final

import torch

from mla_portable.attention.layer_registry import LayerRegistry
from mla_portable.engine.deepseek import choices, indexer_requests, scorer
from mla_portable.engine.entry import obstacle
from mla_portable.engine.routing import decide_route
from mla_portable.engine.status import EngineStatus, version_and_mode
from mla_portable.registry import Registry
from mla_portable.vllm import settings

_MEANING: Final = {
    "custom": "chosen with --attention-backend CUSTOM",
    "override": "in place of FLASHMLA_SPARSE, except for models that only stock serves",
    "auto": "chosen with --attention-backend CUSTOM, and where stock does not serve the device or the configuration",
}


def vllm_status(registry: Registry, device: torch.device, *, environ: Mapping[str, str] | None = None) -> EngineStatus:
    """What vLLM will find of the plugin, and what would serve DeepSeek-V3.2 on `device`. Raises nothing for a bad variable."""
    environ = os.environ if environ is None else environ
    found = version_and_mode("vllm", "vLLM", environ, mode=settings.mode, check=settings.check)
    if isinstance(found, EngineStatus):
        return found
    version, mode = found
    note = _obstacle(mode, environ)
    served = choices(partial(decide_route, registry, device=device))
    indexer = "" if note else _indexer(registry, device, environ)
    return EngineStatus(version, not note, mode, note or _MEANING[mode], served, indexer)


def _indexer(registry: Registry, device: torch.device, environ: Mapping[str, str]) -> str:
    """As vLLM will decide on this device, except that it also tries to import DeepGEMM."""
    mode, facts = settings.indexer(environ), registry.facts(device)
    if mode == "off" or (mode == "auto" and facts.device_type == "cpu"):
        return f"vLLM's ({settings.ENV_INDEXER}={mode})"
    demand = LayerRegistry(registry, None)
    decisions = [demand.decide(request) for request in indexer_requests(facts)]
    select, write = (f"{each.request.primitive} {each.chosen or 'by nothing'}" for each in decisions)
    ours = f"mla_portable's ({select}; keys written by vLLM's operator if it works, else {write})"
    return scorer(facts, ours=ours, theirs="vLLM's, with DeepGEMM", asked=f"{settings.ENV_INDEXER}=on" if mode == "on" else "")


def _obstacle(mode: str, environ: Mapping[str, str]) -> str:
    """Why vLLM does not get to see the backend, "" where it does."""
    if mode == "off":
        return f"{settings.ENV_MODE}=off"
    listed = environ.get("VLLM_PLUGINS")
    return obstacle("vllm.general_plugins", "VLLM_PLUGINS", None if listed is None else listed.split(","))
