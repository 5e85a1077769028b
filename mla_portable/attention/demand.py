# SPDX-License-Identifier: Apache-2.0
"""Demand: the registry as a layer's builder sees it, through the backends that were demanded for the layer."""

from __future__ import annotations

from collections.abc import Mapping

from mla_portable.contracts import BoundPrimitive, Decision, Implementation, InvalidArgument, Primitive, Request
from mla_portable.registry import Registry
from mla_portable.registry.registry import check_backend

__all__ = ["BackendChoice", "Demand"]

BackendChoice = str | Mapping[str, str] | None
"""A backend for every primitive, or one for each primitive named; None lets the registry's policy decide."""


class Demand:
    """Asks the registry with the demanded backend of each primitive."""

    def __init__(self, registry: Registry, backend: BackendChoice) -> None:
        """Raises: InvalidArgument when a mapping names something that is no primitive, or a backend is no name."""
        self._registry = registry
        names = [primitive.value for primitive in Primitive]
        for name in backend if isinstance(backend, Mapping) else ():
            if name not in names:
                expected = f"keys among {', '.join(names)}"
                raise InvalidArgument("SparseMLAAttention", "backend", got=repr(name), expected=expected)
        for name in backend.values() if isinstance(backend, Mapping) else (backend,):
            check_backend(name, "SparseMLAAttention")
        self._backend = backend

    def _for(self, primitive: Primitive) -> str | None:
        if isinstance(self._backend, Mapping):
            return self._backend.get(primitive.value)
        return self._backend

    def decide(self, request: Request) -> Decision:
        """Who serves `request`, and why not the others."""
        return self._registry.decide(request, backend=self._for(request.primitive))

    def bind(self, request: Request) -> BoundPrimitive:
        """The callable that serves `request`. Raises: UnsupportedRequest."""
        return self._registry.bind(request, backend=self._for(request.primitive))

    def chosen(self, decision: Decision) -> Implementation | None:
        """The implementation that a decision chose, if it chose one."""
        offered = self._registry.implementations(decision.request.primitive)
        return next((found for found in offered if found.name == decision.chosen), None)

    def schedule_kind(self, decision: Decision) -> str:
        """What the chosen implementation of sparse_decode takes as a schedule; "none" without one."""
        found = self.chosen(decision)
        return found.schedule_kind if found else "none"
