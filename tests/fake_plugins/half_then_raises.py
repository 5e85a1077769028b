# SPDX-License-Identifier: Apache-2.0
"""Registers an implementation and a detector that claims everything, then fails."""

from __future__ import annotations

from fake_plugins import implementation
from mla_portable.contracts import DeviceFacts, Registrar, hookimpl


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    registrar.add(implementation("half_then_raises.v1", preference=0))
    registrar.add_detector(lambda device: DeviceFacts("half", "half", "half", device_type=device.type))
    raise OSError("the second half of the library is missing")
