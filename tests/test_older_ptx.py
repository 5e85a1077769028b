# SPDX-License-Identifier: Apache-2.0
"""Code for an older GPU on a newer one: what a run hands to the driver, and what its record is worth in the matrix.

Up to the driver; what follows it needs a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machines import H200
from reporting import PROFILES, RUN, derived

from mla_portable.primitives import CACHE_WRITE, CONVERT_INDICES, GATHER_UPCONVERT, SPARSE_DECODE, SPARSE_PREFILL
from mla_portable.registry import Registry
from mla_portable.tools.conformance import CaseResult, Report, cases_for
from mla_portable.tools.matrix.claims import collect_declarations
from mla_portable.tools.matrix.evidence import Evidence, problems_of
from mla_portable.tools.matrix.levels import Cell, Hashes, evaluate
from mla_portable.tools.matrix.record import compiled_report, conformance_report, kernels_of

pytest.importorskip("triton")

ROOT = Path(__file__).parents[1]
STEP = (CONVERT_INDICES, CACHE_WRITE, SPARSE_DECODE, SPARSE_PREFILL)
"""What a step on an FP8 cache takes where prefill reads the cache itself."""

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
from mla_portable_nvidia.native import build
from mla_portable_nvidia.native.choice import SMALL
from mla_portable_nvidia.native.nvrtc import compile_cubin
from mla_portable_nvidia.native.sparse_decode_sm80 import MERGES

load_native_ptx_instead(89, Path("loaded"))
load_native_ptx_instead(89, Path("loaded"))
assert torch.cuda.get_device_capability() == (8, 9)
made = build.compile_build(MERGES[0], "sm_89", compile_cubin)
assert b".target sm_89" in made and b".visible .entry merge_splits" in made and made.endswith(bytes(1))
assert [line.split()[1] for line in Path("loaded").read_text().splitlines()] == ["merge_splits-h1"]
try:
    build.compile_build(SMALL, "sm_90a", compile_cubin)
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


# ------------------------------------------------------------------ what a record of such a run is worth


@pytest.fixture(scope="module")
def portable() -> Registry:
    return Registry(plugins=[("triton", "mla_portable_triton")], environ={}, probe=False)


def cells(
    registry: Registry, arch: str, *, name: str = "triton.portable", level: str = "quick", dead: str = ""
) -> dict[tuple[str, str, str | None], Cell]:
    """(device, primitive, layout) -> what the matrix shows after a run on an H200, every case of it passed but `dead`."""
    older = next(profile.device_facts() for profile in PROFILES.values() if profile.arch == arch)
    declared = collect_declarations(registry, PROFILES)
    claims = [claim for claim in declared.claims if claim.implementation == name]
    results: list[CaseResult] = []
    for implementation in registry.implementations():
        if implementation.name == name:
            for case in cases_for(implementation, older, level):
                died = case.id == dead
                results.append(CaseResult(case, "error" if died else "passed", {}, {}, "it died" if died else "", 0.1))
    versions = (("python", "3.12.0"), ("torch", "2.11.0"), ("triton", "3.6.0"))
    report = Report(name, level, older, versions, tuple(results))
    made: list[dict[str, Any]] = derived(conformance_report(report, declared, RUN, driver="580.1", ran_on=H200))
    usage = {"error": "", "shared": 0, "registers": 1, "spilled": 0, "arch": arch}
    lines = [{**usage, "kernel": kernel, "label": kernel} for claim in claims for kernel in kernels_of(claim)]
    declared = replace(declared, claims=tuple(claims))
    made += derived(compiled_report(lines, claims[0].module, declared, PROFILES, RUN))
    assert [problem for record in made for problem in problems_of(record, PROFILES)] == []
    evidence = [Evidence("here", record) for record in made]
    suite = {record["primitive"]: record["suite_hash"] for record in made if record["kind"] == "conformance"}
    hashes = Hashes({(each["implementation"], each["primitive"], arch): each["source_hash"] for each in made}, suite)
    same_arch = {slug: profile for slug, profile in PROFILES.items() if profile.arch == arch}
    found = evaluate(claims, evidence, hashes, same_arch)
    return {(cell.device, cell.primitive, cell.layout): cell for cell in found}


@pytest.mark.parametrize("arch", ["sm80", "sm89"])
def test_a_run_at_level_quick_covers_the_whole_fp8_step_on_every_device_of_the_architecture(
    portable: Registry, arch: str
) -> None:
    found = cells(portable, arch)
    devices = {slug for slug, profile in PROFILES.items() if profile.arch == arch}
    for primitive in (*STEP, GATHER_UPCONVERT):
        mine = {(device, layout): cell for (device, name, layout), cell in found.items() if name == primitive}
        assert {device for device, _ in mine} == devices
        assert {layout for _, layout in mine} >= {None if primitive is CONVERT_INDICES else "fp8_ds_mla"}
    assert {cell.state for cell in found.values()} == {"compiled+run"}
    assert all(f"the code for {arch} ran on {H200.name}" in cell.reasons for cell in found.values())


@pytest.mark.parametrize("arch", ["sm80", "sm89"])
def test_a_run_of_the_native_kernels_covers_attention_on_every_device_of_the_architecture(arch: str) -> None:
    registry = Registry(plugins=[("nvidia", "mla_portable_nvidia")], environ={}, probe=False)
    found = cells(registry, arch, name="nvidia.native_sm80")
    devices = {slug for slug, profile in PROFILES.items() if profile.arch == arch}
    attention = (str(SPARSE_DECODE), str(SPARSE_PREFILL))
    assert set(found) == {
        (device, name, layout) for device in devices for name in attention for layout in ("fp8_ds_mla", "bf16")
    }
    assert {cell.state for cell in found.values()} == {"compiled+run"}


def test_a_smaller_run_is_partial_and_a_dead_worker_is_failing(portable: Registry) -> None:
    assert {cell.state for cell in cells(portable, "sm80", level="smoke").values()} == {"partial"}
    decode = next(each for each in portable.implementations() if (each.name, each.primitive) == ("triton.portable", STEP[2]))
    older = next(profile.device_facts() for profile in PROFILES.values() if profile.arch == "sm80")
    dead = next(case.id for case in cases_for(decode, older, "quick") if case.request.kv_layout == "fp8_ds_mla")
    states = {cell.state for (_, name, layout), cell in cells(portable, "sm80", dead=dead).items() if name == STEP[2]}
    assert states == {"failing", "compiled+run"}
