# SPDX-License-Identifier: Apache-2.0
"""The plugin's state without importing vLLM: vLLM's version, whether the plugin is registered, what it would choose."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

from mla_portable.attention import RouteDecision
from mla_portable.attention.layer_registry import LayerRegistry
from mla_portable.choose import Registry
from mla_portable.contracts import DeviceFacts, EngineStatus
from mla_portable.engines.common.asked import indexer_requests, layer_requests, v4_layer_spec
from mla_portable.engines.common.routing import decide_route, in_words, pairs, route_pairs, served_by
from mla_portable.engines.common.scorer import deep_gemm_serves, own_indexer, scorer
from mla_portable.engines.common.status import choices, obstacle, version_and_mode
from mla_portable.engines.vllm import indexer_seams, layer_choice, settings
from mla_portable.engines.vllm.v4 import choice as v4
from mla_portable.models import DEEPSEEK_V4
from mla_portable.primitives import SPARSE_DECODE
from mla_portable.times.selection import selection_times

_MEANING: Final = {
    "custom": "chosen with --attention-backend CUSTOM",
    "override": "in place of FLASHMLA_SPARSE, except for models that only stock serves",
    "auto": "chosen with --attention-backend CUSTOM, and where stock does not serve the device or the configuration",
}
_V4_ON_REQUEST: Final = "vLLM's; mla_portable's with --attention-backend CUSTOM, or in mode override"


def vllm_status(registry: Registry, device: torch.device, *, environ: Mapping[str, str] | None = None) -> EngineStatus:
    """What vLLM will find of the plugin, and what would serve DeepSeek-V3.2 on `device`. Raises nothing for a bad variable."""
    environ = os.environ if environ is None else environ
    found = version_and_mode("vllm", "vLLM", environ, mode=settings.mode, check=settings.check)
    if isinstance(found, EngineStatus):
        return found
    version, mode = found
    note = _obstacle(mode, environ)
    served = choices(partial(decide_route, device=device, registry=registry))
    indexer = "" if note else _indexer(registry, device, environ, version)
    models = () if note else _deepseek_v4(registry, device, settings.route(environ), mode)
    layer = "" if note else _layer(registry, device, environ)
    return EngineStatus(version, not note, mode, note or _MEANING[mode], served, indexer, models, layer)


def _layer(registry: Registry, device: torch.device, environ: Mapping[str, str]) -> str:
    """As vLLM will decide in a process that builds a model, except for what the model itself has."""
    against = layer_choice.against_mode(environ)
    if against:
        return f"vLLM's: {against}"
    lacking = [words for module, names in layer_choice.NEEDS.items() for words in _lacking(module, names)]
    if lacking:
        return f"vLLM's: {layer_choice.lacks(lacking)}"
    demand = LayerRegistry(registry, None)
    decisions = [demand.decide(request) for request in layer_requests(registry.facts(device))]
    unserved = next((each for each in decisions if each.chosen is None), None)
    if unserved is not None:
        return f"vLLM's: nothing here serves {unserved.request.primitive}"
    words = f"mla_portable's ({in_words(pairs(decisions))}) where a model has vLLM's {layer_choice.REPLACED}"
    fuses = _capability(registry.facts(device)) is not None and not _lacking(*layer_choice.OWN_LAYER)
    return f"{words}; {layer_choice.FUSED}" if fuses else words


def _indexer(registry: Registry, device: torch.device, environ: Mapping[str, str], version: str) -> str:
    """As vLLM will decide on this device, except that it also tries to import DeepGEMM."""
    mode, facts = settings.indexer(environ), registry.facts(device)
    if mode == "off" or (mode == "auto" and facts.device_type == "cpu"):
        return f"vLLM's ({settings.ENV_INDEXER}={mode})"
    lacking = [words for name in indexer_seams.OPERATOR for words in _lacking(name, indexer_seams.SEAMS[name].needs)]
    if lacking:
        since = f"(it is {version}; 0.24 is the first that has it)"
        return f"vLLM's: mla_portable's needs what this vLLM lacks, {', '.join(lacking)} {since}"
    own = own_indexer(facts)
    if mode == "auto" and own and not deep_gemm_serves(facts):
        return f"vLLM's: {own}"
    demand = LayerRegistry(registry, None)
    decisions = [demand.decide(request) for request in indexer_requests(facts)]
    select, write = (f"{each.request.primitive} {each.chosen or 'by nothing'}" for each in decisions)
    ours = f"mla_portable's ({select}; keys written by vLLM's operator if it works, else {write})"
    asked, divided = f"{settings.ENV_INDEXER}=on" if mode == "on" else "", ""
    if not asked and deep_gemm_serves(facts):
        select_by = decisions[0].chosen
        if environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
            asked = "VLLM_BATCH_INVARIANT is set"
        elif select_by is not None:
            files, request = registry.times_files, decisions[0].request
            times = selection_times(files, request, select_by, settings.INDEXER_IN_TIMES)
            divided = f"; in decodes mla_portable's where it takes less time ({times.text})" if times else ""
    return scorer(facts, ours=ours, theirs="vLLM's, with DeepGEMM", asked=asked) + divided


def _deepseek_v4(registry: Registry, device: torch.device, route: str, mode: str) -> tuple[tuple[str, str], ...]:
    """Whose attention DeepSeek-V4's layers get, and why; empty where vLLM would not choose among classes for CUDA."""
    facts = registry.facts(device)
    capability = _capability(facts)
    if capability is None or any(_lacking(v4.MODULES[0], (v4.SELECT, v4.STOCK))):
        return ()
    if v4.below_sm90(capability):
        return (("DeepSeek-V4", f"{v4.AS_FAR_AS}: {v4.BELOW_SM90}. {v4.FORK}"),)
    if capability[0] == 12:
        return (("DeepSeek-V4", v4.ON_SM12X),)
    asked = f"mla_portable's ({settings.ENV_MODE}=override)" if mode == "override" else _V4_ON_REQUEST
    specs = ((heads, v4_layer_spec(heads)) for heads in DEEPSEEK_V4.rank_heads)
    decided = ((heads, decide_route(spec, device, registry=registry, clean_slots=False)) for heads, spec in specs)
    served = "; ".join(f"{heads} heads per GPU: {_decode(decision)}" for heads, decision in decided)
    against = v4.against_route(route)
    words = f"vLLM's, mla_portable does not serve it: {against[0]}" if against else f"{asked}; {served}"
    newer = v4.against_device(capability, v41=True)
    return (("DeepSeek-V4", words), *(("DeepSeek-V4.1", f"vLLM's, mla_portable does not serve it: {each}") for each in newer))


