# SPDX-License-Identifier: Apache-2.0
"""Primitive: one operation that implementations are chosen for, as a value.

A primitive is a string, its own name, so that it can be a key, a JSON value or an option as it is. Everything else that is
known of it is an attribute. Core primitives are in `mla_portable.primitives`, one module each; a plugin may bring its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic

from mla_portable.features import Promises
from mla_portable.layouts import layout_names

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    F = TypeVar("F", default=Any)
else:
    from typing import TypeVar

    F = TypeVar("F")

_CORE = "mla_portable.primitives"
_CORE_PROBLEMS = "mla_portable.judge.problems"
_named: dict[str, Primitive[Any]] = {}


class Primitive(str, Generic[F]):
    """A primitive whose implementations are callables of type F, a Protocol.

    `Request[F]` and `Implementation[F]` carry the Protocol on, so that a type checker follows a call to the function that a
    plugin registered. Without an argument each of the three stands for any primitive.

    Attributes:
        module: where the value is, for pickling.
        facts: the Request fields that a call's arguments decide, as the named tuple has them that its argument check returns.
        stated: further Request fields that affect a choice, which only the caller knows.
        typical: values of those fields that an explanation starts from, where they differ from other primitives'.
        results: what a call returns, by name; empty for a call that writes to an argument.
        cache: the paged cache that it reads or writes, KV or INDEX of `mla_portable.layouts`; "" for none.
        reference: the primitive in plain torch, on any device; None where a plugin registers its own. Where there is a cache,
            it takes a keyword more, kv_layout: the name of the cache's layout, None to infer it.
        reference_float32: the same in float32, for devices whose float64 cannot be trusted; None where that is no other.
        problems_module: the module whose PROBLEMS are `problems`; "" for none.
    """

    module: str
    facts: tuple[str, ...]
    stated: tuple[str, ...]
    typical: Mapping[str, Any]
    results: tuple[str, ...]
    cache: str
    reference: F | None
    reference_float32: F | None
    problems_module: str

    def __new__(
        cls,
        name: str,
        *,
        module: str,
        facts: tuple[str, ...] = (),
        stated: tuple[str, ...] = (),
        typical: Mapping[str, Any] | None = None,
        results: tuple[str, ...] = (),
        cache: str = "",
        reference: F | None = None,
        reference_float32: F | None = None,
        problems: str = "",
    ) -> Primitive[F]:
        """Make the primitive and remember its name.

        Args:
            problems: the module whose PROBLEMS says how implementations are tried and judged; of a core primitive the one of
                its name in `mla_portable.judge.problems`.
        Raises: ValueError for a name that another module has taken.
        """
        known = _named.get(name)
        if known is not None and known.module != module:
            raise ValueError(f"primitive {name!r} is defined in {known.module} already")
        self = super().__new__(cls, name)
        self.module, self.facts, self.stated, self.typical = module, facts, stated, dict(typical or {})
        self.results, self.cache = results, cache
        self.reference, self.reference_float32 = reference, reference_float32
        self.problems_module = problems or (f"{_CORE_PROBLEMS}.{name}" if module.startswith(f"{_CORE}.") else "")
        _named[name] = self
        return self

    @property
    def layouts(self) -> tuple[str, ...]:
        """Names of the layouts of its cache, those that plugins added included; () where it touches none."""
        return layout_names(self.cache)

    @property
    def promises(self) -> dict[str, Any]:
        """Each promise of `stated`, given: fields of a Request as engines make it."""
        return {each.name: True for each in fields(Promises) if each.name in self.stated}

    @property
    def problems(self) -> Any:
        """How implementations are tried and judged, a `mla_portable.judge.problems.Problems` that is imported on first
        use; None where the primitive brings nothing."""
        return import_module(self.problems_module).PROBLEMS if self.problems_module else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (str(self), self.module)

    @staticmethod
    def all() -> tuple[Primitive[Any], ...]:
        """Every primitive of the core and of the plugins that were imported, the core's first."""
        import_module(_CORE)
        return tuple(sorted(_named.values(), key=lambda each: not each.module.startswith(f"{_CORE}.")))

    @staticmethod
    def named(name: str) -> Primitive[Any]:
        """The primitive of that name. Raises: ValueError."""
        import_module(_CORE)
        if name not in _named:
            raise ValueError(f"{name!r} is no primitive; there are {', '.join(Primitive.all())}")
        return _named[name]


def _load(name: str, module: str) -> Primitive[Any]:
    import_module(module)
    return _named[name]
