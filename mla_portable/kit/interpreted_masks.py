# SPDX-License-Identifier: Apache-2.0
"""Masks with one scalar operand in the interpreter of Triton 3.9.

`tl.load(pointers, mask=scalar & block)` compiles everywhere. The interpreter of 3.9 makes int32 data of a scalar comparison
that becomes a block, and then refuses the mask ("mask has unsupported dtype"); older interpreters take it.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, Final

_MASKED: Final = ("create_masked_load", "create_masked_store", "create_atomic_rmw")


def cast_masks() -> None:
    """Change Triton's interpreter in this process; calling it again changes nothing."""
    from triton.runtime.interpreter import InterpreterBuilder

    for name in _MASKED:
        method = getattr(InterpreterBuilder, name)
        if method.__module__ != __name__:
            setattr(InterpreterBuilder, name, _with_mask_of_bool(method))


def _with_mask_of_bool(method: Callable[..., Any]) -> Callable[..., Any]:
    place = list(signature(method).parameters).index("mask")

    def call(*arguments: Any, **named: Any) -> Any:
        mask = named["mask"] if "mask" in named else arguments[place]
        mask.data = mask.data.astype(bool, copy=False)
        return method(*arguments, **named)

    return call
