# SPDX-License-Identifier: Apache-2.0
"""The times and loads of engines in a run as Markdown: what a user waits for, where a layer's GPU time goes, mixed loads."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from mla_portable.capability.run import EngineLoad, EngineTime, Run

_FIRST: Final = "stock"
"""The backend that others are compared with."""
_UNCHANGED: Final = ("other GEMMs", "MoE")
"""Kinds of kernels that an engine launches alike whatever the attention: a difference is one of the GPU's clock."""
_TOLERANCE: Final = 1.05
_STARTED: Final = {
    "graphs": "without torch.compile",
    "default": "as by default, with torch.compile",
    "eager": "without torch.compile and CUDA graphs",
    "drafts": "with draft tokens",
}
"""By a word of a mode, how the engine was started."""
UNNAMED_MODE: Final = "graphs"
"""Of times without a mode: runs had no other before a mode was kept."""


def modes_of(runs: Iterable[Run]) -> set[str]:
    """How the engines whose times these runs hold were started."""
    return {_mode(time) for run in runs for time in run.engine_times}


def time_tables(run: Run) -> Iterator[str]:
    """For each engine, way of starting it and head count one table of times and one for each profiled step.

    Rows keep the run's order. The last column is the plugin's time in units of stock's, where a run has both. A profiled step
    that contradicts itself or the first token of its size is left out; a sentence says why (`_contradictions`).
    """
    for engine, mode, heads in dict.fromkeys((time.engine, _mode(time), time.heads) for time in run.engine_times):
        own = [each for each in run.engine_times if (each.engine, _mode(each), each.heads) == (engine, mode, heads)]
        backends = _backends(own)
        waits = [time for time in own if time.quantity != "layer"]
        if waits:
            yield _table(f"{engine}, {heads} heads, {_started(mode)}, ms", backends, _rows(waits, 1e3))
        layers = [time for time in own if time.quantity == "layer"]
        for requests, tokens in dict.fromkeys((time.requests, time.tokens) for time in layers):
            step = [time for time in layers if (time.requests, time.tokens) == (requests, tokens)]
            whole = {name: sum(time.us for time in step if time.backend == name) for name in _backends(step)}
            title = f"GPU time of a layer, {heads} heads, {_started(mode)}, {requests} x {tokens:,} tokens, us"
            first = {
                each.backend: each.us
                for each in waits
                if (each.quantity, each.requests, each.tokens) == ("first_token", requests, tokens)
            }
            problems = list(_contradictions(step, whole, first))
            if problems:
                yield f"{title}: not shown, because {'; '.join(problems)}."
            else:
                yield _table(title, backends, [*_rows(step, 1.0), ("all kernels", whole)])


def _contradictions(step: Sequence[EngineTime], whole: Mapping[str, float], first: Mapping[str, float]) -> Iterator[str]:
    """Why a profiled step is not comparable between the backends, or is not the step that was timed.

    Args:
        step: times of its kernels. whole, first: by backend, microseconds of all its kernels, a layer, and of the first token.
            They are summed over the model's layers where the run says how many.
    """
    rows = dict(_rows(step, 1.0))
    differ = [f"{kind} {ratio:.2f}" for kind in _UNCHANGED if (ratio := _spread(rows.get(kind, {}))) > _TOLERANCE]
    if differ:
        yield f"kernels that both launch alike differ: {', '.join(differ)}"
    layers = {time.backend: time.layers for time in step}
    for name, us in whole.items():
        total = us * (layers[name] or 1)
        if name in first and total > first[name]:
            longer = f"more than the first token, {first[name] / 1e3:.1f} ms"
            yield f"the kernels of all layers take {name} {total / 1e3:.1f} ms, {longer}"
    ours = next((name for name in whole if name != _FIRST), "")
    if not {ours, _FIRST} <= whole.keys() & first.keys():
        return
    kernels, waits = (times[ours] / times[_FIRST] for times in (whole, first))
    least, most = sorted((kernels, waits))
    if least < 0.95 and most > _TOLERANCE:
        yield f"{ours} / {_FIRST} is {kernels:.2f} for all kernels and {waits:.2f} for the first token of this size"


