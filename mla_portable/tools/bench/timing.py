# SPDX-License-Identifier: Apache-2.0
"""Timing: the median duration of a call, by device events on a GPU and by `time.perf_counter` on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from mla_portable.accelerator import Accelerator, accelerator
from mla_portable.contracts import InvalidArgument

__all__ = ["Timing", "flush_buffer", "measure", "quantile", "recorded", "run_and_measure", "summary"]

T = TypeVar("T")

_FLUSH_FACTOR = 4
"""The buffer that is overwritten between runs, in units of the last-level cache: LRU-like caches keep nothing older."""
_FLUSH_FALLBACK_BYTES = 256 << 20
"""Where torch does not know the cache's size."""


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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    call: Callable[[], object],
    *,
    device: torch.device,
    repeat: int,
    warmup: int = 1,
    flush_l2: bool = True,
    max_seconds: float | None = None,
) -> Timing:
    """Time `call` on `device`.

    On a GPU each run lies between two events on the current stream; the cache flush in front of it keeps the device busy
    while the host prepares the run, so a short kernel is not charged with the host's launch. All events are read after the
    last run: there is one synchronisation in all, one per run where `max_seconds` bounds the time.

    Args:
        call: what to time; its result is dropped. repeat: timed runs, at least 1. warmup: runs before them.
        flush_l2: overwrite the last-level cache before each run (GPU only).
        max_seconds: stop early once the timed runs took this long; at least one run is always made.
    Raises: InvalidArgument for repeat < 1 or warmup < 0; whatever `call` raises.
    """
    if repeat < 1:
        raise InvalidArgument("measure", "repeat", got=repeat, expected="at least 1")
    if warmup < 0:
        raise InvalidArgument("measure", "warmup", got=warmup, expected="0 or more")
    for _ in range(warmup):
        call()
    if device.type == "cpu":
        samples = _host_samples(call, repeat, max_seconds)
        return summary(samples, clock="perf_counter", cold_l2=False)
    samples = _event_samples(call, device, repeat, flush_l2, max_seconds)
    return summary(samples, clock="device events", cold_l2=flush_l2)


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
        return result, summary([seconds * 1e3], clock="perf_counter", cold_l2=False)
    return result, measure(call, device=device, repeat=repeat, warmup=0, max_seconds=max_seconds)


def quantile(samples: list[float], fraction: float) -> float:
    """The value below which `fraction` of the samples lie, linear between neighbours. samples: not empty."""
    ordered = sorted(samples)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summary(samples: list[float], *, clock: str, cold_l2: bool) -> Timing:
    """The Timing of samples in milliseconds, not empty."""
    return Timing(
        median_ms=quantile(samples, 0.5),
        p10_ms=quantile(samples, 0.1),
        p90_ms=quantile(samples, 0.9),
        n=len(samples),
        clock=clock,
        cold_l2=cold_l2,
    )


def _host_samples(call: Callable[[], object], repeat: int, max_seconds: float | None) -> list[float]:
    samples: list[float] = []
    first = time.perf_counter()
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        stop = time.perf_counter()
        samples.append((stop - start) * 1e3)
        if max_seconds is not None and stop - first > max_seconds:
            break
    return samples


def _event_samples(
    call: Callable[[], object], device: torch.device, repeat: int, flush_l2: bool, max_seconds: float | None
) -> list[float]:
    where = accelerator(device)
    with where.guard():
        flush = flush_buffer(device) if flush_l2 else torch.empty(0, dtype=torch.int8, device=device)
        pairs: list[tuple[Any, Any]] = []
        where.synchronize()
        first = time.perf_counter()
        for _ in range(repeat):
            pairs.append(recorded(call, flush, where))
            if max_seconds is not None:
                where.synchronize()
                if time.perf_counter() - first > max_seconds:
                    break
        where.synchronize()
        return [start.elapsed_time(stop) for start, stop in pairs]


def recorded(call: Callable[[], object], flush: torch.Tensor, where: Accelerator) -> tuple[Any, Any]:
    """Call it on the current stream, behind the overwriting of `flush`; the events around it, which may not have passed yet."""
    start, stop = where.event(timing=True), where.event(timing=True)
    flush.zero_()
    start.record()
    call()
    stop.record()
    return start, stop


def flush_buffer(device: torch.device) -> torch.Tensor:
    """Bytes whose overwriting leaves nothing else in the last-level cache of a GPU."""
    known: int = getattr(accelerator(device).properties(), "L2_cache_size", 0)
    return torch.empty(_FLUSH_FACTOR * known or _FLUSH_FALLBACK_BYTES, dtype=torch.int8, device=device)
