# SPDX-License-Identifier: Apache-2.0
"""Whether a graph can hold a call, where an implementation leaves that open: by capture and replay, where one is asked for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_portable.reference
from mla_portable.choose import Registry, probe
from mla_portable.contracts import DeviceFacts, Implementation, Registrar, Request, Support, hookimpl
from mla_portable.primitives import TOPK_SELECT

FACTS = DeviceFacts(vendor="acme", name="Acme One", arch="a1", device_type="cpu", graph_capture=True)


class Graph:
    """Calls that run when it is replayed."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def replay(self) -> None:
        for call in self.calls:
            call()


class Device:
    """A device that captures."""

    def __init__(self) -> None:
        self.open: list[Graph] = []
        self.graphs = 0

    def graph(self) -> Graph:
        self.graphs += 1
        return Graph()

    @contextmanager
    def capture(self, graph: Graph) -> Generator[None, None, None]:
        self.open.append(graph)
        try:
            yield
        finally:
            self.open.pop()

    def synchronize(self) -> None: ...

    def is_capturing(self) -> bool:
        return bool(self.open)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(probe, "accelerator", lambda _: found)
    return found


def refuses(graph: Graph, call: Callable[[], object]) -> None:
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


WAYS: dict[str, Callable[[Graph, Callable[[], object]], object]] = {
    "is captured": lambda graph, call: graph.calls.append(call),
    "runs at once, past the graph": lambda graph, call: call(),
    "is forgotten": lambda graph, call: None,
    "is refused": refuses,
}


def registry(way: str, device: Device, **graphs: bool) -> Registry:
    def bind(request: Request[Any]) -> Callable[..., Tensor]:
        def select(logits: Tensor, starts: Tensor, ends: Tensor, *, topk: int, out: Tensor | None = None) -> Tensor:
            into = torch.empty((len(logits), topk), dtype=torch.int32) if out is None else out

            def call() -> object:
                return mla_portable.topk_select(logits, starts, ends, topk=topk, out=into, backend="reference")

            WAYS[way](device.open[-1], call) if device.open else call()
            return into

        return select

    class Plugin:
        @hookimpl
        def mla_portable_register(self, registrar: Registrar) -> None:
            registrar.add_detector(lambda found: FACTS if found.type == "cpu" else None)
            support = Support(source="this test", device_types=("cpu",), **graphs)
            registrar.add(
                Implementation("acme.select", TOPK_SELECT, support, bind=bind, check=lambda facts: (), preference=1.0)
            )

    return Registry(plugins=[("reference", mla_portable.reference), ("acme", Plugin())], environ={})


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_is_tried_where_one_is_asked_for(way: str, device: Device):
    machine = registry(way, device, probes_graph=True)
    assert machine.decide(Request(TOPK_SELECT, FACTS, topk=8)).chosen == "acme.select"
    assert device.graphs == 0
    decision = machine.decide(Request(TOPK_SELECT, FACTS, topk=8, graph=True))
    assert (decision.chosen == "acme.select") is (way == "is captured")
    (verdict,) = (v for v in decision.verdicts if v.implementation == "acme.select")
    said = " ".join(map(str, verdict.reasons))
    assert {"is captured": not said, "is refused": "captured in a graph: RuntimeError: CUDA error" in said}.get(
        way, "wrong values" in said
    )
    assert machine.decide(Request(TOPK_SELECT, FACTS, topk=8)).chosen == "acme.select", "outside of graphs it serves"


@pytest.mark.parametrize("graph", [True, False])
def test_what_is_declared_is_not_tried(graph: bool, device: Device):
    decision = registry("is refused", device, graph=graph).decide(Request(TOPK_SELECT, FACTS, topk=8, graph=True))
    assert (decision.chosen == "acme.select") is graph and device.graphs == 0
