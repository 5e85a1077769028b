# SPDX-License-Identifier: Apache-2.0
"""One implementation, offered twice."""

from __future__ import annotations

from fake_plugins import implementation
from mla_portable.contracts import Registrar, hookimpl


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    registrar.add(implementation("registers_twice.v1"))
    registrar.add(implementation("registers_twice.v1", preference=1))
