# SPDX-License-Identifier: Apache-2.0
"""Finding one of AITER's operations, and recognising its calling convention by the names of its parameters.

Nothing of AITER is imported before a device of AMD is there: its import compiles, and reads the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from mla_portable.contracts import Reason
from mla_portable.kit.parameters import parameter_names

Op = Callable[..., Any]
"""One of AITER's operations."""
_INSTALL: Final = "install AITER (github.com/ROCm/aiter) for this build of torch"
_UPDATE: Final = "install AITER of August 2026 or later"


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operation is, and what it must take.

    Attributes:
        modules: those that had it, the newest first. attribute: its name there.
        leading: the names of its first parameters, which are passed by position.
        keywords: further parameters that are passed by name.
    """

    modules: tuple[str, ...]
    attribute: str
    leading: tuple[str, ...]
    keywords: tuple[str, ...] = ()

    def find(self) -> Op:
        """The operation. Raises: NotFound."""
        failures: list[str] = []
        for name in self.modules:
            try:
                module = import_module(name)
            except Exception as error:  # AITER's import also fails where its compiler, or a device, is not as expected
                failures.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
                continue
            found = getattr(module, self.attribute, None)
            if callable(found):
                return found
            failures.append(f"{name} has no {self.attribute}")
        raise NotFound("; ".join(failures))

    def reasons(self) -> Iterator[Reason]:
        """Why the operation cannot be called: it is not here, or its parameters are others."""
        try:
            op = self.find()
        except NotFound as error:
            yield Reason("library", "missing", str(error), _INSTALL)
            return
        names = parameter_names(op)
        if names is None:  # it does not tell: the probe judges it by what it computes
            return
        expected = ", ".join((*self.leading, *(f"{name}=" for name in self.keywords)))
        if names[: len(self.leading)] != self.leading or not set(self.keywords) <= set(names):
            yield Reason("calling convention", f"{self.attribute}({', '.join(names)})", f"expects {expected}", _UPDATE)


class NotFound(Exception):
    """AITER, or an operation of it, is not here; the text says where it was looked for."""
