# SPDX-License-Identifier: Apache-2.0
"""Gives up silently because its library is not there."""

from __future__ import annotations

from mla_portable.contracts import Registrar, hookimpl


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    return
