# SPDX-License-Identifier: Apache-2.0
"""mla_portable as `flash_mla`: where programs find it, what it does not hide, and programs that run with it unchanged."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from mla_portable import flash_mla
from mla_portable.contracts import InvalidArgument
from mla_portable.flash_mla import installing
from mla_portable.flash_mla.__main__ import main
from mla_portable.flash_mla.installing import ON_PATH

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "flash_mla"}
    assert not before, "another test left it behind"
    yield
    flash_mla.uninstall()
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_mla"]:
        del sys.modules[name]


def a_real_one(folder: Path) -> Path:
    """A package `flash_mla` with a submodule, as pip would install it."""
    (folder / "flash_mla").mkdir(parents=True)
    (folder / "flash_mla" / "__init__.py").write_text("from flash_mla import flash_mla_interface\nREAL = True\n")
    (folder / "flash_mla" / "flash_mla_interface.py").write_text("REAL = True\n")
    return folder


class Modules(dict[str, types.ModuleType]):
    """`sys.modules` while another thread imports: it grows whenever someone looks through it."""

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            yield name
            self.setdefault("imported_by_another_thread", types.ModuleType("imported_by_another_thread"))


def test_other_threads_may_import_meanwhile(monkeypatch: pytest.MonkeyPatch):
    for change, installed in ((flash_mla.install, True), (flash_mla.uninstall, False)):
        modules = Modules(sys.modules)
        monkeypatch.setattr(sys, "modules", modules)
        change()
        assert flash_mla.is_installed() is installed and ("flash_mla" in modules) is installed


def test_threads_may_install_it_together(monkeypatch: pytest.MonkeyPatch):
    """Each comes as far as it can before the first has it installed; what was hidden is what was there before."""
    theirs = sys.modules["flash_mla"] = types.ModuleType("flash_mla")
    together = threading.Barrier(8)
    looked_for = installing._another

    def another() -> str | None:
        with suppress(threading.BrokenBarrierError):
            together.wait(0.5)
        return looked_for()

    monkeypatch.setattr(installing, "_another", another)
    with ThreadPoolExecutor(8) as threads:
        done = [threads.submit(flash_mla.install, force=True) for _ in range(8)]
    assert [each.result() for each in done] == [None] * 8 and flash_mla.is_installed()
    flash_mla.uninstall()
    assert sys.modules.pop("flash_mla") is theirs


def test_imports_find_it_until_it_is_uninstalled():
    assert not flash_mla.is_installed()
    with pytest.raises(ImportError):
        importlib.import_module("flash_mla")
    flash_mla.install()
    flash_mla.install()  # changes nothing
    assert flash_mla.is_installed()
    names: dict[str, object] = {}
    exec(  # the ways in which engines import it
        "import flash_mla\n"
        "import flash_mla.cuda as extension\n"
        "import flash_mla.flash_mla_interface\n"
        "from flash_mla import flash_mla_sparse_fwd, fused_norm_rope_attn_rope_cast as mega\n"
        "from flash_mla.flash_mla_interface import FlashMLASchedMeta\n",
        names,
    )
    assert names["flash_mla"] is flash_mla and names["extension"] is flash_mla.cuda
    assert names["flash_mla_sparse_fwd"] is flash_mla.flash_mla_sparse_fwd
    assert names["FlashMLASchedMeta"] is flash_mla.FlashMLASchedMeta
    assert names["mega"] is flash_mla.fused_norm_rope_attn_rope_cast
    found = importlib.util.find_spec("flash_mla")  # pyright: ignore[reportAttributeAccessIssue]
    assert found is not None and found.origin == flash_mla.__file__
    assert "mla.portable" in flash_mla.__version__ and flash_mla.has_legacy()
    flash_mla.uninstall()
    assert not flash_mla.is_installed()
    with pytest.raises(ImportError):
        importlib.import_module("flash_mla")
    flash_mla.uninstall()  # does nothing


def test_every_name_of_flashmla_and_of_sgl_flash_mla_is_there():
    functions = "get_mla_metadata get_mla_decoding_metadata flash_mla_with_kvcache flash_mla_sparse_fwd has_legacy"
    dense = "flash_attn_varlen_func flash_attn_varlen_qkvpacked_func flash_attn_varlen_kvpacked_func"
    wanted = {*functions.split(), *dense.split(), "fused_norm_rope_attn_rope_cast"}
    assert wanted <= set(flash_mla.__all__)
    assert all(hasattr(flash_mla, name) for name in flash_mla.__all__)
    assert "FlashMLASchedMeta" in flash_mla.flash_mla_interface.__all__


def test_a_real_one_is_not_hidden_without_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(a_real_one(tmp_path))
    with pytest.raises(
        InvalidArgument, match=r"flash_mla is installed at .*flash_mla/__init__\.py.*force=True only where"
    ) as caught:
        flash_mla.install()
    assert (caught.value.where, caught.value.argument) == ("flash_mla.install", "force")
    real = importlib.import_module("flash_mla")
    with pytest.raises(InvalidArgument, match="flash_mla is loaded from"):
        flash_mla.install()
    assert sys.modules["flash_mla"] is real
    flash_mla.install(force=True)
    assert importlib.import_module("flash_mla") is flash_mla
    assert importlib.import_module("flash_mla.flash_mla_interface") is flash_mla.flash_mla_interface
    flash_mla.uninstall()
    assert importlib.import_module("flash_mla") is real
    assert importlib.import_module("flash_mla.flash_mla_interface").REAL


def test_a_module_without_a_spec_is_another_one_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "flash_mla", types.ModuleType("flash_mla"))
    with pytest.raises(InvalidArgument, match="loaded from an unknown place"):
        flash_mla.install()


def run(*arguments: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "MLA_PORTABLE_BACKEND": "reference"}
    if path is not None:
        environ["PYTHONPATH"] = os.pathsep.join([str(path), environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "mla_portable.flash_mla", *arguments]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=100)


PROGRAM = """
import multiprocessing
import sys

