# SPDX-License-Identifier: Apache-2.0
"""An Atlas A2 made of a CPU: its facts, the vendor's operations, a registry on top.

The simulated part is the CPU itself under the vendor's name, so that checks and probes really run on the stand-ins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mla_portable.reference
import mla_portable_ascend
from mla_portable.choose import Registry
from mla_portable.contracts import DeviceFacts, Registrar, hookimpl

A2 = DeviceFacts(vendor="ascend", name="Ascend910B3", arch="ascend910b", device_type="cpu", has_fp64=False)
A5 = replace(A2, name="Ascend950PR", arch="ascend950", has_fp8_conversion=True)


class Simulated:
    """A plugin whose detector says that the CPU is an Ascend device."""

    def __init__(self, facts: DeviceFacts) -> None:
        self.facts = facts

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        registrar.add_detector(lambda device: self.facts if device.type == "cpu" else None)


def registry(facts: DeviceFacts = A2, **options: Any) -> Registry:
    """A registry on the simulated device: the reference and the plugin."""
    plugins = [("simulated", Simulated(facts)), ("reference", mla_portable.reference), ("ascend", mla_portable_ascend)]
    return Registry(plugins=plugins, environ={}, **options)
