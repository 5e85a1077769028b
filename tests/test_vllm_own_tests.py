# SPDX-License-Identifier: Apache-2.0
"""`ci/vllm_own_tests`: what becomes of tests that pass, fail, skip, are left out, call nothing of ours, or come to no end.

The vLLM here is a stand-in with the names that suites change, and its tests are written here. With the real one the program is
run by hand (docs/dev/vllm-testing.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "ci" / "vllm_own_tests"
TESTS = """
import pytest
import torch

import vllm.v1.attention.ops.flashmla as fm


def test_sparse_flashmla_attends():
    assert fm.is_flashmla_sparse_supported() == (True, None)
    q, kv = torch.randn(2, 3, 576).bfloat16(), torch.randn(8, 1, 576).bfloat16()
    indices = torch.arange(8, dtype=torch.int32).expand(2, 1, 8).contiguous()
    out = fm.flash_mla_sparse_fwd(q, kv, indices, 0.05)[0]
    rows = kv[:, 0].double()
    wanted = (q.double() @ rows.T * 0.05).softmax(-1) @ rows[:, :512]
    assert (out - wanted).abs().max() < 0.02


@pytest.mark.parametrize("width", [1, 2, 3])
def test_sparse_flashmla_many(width):
    pass


def test_sparse_flashmla_skips():
    pytest.skip("not on this device")


def test_of_something_else():
    raise AssertionError("it calls nothing that is replaced")
"""
FAILS = """

def test_sparse_flashmla_fails():
    assert fm.flash_mla_with_kvcache is None, "it is ours"
"""
HANGS = """

def test_sparse_flashmla_zz_hangs():
    import time

    time.sleep(600)
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return make_sources(tmp_path)


def make_sources(tmp_path: Path) -> Path:
    """A checkout, whose own `vllm` must not be imported, beside an installed stand-in."""
    for module in ("vllm", "vllm/v1", "vllm/v1/attention", "vllm/v1/attention/ops", "checkout/tests", "checkout/vllm"):
        (tmp_path / module).mkdir(parents=True)
        (tmp_path / module / "__init__.py").write_text("")
    (tmp_path / "vllm" / "__init__.py").write_text('__version__ = "0.99"\n')
    (tmp_path / "vllm" / "_custom_ops.py").write_text("")
    (tmp_path / "vllm" / "v1" / "attention" / "ops" / "flashmla.py").write_text("flash_mla_sparse_fwd = None\n")
    (tmp_path / "checkout" / "vllm" / "__init__.py").write_text("raise ImportError('the checkout has no libraries')\n")
    write(tmp_path / "checkout", TESTS)
    return tmp_path / "checkout"


def write(sources: Path, text: str) -> None:
    file = sources / "tests" / "kernels" / "attention" / "test_flashmla_sparse.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    for folder in (file.parent, file.parent.parent):
        (folder / "__init__.py").write_text("")
    file.write_text(text)


def begin(sources: Path, *arguments: str) -> subprocess.Popen[str]:
    out = results_of(sources)
    out.unlink(missing_ok=True)
    paths = [str(sources.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "MLA_PORTABLE_BACKEND": "reference"}
    command = [sys.executable, str(SCRIPT), str(sources), "--json", str(out), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results_of(sources: Path) -> Path:
    return sources.parent / "results.json"


def end(sources: Path, begun: subprocess.Popen[str]) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    stdout, stderr = begun.communicate()
    out = results_of(sources)
    done = subprocess.CompletedProcess(begun.args, begun.returncode, stdout, stderr)
    return done, json.loads(out.read_text()) if out.exists() else {}


def run(sources: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    return end(sources, begin(sources, *arguments))


def check_that_ours_serve_and_each_test_is_accounted_for(sources: Path):
    done, found = run(sources)
    assert done.returncode == 0, done.stdout + done.stderr
    (suite,) = found.values()  # the only one that these sources have a file for
    assert {name: status for name, (status, _) in suite["results"].items()} == {
        "test_sparse_flashmla_attends": "passed",
        "test_sparse_flashmla_skips": "skipped",
        **{f"test_sparse_flashmla_many[{width}]": "passed" for width in (1, 2, 3)},
    }
    assert (suite["vllm"], suite["others"], suite["not_drawn"]) == ("0.99", 1, 0)
    assert "skipped 1: not on this device" in done.stdout


def check_that_a_sample_is_counted_and_a_suite_that_cannot_begin_fails(sources: Path):
    done, found = run(sources, "flash_mla", "--sample", "2", "--seed", "3")
    assert len(found["flash_mla"]["results"]) == 2 and found["flash_mla"]["not_drawn"] == 3
    (sources.parent / "vllm" / "v1" / "attention" / "ops" / "flashmla.py").unlink()
    done, found = run(sources, "flash_mla")
    assert done.returncode == 1 and "the process ended with status 1" in done.stdout
    assert [status for status, _ in found["flash_mla"]["results"].values()] == ["unfinished"]


def test_what_becomes_of_each_test(sources: Path, tmp_path: Path):
    """A failure and a hang are named and fail the program, which waits for the hang; others run beside it."""
    (tmp_path / "others").mkdir()
    others = make_sources(tmp_path / "others")
    write(sources, TESTS + FAILS + HANGS)
    begun = begin(sources, "--seconds", "25")
    try:
        check_that_ours_serve_and_each_test_is_accounted_for(others)
        check_that_a_sample_is_counted_and_a_suite_that_cannot_begin_fails(others)
    finally:
        done, found = end(sources, begun)
    assert done.returncode == 1
    results = found["flash_mla"]["results"]
    assert results["test_sparse_flashmla_fails"][0] == "failed" and "it is ours" in done.stdout
    assert results["test_sparse_flashmla_zz_hangs"][0] == "unfinished" and "no end within 25 s" in done.stdout
    assert results["test_sparse_flashmla_attends"][0] == "passed"  # what is known by then is kept


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["flash_mlb"], "flash_mlb: expected flash_mla, "),
        (["deep_gemm"], "has no kernels/attention/test_deepgemm_attention.py"),
        (["--sample", "0"], "must be positive"),
    ],
)
def test_wrong_arguments_are_refused_in_words(sources: Path, arguments: list[str], words: str):
    done, _ = run(sources, *arguments)
    assert done.returncode == 2 and words in done.stderr


def test_a_folder_without_tests_is_refused(tmp_path: Path):
    done, _ = run(tmp_path)
    assert done.returncode == 2 and "name a checkout" in done.stderr


def test_every_suite_names_places_that_exist():
    """And patterns that say why a test is left out are of tests that the suite would run."""
    folder = str(ROOT / "ci" / "vllm_tests")
    code = f"import sys; sys.path.insert(0, {folder!r})\nfrom in_place import PLACES\nfrom suites import SUITES\n"
    code += "assert all(place in PLACES for suite in SUITES.values() for place in suite.places)\n"
    code += "assert {place for suite in SUITES.values() for place in suite.places} == {*PLACES}"
    subprocess.run([sys.executable, "-c", code], check=True)
