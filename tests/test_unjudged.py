# SPDX-License-Identifier: Apache-2.0
"""An error while a problem is built or judged is a fault of that problem: not of the device, not for the user to catch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from fake_plugins import make_plugin
from faulty import MERGE, RIGHT, candidate, registry
from test_invented_layout import CODES, ROWS, Int8Apart
from torch import Tensor
from typer.testing import CliRunner

import mla_portable
from mla_portable.choose import Registry
from mla_portable.choose.probe import Unjudged
from mla_portable.cli.app import app
from mla_portable.cli.doctor.diagnosis import diagnose
from mla_portable.contracts import Implementation, Primitive, Request, Support
from mla_portable.contracts.primitive import _named
from mla_portable.dispatch import serving
from mla_portable.judge.problems.probe import ProbeCase
from mla_portable.judge.problems.stage import Problem
from mla_portable.layouts import add_layout, base
from mla_portable.primitives import MERGE_STATES, SPARSE_DECODE

CPU = torch.device("cpu")
DOUBLING = "fake_plugins.doubling"


@pytest.fixture
def doubling() -> Iterator[Any]:
    """The plugin with a primitive of its own, for one test alone."""
    found = __import__(DOUBLING, fromlist=["PROBLEMS"])
    yield found
    _named.pop("double_rows", None)
    sys.modules.pop(DOUBLING, None)


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*given: object, **named: object) -> Any:
        raise error

    return call


@pytest.mark.parametrize("oracle", ["oracle", "exiting"])
def test_an_oracle_that_raises_leaves_out_its_primitive_alone(doubling: Any, oracle: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doubling, "oracle", getattr(doubling, oracle))
    right = candidate(MERGE, RIGHT[MERGE])
    reg = Registry(
        plugins=[("reference", "mla_portable.reference"), ("doubling", doubling), ("faulty", make_plugin(right))], environ={}
    )
    what = "LookupError: no such table" if oracle == "oracle" else "SystemExit: an oracle that ends the process"
    decision = reg.decide(Request(doubling.DOUBLE_ROWS, reg.facts(CPU)), thorough=True)
    (verdict,) = decision.verdicts
    assert decision.chosen is None
    assert [str(reason) for reason in verdict.reasons] == [f"probe problem could not be judged: {what} (case request)"]
    found = diagnose(reg, CPU)
    assert {each.implementation: each.reasons == () for each in found.examined if each.primitive == "merge_states"} == {
        "reference.torch": True, "faulty.v1": True,
    }  # fmt: skip
    said = [each.what for each in found.problems]
    assert f"the problem of doubling.v1, double_rows could not be judged: {what} (case tiny)" in said, said
    assert not any("device failed" in each for each in said), said
    with serving(reg):
        shown = CliRunner().invoke(app, ["doctor", "--device", "cpu"])
    assert "the problem of doubling.v1, double_rows could not be judged" in " ".join(shown.output.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable(Int8Apart):
    """A layout whose rows its own code cannot take apart."""

    def split(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("split of tiny_int8")


@pytest.fixture
def unreadable() -> Iterator[Unreadable]:
    before = dict(base._layouts), dict(base._by_rows)
    given = {name: getattr(CODES, name) for name in CODES.__dataclass_fields__}
    add_layout(ROWS)
    layout = Unreadable(**given)
    add_layout(layout)
    yield layout
    for table, kept in zip((base._layouts, base._by_rows), before, strict=True):
        table.clear()
        table.update(kept)


def test_a_layout_whose_split_raises_is_a_fault_of_its_problems(unreadable: Unreadable):
    support = Support("a test", device_types=("cpu",), kv_layouts=(unreadable.name,), scale_formats=("token",))
    right = candidate(MERGE, RIGHT[MERGE])
    own = Implementation("int8.v1", SPARSE_DECODE, support, bind=lambda request: RIGHT[SPARSE_DECODE], preference=1)
    reg = Registry(plugins=[("int8", make_plugin(own)), ("faulty", make_plugin(right))], environ={})
    request = Request(SPARSE_DECODE, reg.facts(CPU), kv_layout=unreadable.name, scale_format="token")
    decision = reg.decide(request, thorough=True)
    assert decision.chosen is None
    with serving(reg):
        explained = mla_portable.explain(
            "sparse_decode", kv_layout=unreadable.name, num_heads=2, topk=16, block_size=4, query_len=1, device="cpu"
        )
    for each in (decision, explained):
        (verdict,) = each.verdicts
        assert verdict.reasons and all(isinstance(reason, Unjudged) for reason in verdict.reasons), verdict
    found = diagnose(reg, CPU)
    said = [each.what for each in found.problems]
    assert any(each.startswith("the problem of int8.v1, sparse_decode could not be ") for each in said), said
    assert not any("failed while" in each for each in said), said
    assert {each.implementation: each.reasons for each in found.examined}["faulty.v1"] == ()


@pytest.mark.parametrize(("owner", "name", "done"), [(ProbeCase, "build", "built"), (Problem, "judged", "judged")])
def test_a_call_is_served_by_another_and_the_log_says_why(
    owner: type, name: str, done: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(owner, name, raising(KeyError("any", "lse")))
    outs, lses = torch.randn(2, 3, 1, 4), torch.randn(2, 3, 1)
    with serving(registry(candidate(MERGE, RIGHT[MERGE]))), caplog.at_level(logging.INFO):
        merged = mla_portable.merge_states(outs, lses)
    for got, want in zip(merged, MERGE_STATES.reference(outs, lses), strict=True):
        assert torch.equal(got, want)
    assert f"faulty.v1: probe problem could not be {done}: KeyError: ('any', 'lse') (case request num_heads=" in caplog.text
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(("owner", "name", "done"), [(ProbeCase, "build", "built"), (Problem, "judged", "judged")])
def test_out_of_memory_says_nothing_about_a_problem(owner: type, name: str, done: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(owner, name, raising(torch.OutOfMemoryError("full")))
    reg = registry(candidate(MERGE, RIGHT[MERGE]))
    raised = rf"full\nraised while the problem of faulty.v1 / merge_states was {done} \(probe, case request num_heads=\d\)"
    with pytest.raises(torch.OutOfMemoryError, match=raised):
        reg.decide(Request(MERGE, reg.facts(CPU)))


def test_sizes_that_cannot_be_drawn_are_a_fault_of_the_problem(monkeypatch: pytest.MonkeyPatch):
    broken = replace(MERGE.problems, of_request=raising(IndexError("sizes")))
    monkeypatch.setattr(sys.modules[MERGE.problems_module], "PROBLEMS", broken)
    reg = registry(candidate(MERGE, RIGHT[MERGE]))
    decision = reg.decide(Request(MERGE, reg.facts(CPU)))
    assert decision.chosen == "reference.torch"
    assert [str(reason) for reason in decision.verdicts[1].reasons] == [
        "probe problem could not be built: IndexError: sizes (its sizes)"
    ]
    assert Primitive.named("merge_states") is MERGE
