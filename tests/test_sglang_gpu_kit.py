# SPDX-License-Identifier: Apache-2.0
"""How `ci/gpu_sglang` runs its processes: here they are a stand-in's, without SGLang."""

from __future__ import annotations

import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

KIT = Path(__file__).parents[1] / "ci" / "sglang_gpu" / "sglang_jobs.py"
PROCESS = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0])"
PROGRAM = """
import os, subprocess, sys, time
print(os.environ["MLA_PORTABLE_SGLANG"], os.environ["MLA_GPU_SGLANG_ARCH"], sys.argv[1:], flush=True)
if sys.argv[1] == "slow":
    print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
    time.sleep(60)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The kit, with programs of its own."""
    spec = spec_from_file_location("sglang_gpu_kit", KIT)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HERE", tmp_path)
    (tmp_path / "process.py").write_text(PROCESS)
    (tmp_path / "program.py").write_text(PROGRAM)
    return module


def ended(pid: int) -> bool:
    """The process is gone, or only waits to be collected."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_process_leaves_its_log_and_its_status(kit: ModuleType, tmp_path: Path):
    end = time.monotonic() + 60
    assert kit.run(kit.Job("program.py", "sm80", "auto", ("0",)), tmp_path, end) == "exit 0"
    assert (tmp_path / "program-0-sm80.log").read_text() == "auto sm80 ['0']\n"
    assert kit.run(kit.Job("program.py", arguments=("3",)), tmp_path, end) == "exit 3"
    assert kit.run(kit.Job("program.py", arguments=("0",)), tmp_path, time.monotonic()) == "left out: the budget is spent"


def test_a_process_that_is_ended_leaves_none_behind(kit: ModuleType, tmp_path: Path):
    job = kit.Job("program.py", arguments=("slow",), seconds=4)
    assert kit.run(job, tmp_path, time.monotonic() + 60) == "ran out of time"
    _, worker = (tmp_path / "program-slow.log").read_text().splitlines()
    deadline = time.monotonic() + 10  # SIGKILL takes effect in its own time
    while not ended(int(worker)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended(int(worker))


@pytest.mark.parametrize("words", [("--only", "fusd"), ("--engine", "--only", "fused")])
def test_a_choice_of_no_process_is_refused(
    kit: ModuleType, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A run of nothing would pass."""
    monkeypatch.setattr(sys, "argv", ["gpu_sglang", str(tmp_path / "report"), *words])
    with pytest.raises(SystemExit, match=rf"--only {words[-1]}: expected text of one of \w+"):
        kit.main()
