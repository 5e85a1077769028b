# SPDX-License-Identifier: Apache-2.0
"""How `ci/gpu_sglang --engine` judges two engines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "ci" / "sglang_gpu"))

import sglang_engine
from sglang_jobs import CACHES, ENGINES, judge


def told(mode: str, length: int, *logprobs: dict[str, float]) -> dict[str, Any]:
    """What an engine tells of a prompt: it takes the likeliest token of each step."""
    tokens = [int(max(at, key=at.__getitem__)) for at in logprobs]
    short = {"length": 17, "tokens": [7], "logprobs": [{"7": -1.0, "8": -2.0}]}
    long = {"length": 5000, "tokens": [7], "logprobs": [{"7": -1.0, "8": -2.0}]}
    run = [short, long, {"length": length, "tokens": tokens, "logprobs": list(logprobs)}]
    return {"name": f"engine v32 {mode} bfloat16", "run": run, "tokens_per_second": 100.0}


@pytest.mark.parametrize(
    ("length", "ours", "passed"),
    [
        (300, {"1": -1.05, "2": -1.1}, True),
        (300, {"1": -1.06, "2": -1.02}, True),  # another token, at a tie
        (300, {"1": -1.2, "2": -1.1}, False),
        (3000, {"1": -1.2, "2": -1.1}, True),  # a selection may be a near-tie
        (3000, {"1": -2.0, "2": -1.0}, False),
        (300, {"3": -1.0, "4": -1.1}, False),  # not one candidate in common
    ],
)
def test_engines_are_judged_by_the_length_of_prompts(length: int, ours: dict[str, float], passed: bool):
    lines = [told("off", length, {"1": -1.0, "2": -1.1}), told("on", length, ours)]
    ((found, line),) = judge([("v32", "bfloat16")], lines)
    assert found == passed
    assert line.startswith("engine v32 bfloat16: short ")


def test_an_engine_that_gave_nothing_fails():
    lines = [told("off", 300, {"1": -1.0}), {"name": "engine v32 on bfloat16", "error": "no"}]
    assert list(judge([("v32", "fp8_e4m3"), ("v32", "bfloat16"), ("glm5", "bfloat16")], lines)) == [
        (False, "engine v32 fp8_e4m3: stock gave no tokens"),
        (False, "engine v32 bfloat16: the plugin gave no tokens"),
        (False, "engine glm5 bfloat16: stock gave no tokens"),
    ]


def test_each_model_runs_with_each_cache_stock_beside_the_plugin():
    assert {job.arguments for job in ENGINES} == {
        (mode, cache, model) for mode in ("off", "on") for cache in CACHES for model in sglang_engine.MODELS
    }
    assert all(job.mode == job.arguments[0] for job in ENGINES)
    assert len({job.name for job in ENGINES}) == len(ENGINES) and sum("glm5" in job.name for job in ENGINES) == 4
