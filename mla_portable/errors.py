# SPDX-License-Identifier: Apache-2.0
"""The failures of mla_portable, one class per kind of mistake; UnsupportedRequest is in `contracts.decision`.

Every message says what was asked, what the limit is and what to do. The functions of `mla_portable`, a layer's `forward` and
`Planner.plan` raise these before a kernel is launched and before anything is written; exceptions of a kernel or the driver
are raised unchanged. `printable` is for texts that others wrote.
"""

from __future__ import annotations

import unicodedata
from typing import Any, Final

__all__ = [
    "DRIVER_FAULTS",
    "InvalidArgument",
    "MLAPortableError",
    "PlanMismatch",
    "PluginError",
    "UnknownBackend",
    "printable",
]

DRIVER_FAULTS: Final = frozenset({214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, 999})
"""Codes of the CUDA driver after which its context is unusable: ECC and NVLink errors, illegal addresses and instructions,
launch timeouts, asserts, a destroyed context, unknown errors. Source: CUresult in cuda.h."""
_UNPRINTABLE: Final = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of Unicode: control and format characters, halves of surrogates, separators of lines and paragraphs."""


def printable(text: str) -> str:
    """`text` with control characters as escapes ("\\x1b"), so that a foreign text cannot steer a terminal; lines are kept."""
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in _UNPRINTABLE:
        return character
    return character.encode("unicode_escape").decode("ascii")


class MLAPortableError(Exception):
    """Base of everything that mla_portable raises on purpose. Can be pickled, for process pools, and copied."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_init, (type(self), self.args), vars(self)


def _without_init(kind: type[MLAPortableError], args: tuple[Any, ...]) -> MLAPortableError:
    """An error with the message that it had: subclasses make theirs of arguments that are not kept."""
    return kind.__new__(kind, *args)


class InvalidArgument(MLAPortableError, ValueError):
    """An argument breaks the contract of a primitive, whatever the backend: refused before any kernel runs.

    Attributes:
        where: the function that was called. argument: its offending parameter. got, expected: both sides in words.
    """

    def __init__(self, where: str, argument: str, *, got: object, expected: str, remedy: str = "") -> None:
        self.where, self.argument, self.got, self.expected, self.remedy = where, argument, str(got), expected, remedy
        super().__init__(self._message())

    def _message(self) -> str:
        message = f"{self.where}: {self.argument}: got {self.got}, expected {self.expected}."
        return f"{message} {self.remedy}" if self.remedy else message


class UnknownBackend(InvalidArgument):
    """A backend name that no loaded plugin carries: a typo is an error, never "not offered"."""

    def _message(self) -> str:
        """The suggestion first: the known names are many."""
        remedy = f" {self.remedy}" if self.remedy else ""
        return f"{self.where}: {self.argument}: got {self.got}.{remedy} Expected {self.expected}."


class PlanMismatch(MLAPortableError, ValueError):
    """A call's tensors are not those that its StepPlan was made for. A plan serves one batch: plan again."""


class PluginError(MLAPortableError, RuntimeError):
    """A plugin registers something malformed; raised on the plugin's own line, then reported by `doctor`."""
