# SPDX-License-Identifier: Apache-2.0
"""How `ci/gpu_sglang --engine` judges two engines' tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ci" / "sglang_gpu"))

from tokens import compare, judge_engines


def told(tokens: list[list[int]], logprobs: list[list[float]], **more: Any) -> dict[str, Any]:
    return {"tokens": tokens, "logprobs": logprobs, **more}


STOCK = told([[1, 2, 3, 4], [5, 6, 7, 8]], [[-1.0] * 4, [-2.0] * 4])


@pytest.mark.parametrize(
    ("tokens", "logprobs", "passed"),
    [
        ([[1, 2, 3, 4], [5, 6, 7, 8]], [[-1.05] * 4, [-2.0] * 4], True),
        ([[1, 2, 9, 9], [5, 6, 7, 8]], [[-1.0, -1.0, -1.02, -7.0], [-2.0] * 4], True),  # a tie; what follows it is another text
        ([[1, 2, 9, 9], [5, 6, 7, 8]], [[-1.0, -1.0, -2.0, -1.0], [-2.0] * 4], False),
        ([[1, 2, 3, 4], [5, 6, 7, 8]], [[-1.0] * 4, [-2.0, -2.0, -2.3, -2.0]], False),
        ([[9, 2, 3, 4], [9, 6, 7, 8]], [[-1.0] * 4, [-2.0] * 4], False),  # nothing was compared
    ],
)
def test_tokens_agree_up_to_a_tie(tokens: list[list[int]], logprobs: list[list[float]], passed: bool):
    assert compare(STOCK, told(tokens, logprobs))[0] == passed


def test_an_engine_that_gave_nothing_fails():
    lines = {"a": [{"name": "engine off fp8_e4m3", **STOCK}], "b": [{"name": "engine on fp8_e4m3", "error": "no"}]}
    assert list(judge_engines(lines)) == [
        (False, "engine fp8_e4m3: the plugin gave no tokens"),
        (False, "engine bfloat16: stock gave no tokens"),
    ]
