#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`mla-portable` in Triton's interpreter, with the same results in less time.

    ci/interpreter.py conform triton --device cpu

A launch in the interpreter replaces the functions of Triton's language by interpreted ones. Triton (3.5 to 3.7) looks all of
them up once more whenever a kernel calls a function of its own, which took 40 % of the time of this project's kernels (triton
3.7.1, 2026-11-26). Here that happens once a launch for each set of language modules that such functions see.

Worker processes import this file, so they do the same.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # Triton decides when a kernel is decorated

from triton.runtime import interpreter

_replaced: set[frozenset[str]] = set()
"""The names of language modules whose functions are replaced until the launch ends."""


def replace_once_a_launch() -> None:
    """Change Triton's interpreter in this process; calling it again changes nothing."""
    if interpreter.InterpretedFunction.__call__ is _call:
        return
    launch = interpreter.GridExecutor.__call__

    def launched(self: Any, *arguments: Any, **options: Any) -> None:
        _replaced.clear()
        try:
            launch(self, *arguments, **options)
        finally:
            _replaced.clear()

    interpreter.GridExecutor.__call__ = launched
    interpreter.InterpretedFunction.__call__ = _call


def _call(self: Any, *arguments: Any, **options: Any) -> Any:
    """As Triton's own, but for what has been replaced since the launch began."""
    modules = _languages(self.fn)
    if modules not in _replaced:
        interpreter._patch_lang(self.fn)
        _replaced.add(modules)
    try:
        return self.rewrite()(*arguments, **options)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


_seen: dict[Any, frozenset[str]] = {}


def _languages(function: Any) -> frozenset[str]:
    """The modules of Triton's language that a function's file imports: `_patch_lang` treats these."""
    if function not in _seen:
        languages = (interpreter.tl, interpreter.tl.core)
        values = function.__globals__.values()
        _seen[function] = frozenset(value.__name__ for value in values if inspect.ismodule(value) and value in languages)
    return _seen[function]


replace_once_a_launch()

if __name__ == "__main__":
    from mla_portable.cli import main

    main()
