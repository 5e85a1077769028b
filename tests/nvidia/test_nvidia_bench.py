# SPDX-License-Identifier: Apache-2.0
"""The parts of the side-by-side benchmark that need no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "backends" / "nvidia" / "bench" / "side_by_side.py"


@pytest.fixture(scope="module")
def side_by_side():
    spec = importlib.util.spec_from_file_location("side_by_side", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], (0, 0)),
        ([(5, 9)], (4, 0)),
        ([(0, 2), (5, 6)], (3, 3)),
        ([(5, 6), (0, 2)], (3, 3)),
        ([(0, 10), (2, 3)], (10, 0)),
        ([(0, 4), (2, 6), (7, 8)], (7, 1)),
    ],
)
def test_idle_time_is_what_no_kernel_covers(side_by_side, intervals, expected):
    assert side_by_side.idle_time(intervals) == expected


def test_without_a_gpu_it_says_so():
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    assert done.returncode == 1 and "needs a CUDA GPU" in done.stderr
