# SPDX-License-Identifier: Apache-2.0
"""The hook wants an argument that nobody passes."""

from __future__ import annotations

from mla_portable.contracts import Registrar, hookimpl


@hookimpl
def mla_portable_register(registrar: Registrar, device: str) -> None:
    raise AssertionError(f"called with {device}")
