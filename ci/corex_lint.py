# SPDX-License-Identifier: Apache-2.0
"""Do the portable Triton kernels keep to what CoreX's Tritons accept? Read off the syntax trees; nothing is compiled.

    python3 ci/corex_lint.py

CoreX brings Triton 2.1 (4.2), 3.1 (4.4) and 3.6 (4.5). No such Triton is needed here: which names a version has was read from
the published wheels of the same versions, and the vendor's own limits are public reports:

names       `tl.` names that Triton 2.1 has already; exp2, log2 and div_rn stand in `tl.math` alone there
launch      num_warps and num_stages alone: `launch_pdl` raises KeyError, `num_ctas` above 1 is rejected
float64     none: it is broken on these devices, and its atomics abort
float8      types are named only where a constexpr ..NATIVE is true, which no CoreX device sets: bytes are decoded by bits
dot         two operands: 2.1 has no accumulator, and options were renamed since
shapes      no `tl.full([], ..)` or `tl.zeros([], ..)`: 2.1 forbids tensors without an axis; a scalar starts as a number
integers    a runtime integer is marked do_not_specialize, or only computed with: CoreX's patch of Triton takes the
            specialisation of 1 away, so a kernel must not care whether an argument became a constant
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["IN_MATH", "Finding", "lint_file", "lint_source"]

KERNELS: Final = Path(__file__).parents[1] / "backends" / "triton" / "src" / "mla_portable_triton" / "kernels"
IN_MATH: Final = frozenset({"div_rn", "exp2", "log2"})
"""To be written `tl.math.`: `tl` itself has them since Triton 3 only."""
IN_2_1_AND_3_1: Final = frozenset(
    {
        "abs", "arange", "atomic_add", "atomic_cas", "atomic_max", "atomic_min", "bfloat16", "broadcast_to", "cat", "cdiv",
        "constexpr", "cumsum", "dot", "exp", "expand_dims", "float16", "float32", "full", "int16", "int1", "int32", "int64",
        "int8", "load", "log", "max", "max_contiguous", "maximum", "min", "minimum", "multiple_of", "num_programs",
        "pointer_type", "program_id", "ravel", "reshape", "sqrt", "static_assert", "static_range", "store", "sum", "trans",
        "uint16", "uint32", "uint64", "uint8", "view", "where", "zeros", "zeros_like",
    }
)  # fmt: skip
FLOAT8: Final = frozenset({"float8e4nv", "float8e5", "float8e4b15", "float8e4b8", "float8e5b16"})
LAUNCH_OPTIONS: Final = frozenset({"num_warps", "num_stages"})
JIT_OPTIONS: Final = frozenset({"do_not_specialize"})
GATE: Final = "NATIVE"


@dataclass(frozen=True)
class Finding:
    """One thing that a CoreX Triton would not accept. rule: of the module's docstring."""

    file: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.text}"


def lint_file(path: Path) -> list[Finding]:
    return lint_source(path.read_text(encoding="utf-8"), path.name)


def lint_source(source: str, file: str = "<text>") -> list[Finding]:
    """Every finding in the text of one file."""
    tree = ast.parse(source)
    found: list[tuple[ast.AST, str, str]] = []
    for function in _jitted(tree):
        found += _decorator(function)
        found += _names(function)
        found += _dots(function)
        found += _shapes(function)
        found += _integers(function)
    found += _launches(tree)
    return [Finding(file, getattr(node, "lineno", 0), rule, text) for node, rule, text in found]


def _jit_of(function: ast.FunctionDef) -> ast.expr | None:
    """The decorator that makes it a kernel: `triton.jit`, bare or called."""
    for decorator in function.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(called) in ("triton.jit", "jit"):
            return decorator
    return None


def _jitted(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _jit_of(node) is not None)


def _decorator(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, str, str]]:
    jit = _jit_of(function)
    for keyword in jit.keywords if isinstance(jit, ast.Call) else ():
        if keyword.arg not in JIT_OPTIONS:
            yield keyword.value, "launch", f"triton.jit({keyword.arg}=...) is not known to every Triton"


