# SPDX-License-Identifier: Apache-2.0
"""The plugin's state without importing SGLang: its version, whether its functions are those that are hooked, what serves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from mla_portable.attention.layer_registry import LayerRegistry
from mla_portable.choose import Registry
from mla_portable.contracts import EngineStatus, Request
from mla_portable.engines.common.routing import decide_route
from mla_portable.engines.common.scorer import scorer
from mla_portable.engines.common.status import choices, obstacle, version_and_mode
from mla_portable.engines.sglang import seams, settings
from mla_portable.models import DEEPSEEK_V32
from mla_portable.primitives import INDEXER_LOGITS, INDEXER_LOGITS_RAGGED

_GROUP = "sglang.srt.plugins"
_MEANING = {
    "on": "serves where it can, whatever SGLang's own kernels support",
    "auto": "serves where SGLang's own kernels do not support the device",
}


def sglang_status(registry: Registry, device: torch.device, *, environ: Mapping[str, str] | None = None) -> EngineStatus:
    """What SGLang will find of the plugin, and what would serve DeepSeek-V3.2 on `device`. A bad variable raises nothing."""
    environ = os.environ if environ is None else environ
    found = version_and_mode("sglang", "SGLang", environ, mode=settings.mode, check=settings.check)
    if isinstance(found, EngineStatus):
        return found
    version, mode = found
    note = _obstacle(mode, environ)

    if note:
        return EngineStatus(version, False, mode, note)
    served = choices(partial(decide_route, device=device, registry=registry, clean_slots=True))
    return EngineStatus(version, True, mode, _MEANING[mode], served, _indexer(registry, device, environ))


def _obstacle(mode: str, environ: Mapping[str, str]) -> str:
    """Why SGLang does not get to use the plugin, "" where it does."""
    if mode == "off":
        return f"{settings.ENV_MODE}=off"
    listed = environ.get("SGLANG_PLUGINS")
    allowed = [name.strip() for name in listed.split(",")] if listed else None  # an empty one lists nothing, and all load
    return obstacle(_GROUP, "SGLANG_PLUGINS", allowed) or "; ".join(changes())


def changes() -> list[str]:
    """The seams of the installed SGLang that are not as the plugin knows them; with any of them it hooks nothing."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return ["the package `sglang` cannot be found"]
    return list(seams.objections(seams.parameters_in(Path(next(iter(spec.submodule_search_locations))))))


def _indexer(registry: Registry, device: torch.device, environ: Mapping[str, str]) -> str:
    """As SGLang will decide on this device, except that it also tries to import DeepGEMM."""
    mode, facts = settings.indexer(environ), registry.facts(device)
    if mode == "off":
        return f"scored by SGLang's functions ({settings.ENV_INDEXER}=off)"
    demand = LayerRegistry(registry, None)
    common = {"kv_layout": "index_fp8", "num_heads": DEEPSEEK_V32.index_heads, "graph": True}
    requests = (
        Request(INDEXER_LOGITS, facts, **common, block_size=64, uniform_query_len=True, whole_tables=True),  # pyright: ignore[reportArgumentType]
        Request(INDEXER_LOGITS_RAGGED, facts, **common),  # pyright: ignore[reportArgumentType]
    )
    served = (f"{each.request.primitive} {each.chosen or 'by nothing'}" for each in map(demand.decide, requests))
    ours = f"scored by mla_portable's functions ({', '.join(served)})"
    return scorer(facts, ours=ours, theirs="scored by DeepGEMM", asked=f"{settings.ENV_INDEXER}=on" if mode == "on" else "")
