# SPDX-License-Identifier: Apache-2.0
"""The code that a result depends on, found by following imports, and its hash. Code is read, never imported; needs no torch.

A source names code in one of four ways:

    package.module                  all objects of a module
    package.module::NAME            one object of it
    package.module::NAME[{arch}]    the row of a table for the device's architecture, else its row "default"
    package.module:file             another file beside the module

An object brings every object that it names: of its module, and through imports of its distribution and of what the core
computes with (`FOLLOWED`). A file beside a module is brought by a string of that module with its name, or its name without
".cu". A table of which a row is a source counts by that row alone. Not followed: annotations, and other distributions, whose
versions are recorded instead.

Python counts as its syntax tree, without comments, docstrings and layout; C and CUDA without comments and blank lines.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property, lru_cache, partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, Final

ARCH: Final = "{arch}"
"""In a source, stands for DeviceFacts.arch of the device that ran."""
FOLLOWED: Final = tuple(f"mla_portable.{name}" for name in ("accelerator", "contracts", "layouts", "primitives", "reference"))
"""Modules of the core that compute. The registry and the dispatcher choose among implementations; errors report."""
_DECLARING: Final = tuple(
    f"mla_portable.contracts.{name}" for name in ("decision", "device", "plugin", "primitive", "request", "support")
)
"""Modules of the contracts that only declare; a declaration is evidence's own field, `support`."""
_TABLES: Final = dict.fromkeys(
    (f"mla_portable.layouts.base::{name}" for name in ("_layouts", "_by_rows")), "mla_portable.layouts"
)
"""Tables that the modules of a package fill when they are imported: who reads one depends on all of them."""
_PRIMITIVE: Final = "Primitive"
"""An object of this class names a primitive, whose implementations have evidence of their own."""
_CORE: Final = "mla_portable"
_C_SUFFIXES: Final = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".mu")
_C_COMMENT: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL)
_NO_CODE: Final = ("ctx", "kind", "type_comment")
"""Fields of a syntax tree that follow from others, or are comments."""
_ANNOTATIONS: Final = ("annotation", "returns")
_INCLUDE: Final = re.compile(r'#include "([^"/]+)"')
_LOOSE: Final = "<statements>"
"""Of a module: those that bind no name, and may change any of its objects."""


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
    """SHA-256 over the names and the code of `code_of(sources, arch)`. Raises: as that does."""
    return _digest(code_of(sources, arch))


def modules_hash(modules: Iterable[str]) -> str:
    """SHA-256 over the names and the code of modules, whose imports are not followed. Raises: as `code_of` does."""
    return _digest({module: _code(module_file(module)) for module in modules})


