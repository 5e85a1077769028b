# SPDX-License-Identifier: Apache-2.0
"""Is an op a kernel, or a slow twin in Python behind the same name?

The vendor's package carries a plain torch twin, named `ref_...`, of nearly every op, and an op may fall to it without a
word: right results, about a hundred times slower. Values cannot tell, so the check looks in two ways:

by name   while the op runs once, Python's profile hook notes functions called `ref_...`: exact, and free of any clock
by time   the op, its adapter included, against one batched torch composition of the same problem on the same device, run by
          turns. Slow means that the op's best run took more than LIMIT times the composition's median, and FLOOR seconds
          more, twice.

A busy or slow machine slows both sides, which take turns; and what it slows by chance speaks for the op, whose best run
counts. A kernel takes a fraction of the composition's dozen launches; a loop over tokens takes dozens of times as many.
A twin that is itself one batched composition and not called `ref_...` is not told from a kernel.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

import torch

from mla_portable.contracts import Reason

__all__ = ["FLOOR", "LIMIT", "Trial", "not_native"]

LIMIT: Final = 8.0
"""Times as long as the torch composition. Chosen between a kernel's share (below 1 on GPUs; a stand-in that checks its
arguments and computes in torch, 1 to 4) and that of a loop over 32 or more tokens."""
FLOOR: Final = 1e-3
"""Seconds beyond the composition that make a difference worth a refusal."""
CONFIRMATIONS: Final = 2
"""Times that it must be seen."""
FEWEST_RUNS: Final = 3
RUNS: Final = 9
PATIENCE: Final = 0.5
"""Seconds after which no further turn begins, once there were a few."""
_TWIN: Final = "ref_"
_REMEDY: Final = "the op falls back in silence: try other shapes or block sizes with CoreX's support, or another version"


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One problem, both ways. native: through the adapter. plain: a batched torch composition. device: where."""

    native: Callable[[], Any]
    plain: Callable[[], Any]
    device: torch.device


def not_native(name: str, trial: Trial) -> Iterator[Reason]:
    """Why the op counts as a slow twin. Errors of the op travel up."""
    if trial.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        yield Reason("speed", "not measured", "needs an ordinary stream", "bind, or call once, before capturing a graph")
        return
    twins = _twins_called(trial.native)
    if twins:
        yield Reason("speed", f"{name} runs {', '.join(twins)}", "a Python twin instead of a kernel", _REMEDY)
        return
    trial.plain()
    for _ in range(CONFIRMATIONS):
        ours, plain = _by_turns(trial)
        if ours <= max(LIMIT * plain, plain + FLOOR):
            return
    yield Reason(
        "speed",
        f"{name} took {1e3 * ours:.3g} ms where batched torch took {1e3 * plain:.3g} ms",
        f"at most {LIMIT:g} times as long: this is a slow twin, not a kernel",
        _REMEDY,
    )


def _twins_called(call: Callable[[], Any]) -> tuple[str, ...]:
    """The names of the vendor's twins that run while `call` does, in order."""
    seen: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name.startswith(_TWIN):
            seen[frame.f_code.co_name] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return tuple(seen)


def _by_turns(trial: Trial) -> tuple[float, float]:
    """Seconds of the op's best run and the composition's median one, the device's work included."""
    ours: list[float] = []
    plain: list[float] = []
    while len(ours) < FEWEST_RUNS or (len(ours) < RUNS and sum(ours) + sum(plain) < PATIENCE):
        plain.append(_seconds(trial.plain, trial.device))
        ours.append(_seconds(trial.native, trial.device))
    return min(ours), statistics.median(plain)


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
