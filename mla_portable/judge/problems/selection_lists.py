# SPDX-License-Identifier: Apache-2.0
"""Lists of keys as the indexer of a real model selects them: how they look, layer by layer, and lists of any size like them.

A benchmark replays a file's rows where their K and their number fit. Else its lists are drawn like a layer: neighbours share as
many keys as they do in the file, and positions lie where they lie there, in proportion to the context. Nothing else is kept:
neither which keys are selected again after a while, nor whether selected keys lie side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from mla_portable.errors import InvalidArgument
from mla_portable.judge.problems.selections import Selections

Array: TypeAlias = "np.ndarray[Any, Any]"

NEAR: Final = 64
"""Keys that count as the first ones and as the last ones of a context."""
TILE: Final = 64
"""Neighbouring tokens whose distinct keys are counted."""
_ENDS: Final = 2.0 ** np.arange(-10, 0)
EDGES: Final = np.concatenate(([0.0], _ENDS, 1 - _ENDS[-2::-1], [1.0]))
"""Of the parts of a context whose keys are counted, narrow at both ends: the first 1/1024, to 1/512, ..., the last 1/1024."""


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """How a layer's lists look. Rows that see at most K keys select all of them, and are left out.

    Attributes:
        layer: its number. rows: that see more than K keys. pairs: of neighbours among them.
        overlap: share of a token's keys that the token before it selected too; mean over pairs, None without pairs.
        overlap_p10, overlap_p90: percentiles of the same.
        ascending: share of a list's entries that are greater than the one before: 1 for lists in order, 0.5 for none.
        first, last: share of the selected keys among the first and the last NEAR of a context.
        distance: median distance of a selected key from its token, as a share of the context.
        side_by_side: share of selected keys whose successor is selected too.
        distinct: of TILE neighbours, distinct keys as a multiple of K; None without so many neighbours.
        profile: share of the selected keys in each part of a context, by EDGES.
    """

    layer: int
    rows: int
    pairs: int
    overlap: float | None
    overlap_p10: float | None
    overlap_p90: float | None
    ascending: float
    first: float
    last: float
    distance: float
    side_by_side: float
    distinct: float | None
    profile: tuple[float, ...]


def statistics_of(selections: Selections, layer: int) -> LayerStatistics:
    """Of the layer of that number. Raises: InvalidArgument for a layer that the file does not have, or has no long row of."""
    return _statistics(selections, _place(selections, layer))


def _place(selections: Selections, layer: int) -> int:
    found = np.flatnonzero(selections.layers == layer)
    if not len(found):
        numbers = ", ".join(map(str, selections.layers.tolist()))
        raise InvalidArgument("selections", "layer", got=layer, expected=f"one of {numbers}, which the file has")
    return int(found[0])


@lru_cache(maxsize=256)
def _statistics(selections: Selections, place: int) -> LayerStatistics:
    topk, seen, positions = selections.topk, selections.seen, selections.positions[place]
    long = np.flatnonzero(seen > topk)
    if not len(long):
        got, expected = f"rows that see {seen.max()} keys at most", f"one that sees more than K = {topk}"
        raise InvalidArgument("selections", "seen", got=got, expected=expected)
    lists, counts = positions[long], seen[long][:, None]
    ordered = np.sort(lists, axis=1)
    far = (counts - 1 - lists) / counts
    shared, distinct = list[float](), list[float]()
    for run in selections.runs():
        rows = [np.sort(positions[row]) for row in range(run.start, run.stop) if seen[row] > topk]
        shared += [len(np.intersect1d(a, b, assume_unique=True)) / topk for a, b in pairwise(rows)]
        tiles = range(0, len(rows) - TILE + 1, TILE)
        distinct += [len(np.unique(np.concatenate(rows[begin : begin + TILE]))) / topk for begin in tiles]
    profile, _ = np.histogram((lists + 0.5) / counts, EDGES)
    low, high = (float(each) for each in np.percentile(shared, (10, 90))) if shared else (None, None)
    return LayerStatistics(
        layer=int(selections.layers[place]),
        rows=len(long),
        pairs=len(shared),
        overlap=float(np.mean(shared)) if shared else None,
        overlap_p10=low,
        overlap_p90=high,
        ascending=float((np.diff(lists, axis=1) > 0).mean()) if topk > 1 else 1.0,
        first=float((lists < NEAR).mean()),
        last=float((lists >= counts - NEAR).mean()),
        distance=float(np.median(far)),
        side_by_side=float((np.diff(ordered, axis=1) == 1).sum() / lists.size),
        distinct=float(np.mean(distinct)) if distinct else None,
        profile=tuple((profile / lists.size).tolist()),
    )


def typical_layers(selections: Selections) -> tuple[int, ...]:
    """The layers whose neighbours share least, in the middle and most; all where no layer has neighbours."""
    layers = [int(each) for each in selections.layers]
    found = {layer: statistics_of(selections, layer).overlap for layer in layers}
    known = sorted((overlap, layer) for layer, overlap in found.items() if overlap is not None)
    chosen = [known[at][1] for at in (0, len(known) // 2, -1)] if known else layers
    return tuple(sorted(set(chosen)))


@dataclass(frozen=True, slots=True)
class LayerLists:
    """Lists of one layer for a benchmark: the file's own, or drawn like them.

    Attributes:
        layer: its number. drawn: the lists are not the file's.
    """

    selections: Selections
    layer: int
    drawn: bool

    def __str__(self) -> str:
        """What a result says of its lists."""
        return f"{'drawn like ' * self.drawn}layer {self.layer} of {self.selections.model}"

    @property
    def _positions(self) -> Array:
        return self.selections.positions[_place(self.selections, self.layer)]

    def of_neighbours(
        self, first: int, last: int, topk: int, *, batch: int = 1, device: torch.device, generator: torch.Generator
    ) -> Tensor:
        """[batch, last - first + 1, K] int32: of requests whose tokens see `first`, ..., `last` keys; -1 behind fewer than K.

        Lists of the file are in its order, and the same for each request of the batch. Drawn ones ascend.
        Raises: InvalidArgument where the file has no neighbours to draw like, or not these rows.
        """
        if not self.drawn:
            rows = neighbours(self.selections, first, last)
            if rows is None or topk != self.selections.topk:
                got, expected = f"K {topk}, rows that see {first} to {last}", "rows that the file has"
                raise InvalidArgument("selections", "rows", got=got, expected=expected)
            return torch.from_numpy(self._positions[rows]).to(device).expand(batch, -1, -1).contiguous()
        self.check(neighbours=last > first)
        stats = statistics_of(self.selections, self.layer)
        return _chain(stats, first, last, topk, batch, device, generator)

    def of_requests(self, rows: int, context: int, topk: int, *, device: torch.device, generator: torch.Generator) -> Tensor:
        """[rows, K] int32: of tokens of requests of their own, each of which sees K or more of at most `context` keys."""
        if not self.drawn:
            chosen = apart(self.selections, rows)
            if chosen is None or topk != self.selections.topk:
                expected = "as many rows that see K keys or more as the file has"
                raise InvalidArgument("selections", "rows", got=f"{rows} rows, K {topk}", expected=expected)
            return torch.from_numpy(self._positions[chosen]).to(device)
        stats = statistics_of(self.selections, self.layer)
        return _chain(stats, context, context, topk, rows, device, generator)[:, 0]

    def check(self, *, neighbours: bool) -> None:
        """Raises: InvalidArgument where nothing can be drawn like the layer; a row of the file is always there."""
        if self.drawn and statistics_of(self.selections, self.layer).overlap is None and neighbours:
            expected = "two rows of one request that follow one another and see more than K keys, to draw neighbours like them"
            raise InvalidArgument("selections", "request", got="no neighbours", expected=expected)

    def index_sizes(
        self, rows: int, *, one_request: bool, width: int | None = None, num_heads: int | None = None
    ) -> dict[str, int]:
        """Width and num_heads of the layer's indexer, whose inputs the file has for so many rows.

        Args:
            one_request: the rows are its last tokens. width, num_heads: that are asked for, None for any.
        Raises: InvalidArgument where the file has no such inputs.
        """
        index = self.selections.index
        if index is None or self.layer not in index.layers:
            got = "no inputs of an indexer" if index is None else f"inputs of layers {index.layers.tolist()}"
            raise InvalidArgument("selections", "index", got=got, expected=f"those of layer {self.layer}")
        sizes = {"width": index.keys.shape[1], "num_heads": index.queries.shape[2]}
        for name, asked in (("width", width), ("num_heads", num_heads)):
            if asked not in (None, sizes[name]):
                raise InvalidArgument("selections", name, got=asked, expected=f"{sizes[name]}, as the indexer's inputs have")
        last = sizes["width"] - np.arange(rows)[::-1]
        if rows > len(index.seen) or (one_request and (index.seen[-rows:] != last).any()):
            which = "the last tokens of its request" if one_request else "rows"
            raise InvalidArgument(
                "selections", "rows", got=rows, expected=f"at most {len(index.seen)} {which}, as the file has"
            )
        return sizes

    def index_inputs(self, rows: int, *, one_request: bool, device: torch.device) -> IndexInputs:
        """The layer's, of its last rows, or of rows evenly spread over those that there are."""
        index = self.selections.index
        assert index is not None  # index_sizes refuses it
        at, count = int(np.flatnonzero(index.layers == self.layer)[0]), len(index.seen)
        chosen = np.arange(count - rows, count) if one_request else np.linspace(0, count - 1, rows).round().astype(np.int64)
        some = torch.from_numpy(chosen)
        tensors = index.keys[at], index.queries[at, some], index.weights[at, some], torch.from_numpy(index.seen)[some]
        return IndexInputs(*(each.to(device) for each in tensors))


