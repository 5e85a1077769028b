# SPDX-License-Identifier: Apache-2.0
"""The hook's name has a letter too few: pluggy alone would never call it."""

from __future__ import annotations

from fake_plugins import implementation
from mla_portable.contracts import Registrar, hookimpl


@hookimpl
def mla_portable_registr(registrar: Registrar) -> None:
    registrar.add(implementation("misspelled.v1"))
