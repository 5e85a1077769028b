# SPDX-License-Identifier: Apache-2.0
"""A CPU that passes for a Hopper or Blackwell device, so that the stand-ins are checked, probed and judged like the kernels.

The plugin's own functions make the implementations; only their device type differs. What ships claims GPUs alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from machines import B200, H200

from mla_portable.choose import Registry
from mla_portable.contracts import DeviceFacts, Implementation, Primitive, Registrar, hookimpl
from mla_portable.judge.conformance import run_suite
from mla_portable_nvidia.flashmla import attention, discovery

FACTS = {
    arch: replace(facts, name=f"stand-in of {facts.name}", device_type="cpu", graph_capture=False)
    for arch, facts in (("sm90", H200), ("sm100", B200))
}


class StandInPlugin:
    """Implementations of the nvidia plugin, on a CPU with the facts of `arch`."""

    def __init__(self, arch: str, implementations: Iterable[Implementation]) -> None:
        self.arch, self.implementations = arch, tuple(implementations)

    def detect(self, device: torch.device) -> DeviceFacts | None:
        return FACTS[self.arch] if device.type == "cpu" else None

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        registrar.add_detector(self.detect)
        for implementation in self.implementations:
            registrar.add(implementation)


def registry(
    arch: str = "sm90", environ: dict[str, str] | None = None, *, offered: Iterable[Implementation] = (), **options
) -> Registry:
    """The reference and what is offered, on a CPU that passes for `arch`; knowing of no provider yet. Default: FlashMLA."""
    discovery.forget()
    offered = tuple(offered) or attention.attention_implementations(device_types=("cpu",), environ=environ or {})
    plugins = [("reference", "mla_portable.reference"), ("nvidia", StandInPlugin(arch, offered))]
    return Registry(plugins=plugins, environ={}, **options)


def conforms(machine: Registry, name: str, level: str, *primitives: Primitive) -> set[str]:
    """The suite at a level, every case of these primitives passed; the words of its cases."""
    report = run_suite(machine, name, device="cpu", level=level)
    wrong = [f"{r.case.id}: {r.status}: {r.message}" for r in report.results if r.status != "passed"]
    assert report.ok and not wrong and not report.unavailable, "\n".join(wrong[:5])
    assert {r.case.primitive for r in report.results} == set(primitives)
    return {word for r in report.results for word in r.case.params.words()}
