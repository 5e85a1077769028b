# SPDX-License-Identifier: Apache-2.0
"""An MI300X and an MI355X made of a CPU: their facts, AITER's stand-in in sys.modules, registries on top.

The simulated part is the CPU itself under AMD's name, so that checks, probes and whole layers really run on the stand-in.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import aiter_ops
import machines

import mla_portable.reference
import mla_portable_amd
from mla_portable.choose import Registry
from mla_portable.contracts import DeviceFacts, Registrar, hookimpl

OPERATIONS = {
    "aiter.mla": (aiter_ops.mla_decode_fwd,),
    "aiter.ops.triton.attention.pa_mqa_logits": (aiter_ops.deepgemm_fp8_paged_mqa_logits,),
    "aiter.ops.triton.attention.fp8_mqa_logits": (aiter_ops.fp8_mqa_logits,),
    "aiter.ops.topk": (aiter_ops.top_k_per_row_prefill,),
    "aiter.ops.cache": (aiter_ops.concat_and_cache_mla, aiter_ops.indexer_k_quant_and_cache),
}
DEVICES = {slug: machines.PROFILES[slug].device_facts() for slug in ("mi300x", "mi355x", "rx7900xtx")}
MI300X, MI355X = (replace(DEVICES[slug], device_type="cpu", memory_bytes=0) for slug in ("mi300x", "mi355x"))
MACHINES = {each.arch: each for each in (MI300X, MI355X)}


@contextmanager
def installed(arch: str = "gfx950", **operations: Any) -> Iterator[None]:
    """AITER's stand-in in sys.modules, on a device of this architecture, and nothing else of its name.

    operations: others by name, None for one that is not there.
    """
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "aiter"}
    for name in hidden:
        del sys.modules[name]
    before, aiter_ops.ARCH = aiter_ops.ARCH, arch
    try:
        for name, ops in OPERATIONS.items():
            module = _module(name)
            for op in ops:
                found = operations.get(op.__name__, op)
                if found is not None:
                    setattr(module, op.__name__, found)
        yield
    finally:
        aiter_ops.ARCH = before
        for name in [each for each in sys.modules if each.partition(".")[0] == "aiter"]:
            del sys.modules[name]
        sys.modules.update(hidden)


def _module(name: str) -> ModuleType:
    if name not in sys.modules:
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(_module(parent), last, module)
    return sys.modules[name]


class Simulated:
    """A plugin whose detector says that the CPU is one of AMD's devices."""

    def __init__(self, facts: DeviceFacts) -> None:
        self._facts = facts

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        registrar.add_detector(lambda device: self._facts if device.type == "cpu" else None)


def registry(arch: str = "gfx950", *more: tuple[str, object], **options: Any) -> Registry:
    """A registry on the simulated device: the reference, the plugin, and what else is given."""
    plugins = [
        ("simulated", Simulated(MACHINES[arch])), ("reference", mla_portable.reference), ("amd", mla_portable_amd), *more,
    ]  # fmt: skip
    return Registry(plugins=plugins, environ={}, **options)
