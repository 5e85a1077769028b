# SPDX-License-Identifier: Apache-2.0
"""The order of tests: theirs, or a random one."""

from __future__ import annotations

import subprocess
import sys
from itertools import groupby
from pathlib import Path

TESTS = Path(__file__).parent


def collected(*options: str) -> list[str]:
    """The tests of two files, in the order in which pytest would run them."""
    files = [str(TESTS / f"test_{name}.py") for name in ("errors", "values")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *options, *files]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_the_order_is_random_where_it_is_asked_for():
    plain, drawn = collected(), collected("-p", "randomly", "--randomly-seed=1")
    assert [file for file, _ in groupby(each.partition("::")[0] for each in plain)] == [
        "tests/test_errors.py",
        "tests/test_values.py",
    ]
    assert sorted(drawn) == sorted(plain) and drawn != plain
    assert drawn == collected("-p", "randomly", "--randomly-seed=1") != collected("-p", "randomly", "--randomly-seed=2")
