# SPDX-License-Identifier: Apache-2.0
"""What is always there: slow, everywhere, everything."""

from __future__ import annotations

from fake_plugins import ANYWHERE, never_runs
from mla_portable.contracts import Implementation, Primitive, Registrar, hookimpl


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    for primitive in Primitive.all():
        registrar.add(Implementation("plain.torch", primitive, ANYWHERE, never_runs, preference=1000))
