# SPDX-License-Identifier: Apache-2.0
"""PromptPlan: how a step's prompts are computed over keys of each head, from lengths that lie on the host.

The keys of a request are its context, which the cache has, and its new tokens. They are projected in parts of at most
`key_rows` rows. The last part has the new tokens of all requests, and in front of those of each request what fits of its
context. The rest of the contexts, one request after the other, is cut into the parts before it. Most steps have one part.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mla_portable.accelerator import accelerator
from mla_portable.contracts.values import INT32_MAX, check_count, describe, refuse
from mla_portable.kit.rules import check_tensor, shape_of
from mla_portable.planner.checks import check_table

_WHERE = "plan_prompts"

Lengths = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class KeyPart:
    """Keys that are projected together, rows of R requests.

    Attributes:
        num_keys: rows. max_key_len: the most of them that belong to one request. num_context: rows that come from the cache.
        key_start_loc: [R + 1] int32, the rows of each request.
        seq_lens: [R] int32, the positions that are gathered up to, for each request; 0 where none are.
        workspace_starts: [R] int32, the row of each request's position 0, which is negative where an earlier part has it.
        first_positions: [T] int32, for each new token the position of the part's first key of its request; None: all are 0.
        new_rows: [T] int64, the rows of the new tokens, in the last part; None in others, and where row t is token t.
    """

    num_keys: int
    max_key_len: int
    num_context: int
    key_start_loc: Tensor
    seq_lens: Tensor
    workspace_starts: Tensor
    first_positions: Tensor | None
    new_rows: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PromptPlan:
    """What every layer of a step does for its R prompts with T new tokens. The tensors are the plan's own.

    Attributes:
        num_tokens: T. max_query_len: new tokens of the longest request. max_context_len: tokens of the longest context.
        masked: tokens attend to their selection; else to all that they see, as the selection is all of that.
        query_start_loc: [R + 1] int32. block_table: [R, columns] int32.
        parts: of the keys, in order; the last one has the new tokens.
    """

    num_tokens: int
    max_query_len: int
    max_context_len: int
    masked: bool
    query_start_loc: Tensor
    block_table: Tensor
    parts: tuple[KeyPart, ...]


def plan_prompts(
    query_lens: Lengths,
    seq_lens: Lengths,
    block_table: Tensor,
    *,
    topk: int,
    key_rows: int,
    block_size: int | None = None,
) -> PromptPlan:
    """Plan the prompts of one step. One copy to the device of `block_table`, from page-locked memory where there is such.

    Args:
        query_lens: [R] int32 on the host, new tokens. seq_lens: [R] int32 on the host, context and new tokens.
        block_table: [R or more, columns] int32, of the cache that has the context.
        topk: a token that sees no more keys selects all of them. Where an indexer's lists are wider than what it selects at
            most, as those of pooled keys are, it is not their width.
        key_rows: keys that are projected at a time, at least the new tokens.
        block_size: of that cache, in tokens: contexts are held against the table. None leaves that to PromptAttention.
    Raises: InvalidArgument.
    """
    check_count(_WHERE, "topk", topk, 1, INT32_MAX)
    check_count(_WHERE, "key_rows", key_rows, 1, INT32_MAX)
    num_reqs = _check_lengths(query_lens, seq_lens)
    num_tokens = int(query_lens.sum())
    if num_tokens > key_rows:
        refuse(_WHERE, "key_rows", key_rows, f"at least {num_tokens}, the step's new tokens")
    rows, columns = shape_of(_WHERE, "block_table", block_table, 2, "[R or more, columns]")
    shape = max(rows, num_reqs), columns
    check_tensor(_WHERE, "block_table", block_table, torch.int32, shape, block_table.device, "[R or more, columns]")

    context_lens = seq_lens - query_lens
    if block_size is not None:
        check_count(_WHERE, "block_size", block_size, 1, INT32_MAX)
        check_table(_WHERE, "seq_lens - query_lens", context_lens, columns * block_size)
    ends = np.cumsum(context_lens, dtype=np.int64)
    begins, total = ends - context_lens, int(ends[-1]) if num_reqs else 0
    before = max(0, total - (key_rows - num_tokens))  # rows of contexts in the parts before the last one
    words = _Words()
    query_start_loc = words.add(_starts(query_lens))

    def part(begin: int, end: int, new: Lengths | None) -> _Part:
        """The rows from `begin` to `end` of the contexts, and the new tokens of each request behind its own."""
        first = _between(begin - begins, context_lens)  # the position of each request's first key
        from_cache = _between(end - begins, context_lens) - first
        keys = from_cache if new is None else from_cache + new
        starts = _starts(keys)
        moved = new is not None and end > begin
        return _Part(
            num_keys=int(starts[-1]),
            max_key_len=int(keys.max(initial=0)),
            num_context=end - begin,
            key_start_loc=words.add(starts),
            seq_lens=words.add(np.where(from_cache > 0, first + from_cache, 0)),
            workspace_starts=words.add(starts[:-1] - first),
            first_positions=words.add(np.repeat(first, query_lens)) if first.any() else None,
            # token t of request r: behind the context rows of requests up to r
            new_rows=words.add(np.arange(num_tokens) + np.repeat(np.cumsum(from_cache), query_lens)) if moved else None,
        )

    def whole() -> _Part:
        """The only part of most steps: each context in front of its request's new tokens."""
        starts = words.add(_starts(seq_lens)) if total else query_start_loc
        return _Part(
            num_keys=total + num_tokens,
            max_key_len=int(seq_lens.max(initial=0)),
            num_context=total,
            key_start_loc=starts,
            seq_lens=words.add(context_lens),
            workspace_starts=slice(starts.start, starts.stop - 1),
            first_positions=None,
            # token t of request r: behind the contexts of requests up to r
            new_rows=words.add(np.arange(num_tokens) + np.repeat(ends, query_lens)) if total else None,
        )

    if before:
        parts = [part(begin, min(begin + key_rows, before), None) for begin in range(0, before, key_rows)]
        parts.append(part(before, total, query_lens))
    else:
        parts = [whole()]
    sent = words.send(block_table.device)
    return PromptPlan(
        num_tokens=num_tokens,
        max_query_len=int(query_lens.max(initial=0)),
        max_context_len=int(context_lens.max(initial=0)),
        masked=bool(seq_lens.max(initial=0) > topk),
        query_start_loc=sent[query_start_loc],
        block_table=block_table[:num_reqs],
        parts=tuple(each.on_device(sent) for each in parts),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """A KeyPart whose tensors are slices of what will be sent."""

    num_keys: int
    max_key_len: int
    num_context: int
    key_start_loc: slice
    seq_lens: slice
    workspace_starts: slice
    first_positions: slice | None
    new_rows: slice | None

    def on_device(self, sent: Tensor) -> KeyPart:
        return KeyPart(
            self.num_keys,
            self.max_key_len,
            self.num_context,
            sent[self.key_start_loc],
            sent[self.seq_lens],
            sent[self.workspace_starts],
            None if self.first_positions is None else sent[self.first_positions],
            None if self.new_rows is None else sent[self.new_rows].long(),
        )


@cache
def _pins(device: torch.device) -> bool:
    """To find out allocates page-locked memory."""
    return accelerator(device).can_pin()


class _Words:
    """Arrays of int32 that travel together."""

    def __init__(self) -> None:
        self._arrays: list[Lengths] = []
        self._end = 0

    def add(self, values: npt.NDArray[Any]) -> slice:
        """Where `values` will be."""
        begin, self._end = self._end, self._end + len(values)
        self._arrays.append(values.astype(np.int32, copy=False))
        return slice(begin, self._end)

    def send(self, device: torch.device) -> Tensor:
        host = torch.empty(self._end, dtype=torch.int32, device="cpu", pin_memory=_pins(device))
        np.concatenate(self._arrays, out=host.numpy())
        return host.to(device, non_blocking=True)


def _between(values: npt.NDArray[np.int64], most: Lengths) -> npt.NDArray[np.int64]:
    """Each from 0 to its `most`; np.clip takes several times as long for so few."""
    return np.minimum(np.maximum(values, 0), most)


def _starts(lengths: Lengths) -> Lengths:
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _check_lengths(query_lens: Lengths, seq_lens: Lengths) -> int:
    for name, values in (("query_lens", query_lens), ("seq_lens", seq_lens)):
        if (
            isinstance(values, np.ma.MaskedArray)
            or not isinstance(values, np.ndarray)
            or values.dtype != np.int32
            or values.ndim != 1
        ):  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse(_WHERE, name, describe(values), "a numpy array [R] of int32")
    if len(query_lens) != len(seq_lens):
        refuse(_WHERE, "seq_lens", f"{len(seq_lens)} requests", f"{len(query_lens)}, as query_lens has")
    if len(query_lens) and (query_lens.min() < 0 or (seq_lens < query_lens).any()):
        less = np.subtract(query_lens, seq_lens, dtype=np.int64).max()
        got = f"query_lens from {query_lens.min()}, seq_lens less by up to {less}"
        refuse(_WHERE, "seq_lens", got, "query_lens of at least 0, seq_lens of at least the query_lens")
    if int(seq_lens.sum(dtype=np.int64)) > INT32_MAX:
        refuse(_WHERE, "seq_lens", int(seq_lens.sum(dtype=np.int64)), f"at most {INT32_MAX} tokens in all")
    return len(query_lens)
