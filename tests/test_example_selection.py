# SPDX-License-Identifier: Apache-2.0
"""examples/selection.py: its rules select what they say, and what it prints follows. tests/test_pages.py runs it as it is."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mla_portable as mp

EXAMPLE = Path(__file__).parents[1] / "examples/selection.py"
TOPK = 64


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("selection_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def given(example: Any) -> Any:
    return example.problem(4, 256, 0.0)


@pytest.mark.parametrize("name", ["indexer", "best", "recent"])
def test_a_rule_selects_k_positions_that_a_token_sees(example: Any, given: Any, name: str) -> None:
    positions = example.RULES[name](given, TOPK).long()
    assert positions.shape == (4, TOPK) and all(len(set(row.tolist())) == TOPK for row in positions)
    assert example.seen(given).gather(1, positions).all()


def test_the_best_selection_keeps_the_most(example: Any, given: Any) -> None:
    with mp.use("reference"):
        everything = torch.where(example.seen(given), torch.arange(256), -1).int()
        out, lse = example.attend(given, everything)
        scores = torch.einsum("thd,nd->thn", given.q.double(), given.kv.double()) * example.SCALE
        scores = scores.masked_fill(~example.seen(given)[:, None], -torch.inf)
        torch.testing.assert_close(lse.double(), scores.logsumexp(dim=-1), atol=1e-3, rtol=0)
        wanted = torch.einsum("thn,nd->thd", scores.softmax(dim=-1), given.kv[:, :512].double())
        torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=2e-2)
        kept = {
            name: (example.attend(given, rule(given, TOPK))[1] - lse).exp().mean().item()
            for name, rule in example.RULES.items()
        }
    assert 1.0001 > kept["best"] > kept["indexer"] > 2 * kept["recent"] > 0
