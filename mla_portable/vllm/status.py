# SPDX-License-Identifier: Apache-2.0
"""The plugin's state without importing vLLM: vLLM's version, whether the plugin is registered, what it would choose."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import product
from typing import Any, Final, NamedTuple

import torch

from mla_portable.attention import AttentionSpec
from mla_portable.attention.layer_registry import LayerRegistry
from mla_portable.contracts import InvalidArgument, Request
from mla_portable.primitives import INDEXER_CACHE_WRITE, INDEXER_SELECT
from mla_portable.registry import Registry
from mla_portable.vllm import settings
from mla_portable.vllm.routing import decide_route, served_by

_GROUP: Final = "vllm.general_plugins"
_ENTRY_POINT: Final = "mla_portable"
_HEADS: Final = (16, 128)
"""DeepSeek-V3.2's 128 query heads over eight ranks, and on one."""

DEEP_GEMM_ARCHS: Final = ("sm90", "sm10", "sm12")
"""What vLLM's platforms say of DeepGEMM: Hopper, and both families of Blackwell."""

_MEANING: Final = {
    "custom": "chosen with --attention-backend CUSTOM",
    "override": "in place of FLASHMLA_SPARSE, except for models that only stock serves",
    "auto": "chosen with --attention-backend CUSTOM, and where stock does not serve the device or the configuration",
}


class Choice(NamedTuple):
    """For DeepSeek-V3.2: the route and what serves each of its primitives; None and the reasons where nothing serves."""

    kv_layout: str
    num_heads: int
    route: str | None
    served_by: str


@dataclass(frozen=True, slots=True)
class VllmStatus:
    """The plugin as `doctor` sees it.

    Attributes:
        version: of vLLM, None where it is not installed. registered: vLLM will load the plugin. mode: as it takes effect.
        note: what stands in the way, or what the mode means here. choices: for each cache layout and heads of a rank.
        indexer: whose indexer vLLM would run, and what serves this one's primitives.
    """

    version: str | None
    registered: bool
    mode: str
    note: str
    choices: tuple[Choice, ...] = ()
    indexer: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "choices": [choice._asdict() for choice in self.choices]}


def vllm_status(registry: Registry, device: torch.device, *, environ: Mapping[str, str] | None = None) -> VllmStatus:
    """What vLLM will find of the plugin, and what would serve DeepSeek-V3.2 on `device`. Raises nothing for a bad variable."""
    environ = os.environ if environ is None else environ
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return VllmStatus(None, False, "off", "vLLM is not installed")
    try:
        mode = settings.mode(environ)
        if mode != "off":
            settings.check(environ)
    except InvalidArgument as error:
        return VllmStatus(version, False, "off", str(error))
    note = _obstacle(mode, environ)
    choices: list[Choice] = []
    for layout, heads in product(("fp8_ds_mla", "bf16"), _HEADS):
        limits: dict[str, Any] = {"max_num_tokens": 8192, "max_num_reqs": 256, "max_model_len": 163840}
        spec = AttentionSpec(num_heads=heads, softmax_scale=192**-0.5, kv_layout=layout, need_lse=False, **limits)
        decision = decide_route(registry, spec, device)
        choices.append(Choice(layout, heads, decision.chosen, served_by(decision)))
    indexer = "" if note else _indexer(registry, device, environ)
    return VllmStatus(version, not note, mode, note or _MEANING[mode], tuple(choices), indexer)


def _indexer(registry: Registry, device: torch.device, environ: Mapping[str, str]) -> str:
    """As vLLM will decide on this device, except that it also tries to import DeepGEMM."""
    mode, facts = settings.indexer(environ), registry.facts(device)
    if mode == "off" or (mode == "auto" and facts.device_type == "cpu"):
        return f"vLLM's ({settings.ENV_INDEXER}={mode})"
    layout: dict[str, Any] = {"kv_layout": "index_fp8", "block_size": 64}
    requests = (
        Request(INDEXER_SELECT, facts, num_heads=64, topk=2048, graph=True, **layout),
        Request(INDEXER_CACHE_WRITE, facts, scale_format="pow2", graph=True, **layout),
    )
    demand = LayerRegistry(registry, None)
    decisions = [demand.decide(request) for request in requests]
    select, write = (f"{each.request.primitive} {each.chosen or 'by nothing'}" for each in decisions)
    ours = f"mla_portable's ({select}; keys written by vLLM's operator if it works, else {write})"
    if mode == "on":
        return f"{ours}: {settings.ENV_INDEXER}=on"
    if facts.vendor == "nvidia" and facts.arch.startswith(DEEP_GEMM_ARCHS):
        return f"vLLM's, with DeepGEMM for {facts.arch}; where that cannot be imported, {ours}"
    return f"{ours}: DeepGEMM does not support {facts.arch}"


def _obstacle(mode: str, environ: Mapping[str, str]) -> str:
    """Why vLLM does not get to see the backend, "" where it does."""
    if mode == "off":
        return f"{settings.ENV_MODE}=off"
    if not any(point.name == _ENTRY_POINT for point in metadata.entry_points(group=_GROUP)):
        return f"no entry point {_ENTRY_POINT!r} in the group {_GROUP}: install mla-portable again"
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and _ENTRY_POINT not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} leaves {_ENTRY_POINT!r} out"
    return ""
