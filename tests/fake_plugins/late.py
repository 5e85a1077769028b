# SPDX-License-Identifier: Apache-2.0
"""Keeps the registrar and tries to register when it is used."""

from __future__ import annotations

from fake_plugins import implementation
from mla_portable.contracts import Registrar, hookimpl

KEPT: list[Registrar] = []


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    registrar.add(implementation("late.v1"))
    KEPT.append(registrar)
