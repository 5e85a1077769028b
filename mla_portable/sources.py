# SPDX-License-Identifier: Apache-2.0
"""The hash of the code that a result is bound to. Modules are found and read, never imported; needs no torch.

A source names code in one of four ways:

    package.module                  all code of a module
    package.module::NAME            one object of it, with everything at module level that the object uses
    package.module::NAME[{arch}]    the row of a table for the device's architecture, else its row "default"
    package.module:file             another file beside the module

Python counts as its syntax tree, without comments, docstrings and layout; C and CUDA without comments and blank lines.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, Final

__all__ = ["ARCH", "SourceNotFound", "imported", "module_file", "modules_of", "source_hash"]

ARCH: Final = "{arch}"
"""In a source, stands for DeviceFacts.arch of the device that ran."""
_C_SUFFIXES: Final = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".mu")
_C_COMMENT: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL)
_NO_CODE: Final = ("ctx", "kind", "type_comment")
"""Fields of a syntax tree that follow from others, or are comments."""


class SourceNotFound(ValueError):
    """A module, file or object is not installed here. `what` names it, `problem` says what was looked for."""

    def __init__(self, what: str, problem: str) -> None:
        self.what, self.problem = what, problem
        super().__init__(f"{what}: {problem}")


@lru_cache(maxsize=64)
def _top(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SourceNotFound(f"module {package}", "not installed here, so its sources cannot be hashed; install the plugin")
    return Path(spec.origin)


def module_file(source: str) -> Path:
    """The file of a source. Raises: SourceNotFound when its module is not installed here, or the file not there."""
    module, _, rest = source.partition(":")
    if rest and not rest.startswith(":"):
        path = module_file(module).with_name(rest)
        if not path.is_file():
            raise SourceNotFound(f"file {rest} of {module}", f"no such file: {path}")
        return path
    top, *inner = module.split(".")
    base = _top(top)
    if not inner:
        return base
    stem = base.parent.joinpath(*inner)
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.is_file():
            return path
    raise SourceNotFound(f"module {module}", f"no such file: {stem.with_suffix('.py')}")


def source_hash(sources: Iterable[str], arch: str = "") -> str:
    """SHA-256 over the names and the code of sources, whatever their order.

    Args:
        arch: the architecture whose rows count, for sources that name a table by `{arch}`.
    Raises: SourceNotFound, OSError; SyntaxError for a module that is no Python.
    """
    named = sorted(set(sources))
    digest = hashlib.sha256()
    for source in named:
        path = module_file(source)
        module, _, name = source.partition("::")
        if name:
            apart = {other.removeprefix(f"{module}::") for other in named if other.startswith(f"{module}::")}
            code = _object(source, path.read_text(encoding="utf-8"), name, arch, apart - {name})
        else:
            code = _code(path)
        digest.update(f"{source}\0{len(code)}\0{code}".encode())
    return digest.hexdigest()


def imported(modules: Iterable[str], packages: Sequence[str]) -> set[str]:
    """`modules`, and those of `packages` that they import, directly or through each other, wherever the import stands."""
    found: set[str] = set()
    todo = list(modules)
    while todo:
        module = todo.pop()
        if module in found:
            continue
        found.add(module)
        for node in ast.walk(_parse(module_file(module).read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            todo += [name for name in names if name.startswith(tuple(packages)) and _is_module(name)]
    return found


def modules_of(package: str) -> list[str]:
    """A package and all modules in it."""
    folder = module_file(package).parent
    inner = [path.relative_to(folder).with_suffix("").parts for path in folder.rglob("*.py")]
    return sorted(".".join([package, *(part for part in parts if part != "__init__")]) for parts in inner)


def _is_module(name: str) -> bool:
    try:
        module_file(name)
    except SourceNotFound:
        return False
    return True


def _code(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return _python(text)
    if path.suffix in _C_SUFFIXES:
        text = _C_COMMENT.sub(lambda found: " " if found[0].startswith("/") else found[0], text)
        return "\n".join(filter(None, map(str.strip, text.splitlines())))
    return text


@lru_cache(maxsize=512)
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


@lru_cache(maxsize=512)
def _python(text: str) -> str:
    return "".join(_dump(_parse(text)))


def _dump(value: Any) -> Iterator[str]:
    """A tree as text that is the same in every version of Python, whatever fields it has added to the nodes."""
    if isinstance(value, ast.JoinedStr):
        yield from _dump_fstring(value)
    elif isinstance(value, ast.AST):
        yield f"{type(value).__name__}("
        for name in value._fields:
            field = getattr(value, name, None)
            if name not in _NO_CODE and field is not None and field != []:
                yield f"{name}="
                yield from _dump(field)
        yield ")"
    elif isinstance(value, list):
        for each in value:  # pyright: ignore[reportUnknownVariableType]
            if not _is_docstring(each):
                yield from _dump(each)
                yield ","
    else:
        yield ascii(value)


def _dump_fstring(node: ast.JoinedStr) -> Iterator[str]:
    """Python 3.12 splits the text between two fields, and adds empty texts."""
    yield "f("
    for is_text, parts in groupby(node.values, lambda each: isinstance(each, ast.Constant)):
        if is_text:
            text = "".join(str(each.value) for each in parts if isinstance(each, ast.Constant))
            yield ascii(text) if text else ""
        else:
            for each in parts:
                yield from _dump(each)
    yield ")"


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _object(source: str, text: str, name: str, arch: str, apart: set[str]) -> str:
    """The code of an object, or of a table's row, with the module's other definitions that it uses.

    apart: objects of the module that are sources themselves, and count as those say.
    """
    name, _, key = name.partition("[")
    definitions = _definitions(_parse(text))
    if name not in definitions:
        raise SourceNotFound(source, f"{source.partition(':')[0]} defines no {name}")
    wanted: list[ast.AST] = [*definitions[name]]
    if key:
        wanted = [_row(source, definitions[name], key.removesuffix("]").replace(ARCH, arch))]
    seen = {name, *(each.partition("[")[0] for each in apart)}
    for node in wanted:  # grows as it goes
        used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} - seen
        for each in sorted(used & definitions.keys()):
            wanted += [more for more in definitions[each] if more not in wanted]
        seen |= used
    return "".join(part for node in wanted for part in _dump(node))


def _definitions(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    """Name -> the statements at module level that bind it."""
    found: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = {statement.name}
        else:
            names = {each.id for each in ast.walk(statement) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
            names |= {(a.asname or a.name).partition(".")[0] for a in ast.walk(statement) if isinstance(a, ast.alias)}
            names |= {each.name for each in ast.walk(statement) if isinstance(each, (ast.FunctionDef, ast.ClassDef))}
        for name in names:
            found.setdefault(name, []).append(statement)
    return found


def _row(source: str, statements: list[ast.stmt], key: str) -> ast.expr:
    tables = [each.value for each in statements if isinstance(each, (ast.Assign, ast.AnnAssign))]
    rows = {
        each.value: row
        for table in tables
        if isinstance(table, ast.Dict)
        for each, row in zip(table.keys, table.values, strict=True)
        if isinstance(each, ast.Constant)
    }
    row = rows.get(key, rows.get("default"))
    if row is None:
        raise SourceNotFound(source, f"no table with a row {key!r} or 'default', written as a dict")
    return row