class IndexInputs(NamedTuple):
    """An indexer's inputs: keys [N, D] bf16, queries [T, H, D] bf16, weights [T, H] float32, seen [T] int32."""

    keys: Tensor
    queries: Tensor
    weights: Tensor
    seen: Tensor


def neighbours(selections: Selections, first: int, last: int) -> slice | None:
    """The file's rows of one request that see `first`, ..., `last` keys."""
    for run in selections.runs():
        begin = first - int(selections.seen[run.start])
        if begin >= 0 and last <= selections.seen[run.stop - 1]:
            return slice(run.start + begin, run.start + begin + last - first + 1)
    return None


def longest_neighbours(selections: Selections, rows: int) -> tuple[int, int] | None:
    """(first, last): the keys that `rows` neighbours of the file see, those that see most; None where it has not so many."""
    ends = [int(selections.seen[run.stop - 1]) for run in selections.runs() if run.stop - run.start >= rows]
    return (max(ends) - rows + 1, max(ends)) if ends else None


def apart(selections: Selections, rows: int) -> Array | None:
    """So many rows of the file that see K keys or more, evenly spread; None where it has not so many."""
    able = np.flatnonzero(selections.seen >= selections.topk)
    return able[np.linspace(0, len(able) - 1, rows).round().astype(np.int64)] if len(able) >= rows else None


