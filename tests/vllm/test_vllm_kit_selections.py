# SPDX-License-Identifier: Apache-2.0
"""The GPU kit's reference for hy_v4: vLLM's own backend, whose decodes wait for what the indexer selects.

vLLM 0.30 and later convert the positions of decodes on a stream of their own. It waits for an event that hy_v4's layer of 0.30
never records.
"""

from __future__ import annotations

from typing import Any

import engine
import pytest
import torch
from vllm.v1.attention.backends.mla import index_group
from vllm_engine import CPU


class Stream:
    """A stream on which work is noted instead of run. `behind`: work of the other stream that it has waited for."""

    def __init__(self) -> None:
        self.enqueued: list[str] = []
        self.behind: list[str] = []

    def wait_event(self, event: Event) -> None:
        self.behind += event.marks

    def wait_stream(self, other: Stream) -> None:
        self.behind += other.enqueued

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None: ...


class Event:
    """Marks what was enqueued when it was recorded; nothing before it is."""

    def __init__(self) -> None:
        self.marks: list[str] = []

    def record(self, stream: Stream) -> None:
        self.marks = list(stream.enqueued)


def converted_behind(monkeypatch: pytest.MonkeyPatch, *, waits: bool, announced: bool = False) -> list[str]:
    """A decode of a layer whose indexer has just selected: what the conversion is enqueued behind."""
    compute = Stream()
    monkeypatch.setattr(index_group, "_create_side_stream", lambda device: Stream())
    monkeypatch.setattr(index_group, "_create_event", Event)
    monkeypatch.setattr(index_group, "current_stream", lambda: compute)
    found: list[str] = []

    def convert(*given: Any, **named: Any) -> Any:
        found.extend(group.side_stream.behind)
        return named["out"]

    monkeypatch.setattr(index_group, "triton_convert_req_index_to_global_index", convert)
    monkeypatch.setattr(index_group.SparseMLAIndexGroup, "_convert_once", index_group.SparseMLAIndexGroup._convert_once)
    if waits:
        assert engine.wait_for_selections()
    positions = torch.zeros((4, 8), dtype=torch.int32, device=CPU)
    group, layer = index_group.SparseMLAIndexGroupBuilder(positions).register_layer(True)
    metadata: Any = type("Metadata", (), {"req_id_per_token": positions[:, 0], "block_table": positions, "block_size": 64})
    compute.enqueued.append("the indexer's selection")
    if announced:
        group.set_logical_topk_ready(layer)
    group.convert_logical_to_physical_topk(layer, positions[:2], metadata, block_stride_rows=None, return_valid_counts=False)
    assert compute.behind == [] or group.physical_topk_ready.marks == compute.behind
    return found


def test_without_a_word_of_the_layer_a_decode_does_not_wait_for_its_selection(monkeypatch: pytest.MonkeyPatch):
    """As vLLM is: what hy_v4's layer of 0.30 does, and what a layer that announces its selection does."""
    assert converted_behind(monkeypatch, waits=False) == []
    assert converted_behind(monkeypatch, waits=False, announced=True) == ["the indexer's selection"]


@pytest.mark.parametrize("announced", [False, True])
def test_the_reference_waits_for_it_whether_or_not_the_layer_says_a_word(announced: bool, monkeypatch: pytest.MonkeyPatch):
    assert converted_behind(monkeypatch, waits=True, announced=announced) == ["the indexer's selection"]
