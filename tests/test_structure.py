# SPDX-License-Identifier: Apache-2.0
"""The arrows of the design, read off the syntax trees: who may import whom, and that importing is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
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
    "errors": {"contracts"},  # for type checking alone
    "layouts": {"errors"},
    "contracts": {"accelerator", "errors", "layouts"},
    "sources": set(),
    "registry": LOW | {"primitives", "problems", "sources"},  # primitives and problems only while it probes, see below
    "problems": LOW | {"planner", "primitives"},
    "dispatch": LOW | {"registry"},
    "explaining": LOW | {"dispatch"},
    "primitives": LOW | {"dispatch"},
    "reference": LOW,
    "planner": LOW | {"primitives"},
    "attention": LOW | {"planner", "primitives", "registry"},
    "deep_gemm": LOW | {"primitives"},
    "vllm": MIDDLE | {"deep_gemm"},
    "tools": MIDDLE | {"sources", "vllm"},
    "__init__": MIDDLE,
    "__main__": {"tools"},
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


def test_modules_of_problems_import_in_one_direction():
    """Imports inside of functions count as well."""
    folder = CORE / "problems"
    graph = {f"mla_portable.problems.{path.stem}": imported_modules(path) for path in folder.glob("*.py")}
    TopologicalSorter(
        {name: needed & graph.keys() for name, needed in graph.items()}
    ).prepare()  # raises where there is a circle


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
