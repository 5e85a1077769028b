# SPDX-License-Identifier: Apache-2.0
"""Iluvatar CoreX devices for mla_portable: the plugin.

Registers a detector, and an implementation for each row of `providers`. Importing this module and registering import
nothing of the vendor; `check` and `bind` do, on a device that the detector recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from mla_portable.contracts import (
    DeviceFacts,
    Implementation,
    Primitive,
    Reason,
    Registrar,
    Request,
    Variable,
    hookimpl,
)
from mla_portable_iluvatar.detection import OVERRIDE, is_override
from mla_portable_iluvatar.detector import detect
from mla_portable_iluvatar.native import not_native
from mla_portable_iluvatar.providers import PROVIDERS, Provider

__all__ = ["mla_portable_register"]

_BACKEND: Final = "iluvatar"


@dataclass(frozen=True, slots=True)
class _Served:
    """One provider for one primitive."""

    provider: Provider
    primitive: Primitive

    def check(self, device: DeviceFacts) -> Iterator[Reason]:
        """The op is there, takes the arguments that its convention passes, and is a kernel."""
        missing = tuple(self.provider.place.missing())
        yield from missing
        if not missing:
            trial = self.provider.trial(self.provider.place.find(), torch.device(device.device_type))
            yield from not_native(self.provider.place.attribute, trial)

    def bind(self, request: Request) -> Callable[..., Any]:
        return self.provider.bind(self.provider.place.find(), self.primitive)


@hookimpl
def mla_portable_register(registrar: Registrar) -> None:
    """Recognise the vendor's devices; offer every provider."""
    registrar.add_detector(detect)
    registrar.add_variable(Variable(OVERRIDE, "on, off, or an architecture such as ivcore11", is_override))
    for provider in PROVIDERS:
        for primitive in provider.primitives:
            served = _Served(provider, primitive)
            registrar.add(
                Implementation(
                    name=f"{_BACKEND}.{provider.variant}",
                    primitive=primitive,
                    support=provider.support[primitive],
                    bind=served.bind,
                    check=served.check,
                    preference=provider.preference,
                    sources=provider.sources,
                )
            )