def _chain(
    stats: LayerStatistics, first: int, last: int, topk: int, batch: int, device: torch.device, generator: torch.Generator
) -> Tensor:
    """[batch, last - first + 1, K] int32, ascending, -1 behind: each row keeps a share of the row before it, at random.

    What a row does not keep it draws from keys that the row before did not select, by the layer's profile, so that neighbours
    share what they share in the file, exactly but for rounding, where the context has keys enough.
    """
    edges = torch.from_numpy(EDGES).to(device, torch.float32)
    density = torch.tensor(stats.profile, device=device, dtype=torch.float32) / edges.diff()
    logs = density.clamp(min=1e-6).log()
    kept = round((stats.overlap or 0.0) * topk)
    out = torch.full((batch, last - first + 1, topk), -1, dtype=torch.int32, device=device)
    taken = torch.zeros((batch, last), dtype=torch.bool, device=device)
    key = torch.arange(last, device=device)
    before = 0
    for row, seen in enumerate(range(first, last + 1)):
        if seen <= topk:
            out[:, row, :seen] = key[:seen]
            taken[:, :seen], before = True, seen
            continue
        draws = torch.rand((batch, seen), generator=generator, device=device)
        mine = taken[:, :seen]
        keep = min(before, max(kept, topk - (seen - before)))
        stay = draws.masked_fill(~mine, -1.0).topk(keep, dim=1).indices
        part = torch.bucketize((key[:seen] + 0.5) / seen, edges[1:-1])
        # the largest of log(weight) + Gumbel noise: a draw by weight, without replacement
        noise = -(-torch.rand((batch, seen), generator=generator, device=device).clamp(1e-9, 1 - 1e-7).log()).log()
        fresh = (logs[part] + noise).masked_fill(mine, -torch.inf).topk(topk - keep, dim=1).indices
        chosen = torch.cat((stay, fresh), dim=1)
        taken = torch.zeros_like(taken).scatter_(1, chosen, True)
        out[:, row], before = chosen.sort(dim=1).values.to(torch.int32), topk
    return out
