# SPDX-License-Identifier: Apache-2.0
"""explain: which implementation would be chosen, with every reason, for a person or a script."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from mla_portable.contracts import Decision, DeviceFacts, InvalidArgument, Primitive, Request
from mla_portable.dispatch import current_registry

__all__ = ["explain"]


def explain(
    primitive: Primitive | str,
    *,
    device: torch.device | str | DeviceFacts | None = None,
    backend: str | None = None,
    **request_fields: Any,
) -> Decision:
    """Which implementation would be chosen for a primitive, and every reason against each of the others.

    Args:
        primitive: its name. device: where, or the facts of a device that is not here; None means the first accelerator,
            or the CPU where there is none.
        backend: as if it were forced. request_fields: of `mla_portable.contracts.Request`, e.g. num_heads=16.
    Returns: the Decision; print `.text()`. A request that nothing can serve is an answer here, not an error.
    Raises: InvalidArgument for an unknown primitive or field; UnknownBackend. May probe kernels; not graph-safe.
    """
    registry = current_registry()  # loads the plugins, which may bring primitives
    names = [str(each) for each in Primitive.all()]
    if primitive not in names:
        raise InvalidArgument("explain", "primitive", got=repr(primitive), expected=f"one of {', '.join(names)}")
    allowed = [field.name for field in fields(Request) if field.name not in ("primitive", "device", "configuration")]
    for name in request_fields:
        if name not in allowed:
            raise InvalidArgument("explain", name, got="an unknown field", expected=f"one of {', '.join(allowed)}")
    if device is None:
        device = registry.default_device()
    facts = device if isinstance(device, DeviceFacts) else registry.facts(device)
    request = Request(Primitive.named(primitive), facts, **request_fields)
    return registry.decide(request, backend=backend, thorough=True)
