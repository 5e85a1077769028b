# SPDX-License-Identifier: Apache-2.0
"""Chosen positions in any order: who may give them, who asks for them, and that they are judged as sets with -1 behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_portable import primitives
from mla_portable.choose import Registry
from mla_portable.contracts import Implementation, InvalidArgument, Registrar, Request, Support, UnsupportedRequest, hookimpl
from mla_portable.dispatch import serving
from mla_portable.judge.conformance import run_suite
from mla_portable.judge.problems.base import cases_for
from mla_portable.primitives import INDEXER_SELECT, TOPK_SELECT


def shuffled(seed: Callable[[], int]) -> Callable[[Tensor], Tensor]:
    """Lists in another order in each call, valid positions first."""

    def apply(rows: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed())
        keys = torch.rand(rows.shape, generator=generator) + (rows < 0)
        return rows.gather(1, keys.argsort(dim=1))

    return apply


def behind(rows: Tensor) -> Tensor:
    """-1 in front."""
    return rows.flip(1)


def later_ties(rows: Tensor) -> Tensor:
    """The second of the chosen positions is the one behind it."""
    return torch.where((torch.arange(rows.shape[1]) == 1) & (rows >= 0), rows + 1, rows)


def twice(rows: Tensor) -> Tensor:
    """The first position once more, in the place of the second."""
    return torch.cat([rows[:, :1], rows[:, :1].where(rows[:, 1:2] >= 0, rows[:, 1:2]), rows[:, 2:]], dim=1)


class Loose:
    """`loose.torch`: primitives of the reference, whose rows `change` puts into another order."""

    def __init__(self, change: Callable[[Tensor], Tensor] | None = None, **support: object) -> None:
        self.calls, self.bound = 0, list[Request]()
        self.change = change or shuffled(lambda: self.calls)
        self.support = {"source": "a stand-in", "device_types": ("cpu",), "ordered": False, **support}

    @hookimpl
    def mla_portable_register(self, registrar: Registrar) -> None:
        registrar.add(Implementation("loose.torch", TOPK_SELECT, Support(**self.support), self.bind, preference=5))
        indexer = {**self.support, "kv_layouts": ("index_bf16",), "context_parallel": True}
        registrar.add(Implementation("loose.torch", INDEXER_SELECT, Support(**indexer), self.bind, preference=5))

    def bind(self, request: Request) -> Callable[..., Tensor]:
        self.bound.append(request)

        def call(*args: Tensor, out: Tensor | None = None, scores_out: Tensor | None = None, **keywords: Any) -> Tensor:
            self.calls += 1
            if scores_out is None:
                found = self.change(request.primitive.reference(*args, **keywords))
            else:
                found = request.primitive.reference(*args, scores_out=scores_out, **keywords)
                at = self.change(torch.where(found < 0, -1, torch.arange(found.shape[1]).expand_as(found)))
                found = found.gather(1, at.clamp(min=0)).where(at >= 0, -1).int()
                scores_out.copy_(scores_out.gather(1, at.clamp(min=0)).where(at >= 0, -torch.inf))
            return found if out is None else out.copy_(found)

        return call


def registry_of(plugin: object, name: str = "loose") -> Registry:
    return Registry(plugins=[("reference", "mla_portable.reference"), (name, plugin)], environ={})


def asked(registry: Registry, **changes: Any) -> Request:
    return Request(TOPK_SELECT, registry.facts("cpu"), topk=32, **changes)


def test_it_is_refused_where_the_order_counts():
    registry = registry_of(Loose())
    assert registry.decide(asked(registry)).chosen == "loose.torch"
    decision = registry.decide(asked(registry, ordered=True))
    assert decision.chosen == "reference.torch" and "ordered requested (not supported)" in decision.text()
    with pytest.raises(UnsupportedRequest, match="pass ordered=False where nothing depends on the order"):
        registry.bind(asked(registry, ordered=True), backend="loose")


def test_public_functions_ask_for_the_order_unless_they_are_told_not_to():
    plugin = Loose()
    logits, starts, ends = torch.arange(50.0).flip(0)[None], torch.zeros(1, dtype=torch.int32), torch.full((1,), 50).int()
    with serving(registry_of(plugin)):
        assert primitives.topk_select(logits, starts, ends, topk=8).tolist() == [list(range(8))]
        assert not plugin.bound
        found = primitives.topk_select(logits, starts, ends, topk=8, ordered=False)
        assert plugin.bound and sorted(found[0].tolist()) == list(range(8))
        with pytest.raises(InvalidArgument, match="topk_select: ordered: got None, expected True or False"):
            primitives.topk_select(logits, starts, ends, topk=8, ordered=None)


def test_indexer_select_likewise():
    q, weights = torch.randn(1, 8, 128).bfloat16(), torch.rand(1, 8)
    pages = torch.randn(4, 16, 128).bfloat16()
    starts, lengths, table = (torch.tensor(each, dtype=torch.int32) for each in ([0, 1], [60], [[3, 0, 2, 1]]))
    with serving(registry_of(Loose())):
        ascending = primitives.indexer_select(q, weights, pages, starts, lengths, table, topk=16)
        loose = primitives.indexer_select(q, weights, pages, starts, lengths, table, topk=16, ordered=False)
        with pytest.raises(InvalidArgument, match="indexer_select: ordered: got 1, expected True or False"):
            primitives.indexer_select(q, weights, pages, starts, lengths, table, topk=16, ordered=1)
    assert not torch.equal(ascending, loose) and torch.equal(ascending, loose.sort(dim=1).values)


@pytest.mark.parametrize("primitive", [TOPK_SELECT, INDEXER_SELECT])
def test_another_order_in_each_call_conforms(primitive):
    report = run_suite(registry_of(Loose()), "loose", device="cpu", level="quick", primitives=[primitive])
    assert report.ok, [(each.case.id, each.message) for each in report.results if each.status != "passed"][:5]
    assert report.passed > 30 and not any(each.case.request.ordered for each in report.results)


@pytest.mark.parametrize("primitive", [TOPK_SELECT, INDEXER_SELECT])
@pytest.mark.parametrize("change", [behind, later_ties, twice])
def test_another_set_or_minus_one_in_front_does_not(primitive, change: Callable[[Tensor], Tensor]):
    plugin = Loose(change)
    registry = registry_of(plugin)
    report = run_suite(registry, "loose", device="cpu", level="smoke", primitives=[primitive])
    assert report.failed
    topk = {"topk": 16} | ({"num_heads": 2, "block_size": 16, "kv_layout": "index_bf16"} if primitive is INDEXER_SELECT else {})
    assert registry.decide(Request(primitive, registry.facts("cpu"), **topk)).chosen == "reference.torch"


@pytest.mark.parametrize("primitive", [TOPK_SELECT, INDEXER_SELECT])
def test_who_claims_an_order_is_held_to_it(primitive):
    registry = registry_of(Loose(ordered=True))
    report = run_suite(registry, "loose", device="cpu", level="smoke", primitives=[primitive])
    assert report.failed
    (implementation,) = (each for each in registry.implementations(primitive) if each.backend == "loose")
    assert not registry.probe(implementation, torch.device("cpu")).ok


@pytest.mark.parametrize("primitive", [TOPK_SELECT, INDEXER_SELECT])
def test_who_gives_an_order_is_asked_for_none_too(primitive):
    registry = registry_of(Loose())
    (reference,) = (each for each in registry.implementations(primitive) if each.backend == "reference")
    cases = cases_for(reference, registry.facts("cpu"), "quick")
    assert {case.request.ordered for case in cases} == {True, False}
    assert all(case.request.ordered == ("order_none" not in case.id) for case in cases)