def _names(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, str, str]]:
    gated = {id(inner) for branch in _gated(function) for statement in branch for inner in ast.walk(statement)}
    for node in ast.walk(function):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in ("fp64", "float64"):
            yield node, "float64", repr(node.value)
        if isinstance(node, ast.Attribute) and _is_tl(node.value, "math") and node.attr not in IN_MATH:
            yield (
                node,
                "names",
                f"tl.math.{node.attr} is not known to be in Triton 2.1; compare with its wheel, then list it here",
            )
        if not isinstance(node, ast.Attribute) or not _is_tl(node.value) or node.attr == "math":
            continue
        name = node.attr
        if name == "float64":
            yield node, "float64", "tl.float64"
        elif name in FLOAT8:
            if id(node) not in gated:
                yield node, "float8", f"tl.{name} outside of `if ..{GATE}:`"
        elif name in IN_MATH:
            yield node, "names", f"tl.{name} is tl.math.{name} in Triton 2.1"
        elif name not in IN_2_1_AND_3_1:
            yield node, "names", f"tl.{name} is not known to be in Triton 2.1; compare with its wheel, then list it here"


def _is_tl(node: ast.expr, module: str = "") -> bool:
    """`tl`, or `tl.<module>`."""
    if module:
        return isinstance(node, ast.Attribute) and node.attr == module and _is_tl(node.value)
    return isinstance(node, ast.Name) and node.id == "tl"


def _gated(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    """What runs only where a constexpr ..NATIVE is true. Guards that are more than a name do not count."""
    constexprs = {a.arg for a in _arguments(function) if _is_constexpr(a) and a.arg.endswith(GATE)}
    for node in ast.walk(function):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id in constexprs:
            yield node.body


def _arguments(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _is_constexpr(argument: ast.arg) -> bool:
    return argument.annotation is not None and ast.unparse(argument.annotation).endswith("constexpr")


def _dots(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, str, str]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.dot" and (len(node.args) > 2 or node.keywords):
            yield node, "dot", f"{ast.unparse(node)}: 2 operands, and no option"


def _shapes(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, str, str]]:
    for node in ast.walk(function):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("tl.full", "tl.zeros"):
            continue
        given = [*node.args[:1], *(keyword.value for keyword in node.keywords if keyword.arg == "shape")]
        if any(isinstance(shape, (ast.List, ast.Tuple)) and not shape.elts for shape in given):
            yield node, "shapes", f"{ast.unparse(node)}: no axis; start from a number"


def _integers(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, str, str]]:
    """Of a kernel that is launched: helpers get their arguments as the kernel has them."""
    if not function.name.endswith("_kernel"):
        return
    marked = _unspecialised(function)
    loose = {a.arg for a in _arguments(function) if not _is_constexpr(a) and not a.arg.endswith("_ptr")} - marked
    unknown = marked - {a.arg for a in _arguments(function)}
    for name in sorted(unknown):
        yield function, "integers", f"do_not_specialize names {name}, which is no argument"
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in loose:
            yield node, "integers", f"{ast.unparse(node)}: {node.value.id} is a constant where it is 1; mark it"
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            for name in sorted({n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)} & loose):
                yield node, "integers", f"a branch on {name}, which is a constant where it is 1; mark it"


def _unspecialised(function: ast.FunctionDef) -> set[str]:
    """The names in do_not_specialize, a literal list."""
    jit = _jit_of(function)
    for keyword in jit.keywords if isinstance(jit, ast.Call) else ():
        if keyword.arg == "do_not_specialize":
            return {n.value for n in ast.walk(keyword.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return set()


def _launches(tree: ast.AST) -> Iterator[tuple[ast.AST, str, str]]:
    """Calls `kernel[grid](...)`: constexprs are written in capitals here, so every other keyword is an option."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Subscript):
            continue
        if not ast.unparse(node.func.value).endswith("_kernel"):
            continue
        for keyword in node.keywords:
            if keyword.arg is None:
                yield keyword.value, "launch", "**options hide what is passed"
            elif not keyword.arg.isupper() and keyword.arg not in LAUNCH_OPTIONS:
                yield keyword.value, "launch", f"{keyword.arg}= is no option of every Triton"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=sorted(KERNELS.glob("*.py")))
    options = parser.parse_args()
    found = [finding for path in options.files for finding in lint_file(path)]
    print(*found, sep="\n", end="\n" if found else "")
    print(f"{len(options.files)} files, {len(found)} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
