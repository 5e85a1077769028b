# SPDX-License-Identifier: Apache-2.0
"""A type checker follows a call from a Request to the function that a plugin registered."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLANTED = """
from typing import assert_type

from torch import Tensor

from mla_portable.contracts import Implementation, Request, Support
from mla_portable.primitives import MERGE_STATES, SPARSE_DECODE, MergeStates
from mla_portable.choose import get_registry


def right(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs, lses


def wrong(outs: Tensor, sums: Tensor, scale: float) -> Tensor:
    return outs


def bind_right(request: Request[MergeStates]) -> MergeStates:
    return right


support = Support("a test")
Implementation("acme.right", MERGE_STATES, support, bind_right)
Implementation("acme.wrong", MERGE_STATES, support, lambda request: wrong)  # planted 1
Implementation("acme.other", SPARSE_DECODE, support, bind_right)  # planted 2


def use(request: Request[MergeStates], outs: Tensor, lses: Tensor) -> None:
    bound = get_registry().bind(request)
    assert_type(bound, MergeStates)
    assert_type(bound(outs, lses), tuple[Tensor, Tensor])
    bound(outs)  # planted 3
"""


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_a_callable_of_the_wrong_signature_is_an_error(tmp_path: Path):
    planted = tmp_path / "planted.py"
    planted.write_text(PLANTED.replace("typing import assert_type", "typing_extensions import assert_type"))
    config = {"typeCheckingMode": "strict", "pythonVersion": "3.10", "extraPaths": [str(ROOT)], "include": [str(planted)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config))
    done = subprocess.run(["pyright", "--outputjson", "-p", str(tmp_path)], capture_output=True, text=True)
    found = [each for each in json.loads(done.stdout)["generalDiagnostics"] if each["severity"] == "error"]
    lines = PLANTED.splitlines()
    assert [lines[each["range"]["start"]["line"]].partition("# ")[2] for each in found] == [
        "planted 1",
        "planted 2",
        "planted 3",
    ]
