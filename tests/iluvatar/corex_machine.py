# SPDX-License-Identifier: Apache-2.0
"""A BI-V150 made of a CPU: its facts, the vendor's packages of each generation in sys.modules, registries on top.

The simulated part is the CPU itself under the vendor's name, so that checks, probes and whole steps really run on the
stand-ins; facts of a device that is not there would decide by declarations alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import corex_ops as ops
import machines

import mla_portable.reference
import mla_portable_iluvatar
from mla_portable.choose import Registry
from mla_portable.contracts import Registrar, hookimpl

Packages = Mapping[str, Callable[..., Any]]
"""Ops by "module:attribute"."""

BI_V150 = replace(machines.BI_V150, device_type="cpu", memory_bytes=0)
_KERNELS = "vllm_iluvatar.custom_kernels"
_MAP_PREFILL = "map_prefill_request_block_indices_to_global_blocks"
_LOGITS = "compute_block_sparse_mqa_logits"
_FUNCTIONS = "ixformer.inference.functions"

COREX_42: Packages = {
    f"{_FUNCTIONS}:vllm_concat_and_cache_mla": ops.vllm_concat_and_cache_mla,
    f"{_FUNCTIONS}:dsa_indexer_mqa_logits_with_blocks": ops.dsa_indexer_mqa_logits_with_blocks,
    f"{_FUNCTIONS}:dsa_update_topk_indices": ops.dsa_update_topk_indices,
    "vllm._custom_ops:dsa_convert_req_index_to_global_index": ops.dsa_convert_req_index_to_global_index,
    "vllm.v1.attention.ops.flashmla:flash_mla_sparse_prefill": ops.flash_mla_sparse_prefill,
}
COREX_45: Packages = {
    f"{_FUNCTIONS}:vllm_concat_and_cache_mla": ops.vllm_concat_and_cache_mla,
    f"{_FUNCTIONS}:dsa_indexer_mqa_logits_with_blocks": ops.dsa_indexer_mqa_logits_with_blocks,
    f"{_FUNCTIONS}:dsa_update_topk_indices": ops.dsa_update_topk_indices,
    f"{_KERNELS}.concat_and_cache_mla:concat_and_cache_mla": ops.concat_and_cache_mla,
    f"{_KERNELS}.{_LOGITS}.perf_impl:{_LOGITS}_perf": ops.compute_block_sparse_mqa_logits_perf,
    "ixtriturbo._C:ops.flash_mla_sparse_v2": ops.flash_mla_sparse_v2,
    f"{_KERNELS}.{_MAP_PREFILL}.perf_impl:{_MAP_PREFILL}_perf": ops.map_prefill_request_block_indices_to_global_blocks_perf,
}
GENERATIONS = {"corex 4.2": COREX_42, "corex 4.5": COREX_45}
NEWEST = COREX_45


@contextmanager
def installed(packages: Packages) -> Iterator[None]:
    """The packages in sys.modules, and nothing else of their top-level names."""
    tops = {place.partition(":")[0].partition(".")[0] for place in packages} | {
        "ixformer", "ixtriturbo", "vllm_iluvatar", "vllm",
    }  # fmt: skip
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in tops}
    for name in hidden:
        del sys.modules[name]
    try:
        _module("vllm")
        for place, op in packages.items():
            name, _, attribute = place.partition(":")
            *middle, last = attribute.split(".")
            owner: Any = _module(name, leaf=True)
            for part in middle:
                if not hasattr(owner, part):
                    setattr(owner, part, SimpleNamespace())
                owner = getattr(owner, part)
            setattr(owner, last, op)
        yield
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] in tops]:
            del sys.modules[name]
        sys.modules.update(hidden)


def _module(name: str, *, leaf: bool = False) -> ModuleType:
    """The stand-in module `name` and its parents, which are packages that have no other modules."""
    if name not in sys.modules:
        module = sys.modules[name] = ModuleType(name)
        if not leaf:
            module.__path__ = []
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(_module(parent), last, module)
    return sys.modules[name]


class Simulated:
    """A plugin whose detector says that the CPU is a BI-V150."""

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        registrar.add_detector(lambda device: BI_V150 if device.type == "cpu" else None)


def registry(*more: tuple[str, object], **options: Any) -> Registry:
    """A registry on the simulated BI-V150: the reference, the plugin, and what else is given."""
    plugins = [
        ("simulated", Simulated()), ("reference", mla_portable.reference), ("iluvatar", mla_portable_iluvatar), *more,
    ]  # fmt: skip
    return Registry(plugins=plugins, environ={}, **options)
