# SPDX-License-Identifier: Apache-2.0
"""SGLang's real `Indexer` on a kernel of scores that cannot leave out holes of a table: SGLang's tables have none."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import sglang_indexer
from fused_indexer import Plugin
from machines import A100
from sglang_kit import pretend_for_indexer
from sglang_version import FUSED
from test_sglang_real_indexer import DECODE, VERIFY, Fails

from mla_portable.choose import Registry
from mla_portable.dispatch import serving as serving_by
from mla_portable.engines.sglang import serving, stock


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    from interpreter_rounding import round_ties_to_even
    from test_sglang_index_codes import KERNELS

    round_ties_to_even(monkeypatch)
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Fails(getattr(module, name)))
    facts = SimpleNamespace(facts=lambda device: A100, keep=lambda key, make: make())
    monkeypatch.setattr(serving, "get_registry", lambda: facts)
    pretend_for_indexer(monkeypatch, A100)
    monkeypatch.setattr(stock, "_import_error", lambda module: None)
    made = Registry(plugins=[("reference", "mla_portable.reference"), ("fused", Plugin())], environ={})
    with sglang_indexer.on_the_cpu(), serving_by(made):
        yield made


@pytest.mark.parametrize("case", [DECODE, VERIFY], ids=lambda case: case.forward_mode.name.lower())
def test_a_step(case, registry: Registry, monkeypatch: pytest.MonkeyPatch):
    if FUSED:
        monkeypatch.setenv("SGLANG_DSA_FUSE_TOPK", "0")
    worst = sglang_indexer.run(case, topk=16, fused_store=False, device="cpu", dsa_decode_backend="tilelang")
    assert worst == 0
    assert "fused.indexer" in {each.name for each in registry.dispatched.values()}
