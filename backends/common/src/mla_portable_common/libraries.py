# SPDX-License-Identifier: Apache-2.0
"""Vendors' libraries on this machine: their operators found and loaded, conventions recognised, refusals told from faults.

A convention is recognised by the names in an operator's schema or in a function's signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from mla_portable.accelerator import device_count
from mla_portable.contracts import DeviceFacts, Reason

REFUSING: Final = (RuntimeError, TypeError, ValueError, AssertionError)
"""What a provider raises that does not take a call."""
_REFUSALS: Final = ("no kernel image is available", "invalid device function")
"""CUDA errors that leave the device usable: nothing was launched."""


class NotThisConvention(Exception):
    """A symbol is missing, or takes arguments that this project does not know; the message says which."""


def any_device(facts: DeviceFacts) -> torch.device | None:
    """The current device of the type that these facts name; None where this machine has none."""
    return torch.device(facts.device_type) if device_count(facts.device_type) else None


@dataclass(frozen=True, slots=True)
class Library:
    """Where a vendor's copy of an interface is found.

    Attributes:
        modules: names to import, in the order of asking. remedy: what a user does who has none of them.
        device_with: the device of this machine that some facts describe, on which the copy is tried; None where there is none.
    """

    modules: tuple[str, ...]
    remedy: str
    device_with: Callable[[DeviceFacts], torch.device | None] = any_device


def operator_of(library: str, name: str) -> Any | None:
    """An operator's default overload, None where it is not registered."""
    packet = getattr(getattr(torch.ops, library), name, None)
    return getattr(packet, "default", None)


def load_from(package: str, pattern: str) -> None:
    """Load the library of operators that lies in an installed package, without importing the package."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError) as error:  # a module without a spec, put there by someone else
        raise NotThisConvention(f"package {package} cannot be looked for: {error}") from error
    if spec is None:
        raise NotThisConvention(f"package {package} is not installed")
    found = [path for folder in spec.submodule_search_locations or () for path in sorted(Path(folder).glob(pattern))]
    if not found:
        raise NotThisConvention(f"package {package} has no {pattern}")
    load_library(found[0])


def load_library(path: Path) -> None:
    """Load a library of operators. Raises: NotThisConvention where it does not load."""
    try:
        torch.ops.load_library(path)
    except (OSError, RuntimeError) as error:
        raise NotThisConvention(f"{path} does not load: {' '.join(str(error).split())[:200]}") from error


class Positions:
    """An operator's arguments in the order of its schema: what is known by name, defaults or None for the rest."""

    def __init__(self, operator: Any, needed: tuple[str, ...], optional: tuple[str, ...]) -> None:
        arguments = operator._schema.arguments
        names = [argument.name for argument in arguments]
        missing = [name for name in needed if name not in names]
        if missing:
            raise NotThisConvention(f"{operator} has no argument {', '.join(missing)}")
        self.template: list[Any] = []
        for argument in arguments:
            known = argument.name in needed or argument.name in optional
            if not known and not argument.has_default_value() and argument.type.kind() != "OptionalType":
                raise NotThisConvention(f"{operator} wants an argument {argument.name}, whose meaning is not known here")
            self.template.append(argument.default_value if argument.has_default_value() else None)
        self.index = {name: names.index(name) for name in (*needed, *optional) if name in names}


def parameters_of(function: Callable[..., Any], names: tuple[str, ...]) -> list[str]:
    """The parameters of a function, which must include `names`."""
    parameters = list(inspect.signature(function).parameters)
    missing = [name for name in names if name not in parameters]
    if missing:
        where = f"{function.__module__}.{function.__qualname__}"
        raise NotThisConvention(f"{where} has no parameter {', '.join(missing)}")
    return parameters


def triton_missing() -> tuple[Reason, ...]:
    """A reason where Triton is not installed: the passes around a vendor's kernel are written in it."""
    if find_spec("triton") is None:
        return (Reason("triton", "is not installed", "the passes around the kernel are written in it", "pip install triton"),)
    return ()


def refused(what: str, error: Exception) -> NotThisConvention:
    """The refusal as a reason; what says nothing about the provider, or leaves the device unusable, is raised again."""
    message = " ".join(str(error).split())
    fault = isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in message
    if isinstance(error, torch.OutOfMemoryError) or (fault and not any(text in message for text in _REFUSALS)):
        raise error
    return NotThisConvention(f"{what} was refused: {type(error).__name__}: {message[:200]}")
