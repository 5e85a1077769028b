# SPDX-License-Identifier: Apache-2.0
"""A public call says how many rows it has: what was measured to be the fastest at its size serves it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch_reference as reference
from fake_plugins import implementation, make_plugin
from machines import CPU, H200, Costs
from recorder import Recorder, registry_of

import mla_portable
from mla_portable import dispatch
from mla_portable.accelerator import Accelerator
from mla_portable.choose import Registry, probe
from mla_portable.contracts import Implementation, InvalidArgument, Request
from mla_portable.contracts.values import rounded_rows
from mla_portable.dispatch import serving
from mla_portable.kit.split_kv import SplitSchedule
from mla_portable.primitives import INDEXER_SELECT, SPARSE_DECODE, TOPK_SELECT


def test_rows_are_rounded_to_the_nearest_power_of_two():
    assert [rounded_rows(rows) for rows in (0, 1, 2, 3, 4, 5, 6, 11, 12, 256, 10_000)] == [
        1,
        1,
        2,
        4,
        4,
        4,
        8,
        8,
        16,
        256,
        8192,
    ]
    for rows in range(1, 5000):
        assert abs(math.log2(rounded_rows(rows) / rows)) <= 0.5


class Shipped(Registry):
    """The plugins that are installed and their times, on a simulated H200. What is bound computes nothing."""

    def __init__(self) -> None:
        super().__init__(facts={"cpu": H200}, environ={}, probe=False, costs="measured")
        self.called: list[str] = []

    def bind_implementation(self, implementation: Implementation, request: Request) -> Any:
        assert request.rows is None, "one callable serves every number of rows"
        return lambda *args, **kwargs: self.called.append(implementation.name)

    def fastest(self, request: Request) -> list[str]:
        """The implementations that can serve and whose time on record for these rows is within 3 % of the least."""
        decision = self.decide(request, probe=False, thorough=True)
        times = {
            each.name: found[request.rows]
            for each in self.implementations(request.primitive)
            if not next(v for v in decision.verdicts if v.implementation == each.name).reasons
            and request.rows in (found := self.times(each, request))
        }
        assert len(times) > 1
        return [name for name, us in times.items() if us <= 1.03 * min(times.values())]


@pytest.fixture(scope="module")
def shipped():
    registry = Shipped()
    with serving(registry):
        yield registry


@pytest.mark.parametrize(("rows", "served"), [(1, ""), (16, "native"), (33, "native"), (64, "native"), (4096, "")])
def test_the_indexer_takes_what_is_fastest_at_its_rows(shipped: Shipped, rows: int, served: str):
    """Where two kernels are within some per cent of one another, the times on record say which may serve."""
    q, weights = torch.zeros(rows, 64, 128).to(torch.float8_e4m3fn), torch.zeros(rows, 64)
    keys, ones = torch.zeros(2, 64, 132, dtype=torch.uint8), torch.ones(1, dtype=torch.int32)
    starts, table = torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    mla_portable.indexer_select(q, weights, keys, starts, ones, table, topk=2048)
    asked = Request(INDEXER_SELECT, H200, kv_layout="index_fp8", num_heads=64, topk=2048, block_size=64, rows=rows)
    assert shipped.called[-1] == f"nvidia.{served}" if served else shipped.called[-1] in shipped.fastest(asked)


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("rows", [1, 4, 16, 256])
@pytest.mark.parametrize("layout", ["bf16", "fp8_ds_mla"])
def test_a_decode_takes_what_is_fastest_at_its_rows(shipped: Shipped, heads: int, rows: int, layout: str):
    cache = torch.zeros(2, 64, 576).bfloat16() if layout == "bf16" else torch.zeros(2, 64, 656, dtype=torch.uint8)
    q, indices = torch.zeros(rows, 1, heads, 576).bfloat16(), torch.zeros(rows, 1, 2048, dtype=torch.int32)
    mla_portable.sparse_decode(q, cache, indices, softmax_scale=1.0)
    asked = Request(SPARSE_DECODE, H200, kv_layout=layout, num_heads=heads, topk=2048, block_size=64, query_len=1, lse=True)
    assert shipped.called[-1] in shipped.fastest(asked.but(rows=rows))


def test_a_planned_decode_is_of_one_kind_whatever_its_rows():
    """Its schedule was made for one implementation."""
    kinds: list[int | None] = []

    def table(each: Implementation, request: Request) -> tuple[float, str]:
        kinds.append(request.rows)
        return 10.0, "measured once"

    registry = Registry(plugins=[("recorder", Recorder())], facts={"cpu": H200}, environ={}, probe=False, costs=Costs(table))
    with serving(registry):
        for rows in (1, 40):
            q, indices = torch.zeros(rows, 1, 16, 576).bfloat16(), torch.zeros(rows, 1, 64, dtype=torch.int32)
            cache = torch.zeros(2, 64, 576).bfloat16()
            schedule = SplitSchedule(num_rows=rows, num_heads=16, topk=64, num_splits=1)
            mla_portable.sparse_decode(q, cache, indices, softmax_scale=1.0, schedule=schedule)
    assert set(kinds) == {None}


def select(rows: int) -> torch.Tensor:
    starts, ends = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), 9, dtype=torch.int32)
    return mla_portable.topk_select(torch.arange(9.0).repeat(rows, 1), starts, ends, topk=2)


def test_calls_of_any_rows_probe_and_bind_once():
    bound: list[Request] = []

    def bind(request: Request) -> Any:
        bound.append(request)
        return reference.topk_select

    plugin = make_plugin(implementation("acme.v1", TOPK_SELECT, bind=bind))
    registry = Registry(plugins=[("acme", plugin)], environ={})
    with serving(registry):
        for rows in (1, 2, 3, 4, 5, 9, 17, 100, 1000):
            assert select(rows).shape == (rows, 2)
    assert len(bound) == 2, "by the probe, and for the calls"
    assert len(registry.dispatched) == 7, "a kind of call for each power of two"


def test_a_call_under_capture_is_served_as_other_rows_were(monkeypatch: pytest.MonkeyPatch):
    """`many` is the fastest for 64 rows, but nothing can be probed under capture: `few` serves, which was probed before."""
    capturing = False
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    host = Accelerator(torch.device("cpu"))
    host.is_capturing = lambda: capturing
    monkeypatch.setattr(dispatch, "accelerator", lambda device: host)
    monkeypatch.setattr(probe, "accelerator", lambda device: host)
    called: list[str] = []

    def made(name: str) -> Implementation:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            called.append(name)
            return reference.topk_select(*args, **kwargs)

        return implementation(name, TOPK_SELECT, bind=lambda request: call)

    def table(each: Implementation, request: Request) -> tuple[float, str]:
        small = (request.rows or 256) <= 8
        return (10.0 if (each.name == "few.v1") is small else 30.0), "measured once"

    able = replace(CPU, graph_capture=True)
    named = [(name, make_plugin(made(f"{name}.v1"), detectors=(lambda device: able,))) for name in ("few", "many")]
    registry = Registry(plugins=named, environ={}, costs=Costs(table))
    with serving(registry):
        capturing = True
        with pytest.raises(InvalidArgument, match="before capturing"):
            select(64)
        capturing = False
        select(1)
        assert set(called) == {"few.v1"}
        capturing = True
        for rows in (2, 64, 64):
            select(rows)
        assert set(called) == {"few.v1"} and len(called) > 4
        capturing = False
        select(64)
        assert called[-1] == "many.v1", "outside of a capture the choice is the fastest"
        capturing = True
        select(64)
        assert called[-1] == "many.v1"


def test_a_tape_is_bound_once_for_every_number_of_rows():
    tape = Recorder()
    with serving(registry_of(tape)):
        for rows in (1, 2, 64):
            select(rows)
    assert len(tape.bound) == 1 and tape.bound[0].rows is None
