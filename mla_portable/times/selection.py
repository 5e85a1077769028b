# SPDX-License-Identifier: Apache-2.0
"""SelectionTimes: whether an engine's own kernels or ours choose a decode's keys in less time, by rows and keys of a request.

Both sides are medians of indexer_select on the same problems, one token a request, which files of times have by
`form_of(keys)`: ours among `times`, where they rank nothing, the engine's among `baselines`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from mla_portable.contracts import Request
from mla_portable.times.files import TimesFile
from mla_portable.times.records import MeasuredTime
from mla_portable.times.rows import Times, time_spent

_FORM: Final = re.compile(r"([1-9][0-9]{0,9}) keys")
_Grid = Mapping[int, Times]
"""Keys of a request -> times by rows."""


def form_of(keys: int) -> str:
    """`MeasuredTime.form` of a selection among so many keys of each request."""
    return f"{keys} keys"


def keys_of(form: str) -> int | None:
    """The keys of `form_of`; None for another form."""
    found = _FORM.fullmatch(form)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class SelectionTimes:
    """The times of both sides, at the same numbers of keys and rows.

    Attributes:
        ours, theirs: microseconds by keys and rows. most_rows: that were timed. text: who was timed, and where, for a log.
    """

    ours: _Grid
    theirs: _Grid
    most_rows: int
    text: str

    def ours_is_faster(self, rows: int, keys: int) -> bool:
        """For a step of `rows` tokens, whose longest request has `keys`. Beyond what was timed it is not."""
        if not 1 <= rows <= self.most_rows or not 1 <= keys <= max(self.ours):
            return False
        ours, theirs = (_us(grid, rows, keys) for grid in (self.ours, self.theirs))
        return ours < theirs

    def ours_is_faster_up_to(self, rows: int, keys: int) -> bool:
        """For all steps of `rows` tokens whose longest request has up to `keys`, as a CUDA graph's have: by their sum."""
        if not 1 <= rows <= self.most_rows:
            return False
        sizes = [each for each in self.ours if each <= keys] or [min(self.ours)]
        ours, theirs = (time_spent(grid[each].us(rows) for each in sizes) for grid in (self.ours, self.theirs))
        return ours < theirs


def _us(grid: _Grid, rows: int, keys: int) -> float:
    return Times({each: times.us(rows) for each, times in grid.items()}).us(keys)


def selection_times(files: Iterable[TimesFile], request: Request, ours: str, theirs: str) -> SelectionTimes | None:
    """Of the device, layout, heads and topk of a request on indexer_select; None unless both sides were timed.

    Args:
        files: of which a later one replaces an earlier one. ours: an implementation. theirs: an engine's kernels, a baseline.
    """
    found: dict[str, dict[int, dict[int, MeasuredTime]]] = {ours: {}, theirs: {}}
    for file in files:
        named = [*((ours, each) for each in file.times), *((theirs, each) for each in file.baselines)]
        for name, each in named:
            keys = keys_of(each.form)
            if keys is not None and each.implementation == name and _is_of(each, request):
                found[name].setdefault(keys, {})[each.rows] = each
    both: dict[int, list[int]] = {}
    for keys in sorted(found[ours].keys() & found[theirs].keys()):
        rows = sorted(found[ours][keys].keys() & found[theirs][keys].keys())
        if rows:
            both[keys] = rows
    if not both:
        return None

    def grid(name: str) -> _Grid:
        return {keys: Times({each: found[name][keys][each].us for each in rows}) for keys, rows in both.items()}

    most_rows = min(rows[-1] for rows in both.values())
    newest = max((found[ours][keys][rows[-1]].measurement for keys, rows in both.items()), key=lambda each: each.recorded)
    return SelectionTimes(grid(ours), grid(theirs), most_rows, f"{ours} and {theirs}, {newest.text(request.device)}")


def has_selection_times(files: Iterable[TimesFile], request: Request, theirs: str) -> bool:
    """An engine's kernels were timed for such a request on this device."""
    return any(each.implementation == theirs and _is_of(each, request) for file in files for each in file.baselines)


def _is_of(time: MeasuredTime, request: Request) -> bool:
    same = time.primitive == str(request.primitive) and time.layout == request.kv_layout and time.configuration is None
    sizes = time.heads == request.num_heads and time.topk == request.topk
    return same and sizes and time.measurement.matches(request.device.name)
