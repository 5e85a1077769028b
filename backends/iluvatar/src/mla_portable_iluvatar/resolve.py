# SPDX-License-Identifier: Apache-2.0
"""Finding one op in the vendor's packages, and telling a kernel from its slow twin.

Nothing is imported before a device of the vendor is there, and sys.path is never touched. The vendor's package carries a
plain torch twin, named `ref_...`, of nearly every op, and an op may fall to it without a word: right results, about a
hundred times slower. Values cannot tell, so Python's profile hook notes the functions of that name that one call runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import FrameType
from typing import Any

from mla_portable.contracts import Reason
from mla_portable.kit.parameters import parameter_names

Op = Callable[..., Any]
"""A vendor's op, of one of the calling conventions that the adapters know."""
_WHERE_PACKAGES_ARE = "put CoreX's dist-packages (often /usr/local/corex/lib64/python3/dist-packages) on PYTHONPATH"


@dataclass(frozen=True, slots=True)
class Place:
    """Where an op is looked for.

    Attributes:
        module: imported; a part of it that is no module is read as an attribute. attribute: of it.
        before: modules to import first; `vllm_iluvatar.custom_kernels` needs vllm to be imported before it.
        parameters: the leading parameter names that its calling convention needs, where Python can see them; a compiled op
            has no signature, and is judged by what it computes.
    """

    module: str
    attribute: str
    before: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"

    def find(self) -> Op:
        """The op. Raises: ImportError, AttributeError."""
        for name in self.before:
            import_module(name)
        found: Any = _module_or_attribute(self.module)
        for part in self.attribute.split("."):
            found = getattr(found, part)
        if not callable(found):
            raise AttributeError(f"{self} is {type(found).__name__}, not callable")
        return found

    def missing(self) -> Iterator[Reason]:
        """Why the op cannot be had, or is not the one that the convention knows."""
        try:
            op = self.find()
        except ImportError as error:
            yield Reason("library", self.module, f"cannot be imported: {error}", _WHERE_PACKAGES_ARE)
            return
        except AttributeError:
            yield Reason("symbol", str(self), "not in this version of the library", "install another version of CoreX's ops")
            return
        names = parameter_names(op)
        if self.parameters and names is not None and names[: len(self.parameters)] != self.parameters:
            yield Reason(
                "calling convention",
                f"{self.attribute}({', '.join(names)})",
                f"expects {', '.join(self.parameters)}",
                "install a version of CoreX's ops with that convention",
            )


def _module_or_attribute(name: str) -> Any:
    """The module `name`; where its last parts are attributes of a module, as of a compiled extension, those."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        parent, _, last = name.rpartition(".")
        if not parent or error.name != name:
            raise
        container = _module_or_attribute(parent)
        if not hasattr(container, last):
            raise
        return getattr(container, last)


def twins_called(call: Callable[[], object]) -> tuple[str, ...]:
    """The names of the vendor's twins that run while `call` does, in order. Errors of the call travel up."""
    seen: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name.startswith("ref_"):
            seen[frame.f_code.co_name] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return tuple(seen)
