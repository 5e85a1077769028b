# SPDX-License-Identifier: Apache-2.0
"""The order of tests: theirs, or a random one; none leaves a setting changed that others share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import groupby
from pathlib import Path

TESTS = Path(__file__).parent
LEAKS = f"""
import os, signal, sys, torch
from mla_portable import dispatch
from mla_portable.layouts import base

def test_variable(): os.environ["MLA_AN_INVENTED_VARIABLE"] = "1"
def test_folder(tmp_path): os.chdir(tmp_path)
def test_path(): sys.path.append({str(TESTS / "an invented folder")!r})
def test_handler(): signal.signal(signal.SIGTERM, signal.SIG_IGN)
def test_dtype(): torch.set_default_dtype(torch.float64)
def test_device(): torch.set_default_device("meta")
def test_deterministic(): torch.use_deterministic_algorithms(True)
def test_filling(): torch.utils.deterministic.fill_uninitialized_memory = False
def test_precision(): torch.set_float32_matmul_precision("medium")
def test_gradients(): torch.set_grad_enabled(False)
def test_registry(): dispatch._override = object()
def test_policy(): from mla_portable import use; globals().update(kept=use("reference")); kept.__enter__()
def test_primitive(): import fake_plugins.scaling
def test_layout(): base._layouts["invented"] = base.LAYOUTS["bf16"]

def test_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("MLA_ANOTHER", "1")
    monkeypatch.chdir(tmp_path)
    with torch.no_grad(), dispatch.serving(object()):
        pass
"""
"""Tests, each named after the setting that it leaves changed."""
SETTINGS = {
    "variable": "the environment",
    "folder": "the current folder",
    "path": "sys.path",
    "handler": "handlers of signals",
    "dtype": "torch's default dtype",
    "device": "torch's default device",
    "deterministic": "torch's deterministic algorithms",
    "filling": "torch's filling of fresh memory",
    "precision": "torch's matmul precision",
    "gradients": "torch's gradients",
    "registry": "the registry of a `serving` block",
    "policy": "the policy of a `use` block",
    "primitive": "the primitives",
    "layout": "the layouts",
}


def pytest_run(*arguments: str, folder: Path) -> str:
    """What a pytest of its own prints, without the options of the one that runs this test."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True).stdout


def collected(*options: str) -> list[str]:
    """The tests of two files, in the order in which pytest would run them."""
    files = ["tests/test_errors.py", "tests/test_values.py"]
    printed = pytest_run("--collect-only", "-q", *options, *files, folder=TESTS.parent)
    return [line for line in printed.splitlines() if "::" in line]


def test_the_order_is_random_where_it_is_asked_for():
    plain, drawn = collected(), collected("-p", "randomly", "--randomly-seed=1")
    files = [file for file, _ in groupby(each.partition("::")[0] for each in plain)]
    assert files == ["tests/test_errors.py", "tests/test_values.py"]
    assert sorted(drawn) == sorted(plain) and drawn != plain


def test_a_test_that_leaves_a_setting_changed_fails_itself(tmp_path: Path):
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    own = TESTS / "conftest.py"
    (tmp_path / "conftest.py").write_text(own.read_text().replace("__file__", repr(str(own))))
    options = ["-p", "no:randomly", f"--rootdir={tmp_path}", "-o", f"pythonpath={TESTS}", "--junitxml=report.xml"]
    printed = pytest_run(*options, folder=tmp_path)
    assert f"{len(SETTINGS) + 1} passed, {len(SETTINGS)} errors" in printed
    cases = ElementTree.parse(tmp_path / "report.xml").iter("testcase")
    errors = {case.get("name"): each.get("message", "") for case in cases for each in case}
    found = {name: re.findall("the test left changed: (.*)", message) for name, message in errors.items()}
    assert found == {f"test_{name}": [what] for name, what in SETTINGS.items()}
