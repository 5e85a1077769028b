# SPDX-License-Identifier: Apache-2.0
"""vLLM's indexer layer on an operation that fuses scores and top-k: it cannot leave out holes of a table, vLLM's have none."""

from __future__ import annotations

import functools

import pytest
from fused_indexer import Plugin
from vllm_indexer import check, make_batch, make_indexer, run, without_kernels

from mla_portable.choose import Registry, registry
from mla_portable.engines.vllm import indexer, indexer_choice, indexer_seams, settings


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(settings.ENV_INDEXER, "on")
    plugin = Plugin()
    made = Registry(plugins=[("reference", "mla_portable.reference"), ("fused", plugin)], environ={})
    monkeypatch.setattr(registry, "_registry", made)
    monkeypatch.setattr(indexer, "_servers", functools.cache(dict))
    indexer_choice.forget()
    indexer_seams.install()
    without_kernels(monkeypatch)
    yield plugin
    indexer_choice.forget()
    indexer_seams.set_functions(ours=False)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([1, 1, 1], [40, 5, 256]), ([7, 90], [7, 200]), ([1, 1, 30, 5], [70, 129, 64, 200])]
)
def test_it_serves_and_every_token_gets_its_best_keys(plugin: Plugin, query_lens: list[int], seq_lens: list[int]):
    engine = make_indexer()
    step = make_batch(engine, query_lens, seq_lens)
    probed = plugin.fused.calls
    run(engine, step)
    assert plugin.fused.calls > probed
    check(engine, step)


def test_requests_of_padding(plugin: Plugin):
    """Their lengths are 0, so that their table entries are none below a length."""
    engine = make_indexer(drafts=1)
    step = make_batch(engine, [2, 2], [33, 190], padded_reqs=4, padded_tokens=8)
    run(engine, step, capture=True)
    check(engine, step)