def _lacking(module: str, names: tuple[str, ...]) -> list[str]:
    """What a module of the installed vLLM lacks of `names`; the module itself where there is none. It is not imported.

    The same names that decide when vLLM imports it. A module without a source cannot be looked at, and lacks nothing.
    """
    spec = find_spec("vllm")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        path = Path(folder, *module.split(".")[1:])
        source = path.with_suffix(".py")
        if source.is_file():
            known = set(_defined(ast.parse(source.read_text(encoding="utf-8")).body))
            return [f"{module}.{name}" for name in names if name not in known]
        if any(path.parent.glob(f"{path.name}.*")):
            return []
    return [module]


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    """The names that statements of a module define, in branches too."""
    for each in body:
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield each.name
        elif isinstance(each, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in each.names)
        elif isinstance(each, (ast.Assign, ast.AnnAssign)):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(each, (ast.If, ast.Try, ast.With)):
            yield from _defined([*each.body, *getattr(each, "orelse", ())])


def _decode(decision: RouteDecision) -> str:
    """What serves decodes; whether prompts are read in place depends on more (docs/vllm.md)."""
    if decision.chosen is None:
        return served_by(decision)
    return ", ".join(f"{name} {by}" for name, by in route_pairs(decision) if name == str(SPARSE_DECODE))


def _capability(facts: DeviceFacts) -> tuple[int, int] | None:
    """The CUDA compute capability of an NVIDIA architecture's name."""
    number = facts.arch.removeprefix("sm") if facts.vendor == "nvidia" else ""
    return divmod(int(number), 10) if number.isdigit() else None


def _obstacle(mode: str, environ: Mapping[str, str]) -> str:
    """Why vLLM does not get to see the backend, "" where it does."""
    if mode == "off":
        return f"{settings.ENV_MODE}=off"
    listed = environ.get("VLLM_PLUGINS")
    return obstacle("vllm.general_plugins", "VLLM_PLUGINS", None if listed is None else listed.split(","))
