# SPDX-License-Identifier: Apache-2.0
"""Primitive: one operation that implementations are chosen for, as a value.

A primitive is a string, its own name, so that it can be a key, a JSON value or an option as it is. Everything else that is
known of it is an attribute. Core primitives are in `mla_portable.primitives`, one module each; a plugin may bring its own.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Generic, TypeVar

__all__ = ["BoundPrimitive", "Primitive"]

BoundPrimitive = Callable[..., Any]
"""A callable of some primitive's Protocol, chosen and configured for one Request."""

F = TypeVar("F")
_CORE = "mla_portable.primitives"
_CORE_PROBLEMS = "mla_portable.problems"
_named: dict[str, Primitive[Any]] = {}


class Primitive(str, Generic[F]):
    """A primitive whose implementations are callables of type F, a Protocol.

    Attributes:
        facts: the Request fields that a call's arguments decide, in the order in which its argument check returns them.
        results: what a call returns, by name; empty for a call that writes to an argument.
        has_layout: `kv_layout` matters: it reads or writes the paged cache.
        module: where the value is, for pickling.
    """

    facts: tuple[str, ...]
    results: tuple[str, ...]
    has_layout: bool
    module: str
    _problems: str

    def __new__(
        cls,
        name: str,
        *,
        module: str,
        facts: tuple[str, ...] = (),
        results: tuple[str, ...] = (),
        has_layout: bool = False,
        problems: str = "",
    ) -> Primitive[F]:
        """Make the primitive and remember its name.

        Args:
            problems: the module whose PROBLEMS says how implementations are tried and judged; of a core primitive the one of
                its name in `mla_portable.problems`.
        Raises: ValueError for a name that another module has taken.
        """
        known = _named.get(name)
        if known is not None and known.module != module:
            raise ValueError(f"primitive {name!r} is defined in {known.module} already")
        self = super().__new__(cls, name)
        self.facts, self.results, self.has_layout, self.module = facts, results, has_layout, module
        self._problems = problems or (f"{_CORE_PROBLEMS}.{name}" if module.startswith(f"{_CORE}.") else "")
        _named[name] = self
        return self

    @property
    def problems(self) -> Any:
        """How implementations are tried and judged, a `mla_portable.problems.Problems` that is imported on first use; None
        where the primitive brings nothing."""
        return import_module(self._problems).PROBLEMS if self._problems else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (str(self), self.module)

    @staticmethod
    def all() -> tuple[Primitive[Any], ...]:
        """Every primitive of the core and of the plugins that were imported, the core's first."""
        import_module(_CORE)
        return tuple(_named.values())

    @staticmethod
    def named(name: str) -> Primitive[Any]:
        """The primitive of that name. Raises: ValueError."""
        for each in Primitive.all():
            if each == name:
                return each
        raise ValueError(f"{name!r} is no primitive; there are {', '.join(Primitive.all())}")


def _load(name: str, module: str) -> Primitive[Any]:
    import_module(module)
    return _named[name]
