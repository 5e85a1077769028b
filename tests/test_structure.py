# SPDX-License-Identifier: Apache-2.0
"""The arrows of the design, read off the syntax trees: who may import whom, and that importing is cheap."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest

from mla_portable import contracts

ROOT = Path(__file__).parents[1]
CORE = ROOT / "mla_portable"
PLUGINS = sorted(path.name for path in (ROOT / "backends").iterdir() if (path / "pyproject.toml").exists())
SHARED = "common"
"""Of PLUGINS the distribution that is none: the others may import it, and it imports none of them."""
CODE = (CORE, ROOT / "ci", *(ROOT / "backends" / plugin / "src" / f"mla_portable_{plugin}" for plugin in PLUGINS))

LOW = {"_version", "accelerator", "contracts", "errors", "features", "kit", "layouts", "models"}
PLUGINS_MAY_IMPORT = tuple(f"mla_portable.{name}" for name in ("accelerator", "contracts", "kit", "layouts", "primitives"))
MIDDLE = LOW | {"attention", "dispatch", "explaining", "planner", "primitives", "reference", "times"}
MIDDLE |= {"choose", "judge.problems"}
MAY_IMPORT = {
    "_version": set(),
    "models": set(),
    "accelerator": set(),
    "errors": set(),
    "features": set(),
    "layouts": {"errors"},
    "contracts": {"accelerator", "errors", "features", "layouts"},
    "kit": {"accelerator", "contracts", "errors", "features", "layouts"},
    "times": LOW,
    "choose": LOW | {"primitives", "judge.problems", "times"},  # primitives and problems only while it probes, see below
    "dispatch": LOW | {"choose"},
    "explaining": LOW | {"dispatch"},
    "primitives": LOW | {"dispatch"},
    "reference": LOW,
    "planner": LOW | {"primitives", "times"},
    "attention": LOW | {"choose", "planner", "primitives", "times"},
    "deep_gemm": LOW | {"dispatch", "primitives"},
    "flash_mla": LOW | {"choose", "dispatch", "primitives"},
    "engines.common": MIDDLE,
    "engines.sglang": MIDDLE | {"deep_gemm", "engines.common"},
    "engines.transformers": MIDDLE,
    "engines.vllm": MIDDLE | {"deep_gemm", "engines.common"},
    "transformers": {"engines.transformers"},
    "judge.problems": LOW | {"planner", "primitives"},
    "judge.conformance": MIDDLE,
    "capability": LOW | {"choose", "primitives"},
    "bench": MIDDLE | {"capability", "engines.common"},
    "cli": MIDDLE | {"bench", "capability", "engines.common", "judge.conformance"},
    "conformance": {"judge.conformance"},  # the former names, for a release
    "registry": {"choose"},
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


def part_of(module: str) -> str | None:
    """The part of the core that a module below `mla_portable` belongs to; None where none of that name is there."""
    first, _, rest = module.removeprefix("mla_portable.").partition(".")
    inner = f"{first}.{rest.partition('.')[0]}"
    part = inner if inner in MAY_IMPORT else first
    there = (CORE / part.replace(".", "/")).exists() or (CORE / f"{part}.py").exists()
    return part if there else None


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda path: str(path.relative_to(CORE)))
def test_core_imports_follow_the_arrows(path: Path):
    part = part_of(".".join(path.relative_to(CORE.parent).with_suffix("").parts))
    parts = {part_of(m) for m in imported_modules(path) if m.startswith("mla_portable.")} - {None, part}
    foreign = parts - MAY_IMPORT.get(part, set())
    assert not foreign, f"{part} may not import {sorted(foreign)}"
    vendors = {m for m in imported_modules(path) if m.startswith("mla_portable_")}
    assert not vendors, f"core imports a vendor: {sorted(vendors)}"


KNOWN_CIRCLES = {
    # `use` has plugins loaded, in case one of them brings the primitive that it names
    frozenset(f"mla_portable.choose{name}" for name in ("", ".policy", ".registry", ".select")),
}


def module_name(path: Path) -> str:
    """Its name with the packages that it is in; those of ci/ begin with `ci`."""
    root = next(top.parent for top in CODE if path.is_relative_to(top))
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imported_as(module: str) -> set[str]:
    """The names that import it: programs of ci/ put ci/ on sys.path, or one of its folders."""
    parts = module.split(".")
    return {".".join(parts[1:]), parts[-1]} if parts[0] == "ci" else {module}


def arrows_of_modules(*tops: Path) -> dict[str, set[str]]:
    """Module below these folders -> those among them whose names it imports.

    `from package import module` is an arrow to the module alone.
    """
    files = {module_name(path): path for top in tops for path in top.rglob("*.py")}
    known = {name: module for module in files for name in imported_as(module)}
    arrows: dict[str, set[str]] = {}
    for module, path in files.items():
        targets = set[str]()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                targets |= {each if each in known else node.module for each in inner}
        arrows[module] = {known[target] for target in targets & known.keys()} - {module}
    return arrows


def arrows_of_rooms(top: Path) -> dict[str, set[str]]:
    """As `arrows_of_modules`, each folder below `top` being one node; the files of `top` itself stay nodes of their own."""
    modules = arrows_of_modules(top)
    folders = {module_name(path): module_name(path.parent) for path in top.rglob("*.py") if path.parent != top}
    rooms: dict[str, set[str]] = {}
    for module, targets in modules.items():
        room = folders.get(module, module)
        rooms[room] = rooms.get(room, set()) | {folders.get(target, target) for target in targets} - {room}
    return rooms


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
    arrows = arrows_of_modules(*CODE)
    assert {name.split(".")[0] for name in arrows} == {top.name for top in CODE}
    assert circles(arrows) <= KNOWN_CIRCLES


@pytest.mark.parametrize("top", CODE[1:], ids=lambda top: top.name)
def test_folders_import_one_another_in_no_circle(top: Path):
    """Of ci/ and of the plugins; the core's have `MAY_IMPORT`."""
    assert not circles(arrows_of_rooms(top))


