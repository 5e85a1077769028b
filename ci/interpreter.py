#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`mla-portable` in Triton's interpreter, with the same results in less time.

    ci/interpreter.py conform triton --device cpu

Triton's interpreter (3.5 to 3.9) does work again whose result is known, or that nothing uses. Left out here are

- replacing the functions of the language by interpreted ones whenever a kernel calls a function of its own: once a launch is
  enough, for each set of language modules that such functions see. It took 40 % of the time of this project's kernels;
- looking for an overflow of every sum and product of integers: without Triton's debug mode what is found is dropped;
- making the same block types, and the same shapes of tensors, for every value of a kernel. With the overflows this took 45 % of
  what was left (triton 3.7.1, 2026-11-26);
- finding out what two operands of one type and shape have to be converted to.

Worker processes import this file, so they do the same.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from functools import partial
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


def drop_unused_checks() -> None:
    """Change Triton's interpreter in this process; calling it again changes nothing."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def make_types_once() -> None:
    """Change Triton's interpreter in this process; calling it again changes nothing."""
    if isinstance(interpreter._get_np_dtype, partial):
        return
    core = interpreter.tl.core
    interpreter._get_np_dtype = partial(_np_dtype, interpreter._get_np_dtype, {})
    new_block, blocks, shapes = core.block_type.__init__, dict[Any, dict[str, Any]](), dict[Any, Any]()
    new_tensor, tensors = core.tensor.__init__, dict[str, dict[str, Any]]()

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key in blocks:
            self.__dict__.update(blocks[key], element_ty=element_ty)
        else:
            new_block(self, element_ty, shape)
            self.shape = shapes.setdefault(key[1:], self.shape)
            blocks[key] = dict(self.__dict__)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name in tensors:
            self.__dict__.update(tensors[type.name], handle=handle, type=type, dtype=type.scalar)
        else:
            new_tensor(self, handle, type)
            tensors[type.name] = {
                name: value for name, value in self.__dict__.items() if name not in ("handle", "type", "dtype")
            }

    core.block_type.__init__, core.tensor.__init__ = block, tensor


def _np_dtype(find: Any, known: dict[str, Any], type: Any) -> Any:
    """As Triton's own, `find`, which makes a table of all types for each call."""
    if type.name not in known:
        known[type.name] = find(type)
    return known[type.name]


def leave_equal_operands() -> None:
    """Change Triton's interpreter in this process, after `make_types_once`: operands that are alike pass as they are."""
    semantic, core = interpreter.TritonSemantic, interpreter.tl.core
    convert, match, check = semantic.cast, semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl
    if convert.__module__ == __name__:
        return
    # two of one of these are computed in it, divisions too
    plain = {core.int1, core.uint8, core.int8, core.int32, core.uint32, core.int64, core.uint64, core.float32, core.float64}

    def cast(self: Any, input: Any, dst_ty: Any, *rounding: Any, **named: Any) -> Any:
        return input if input.dtype is dst_ty else convert(self, input, dst_ty, *rounding, **named)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if _one_shape(lhs.type, rhs.type) else match(self, lhs, rhs)

    def operands(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        if type(lhs) is type(rhs) is core.tensor and lhs.dtype is rhs.dtype and lhs.dtype in plain:
            return broadcast(self, lhs, rhs)
        return check(self, lhs, rhs, *options, **named)

    semantic.cast, semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl = cast, broadcast, operands


def _one_shape(one: Any, other: Any) -> bool:
    """Of types; equal shapes that are two objects may count as different ones. A scalar has none."""
    return getattr(one, "shape", None) is getattr(other, "shape", None)


replace_once_a_launch()
drop_unused_checks()
make_types_once()
leave_equal_operands()

if __name__ == "__main__":
    from mla_portable.cli import main

    main()
