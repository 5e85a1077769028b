# SPDX-License-Identifier: Apache-2.0
"""`ci/gpu_flash_mla`: which cases it takes, and what becomes of those that pass, fail, raise, or end their process.

The programs here are laid out like FlashMLA's, with a function of one case and a loop behind `lib.is_no_cooldown()`, and attend
with `flash_mla` on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "ci" / "gpu_flash_mla"
LIB = """
import dataclasses
import os


@dataclasses.dataclass
class TestParam:
    b: int
    d_qk: int = 512
    h_q: int = 16
    seed: int = -1


def is_no_cooldown():
    return os.environ.get("NO_COOLDOWN") == "1"
"""
PREFILL = """
import os

import lib
import torch

import flash_mla


def run_test(p):
    print(f"seed {p.seed}, of case {p.b}")
    if p.b == 3:
        raise ValueError("odd")
    if p.b == 4:
        os._exit(9)
    torch.manual_seed(p.seed)
    q = torch.randn(1, p.h_q, p.d_qk).bfloat16()
    kv = torch.randn(8, 1, p.d_qk).bfloat16()
    indices = torch.arange(8, dtype=torch.int32).view(1, 1, 8)
    out = flash_mla.flash_mla_sparse_fwd(q, kv, indices, sm_scale=0.1)[0]
    rows = kv[:, 0].double()
    want = (q[0].double() @ rows.T * 0.1).softmax(1) @ rows[:, :512]
    return bool((out[0] - want).abs().max() < 0.02) and p.b != 2


if __name__ == "__main__":
    testcases = [lib.TestParam(b, d_qk=576 if b % 2 else 512) for b in range(6)]
    pause = lib.is_no_cooldown()
    for test in testcases:
        raise SystemExit("the loop of the program is not reached")
"""


def script() -> ModuleType:
    loader = SourceFileLoader("gpu_flash_mla", str(SCRIPT))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look there
    loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    tests = tmp_path / "FlashMLA" / "tests"
    tests.mkdir(parents=True)
    (tests / "lib.py").write_text(LIB)
    (tests / "test_flash_mla_sparse_prefill.py").write_text(PREFILL)
    return tests.parent


def run(checkout: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(checkout), "prefill", "--processes", "1", *options]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=580)


def test_passes_failures_errors_and_dead_processes_are_told_apart(checkout: Path, tmp_path: Path) -> None:
    passed = tmp_path / "passed.jsonl"
    done = run(checkout, "--passed", str(passed))
    assert done.returncode == 1, done.stdout + done.stderr
    records = [json.loads(line) for line in passed.read_text().splitlines()]
    assert sorted(each["case"] for each in records) == [0, 1, 5]
    assert {(each["program"], each["of"], each["backend"], each["arch"]) for each in records} == {("prefill", 6, "auto", "")}
    assert "FAIL prefill 2" in done.stdout and "seed 2, of case 2" in done.stdout
    assert "FAIL prefill 3" in done.stdout and "ValueError: odd" in done.stdout
    assert "FAIL prefill 4" in done.stdout and "the process ended with status 9" in done.stdout
    total = done.stdout.splitlines()[-2].split()
    assert total[:5] == ["all", "6", "3", "3", "0"]
    assert done.stdout.splitlines()[-1].startswith("backend auto; 1 processes")
    # what passed is left out the next time, for this backend alone
    rest = run(checkout, "--passed", str(passed), "--list")
    assert rest.stdout.splitlines()[-1].split()[:2] == ["all", "3"], rest.stdout + rest.stderr
    other = run(checkout, "--passed", str(passed), "--list", "--backend", "triton")
    assert other.stdout.splitlines()[-1].split()[:2] == ["all", "6"]


def test_shards_are_disjoint_and_samples_are_the_first_of_an_order() -> None:
    choose = script().choose
    cases = {"decoding": [{"b": b, "d_qk": 512 + 64 * (b % 2)} for b in range(100)], "prefill": [{"d_qk": 512}] * 7}
    plain = {"only": {}, "seed": 0, "passed": set(), "sample": None}
    shards = [choose(cases, shard=(share, 4), **plain) for share in (1, 2, 3, 4)]
    every = [*(("decoding", b) for b in range(100)), *(("prefill", b) for b in range(7))]
    assert sorted(case for shard in shards for case in shard) == every
    assert [len(each) for each in shards] == [27, 27, 27, 26]
    assert choose(cases, shard=(2, 4), **{**plain, "sample": 5}) == shards[1][:5]
    assert choose(cases, shard=(2, 4), **{**plain, "passed": set(shards[1][:5])}) == shards[1][5:]
    assert choose(cases, shard=(1, 1), **{**plain, "seed": 1}) != choose(cases, shard=(1, 1), **plain)
    odd = choose(cases, shard=(1, 1), **{**plain, "only": {"d_qk": "576"}})
    assert len(odd) == 50 and all(name == "decoding" and place % 2 for name, place in odd)


def test_what_cannot_be_run_is_refused_with_words(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parsed = script().parsed
    for words, expected in (
        ((), "name a checkout"),
        ((str(checkout), "dense"), "dense: expected decoding, prefill"),
        ((str(checkout),), "has no test_flash_mla_sparse_decoding.py"),
        ((str(checkout), "prefill", "--shard", "5/4"), "--shard 5/4"),
        ((str(checkout), "prefill", "--as", "sm80"), "--as needs --backend"),
        ((str(checkout), "prefill", "--only", "b"), "expected NAME=VALUE"),
        ((str(checkout), "prefill", "--processes", "0"), "must be positive"),
    ):
        with pytest.raises(SystemExit):
            parsed(list(words))
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("only", "expected"),
    [("width=512", "no case has an argument of this name"), ("d_qk=64", "no case has these values")],
)
def test_a_choice_of_no_case_is_refused(checkout: Path, only: str, expected: str) -> None:
    """A run of nothing would pass."""
    done = run(checkout, "--only", only)
    assert done.returncode == 1 and f"--only {only.partition('=')[0]}" in done.stderr and expected in done.stderr
