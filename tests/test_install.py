# SPDX-License-Identifier: Apache-2.0
"""Installing beside an existing torch: one command on every page, and it brings everything that the core imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
NO_TORCH = "requirements-no-torch.txt"
FROM_THE_MACHINE = {"torch", "triton", "vllm", "sglang", "packaging", "prometheus_client"}
"""What the core imports and such an installation leaves alone. The last three are used where they are installed."""
BESIDE_AN_ENGINE = ("bench", "capability", "cli", "judge.conformance")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CLI = PROJECT["optional-dependencies"]["cli"]


def requirements(name: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [line for line in lines if line]


def distribution(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement)[0]


def imported(tools: bool) -> set[str]:
    """Every package outside of the standard library that modules of the core, or of its tools, import anywhere."""
    found: set[str] = set()
    for path in (ROOT / "mla_portable").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "mla_portable").with_suffix("").parts)
        if module.startswith(tuple(f"{name}." for name in BESIDE_AN_ENGINE)) != tools:
            continue
        tree = ast.parse(path.read_text())
        unseen = [
            n
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for n in node.body
        ]
        for node in ast.walk(tree):
            if node in unseen:
                continue
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"mla_portable", "tomllib"}


def test_the_list_without_torch_is_the_list_of_dependencies_without_torch() -> None:
    assert requirements(NO_TORCH) == [each for each in (*PROJECT["dependencies"], *CLI) if distribution(each) != "torch"]
    assert "-e .[cli]" in requirements("requirements.txt")


def test_what_is_imported_is_declared() -> None:
    needed = {distribution(each) for each in PROJECT["dependencies"]}
    assert imported(tools=False) - FROM_THE_MACHINE == needed - {"torch"}
    assert imported(tools=True) - FROM_THE_MACHINE - needed == set(map(distribution, CLI))
    (marked,) = [each for each in CLI if distribution(each) == "tomli"]
    assert marked.endswith("python_version < '3.11'"), "Python 3.10 has no tomllib"


def test_what_an_engine_imports_needs_no_tool() -> None:
    """Modules of the extra are not there, and no module of the tools is loaded."""
    tools = tuple(f"mla_portable.{name}" for name in BESIDE_AN_ENGINE)
    code = (
        f"import sys\nfor name in {[distribution(each) for each in CLI]}: sys.modules[name] = None\n"
        "import mla_portable\nfor name in mla_portable.__all__: getattr(mla_portable, name)\n"
        "import mla_portable.attention, mla_portable.choose\n"
        "import mla_portable.engines.vllm.plugin, mla_portable.engines.sglang.plugin\n"
        "mla_portable.get_registry().implementations()\n"
        f"print([name for name in sys.modules if name.startswith({tools})])\n"
        "from mla_portable.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
    assert done.returncode == 1 and "pip install 'mla-portable[cli]'" in done.stderr and "Traceback" not in done.stderr


def test_every_page_gives_the_same_command() -> None:
    done = subprocess.run([sys.executable, "ci/readme_command.py", "beside"], cwd=ROOT, capture_output=True, text=True)
    command = done.stdout.strip()
    plugins = sorted(path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "backends").glob("*/pyproject.toml"))
    assert command.startswith(f"pip install -r {NO_TORCH} && pip install --no-deps -e . ")
    assert sorted(re.findall(r"-e (backends/\w+)", command)) == plugins
    pages = [ROOT / "README.md", ROOT / "Dockerfile", *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.yml")]
    given = {path.name for path in pages if command in path.read_text()}
    assert given >= {"README.md", "Dockerfile", "deploy.md", "iluvatar.md", "gpu.yml"}
    other = [line for path in pages for line in path.read_text().splitlines() if "pip install --no-deps -e" in line]
    assert all(command in line for line in other), other


def test_a_container_starts_as_the_engine_s_own_image_does() -> None:
    words = [line.split()[0] for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    assert words == ["ARG", "FROM", "ARG", "ARG", "COPY", "RUN"], "ENTRYPOINT, CMD, WORKDIR, USER and ENV stay the image's"


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-engines.txt"])
def test_no_other_list_repeats_the_dependencies(name: str) -> None:
    own = {distribution(each) for each in requirements(NO_TORCH)}
    assert not own & {distribution(each) for each in requirements(name)}
