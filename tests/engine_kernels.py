# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of an engine, out of its files, compiled for sm80 without the engine or Triton's interpreter."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

__all__ = ["load_file", "tell_what_compiles"]


def load_file(name: str, path: str) -> ModuleType:
    """The module in a file, by a name of its own."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def tell_what_compiles(name: str, kernel: Any, stored: str, pointers: Mapping[str, str], sizes: Mapping[str, Any]) -> None:
    """Print a line: the kernel, what it stores, and `cubin`, or why it does not compile.

    pointers: what those point to that do not point to what is stored. sizes: the values of its constants.
    """
    signature = {each: "constexpr" if each in sizes else "i32" for each in kernel.arg_names}
    signature |= {each: f"*{pointers.get(each, stored)}" for each in kernel.arg_names if each.endswith("_ptr")}
    try:
        made = triton.compile(ASTSource(kernel, signature, constexprs=dict(sizes)), target=GPUTarget("cuda", 80, 32)).asm
        said = "cubin" if "cubin" in made else "nothing"
    except Exception as error:
        said = " ".join(f"{error} {error.__cause__ or ''}".split())[:2000]
    sys.stdout.write(f"{name} {stored} {said}\n")