import helper
import torch
import flash_mla
from flash_mla.flash_mla_interface import FlashMLASchedMeta


def attend(heads):
    q, kv = torch.ones(2, heads, 576, dtype=torch.bfloat16), torch.ones(4, 1, 576, dtype=torch.bfloat16)
    indices = torch.tensor([[[0, 3, -1]], [[-1, 4, -1]]], dtype=torch.int32)
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 1 / 576)
    return out[:, 0, 0].tolist(), max_logits[:, 0].tolist(), lse[:, 0].tolist()


if __name__ == "__main__":
    print(sys.argv[1:], helper.NAME, flash_mla.__name__)
    print(attend(3))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(attend, [5])[0])
    sys.exit(3)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "helper.py").write_text("NAME = 'beside the program'\n")
    return tmp_path


@pytest.mark.parametrize("form", ["script", "module"])
def test_a_program_runs_unchanged_and_so_do_its_child_processes(
    form: str, program: Path, tmp_path_factory: pytest.TempPathFactory
):
    """Another directory is the current one; spawned processes begin with nothing but the environment."""
    script, elsewhere = str(program / "program.py"), tmp_path_factory.mktemp("elsewhere")
    if form == "module":
        done = run("-m", "program", "--size", "7", cwd=elsewhere, path=program)
    else:
        done = run("--", script, "--size", "7", cwd=elsewhere)
    assert done.returncode == 3, done.stderr
    first, own, child = done.stdout.splitlines()
    assert first == "['--size', '7'] beside the program mla_portable.flash_mla"
    # one of two equal scores, as max_logits is the lse of scores 2**20 times as large
    assert own == child == f"([1.0, 0.0], [{1 + 6 * 2**-23}, -inf], [1.6931471824645996, inf])"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected a script or -m MODULE"),
        (["-m"], "expected a module after -m"),
        (["--fast", "program.py"], "expected a script (got --fast)"),
        (["nowhere.py"], "there is no nowhere.py"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("error: ") and words in shown.err
    assert not flash_mla.is_installed()


def test_help(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m mla_portable.flash_mla")


def test_the_runner_hides_a_real_one_only_by_force(tmp_path: Path):
    program, real = tmp_path, a_real_one(tmp_path / "site")
    (program / "program.py").write_text("import flash_mla, sys\nprint(flash_mla.__name__)\nsys.exit(3)\n")
    refused = run("program.py", cwd=program, path=real)
    assert refused.returncode == 2 and "flash_mla is installed at" in refused.stderr and "--force" in refused.stderr
    done = run("--force", "program.py", cwd=program, path=real)
    assert done.returncode == 3 and "mla_portable.flash_mla" in done.stdout, done.stderr


def test_the_folder_for_child_processes_serves_any_program(tmp_path: Path):
    """On PYTHONPATH, it is the way to install it where a program cannot be started by the runner."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ON_PATH), os.environ.get("PYTHONPATH", "")])}
    code = (
        "from flash_mla.flash_mla_interface import FlashMLASchedMeta as own\n"
        "import flash_mla, mla_portable.flash_mla as ours\n"
        "ours.install()\n"
        "print(flash_mla is ours, own is ours.FlashMLASchedMeta)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100)
    assert done.stdout == "True True\n", done.stderr
    code = "import mla_portable.flash_mla as ours; ours.install(); print(ours.is_installed())"  # no other is on the path
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100)
    assert done.stdout == "True\n", done.stderr
