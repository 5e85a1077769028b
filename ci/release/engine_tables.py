# SPDX-License-Identifier: Apache-2.0
"""The times of engines in a run as Markdown: of each rank what a user waits for, and where a layer's GPU time goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from mla_portable.capability.run import EngineTime, Run

_FIRST: Final = "stock"
"""The backend that others are compared with."""
_UNCHANGED: Final = ("other GEMMs", "MoE")
"""Kinds of kernels that an engine launches alike whatever the attention: a difference is one of the GPU's clock."""
_TOLERANCE: Final = 1.05


def engine_tables(run: Run) -> str:
    """A paragraph that says what ran, then for each engine and head count one table of times and one for each profiled step.

    Rows keep the run's order. The last column is the plugin's time in units of stock's, where a run has both. Of a profiled
    step whose unchanged kernels took the backends times that differ by more than 5 % there is a sentence instead: its sums
    compare clocks.
    """
    parts = [_origin(run)]
    for engine, heads in dict.fromkeys((time.engine, time.heads) for time in run.engine_times):
        own = [time for time in run.engine_times if (time.engine, time.heads) == (engine, heads)]
        backends = sorted({time.backend for time in own}, key=lambda name: (name != _FIRST, name))
        waits = [time for time in own if time.quantity != "layer"]
        if waits:
            parts.append(_table(f"{engine}, {heads} heads, ms", backends, _rows(waits, 1e3)))
        layers = [time for time in own if time.quantity == "layer"]
        for requests, tokens in dict.fromkeys((time.requests, time.tokens) for time in layers):
            step = [time for time in layers if (time.requests, time.tokens) == (requests, tokens)]
            title = f"GPU time of a layer, {heads} heads, {requests} x {tokens:,} tokens, us"
            rows = dict(_rows(step, 1.0))
            disturbed = [f"{kind} {ratio:.2f}" for kind in _UNCHANGED if (ratio := _spread(rows.get(kind, {}))) > _TOLERANCE]
            if disturbed:
                parts.append(f"{title}: not shown, because kernels that both launch alike differ: {', '.join(disturbed)}.")
                continue
            whole = {name: sum(times[name] for times in rows.values() if name in times) for name in backends}
            parts.append(_table(title, backends, [*rows.items(), ("all kernels", {n: us for n, us in whole.items() if us})]))
    return "\n\n".join(parts)


def _spread(times: Mapping[str, float]) -> float:
    """The largest time in units of the smallest, 1 for fewer than two."""
    return max(times.values()) / min(times.values()) if len(times) > 1 else 1.0


def _origin(run: Run) -> str:
    versions = ", ".join(f"{name} {run.versions[name]}" for name in ("mla_portable", "torch", "triton") if name in run.versions)
    commit = f"commit {run.commit[:10]}" if run.commit else "an unknown commit"
    driver = f", driver {run.driver}" if run.driver else ""
    return f"{run.device_name}{driver}; {versions}, {commit}; {run.date}."


def _rows(times: Sequence[EngineTime], unit: float) -> list[tuple[str, dict[str, float]]]:
    """By the row's name, times of each backend in units of `unit` microseconds."""
    rows: dict[str, dict[str, float]] = {}
    for time in times:
        rows.setdefault(_name(time), {})[time.backend] = time.us / unit
    return list(rows.items())


def _name(time: EngineTime) -> str:
    if time.quantity == "layer":
        return time.kernels
    what = f"{time.requests} x {time.tokens:,}"
    return f"first token of {what}" if time.quantity == "first_token" else f"a decode step of {what} of context"


def _table(title: str, backends: Sequence[str], rows: Iterable[tuple[str, Mapping[str, float]]]) -> str:
    ours = next((name for name in backends if name != _FIRST), "")
    compared = len(backends) == 2 and backends[0] == _FIRST

    def lines() -> Iterator[str]:
        heads = [title, *backends, *([f"{ours} / {_FIRST}"] if compared else [])]
        yield f"| {' | '.join(heads)} |"
        yield "|" + "---|" * len(heads)
        for name, times in rows:
            cells = [_figure(times[each]) if each in times else "-" for each in backends]
            if compared:
                both = ours in times and _FIRST in times
                cells.append(f"{times[ours] / times[_FIRST]:.3f}" if both else "-")
            yield f"| {' | '.join([name, *cells])} |"

    return "\n".join(lines())


def _figure(value: float) -> str:
    """Four digits of small values, whole ones of large."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"
