# SPDX-License-Identifier: Apache-2.0
"""What a vendor's function takes, by the names of its parameters: how a plugin recognises a calling convention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["parameter_names"]


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """The names of a function's parameters in order, of an operator of torch those of its schema.

    Returns: None where it does not tell, as of compiled code, or takes anything.
    """
    schema = getattr(getattr(function, "default", function), "_schema", None)
    if schema is not None:
        return tuple(argument.name for argument in schema.arguments)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters):
        return None
    return tuple(each.name for each in parameters)