def _digest(code: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name, text in sorted(code.items()):
        digest.update(f"{name}\0{len(text)}\0{text}".encode())
    return digest.hexdigest()


def sources_of(implementation: Any) -> tuple[str, ...]:
    """Where the code of an implementation starts: what its `bind` and `schedule_kind` are and hold, and its `sources`.

    Functions and classes count, also those in partials, closures, methods, containers and values of followed classes.
    Returns: sources, sorted; () where nothing lies in a module, as at a prompt.
    """
    found = {*implementation.sources}
    seen: set[int] = set()
    home = getattr(_function(implementation.bind), "__module__", "")
    packages = {*FOLLOWED, home.partition(".")[0]} - {_CORE}

    def followed(thing: Any) -> bool:
        module = thing.__module__
        if module == "__main__" or not _in(module, packages) or _in(module, _DECLARING):
            return False
        name = thing.__qualname__.partition(".")[0]
        found.add(module if name.startswith("<") else f"{module}::{name}")
        return True

    def hold(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        for each in held(value):
            hold(each)

    def held(value: Any) -> Iterable[Any]:
        if isinstance(value, partial):
            return value.func, *value.args, *value.keywords.values()
        if isinstance(value, MethodType):
            return value.__func__, value.__self__
        if isinstance(value, FunctionType):
            followed(value)
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return *cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
        if isinstance(value, type):
            followed(value)
            return ()
        if isinstance(value, Mapping):
            return value.values()
        if isinstance(value, (tuple, list, set, frozenset)):
            return value
        if hasattr(value, "__wrapped__"):
            return (value.__wrapped__,)
        if followed(type(value)):
            slots = (slot for each in type(value).__mro__ for slot in getattr(each, "__slots__", ()))
            return *getattr(value, "__dict__", {}).values(), *(getattr(value, slot, None) for slot in slots)
        return ()

    hold(implementation.bind)
    hold(implementation.schedule_kind)
    return tuple(sorted(found))


def _function(bind: Any) -> Any:
    """What is called first."""
    while isinstance(bind, partial) or hasattr(bind, "__wrapped__"):
        bind = bind.func if isinstance(bind, partial) else bind.__wrapped__
    return bind if isinstance(bind, (FunctionType, MethodType)) else type(bind)


def code_of(sources: Iterable[str], arch: str = "") -> dict[str, str]:
    """Source -> code, of everything that some sources lead to; files as "module:file", objects as "module::NAME".

    Args:
        arch: the architecture whose rows count, for sources that name a table by `{arch}`.
    Raises: SourceNotFound, OSError; SyntaxError for a module that is no Python.
    """
    todo = sorted({*sources})
    rows = {source.partition("[")[0]: source for source in todo if "[" in source}
    packages = {*FOLLOWED, *(re.split("[.:]", source)[0] for source in todo)} - {_CORE}
    modules: dict[str, Mapping[str, list[_Definition]]] = {}
    files: dict[str, list[str]] = {}
    found: dict[str, str] = {}

    def read(module: str) -> Mapping[str, list[_Definition]]:
        if module not in modules:
            path = module_file(module)
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            modules[module] = _definitions(path.read_text(encoding="utf-8"), package)
            files[module] = sorted(each.name for each in path.parent.iterdir() if each.suffix in _C_SUFFIXES)
        return modules[module]

    def brought(target: tuple[str, str], attributes: Iterable[str]) -> list[str]:
        """Of an import that is followed: the object; or, of a module, the attributes that are used, else all of it."""
        module, name = target
        if not _in(module, packages) or _in(module, _DECLARING):
            return []
        inner = f"{module}.{name}" if name else module
        if not name or _is_module(inner):
            return [f"{inner}::{each}" for each in attributes if each in read(inner)] if attributes else [inner]
        if name in read(module):
            return [f"{module}::{name}"]
        starred = (star.alias for star in read(module).get("*", ()) if star.alias)
        return next((found for path, _ in starred if (found := brought((path, name), ()))), [])

    while todo:
        source = todo.pop()
        source = rows.get(source, source)
        if source in found:
            continue
        module, _, rest = source.partition(":")
        if rest and not rest.startswith(":"):
            path = module_file(source)
            found[source] = _code(path)
            todo += [f"{module}:{name}" for name in _INCLUDE.findall(found[source]) if path.with_name(name).is_file()]
            continue
        known = read(module)
        name, _, key = rest.removeprefix(":").partition("[")
        if not name:
            found[source] = ""
            todo += [f"{module}::{each}" for each, parts in known.items() if not parts[0].alias]
            continue
        if name not in known:
            raise SourceNotFound(source, f"{module} defines no {name}")
        parts = known[name]
        if key:
            parts = [_Definition(_row(source, parts, key.removesuffix("]").replace(ARCH, arch)), parts[0].package)]
        found[source] = "".join(part.code for part in parts)
        todo += [f"{module}::{_LOOSE}"] if _LOOSE in known else []
        todo += modules_of(_TABLES[source]) if source in _TABLES else []
        for part in parts:
            for target, attributes in part.imports:
                todo += brought(target, attributes)
            for each in (known.keys() & part.names) - {name}:
                alias = known[each][0].alias
                if alias and (attributes := part.attributes(each)):
                    found[f"{module}::import {each}"] = known[each][0].code
                    todo += brought(alias, attributes)
                else:
                    todo.append(f"{module}::{each}")
            todo += [f"{part.package}:{each}" for each in files[module] if part.names_file(each)]
    return found


def imported(modules: Iterable[str], packages: Sequence[str]) -> set[str]:
    """`modules`, and those of `packages` that they import, directly or through each other, wherever the import stands."""
    found: set[str] = set()
    todo = list(modules)
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            names = _imports(module_file(module).read_text(encoding="utf-8"))
            todo += [name for name in names if name not in found and name.startswith(tuple(packages)) and _is_module(name)]
    return found


@lru_cache(maxsize=512)
def _imports(text: str) -> frozenset[str]:
    """Every name that a module may import as a module."""
    found: set[str] = set()
    for node in ast.walk(_parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


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
    return _dump(_parse(text))


def _in(module: str, packages: Iterable[str]) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in packages)


def _dump(value: Any) -> str:
    """A tree as text that is the same in every version of Python, whatever fields it has added to the nodes."""
    parts: list[str] = []
    _add(value, parts.append)
    return "".join(parts)


def _add(value: Any, add: Callable[[str], None]) -> None:
    if isinstance(value, ast.JoinedStr):
        _add_fstring(value, add)
    elif isinstance(value, ast.AST):
        add(f"{type(value).__name__}(")
        for name in value._fields:
            field = getattr(value, name, None)
            if name not in _NO_CODE and field is not None and field != []:
                add(f"{name}=")
                _add(field, add)
        add(")")
    elif isinstance(value, list):
        for each in value:  # pyright: ignore[reportUnknownVariableType]
            if not _is_docstring(each):
                _add(each, add)
                add(",")
    else:
        add(ascii(value))


def _add_fstring(node: ast.JoinedStr, add: Callable[[str], None]) -> None:
    """Python 3.12 splits the text between two fields, and adds empty texts."""
    add("f(")
    for is_text, parts in groupby(node.values, lambda each: isinstance(each, ast.Constant)):
        if is_text:
            text = "".join(str(each.value) for each in parts if isinstance(each, ast.Constant))
            add(ascii(text) if text else "")
        else:
            for each in parts:
                _add(each, add)
    add(")")


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class _Definition:
    """A statement that binds an object, or the part of an import statement that does; what it uses."""

    def __init__(self, node: ast.AST | None, package: str, alias: tuple[str, str] | None = None) -> None:
        """package: of the module, for relative imports. alias: of an import, (module, name), name "" for the module itself."""
        self.node, self.package, self.alias = node, package, alias

    @cached_property
    def code(self) -> str:
        return f"import {self.alias}" if self.node is None else _PRIMITIVE if self._is_primitive else _dump(self.node)

    @property
    def _is_primitive(self) -> bool:
        called = getattr(getattr(self.node, "value", None), "func", None)
        return getattr(getattr(called, "value", called), "id", "") == _PRIMITIVE

    @cached_property
    def _uses(self) -> tuple[Counter[str], dict[str, Counter[str]], set[str], list[ast.Import | ast.ImportFrom]]:
        """Names and how often, attributes of names and how often, strings, imports."""
        names: Counter[str] = Counter()
        attributes: dict[str, Counter[str]] = {}
        strings: set[str] = set()
        imports: list[ast.Import | ast.ImportFrom] = []
        for each in () if self.node is None or self._is_primitive else _walk(self.node):
            if isinstance(each, ast.Name):
                names[each.id] += 1
            elif isinstance(each, ast.Attribute):
                if isinstance(each.value, ast.Name):
                    attributes.setdefault(each.value.id, Counter())[each.attr] += 1
            elif isinstance(each, ast.Constant):
                if isinstance(each.value, str):
                    strings.add(each.value)
            elif isinstance(each, (ast.Import, ast.ImportFrom)):
                imports.append(each)
        return names, attributes, strings, imports

    @property
    def names(self) -> Set[str]:
        return self._uses[0].keys()

    def attributes(self, name: str) -> Iterable[str]:
        """The attributes of a name that are used, where it is used in no other way."""
        names, attributes, *_ = self._uses
        used = attributes.get(name, Counter())
        return used if sum(used.values()) == names[name] else ()

    def names_file(self, name: str) -> bool:
        """A string is the name of a file, or its name without ".cu"."""
        return name in self._uses[2] or name.removesuffix(".cu") in self._uses[2]

    @cached_property
    def imports(self) -> list[tuple[tuple[str, str], Iterable[str]]]:
        """What it imports itself: ((module, name), attributes that are used where it is a module and no more than they are)."""
        if self.alias:
            return [(self.alias, ())]
        aliases = (alias for each in self._uses[3] for alias in _aliases(each, self.package).items())
        return [(target, self.attributes(name)) for name, target in aliases]


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, without annotations and docstrings."""
    yield node
    for name, field in ast.iter_fields(node):
        if name in _ANNOTATIONS:
            continue
        for each in field if isinstance(field, list) else (field,):
            if isinstance(each, ast.AST) and not _is_docstring(each):
                yield from _walk(each)


def _aliases(node: ast.Import | ast.ImportFrom, package: str) -> dict[str, tuple[str, str]]:
    """Name -> what an import statement binds it to: (module, name), name "" for the module itself."""
    if isinstance(node, ast.Import):
        return {each.asname or each.name.partition(".")[0]: (each.name, "") for each in node.names}
    base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    module = ".".join([*base, *([node.module] if node.module else [])])
    return {each.asname or each.name: (module, each.name) for each in node.names}


@lru_cache(maxsize=512)
def _definitions(text: str, package: str) -> dict[str, list[_Definition]]:
    """Name -> what binds it at module level; `_LOOSE` -> what binds no name."""
    found: dict[str, list[_Definition]] = {}
    for statement in _parse(text).body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            for name, target in _aliases(statement, package).items():
                found.setdefault(name, []).append(_Definition(None, package, target))
            continue
        if _is_docstring(statement) or (isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"):
            continue
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = {statement.name}
        else:
            names = {each.id for each in ast.walk(statement) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
            names |= {(a.asname or a.name).partition(".")[0] for a in ast.walk(statement) if isinstance(a, ast.alias)}
            names |= {each.name for each in ast.walk(statement) if isinstance(each, (ast.FunctionDef, ast.ClassDef))}
            if not names or isinstance(statement, (ast.For, ast.While)):
                names.add(_LOOSE)
        definition = _Definition(statement, package)
        for name in names:
            found.setdefault(name, []).append(definition)
    return found


def _row(source: str, parts: Sequence[_Definition], key: str) -> ast.expr:
    tables = [each.node.value for each in parts if isinstance(each.node, (ast.Assign, ast.AnnAssign))]
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
