# SPDX-License-Identifier: Apache-2.0
"""A CPU that passes for a Hopper or Blackwell device, so that the stand-ins are checked, probed and judged like the kernels.

The plugin's own functions make the implementations; only their device type differs. What ships claims GPUs alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from machines import B200, H200

from mla_portable.contracts import DeviceFacts, Registrar, hookimpl
from mla_portable.registry import Registry
from mla_portable_nvidia import attention, discovery

FACTS = {
    arch: replace(facts, name=f"stand-in of {facts.name}", device_type="cpu", graph_capture=False)
    for arch, facts in (("sm90", H200), ("sm100", B200))
}


class StandInPlugin:
    """The nvidia plugin for a CPU with the facts of `arch`."""

    def __init__(self, arch: str = "sm90", environ: dict[str, str] | None = None) -> None:
        self.arch, self.environ = arch, environ or {}

    def detect(self, device: torch.device) -> DeviceFacts | None:
        return FACTS[self.arch] if device.type == "cpu" else None

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        registrar.add_detector(self.detect)
        for implementation in attention.attention_implementations(device_types=("cpu",), environ=self.environ):
            registrar.add(implementation)


def registry(arch: str = "sm90", environ: dict[str, str] | None = None, **options) -> Registry:
    """The reference and the plugin, on a CPU that passes for `arch`; knowing of no provider yet."""
    discovery.forget()
    plugins = [("reference", "mla_portable.reference"), ("nvidia", StandInPlugin(arch, environ))]
    return Registry(plugins=plugins, environ={}, **options)
