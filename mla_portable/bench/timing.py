# SPDX-License-Identifier: Apache-2.0
"""Timing: the median duration of calls, by device events on a GPU and by `time.perf_counter` on a CPU.

Several calls are timed in turns, so that a clock that changes or a busy moment strikes all of them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import torch

from mla_portable.accelerator import Accelerator, accelerator
from mla_portable.contracts import InvalidArgument

T = TypeVar("T")

_FLUSH_FACTOR: Final = 4
"""The buffer that is overwritten between runs, in units of the last-level cache: LRU-like caches keep nothing older."""
_FLUSH_FALLBACK_BYTES: Final = 256 << 20
"""Where torch does not know the cache's size."""
_LEAD: Final = 16
"""Cache flushes that are queued after a look, so that the host never falls behind the device."""
_ROUNDS_PER_LOOK: Final = 10
"""Rounds between two looks at the clock, where a round is short."""
_LONG_ROUND: Final = 0.05
"""Seconds of the first round from which on the clock is looked at after each."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a call took.

    Attributes:
        median_ms, p10_ms, p90_ms: quantiles over the runs, in milliseconds. n: runs that were timed.
        clock: "device events" (kernels and the gaps between them) or "perf_counter" (the call as its caller sees it).
        cold_l2: the device's last-level cache was overwritten before each run.
    """

    median_ms: float
    p10_ms: float
    p90_ms: float
    n: int
    clock: str
    cold_l2: bool


def measure(
    call: Callable[[], object],
    *,
    device: torch.device,
    repeat: int,
    warmup: int = 1,
    flush_l2: bool = True,
    max_seconds: float | None = None,
) -> Timing:
    """Time `call` on `device`, its result dropped.

    Args:
        repeat: timed runs, at least 1. warmup: runs before them. flush_l2: see `measure_in_turns`.
        max_seconds: stop early once the timed runs took this long; at least one run is always made.
    Raises: InvalidArgument for repeat < 1 or warmup < 0; whatever `call` raises.
    """
    if repeat < 1:
        raise InvalidArgument("measure", "repeat", got=repeat, expected="at least 1")
    if warmup < 0:
        raise InvalidArgument("measure", "warmup", got=warmup, expected="0 or more")
    for _ in range(warmup):
        call()
    return measure_in_turns([call], device=device, repeat=repeat, max_seconds=max_seconds, flush_l2=flush_l2)[0]


def run_and_measure(
    call: Callable[[], T], *, device: torch.device, repeat: int, max_seconds: float | None = None
) -> tuple[T, Timing]:
    """The result of a first call, and how long the calls after it take; arguments as for `measure`.

    The first call compiles and allocates, so it is not counted, unless it alone takes longer than `max_seconds` on a CPU:
    it is then the only one.
    """
    begin = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - begin
    if device.type == "cpu" and max_seconds is not None and seconds > max_seconds:
        return result, _host_timing([seconds * 1e3])
    return result, measure(call, device=device, repeat=repeat, warmup=0, max_seconds=max_seconds)


def measure_in_turns(
    calls: Sequence[Callable[[], object]],
    *,
    device: torch.device,
    repeat: int,
    max_seconds: float | None = None,
    flush_l2: bool = True,
) -> list[Timing]:
    """A Timing for each call; every round runs each once and begins with the next one, for the first meets a cooler GPU.

    On a GPU each run lies between two events on the current stream. The cache flush in front of it keeps the device busy
    while the host prepares the run, so a short kernel is not charged with the host's launch. Events are read after the
    last run.

    Args:
        calls: each was run once before. repeat: rounds at most. max_seconds: end after the round that passes it.
        flush_l2: overwrite the last-level cache before each run (GPU only).
    """
    if device.type == "cpu":
        return [_host_timing(samples) for samples in _on_the_host(calls, repeat, max_seconds)]
    where = accelerator(device)
    with where.guard():
        samples = _on_the_device(calls, where, repeat, max_seconds, flush_l2)
    return [Timing(*quantiles(each), n=len(each), clock="device events", cold_l2=flush_l2) for each in samples]


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
    return lambda kept=call: graph.replay()


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile, linear between neighbours. samples: not empty."""
    median, p10, p90 = np.quantile(samples, (0.5, 0.1, 0.9)).tolist()
    return median, p10, p90


def _host_timing(samples: Sequence[float]) -> Timing:
    return Timing(*quantiles(samples), n=len(samples), clock="perf_counter", cold_l2=False)


def _on_the_host(calls: Sequence[Callable[[], object]], repeat: int, max_seconds: float | None) -> list[list[float]]:
    samples: list[list[float]] = [[] for _ in calls]
    first = time.perf_counter()
    turns = deque(zip(calls, samples, strict=True))
    for _ in range(repeat):
        for call, times in turns:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        turns.rotate(-1)
        if max_seconds is not None and time.perf_counter() - first > max_seconds:
            break
    return samples


def _on_the_device(
    calls: Sequence[Callable[[], object]], where: Accelerator, repeat: int, max_seconds: float | None, flush_l2: bool
) -> list[list[float]]:
    flush = _flush_buffer(where) if flush_l2 else torch.empty(0, dtype=torch.int8, device=where.device)
    pairs: list[list[tuple[Any, Any]]] = [[] for _ in calls]
    turns = deque(zip(calls, pairs, strict=True))
    rounds_per_look = 1
    first = time.perf_counter()
    for done in range(repeat):
        if done % rounds_per_look == 0:
            where.synchronize()
            spent = time.perf_counter() - first
            if done and max_seconds is not None and spent > max_seconds:
                break
            if done == 1 and spent < _LONG_ROUND:
                rounds_per_look = _ROUNDS_PER_LOOK
            for _ in range(_LEAD):
                flush.zero_()
        for call, events in turns:
            start, stop = where.event(timing=True), where.event(timing=True)
            flush.zero_()  # the run lies behind it: its kernels are enqueued before the device is idle
            start.record()
            call()
            stop.record()
            events.append((start, stop))
        turns.rotate(-1)
    where.synchronize()
    return [[start.elapsed_time(stop) for start, stop in events] for events in pairs]


def _flush_buffer(where: Accelerator) -> torch.Tensor:
    """Bytes whose overwriting leaves nothing else in the last-level cache of a GPU."""
    known: int = getattr(where.properties(), "L2_cache_size", 0)
    return torch.empty(_FLUSH_FACTOR * known or _FLUSH_FALLBACK_BYTES, dtype=torch.int8, device=where.device)