ROOMS = {
    "native": {"native.runtime"},
    "native.runtime": set(),
    "passes": {"native.runtime"},
    "flashmla": {"passes"},
    "fa3": {"passes"},
    "deepgemm": {"native"},
    "baselines": {"deepgemm", "flashmla"},
}
"""Folder of the nvidia plugin -> the folders that it imports. No library's folder imports another library's."""


def test_the_nvidia_plugin_s_folders_are_by_library():
    """Of the files beside the folders the plugin's face and `compile_all` alone import folders; no folder imports them."""
    rooms = arrows_of_rooms(next(top for top in CODE if top.name == "mla_portable_nvidia"))
    found = {room.partition(".")[2]: {target.partition(".")[2] for target in targets} for room, targets in rooms.items()}
    assert {room: found[room] & ROOMS.keys() for room in ROOMS} == ROOMS
    files = found.keys() - ROOMS.keys()
    assert {file for file in files if found[file] & ROOMS.keys()} == {"", "compile_all"}
    assert not any(found[room] & {"", "compile_all"} for room in ROOMS)


def test_a_circle_is_found():
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert circles(arrows) == {frozenset({"b", "c"})}


def test_arrows_between_files_of_one_folder_on_the_path_are_found():
    arrows = arrows_of_modules(ROOT / "ci")
    assert {"ci.vllm_gpu.checkpoint", "ci.vllm_gpu.other_models"} <= arrows["ci.vllm_gpu.named_models"]
    assert "ci.vllm_gpu.older_ptx" in arrows["ci.run_older_ptx"]


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
        "from mla_portable.kit.rules import _STRIDED, check_cache\n"
        "from mla_portable import __version__\n"
    )
    assert private_imports(path, "mla_portable.attention") == {
        "mla_portable.primitives._indexer",
        "mla_portable.kit.rules._STRIDED",
    }
    assert private_imports(path, "mla_portable.primitives") == {"mla_portable.kit.rules._STRIDED"}


