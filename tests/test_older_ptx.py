# SPDX-License-Identifier: Apache-2.0
"""Code for an older GPU on a newer one: what a run hands to the driver, and what is kept of it.

Up to the driver; what follows it needs a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import H200, PROFILES

from mla_portable.capability.model import RecordError
from mla_portable.capability.profiles import profile_of
from mla_portable.capability.run import read_run
from mla_portable.choose import Registry
from mla_portable.cli.recording import recorder
from mla_portable.contracts import Primitive
from mla_portable.dispatch import current_registry
from mla_portable.judge.conformance import CaseResult, run_suite

pytest.importorskip("triton")

ROOT = Path(__file__).parents[1]
KERNEL = """
import triton
import triton.language as tl


@triton.jit
def double(x):
    tl.store(x, 2 * tl.load(x))
"""
NO_DRIVER = """
import sys
from pathlib import Path
from types import SimpleNamespace
import triton
from vllm_gpu import older_ptx
from kernel_file import double
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
older_ptx.triton_driver = SimpleNamespace(active=SimpleNamespace())

def compiled(capability):
    return triton.compile(ASTSource(double, {"x": "*fp32"}, constexprs={}), target=GPUTarget("cuda", capability, 32))

loaded = Path("loaded")
older_ptx.load_ptx_instead(80, loaded)
older_ptx.load_ptx_instead(80, loaded)
assert older_ptx.triton_driver.active.get_current_target() == GPUTarget("cuda", 80, 32)
made = compiled(80)
assert b".target sm_80" in made.kernel and b".visible .entry double" in made.kernel
assert [line.split()[1] for line in loaded.read_text().splitlines()] == ["double"]
try:
    compiled(89)
except RuntimeError as error:
    assert "not for sm_80" in str(error)
else:
    sys.exit("PTX for another architecture went through")
"""

NATIVE = """
import sys
from pathlib import Path
import torch
from vllm_gpu.older_ptx import load_native_ptx_instead
from mla_portable_nvidia.native import kernel_build
from mla_portable_nvidia.native.build_choice import SMALL
from mla_portable_nvidia.native.runtime.nvrtc import compile_cubin
from mla_portable_nvidia.native.sparse_decode_sm80 import MERGES

load_native_ptx_instead(89, Path("loaded"))
load_native_ptx_instead(89, Path("loaded"))
assert torch.cuda.get_device_capability() == (8, 9)
made = kernel_build.compile_build(MERGES[0], "sm_89", compile_cubin)
assert b".target sm_89" in made and b".visible .entry merge_splits" in made and made.endswith(bytes(1))
assert [line.split()[1] for line in Path("loaded").read_text().splitlines()] == ["merge_splits-h1"]
try:
    kernel_build.compile_build(SMALL, "sm_90a", compile_cubin)
except RuntimeError as error:
    assert "not for sm89" in str(error)
else:
    sys.exit("a kernel for another architecture went through")
"""


@pytest.mark.parametrize("script", [NO_DRIVER, NATIVE], ids=["triton", "nvrtc"])
def test_a_compiled_kernel_hands_its_ptx_to_the_driver(tmp_path: Path, script: str) -> None:
    """In a process of its own; Triton's driver is a stand-in, and no native kernel is loaded."""
    (tmp_path / "kernel_file.py").write_text(KERNEL)
    (tmp_path / "script.py").write_text(script)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "ci"), str(tmp_path), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_only_what_is_compiled_here_can_run_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a vendor's library are not; what ran is kept with its `target`: test_runs."""
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    import run_older_ptx

    registry = Registry(plugins=[("triton", "mla_portable_triton"), ("nvidia", "mla_portable_nvidia")], environ={}, probe=False)
    assert run_older_ptx.libraries_of("triton", PROFILES["a100-80g"], registry) == []
    assert run_older_ptx.libraries_of("nvidia.native_sm80", PROFILES["l40s"], registry) == []
    assert "nvidia.flashmla / sparse_decode" in run_older_ptx.libraries_of("nvidia", PROFILES["h100"], registry)


def test_an_interrupted_run_keeps_the_cases_that_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    import run_older_ptx

    registry = Registry(plugins=[("reference", "mla_portable.reference")], environ={}, probe=False)
    results: list[CaseResult] = []

    def interrupted(loaded: Path) -> None:
        file = recorder(tmp_path / "run.json.gz", registry, torch.device("cpu"), target="sm80")
        with run_older_ptx.kept(file, "smoke", loaded) as kept:
            report = run_suite(
                registry, "reference", device="cpu", level="smoke", primitives=[Primitive.named("merge_states")],
                progress=lambda done, total, each: kept.append(each),
            )  # fmt: skip
            results.extend(report.results)
            raise KeyboardInterrupt

    (tmp_path / "none").touch()
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "none")
    assert not (tmp_path / "run.json.gz").exists(), "no kernel was loaded, so nothing of sm80 ran"
    (tmp_path / "loaded").write_text("1 double\n")
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "loaded")
    assert len(read_run(tmp_path / "run.json.gz").cases) == len(results) / 2 > 0


def test_times_are_of_a_device_that_no_profile_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    import run_older_ptx

    seen: list[Any] = []
    monkeypatch.setattr(run_older_ptx, "get_registry", lambda: Registry(plugins=[], facts={"cuda": H200}, environ={}))
    monkeypatch.setattr(run_older_ptx, "load_older", lambda capability, loaded: seen.append((capability, loaded.exists())))
    monkeypatch.setattr(run_older_ptx, "app", lambda words: seen.append((words[-2:], current_registry().facts("cuda"))))
    run_older_ptx.bench(PROFILES["a100-80g"], ["kernels", "--rows", "4"])
    (loaded, (words, facts)) = seen
    assert (loaded, words) == ((80, True), ["--rows", "4"])
    assert (facts.arch, facts.num_sms, facts.shared_memory) == ("sm80", 132, 163 << 10)
    with pytest.raises(RecordError, match="no profile matches"):
        profile_of(facts.name, PROFILES)
