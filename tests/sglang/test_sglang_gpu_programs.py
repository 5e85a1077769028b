# SPDX-License-Identifier: Apache-2.0
"""The programs of `ci/gpu_sglang` on the CPU: what they say of stock that is not there, and of what was not run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from mla_portable.engines.sglang import seams

PROGRAMS = Path(__file__).parents[2] / "ci" / "sglang_gpu"
NAMES = ("process", "stock", "times")


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """The modules, and the file that they report to."""
    monkeypatch.syspath_prepend(str(PROGRAMS))
    monkeypatch.setenv("MLA_TEST_SGLANG_DEVICE", "cpu")
    monkeypatch.setenv("MLA_GPU_SGLANG_OUT", str(tmp_path / "told"))
    monkeypatch.setenv("MLA_PORTABLE_SGLANG", "on")
    monkeypatch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0")
    yield SimpleNamespace(**{name: import_module(name) for name in NAMES}, told=tmp_path / "told")
    for name in NAMES:
        del sys.modules[name]


def lines(programs: SimpleNamespace) -> list[dict[str, Any]]:
    return [json.loads(line) for line in programs.told.read_text().splitlines()]


def test_a_stand_in_has_no_time(programs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    """Ours is timed, and judged by the oracle."""
    backend = import_module(seams.BACKEND_MODULE)
    monkeypatch.setattr(backend, "flash_attn_with_kvcache", MagicMock(), raising=False)
    monkeypatch.setattr(programs.times, "TOPK", 128)
    monkeypatch.setattr(programs.times, "CONTEXT", 256)
    monkeypatch.setattr(programs.times, "median_us", lambda call: call() is None)
    case = replace(programs.times.DECODE, num_heads=4, prefix_lens=(64,) * 2)
    programs.times.timed("fa3", case, seams.FA3, 2, fp8=False)
    (line,) = lines(programs)
    assert line["passed"] is None and "stock_us" not in line and "from_stock" not in line
    assert line["stock"].startswith("not available: what _forward_fa3 calls is not installed, a MagicMock stands for it")
    assert 0 < line["from_oracle"] < programs.times.TOLERANCE and "ours_us" in line


def test_a_wrong_result_fails_where_stock_is_not_available(programs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(import_module(seams.BACKEND_MODULE), "flash_attn_with_kvcache", MagicMock(), raising=False)
    monkeypatch.setattr(programs.times, "TOPK", 128)
    monkeypatch.setattr(programs.times, "CONTEXT", 256)
    monkeypatch.setattr(programs.times, "median_us", lambda call: 0.0)
    attend = getattr(programs.stock.backend_class(), seams.FA3)

    def wrong(*arguments: Any, **named: Any) -> torch.Tensor:
        return attend(*arguments, **named) + 1

    wrong.__wrapped__ = attend.__wrapped__
    monkeypatch.setattr(programs.stock.backend_class(), seams.FA3, wrong)
    programs.times.timed("fa3", replace(programs.times.DECODE, num_heads=4, prefix_lens=(64,) * 2), seams.FA3, 2, fp8=False)
    assert [line["passed"] for line in lines(programs)] == [False]


@pytest.mark.parametrize(("missing", "passed"), [("datasets", None), ("sglang.kernels.lost", False)])
def test_what_needs_a_package_of_others_is_not_run(programs: SimpleNamespace, missing: str, passed: bool | None):
    with programs.process.trying("draft", {}):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
    (line,) = lines(programs)
    assert line["passed"] is passed and ("not_run" in line) == (passed is None)


@pytest.mark.parametrize(
    ("words", "passed"), [("Unsupported dsa_impl = 'flashmla_auto'", True), ("1 != 2", False), ("", False)]
)
def test_what_sglang_refuses_is_expected(programs: SimpleNamespace, words: str, passed: bool):
    found: dict[str, Any] = {}
    with programs.process.trying("decode", found), programs.process.refused("Unsupported dsa_impl", found):
        assert not words, words
    assert [line["passed"] for line in lines(programs)] == [passed]
