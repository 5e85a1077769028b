# SPDX-License-Identifier: Apache-2.0
"""What an engine's metrics and its log say of this project: of text that a server elsewhere wrote, which may be anything."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from mla_portable.cli.doctor.instead import Said
from mla_portable.engines.common.metrics import LABELS, LOG_LINE, METRIC, NOT_SERVING

_ONE_PROCESS: Final = "process_start_time_seconds"
"""A metric of the process that answers; in multiprocess mode `/metrics` has none of them."""
_LONGEST: Final = 4096
"""Characters of a sample or a line that are read; those of this project are some hundred."""
_BEFORE: Final = 200
_AFTER: Final = 800
"""Characters of a line that are shown around the words that refuse."""
_MOST_REFUSALS: Final = 10
_MOST_SERVED: Final = 1000
"""Kept of a log."""
_SAMPLE: Final = re.compile(rf"{METRIC}\{{(?P<labels>.*)\}} (?P<value>\S+)")
_LABEL: Final = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')
_SERVED: Final = re.compile(r"\b([a-z0-9_]+) ([a-z][a-z0-9_]*\.[a-z][a-z0-9_]*)(?=[,;]| *$)")
_PROCESS: Final = re.compile(r"\bpid=(\d+)|\b(TP\d+|DP\d+)\b")


@dataclass(frozen=True, slots=True)
class Serving:
    """An implementation that was bound for layers of a model. processes: in how many processes, as far as is known."""

    primitive: str
    implementation: str
    device: str
    processes: int = 1


def in_metrics(text: str) -> tuple[Serving, ...]:
    """What a server's metrics, in Prometheus's text format, say of this project's gauge."""
    return tuple(found for _, found in _samples(text) if found is not None and found.processes)


def unread_in_metrics(text: str) -> tuple[str, ...]:
    """The samples of this project's gauge that are none: cut short, without a label, or of a value that counts nothing."""
    return tuple(line for line, found in _samples(text) if found is None)


def _samples(text: str) -> Iterator[tuple[str, Serving | None]]:
    """The lines of this project's gauge, each with what it says; None where that cannot be read."""
    for line in text.split("\n"):
        if line.startswith(f"{METRIC}{{"):
            sample = _SAMPLE.match(line[:_LONGEST])
            yield line[:_LONGEST], sample and _serving(sample["labels"], sample["value"])


def _serving(labels: str, value: str) -> Serving | None:
    named: dict[str, str] = {name: re.sub(r"\\(.)", r"\1", given) for name, given in _LABEL.findall(labels)}
    try:
        processes = float(value)
    except ValueError:
        return None
    if not (math.isfinite(processes) and processes >= 0 and processes.is_integer() and named.keys() >= {*LABELS}):
        return None
    return Serving(named["primitive"], named["implementation"], named["device"], int(processes))


def is_of_one_process(text: str) -> bool:
    """These metrics are those of the process that answered, and say nothing of the processes that run layers."""
    return re.search(rf"^{_ONE_PROCESS} ", text, re.MULTILINE) is not None


@dataclass(frozen=True, slots=True)
class Logged:
    """What an engine's log says.

    Attributes:
        refusals: the first lines in which the plugin does not serve, each once. others: how many further lines there are.
        engine: what it says of the engine.
    """

    served: tuple[Serving, ...]
    refusals: tuple[str, ...]
    others: int
    engine: Said


def in_log(lines: Iterable[str]) -> Logged:
    """What the lines of an engine's log say, in one pass. A line counts once for a process that it names."""
    processes: dict[Serving, set[str]] = {}
    refusals: dict[str, None] = {}
    others, said = 0, Said()
    for line in lines:
        said.read(line[:_LONGEST])
        before, begin, words = line.partition(LOG_LINE)
        if begin:
            named = _PROCESS.search(before[-_LONGEST:])
            for serving in _served(words[:_LONGEST]):
                if serving in processes or len(processes) < _MOST_SERVED:
                    processes.setdefault(serving, set()).add(named[0] if named else "")
        at = min((line.find(words) for words in NOT_SERVING if words in line), default=None)
        if at is not None:
            refusal = line[max(0, at - _BEFORE) : at + _AFTER].strip()
            if len(refusals) < _MOST_REFUSALS:
                refusals[refusal] = None
            others += refusal not in refusals
    served = tuple(Serving(each.primitive, each.implementation, each.device, len(who)) for each, who in processes.items())
    return Logged(served, tuple(refusals), others, said)


def _served(words: str) -> Iterator[Serving]:
    """What a line says behind its beginning. The device stands between "on" and "by route", or the next punctuation."""
    begin = re.search(r"\bon ", words)
    end = begin and re.compile(r" by route|[,;:]").search(words, begin.end())
    device = re.sub(r" \(\w+\)$", "", words[begin.end() : end.start()]) if begin and end else ""
    for primitive, implementation in _SERVED.findall(words):
        yield Serving(primitive, implementation, device)
