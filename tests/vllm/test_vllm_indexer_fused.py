# SPDX-License-Identifier: Apache-2.0
"""vLLM's indexer layer on an operation that fuses scores and top-k: it cannot leave out holes of a table, vLLM's have none."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from fused_indexer import Plugin
from vllm_indexer import check, make_batch, make_indexer, run, without_kernels

from mla_portable.choose import Registry, registry
from mla_portable.engines.vllm import compat, indexer, indexer_choice, indexer_seams, settings


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(settings.ENV_INDEXER, "on")
    plugin = Plugin()
    made = Registry(plugins=[("reference", "mla_portable.reference"), ("fused", plugin)], environ={})
    monkeypatch.setattr(registry, "_registry", made)
    monkeypatch.setattr(indexer, "_indexers", functools.cache(dict))
    indexer_choice.forget()
    indexer_seams.install()
    without_kernels(monkeypatch)
    yield plugin
    indexer_choice.forget()
    indexer_seams.set_functions(ours=False)


def in_order(engine: Any) -> bool:
    """Sort the chosen positions, which lie in front of -1. Returns: they were not sorted."""
    chosen = engine.topk.clone()
    last = torch.iinfo(torch.int32).max
    ascending = torch.where(chosen < 0, last, chosen).sort(dim=1).values
    engine.topk.copy_(torch.where(chosen < 0, -1, ascending))
    assert ((engine.topk >= 0) == (ascending < last)).all(), "-1 is in front of a position"
    return not torch.equal(chosen, engine.topk)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([1, 1, 1], [40, 5, 256]), ([7, 90], [7, 200]), ([1, 1, 30, 5], [70, 129, 64, 200])]
)
def test_it_serves_and_every_token_gets_its_best_keys(plugin: Plugin, query_lens: list[int], seq_lens: list[int]):
    engine = make_indexer()
    step = make_batch(engine, query_lens, seq_lens)
    probed = plugin.fused.calls
    run(engine, step)
    assert plugin.fused.calls > probed
    assert in_order(engine)
    check(engine, step)


def test_requests_of_padding(plugin: Plugin):
    """Their lengths are 0, so that their table entries are none below a length."""
    engine = make_indexer(drafts=1)
    step = make_batch(engine, [2, 2], [33, 190], padded_reqs=4, padded_tokens=8)
    run(engine, step, capture=True)
    assert in_order(engine)
    check(engine, step)


@pytest.mark.parametrize("asked", [True, False])
def test_the_same_bits_need_the_same_order(plugin: Plugin, asked: bool, monkeypatch: pytest.MonkeyPatch):
    """Attention adds in the order of the list: under batch invariance nothing serves that gives another one in each call."""
    monkeypatch.setattr(compat, "wants_batch_invariance", lambda: asked)
    engine = make_indexer()
    step = make_batch(engine, [1, 1, 1], [40, 5, 256])
    before = plugin.fused.calls
    run(engine, step)
    assert (plugin.fused.calls == before) == asked
    assert in_order(engine) != asked  # the reference's ascend already
    check(engine, step)
