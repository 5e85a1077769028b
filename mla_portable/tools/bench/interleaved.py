# SPDX-License-Identifier: Apache-2.0
"""Several calls timed in turns, so that a clock that changes or a busy moment strikes all of them; on a GPU as graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

from mla_portable.accelerator import accelerator
from mla_portable.tools.bench.timing import Timing, flush_buffer, recorded, summary

__all__ = ["captured", "measure_in_turns"]

_LEAD: Final = 16
"""Cache flushes that are queued ahead of the first round, so that the host never falls behind the device."""
_ROUNDS_PER_LOOK: Final = 10
"""Rounds between two looks at the clock."""


def captured(call: Callable[[], object], device: torch.device, *, calls: int = 1) -> Callable[[], object]:
    """A call that replays `calls` calls from one graph; two eager ones come first, which compile and allocate.

    What the captured run allocates belongs to the graph: it lives as long as the returned call, at the same addresses.
    Raises: whatever `call` raises, under capture too.
    """
    where = accelerator(device)
    with where.guard():
        with where.side_stream():
            call()
            call()
        where.synchronize()
        graph = where.graph()
        with where.capture(graph):
            for _ in range(calls):
                call()
    # what the call reads (a schedule, say) may be known to the call alone, and has to live as long as the graph
    return partial(_replay, graph, call)


def _replay(graph: Any, _kept: Callable[[], object]) -> None:
    graph.replay()


def measure_in_turns(
    calls: Sequence[Callable[[], object]], *, device: torch.device, repeat: int, max_seconds: float
) -> list[Timing]:
    """A Timing for each call; every round runs each once, the last-level cache overwritten before each on a GPU.

    Args:
        calls: ready to be run, compiled already. repeat: rounds at most. max_seconds: end after the round that passes it.
    """
    if device.type == "cpu":
        samples = _on_the_host(calls, repeat, max_seconds)
        return [summary(each, clock="perf_counter", cold_l2=False) for each in samples]
    with accelerator(device).guard():
        samples = _on_the_device(calls, device, repeat, max_seconds)
    return [summary(each, clock="device events", cold_l2=True) for each in samples]


def _on_the_host(calls: Sequence[Callable[[], object]], repeat: int, max_seconds: float) -> list[list[float]]:
    samples: list[list[float]] = [[] for _ in calls]
    first = time.perf_counter()
    for _ in range(repeat):
        for call, times in zip(calls, samples, strict=True):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        if time.perf_counter() - first > max_seconds:
            break
    return samples


def _on_the_device(
    calls: Sequence[Callable[[], object]], device: torch.device, repeat: int, max_seconds: float
) -> list[list[float]]:
    where, flush = accelerator(device), flush_buffer(device)
    pairs: list[list[tuple[Any, Any]]] = [[] for _ in calls]
    for call in calls:
        call()
    where.synchronize()
    first = time.perf_counter()
    for done in range(repeat):
        if done % _ROUNDS_PER_LOOK == 0:
            where.synchronize()
            if done and time.perf_counter() - first > max_seconds:
                break
            for _ in range(_LEAD):
                flush.zero_()
        for call, events in zip(calls, pairs, strict=True):
            events.append(recorded(call, flush, where))
    where.synchronize()
    return [[start.elapsed_time(stop) for start, stop in events] for events in pairs]