def absent_imports(path: Path, modules: set[str]) -> set[str]:
    """The modules of this project that a file imports, in functions too, and that are not there."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {each for each in found if each.startswith("mla_portable")} - modules


def test_every_import_of_this_project_finds_its_module():
    """A lazy import is not run before somebody uses the command that it is in."""
    modules = {".".join((package, path.stem)).removesuffix(".__init__") for path, package in SOURCES.items()}
    others = [path for top in ("ci", "tests") for path in sorted((ROOT / top).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)): absent_imports(path, modules) for path in (*SOURCES, *others)}
    assert len(found) > 400 and {name: absent for name, absent in found.items() if absent} == {}


def test_an_import_of_an_absent_module_is_found(tmp_path: Path):
    path = tmp_path / "module.py"
    path.write_text("import torch\nfrom mla_portable.here import f\n\ndef lazy():\n    from mla_portable.gone import g\n")
    assert absent_imports(path, {"mla_portable.here"}) == {"mla_portable.gone"}


def test_no_bound_on_scratch_is_defined_twice():
    """A second constant of the same name and value would not follow a change of the first."""
    defined = Counter(
        (ast.unparse(node.target), ast.unparse(node.value))
        for path in SOURCES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.target).endswith("SCRATCH_BYTES")
    )
    assert ("SELECT_SCRATCH_BYTES", "64 << 20") in defined and set(defined.values()) == {1}, defined


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_imports_the_contracts_and_what_is_made_for_plugins(plugin: str):
    for path in (ROOT / "backends" / plugin / "src").rglob("*.py"):
        core = {m for m in imported_modules(path) if m == "mla_portable" or m.startswith("mla_portable.")}
        outside = {m for m in core if not m.startswith(PLUGINS_MAY_IMPORT)}
        assert not outside, f"{path.relative_to(ROOT)} imports {sorted(outside)}"
        plugins = {m.split(".")[0] for m in imported_modules(path) if m.startswith("mla_portable_")}
        others = plugins - {f"mla_portable_{plugin}", f"mla_portable_{SHARED}"}
        assert not others, f"{path.relative_to(ROOT)} imports another plugin: {sorted(others)}"


def test_what_plugins_share_is_no_plugin_itself():
    """It has no entry point, so that nothing is registered where no vendor's plugin asks for it."""
    entry = "[project.entry-points"
    texts = {plugin: (ROOT / "backends" / plugin / "pyproject.toml").read_text() for plugin in PLUGINS}
    assert {plugin for plugin, text in texts.items() if entry not in text} == {SHARED}
    users = {
        plugin
        for plugin in PLUGINS
        if plugin != SHARED
        and f"mla_portable_{SHARED}" in "".join(path.read_text() for path in (ROOT / "backends" / plugin / "src").rglob("*.py"))
    }
    declared = {plugin for plugin, text in texts.items() if f'"mla-portable-{SHARED}>=' in text}
    assert declared == users >= {"nvidia"}


def test_importing_mla_portable_loads_neither_torch_nor_plugins():
    code = "import sys, mla_portable; print([m for m in ('torch', 'triton', 'mla_portable.choose') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_registry_needs_no_primitive_to_be_imported():
    code = "import sys, mla_portable.choose; print('mla_portable.primitives' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


@pytest.mark.parametrize(
    ("module", "names"),
    {
        "defaults": ("neutral_defaults",),
        "results": ("attention_results", "head_results"),
        "split_kv": ("SPLIT_KV", "ProgramShape", "SplitSchedule", "split_kv", "split_kv_kind"),
    }.items(),
)
def test_what_the_contracts_handed_on_is_there_for_a_release(module: str, names: tuple[str, ...]):
    for name in names:
        with pytest.warns(DeprecationWarning, match=rf"import {name} from mla_portable\.kit\.{module}, not from"):
            assert getattr(contracts, name) is getattr(import_module(f"mla_portable.kit.{module}"), name)


@pytest.mark.parametrize(("former", "name"), [("conformance", "run_suite"), ("registry", "Registry")])
def test_a_package_s_former_name_is_there_for_a_release(former: str, name: str):
    now = {"conformance": "mla_portable.judge.conformance", "registry": "mla_portable.choose"}[former]
    sys.modules.pop(f"mla_portable.{former}", None)
    with pytest.warns(DeprecationWarning, match=f"mla_portable.{former} is now {now}"):
        module = import_module(f"mla_portable.{former}")
    assert getattr(module, name) is getattr(import_module(now), name)


def test_the_launcher_s_former_module_is_there_for_a_release():
    """By a name that the pages gave."""
    code = (
        "from mla_portable.contracts.triton_launcher import TritonLauncher as former\n"
        "from mla_portable.kit.triton_launcher import TritonLauncher\nassert former is TritonLauncher"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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


@pytest.mark.parametrize(
    "package", ["cli/doctor", "engines/common", "engines/sglang", "engines/transformers", "engines/vllm", "kit", "times"]
)
def test_a_package_s_table_lists_its_modules(package: str):
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