def load_tables(run: Run) -> Iterator[str]:
    """For each engine, head count, depth and way of starting it a table of mixed loads, and a sentence on what was compiled.

    Figures are medians over the turns in which a load was served.
    """
    kinds = [(each.engine, each.heads, each.layers, each.mode, each.requests) for each in run.engine_loads]
    for kind in dict.fromkeys(kinds):
        own = [load for load, its in zip(run.engine_loads, kinds, strict=True) if its == kind]
        engine, heads, layers, mode, requests = kind
        backends = _backends(own)
        rates = sorted({load.rate or 0.0 for load in own})
        served = {
            (name, rate): [x for x in own if (x.backend, x.rate or 0.0) == (name, rate)] for name in backends for rate in rates
        }
        turns = sorted({len(several) for several in served.values() if several})
        title = f"{engine}, {heads} heads, {layers} layers, {_started(mode)}, {requests} requests, median of {_range(turns)}"
        rows: list[tuple[str, dict[str, float]]] = []
        for rate in rates:
            figures = {name: _figures(served[name, rate]) for name in backends if served[name, rate]}
            for what in dict.fromkeys(what for several in figures.values() for what in several):
                values = {name: several[what] for name, several in figures.items()}
                rows.append((f"{f'{rate:g} requests/s' if rate else 'all at once'}: {what}", values))
        yield _table(title, backends, rows)
        yield _compiled(own, backends)


def _figures(loads: Sequence[EngineLoad]) -> dict[str, float]:
    """By the name of a figure, its median over loads that are alike."""

    def flat(load: EngineLoad) -> dict[str, float]:
        waits = {"to the first token": load.first_ms, "between tokens": load.between_ms}
        several = (
            (f"ms {what}, {which}", getattr(wait, which)) for what, wait in waits.items() for which in ("mean", "p50", "p99")
        )
        return {"output tokens/s": load.tokens_s, **dict(several)}

    each = list(map(flat, loads))
    return {what: statistics.median(one[what] for one in each) for what in each[0]}


def _compiled(loads: Sequence[EngineLoad], backends: Sequence[str]) -> str:
    """The kernels that requests waited for, over all loads."""
    counts = {
        name: sum((Counter(load.compiled) for load in loads if load.backend == name), Counter[str]()) for name in backends
    }
    several = [
        f"{name}: {', '.join(f'`{kernel}` {n}' for kernel, n in sorted(found.items()))}"
        for name, found in counts.items()
        if found
    ]
    what = "Kernels compiled, or read from the disk, while requests waited"
    return f"{what}, in all of these loads: {'; '.join(several)}." if several else f"{what}: none."


def _range(turns: Sequence[int]) -> str:
    least, most = turns[0], turns[-1]
    return f"{least} turn{'s' if least > 1 else ''}" if least == most else f"{least} to {most} turns"


def origin(run: Run) -> str:
    """A line: the device, the versions and the commit that ran, and the day."""
    versions = ", ".join(f"{name} {run.versions[name]}" for name in ("mla_portable", "torch", "triton") if name in run.versions)
    commit = f"commit {run.commit[:10]}" if run.commit else "an unknown commit"
    driver = f", driver {run.driver}" if run.driver else ""
    return f"{run.device_name}{driver}; {versions}, {commit}; {run.date}."


def _mode(time: EngineTime) -> str:
    return time.mode or UNNAMED_MODE


def _started(mode: str) -> str:
    """How the engine was started, in words; of a word that is not known, the word."""
    return ", ".join(_STARTED.get(word, word) for word in mode.split(", "))


def _backends(found: Iterable[EngineTime | EngineLoad]) -> list[str]:
    return sorted({each.backend for each in found}, key=lambda name: (name != _FIRST, name))


def _spread(times: Mapping[str, float]) -> float:
    """The largest time in units of the smallest, 1 for fewer than two."""
    return max(times.values()) / min(times.values()) if len(times) > 1 else 1.0


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
