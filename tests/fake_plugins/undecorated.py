# SPDX-License-Identifier: Apache-2.0
"""The right function without @hookimpl."""

from __future__ import annotations

from fake_plugins import implementation
from mla_portable.contracts import Registrar


def mla_portable_register(registrar: Registrar) -> None:
    registrar.add(implementation("undecorated.v1"))
