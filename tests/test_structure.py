# SPDX-License-Identifier: Apache-2.0
"""The arrows of the design, read off the syntax trees: who may import whom, and that importing is cheap."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "mla_portable"
PLUGINS = sorted(path.name for path in (ROOT / "backends").iterdir() if (path / "pyproject.toml").exists())

LOW = {"accelerator", "contracts", "errors", "layouts"}
PLUGINS_MAY_IMPORT = tuple(f"mla_portable.{name}" for name in ("accelerator", "contracts", "layouts", "primitives"))
MIDDLE = LOW | {"attention", "dispatch", "explaining", "planner", "primitives", "problems", "reference", "registry"}
MAY_IMPORT = {
    "accelerator": set(),
    "errors": set(),
    "layouts": {"errors"},
    "contracts": {"accelerator", "errors", "layouts"},
    "registry": LOW | {"primitives", "problems"},  # primitives and problems only while it probes, see below
    "problems": LOW | {"planner", "primitives"},
    "dispatch": LOW | {"registry"},
    "explaining": LOW | {"dispatch"},
    "primitives": LOW | {"dispatch"},
    "reference": LOW,
    "planner": LOW | {"primitives"},
    "attention": LOW | {"planner", "primitives", "registry"},
    "deep_gemm": LOW | {"primitives"},
    "flash_mla": LOW | {"primitives", "registry"},
    "engine": MIDDLE,
    "sglang": MIDDLE | {"deep_gemm", "engine"},
    "vllm": MIDDLE | {"deep_gemm", "engine"},
    "capability": LOW | {"primitives", "registry"},
    "conformance": MIDDLE,
    "bench": MIDDLE | {"capability", "engine"},
    "cli": MIDDLE | {"bench", "capability", "conformance", "engine", "sglang", "vllm"},
    "__init__": MIDDLE,
    "__main__": {"cli"},
}


def imported_modules(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import, write the whole name"
            modules.add(node.module or "")
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def part_of(path: Path) -> str:
    first = path.relative_to(CORE).parts[0]
    return first.removesuffix(".py")


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda path: str(path.relative_to(CORE)))
def test_core_imports_follow_the_arrows(path: Path):
    part = part_of(path)
    parts = {m.split(".")[1] for m in imported_modules(path) if m.startswith("mla_portable.")}
    foreign = {name for name in parts - {part} - MAY_IMPORT[part] if (CORE / name).exists() or (CORE / f"{name}.py").exists()}
    assert not foreign, f"{part} may not import {sorted(foreign)}"
    vendors = {m for m in imported_modules(path) if m.startswith("mla_portable_")}
    assert not vendors, f"core imports a vendor: {sorted(vendors)}"


KNOWN_CIRCLES = {
    # `use` has plugins loaded, in case one of them brings the primitive that it names
    frozenset(f"mla_portable.registry{name}" for name in ("", ".policy", ".registry", ".select")),
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def arrows_of_modules() -> dict[str, set[str]]:
    """Module -> the modules whose names it imports; the package itself is left out, for its names load on first use.

    `from package import module` is an arrow to the module alone.
    """
    files = {module_name(path): path for path in CORE.rglob("*.py")}
    del files["mla_portable"]
    arrows: dict[str, set[str]] = {}
    for name, path in files.items():
        targets = set[str]()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                targets |= {each if each in files else node.module for each in inner}
        arrows[name] = targets & files.keys() - {name}
    return arrows


def circles(arrows: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """The sets of nodes that reach one another."""

    def reached(start: str) -> set[str]:
        found, todo = set[str](), [start]
        while todo:
            new = arrows[todo.pop()] - found
            found |= new
            todo += new
        return found

    reach = {name: reached(name) for name in arrows}
    return {frozenset(other for other in reach[name] if name in reach[other]) for name in arrows if name in reach[name]}


def test_modules_import_one_another_in_no_circle():
    """Lazy imports and those for type checkers count."""
    assert circles(arrows_of_modules()) <= KNOWN_CIRCLES


def test_a_circle_is_found():
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert circles(arrows) == {frozenset({"b", "c"})}


def private_imports(path: Path, package: str) -> set[str]:
    """What a file imports, of this project, whose name begins with an underscore and which is of another package.

    package: the file's own, with dots. What is below it is its own as well.
    """
    found = set[str]()
    for module in imported_modules(path):
        parts = module.split(".")
        private = next((i for i, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")), None)
        if parts[0].startswith("mla_portable") and private is not None:
            owner = ".".join(parts[:private])
            if not (owner == package or owner.startswith(f"{package}.") or package.startswith(f"{owner}.")):
                found.add(module)
    return found


SOURCES = {
    path: ".".join(path.parent.relative_to(top).parts)
    for top in (ROOT, *sorted(ROOT.glob("backends/*/src")), *sorted(ROOT.glob("examples/*/src")))
    for path in sorted((CORE if top == ROOT else top).rglob("*.py"))
}
"""Every module of the project -> its package."""


def test_private_names_stay_in_their_package():
    found = {str(path.relative_to(ROOT)): private_imports(path, package) for path, package in SOURCES.items()}
    assert len(found) > 100 and {name: imported for name, imported in found.items() if imported} == {}


def test_a_private_name_of_another_package_is_found(tmp_path: Path):
    path = tmp_path / "module.py"
    path.write_text(
        "import mla_portable.primitives._indexer, torch._C\n"
        "from mla_portable.contracts.rules import _STRIDED, check_cache\n"
        "from mla_portable import __version__\n"
    )
    assert private_imports(path, "mla_portable.attention") == {
        "mla_portable.primitives._indexer",
        "mla_portable.contracts.rules._STRIDED",
    }
    assert private_imports(path, "mla_portable.primitives") == {"mla_portable.contracts.rules._STRIDED"}


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_imports_the_contracts_alone(plugin: str):
    for path in (ROOT / "backends" / plugin / "src").rglob("*.py"):
        core = {m for m in imported_modules(path) if m == "mla_portable" or m.startswith("mla_portable.")}
        outside = {m for m in core if not m.startswith(PLUGINS_MAY_IMPORT)}
        assert not outside, f"{path.relative_to(ROOT)} imports {sorted(outside)}"
        others = {m for m in imported_modules(path) if m.startswith("mla_portable_")} - {
            m for m in imported_modules(path) if m.startswith(f"mla_portable_{plugin}")
        }
        assert not others, f"{path.relative_to(ROOT)} imports another plugin: {sorted(others)}"


def test_importing_mla_portable_loads_neither_torch_nor_plugins():
    code = "import sys, mla_portable; print([m for m in ('torch', 'triton', 'mla_portable.registry') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_registry_needs_no_primitive_to_be_imported():
    code = "import sys, mla_portable.registry; print('mla_portable.primitives' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_every_public_name_is_there():
    import mla_portable
    from mla_portable.contracts import Primitive

    for name in mla_portable.__all__:
        assert getattr(mla_portable, name) is not None
    assert {"SparseMLAAttention", "explain", *Primitive.all()} <= set(mla_portable.__all__)


@pytest.mark.parametrize("path", sorted([*CORE.rglob("*.py"), *(ROOT / "backends").rglob("*.py")]), ids=lambda path: path.name)
def test_every_file_carries_its_licence_and_says_what_it_is(path: Path):
    text = path.read_text()
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0")
    assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


@pytest.mark.parametrize("package", ["engine", "sglang", "vllm"])
def test_an_adapter_s_table_lists_its_modules(package: str):
    folder = CORE / package
    table = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    listed = set(re.findall(r"(?:^|  )([a-z]\w*)  +\S", table, re.MULTILINE))
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert listed == modules - {"__init__"}


def test_wheel_lists_every_package():
    """Explicit package lists forget new folders silently: compare them with the tree."""
    try:
        import tomllib
    except ImportError:
        import tomli as tomllib
    for project, top in [(ROOT, CORE), *((ROOT / "backends" / p, ROOT / "backends" / p / "src") for p in PLUGINS)]:
        listed = set(tomllib.loads((project / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
        base = top.parent if top == CORE else top
        found = {".".join(init.parent.relative_to(base).parts) for init in top.rglob("__init__.py")}
        assert listed == found


def test_no_two_modules_that_tests_import_have_one_name():
    """They are found by name on `sys.path`: of two, a process would get the one that it imported first."""
    roots = [ROOT / "tests", ROOT / "ci"]
    folders = [folder for root in roots for folder in (root, *(each for each in root.iterdir() if each.is_dir()))]
    names = Counter(path.stem for folder in folders for path in folder.glob("*.py"))
    assert {name for name, times in names.items() if times > 1} <= {"conftest"}
