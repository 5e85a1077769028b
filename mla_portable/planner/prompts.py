# SPDX-License-Identifier: Apache-2.0
"""PromptPlan: how a step's prompts are computed over keys of each head, from lengths that lie on the host.

The new tokens of all requests are projected together. What the cache holds before them, the context, is projected in parts of a
bounded number of rows: the contexts of all requests stand one after the other, and a part is the next `context_rows` rows of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mla_portable.accelerator import accelerator
from mla_portable.contracts.rules import check_tensor, shape_of
from mla_portable.contracts.values import INT32_MAX, check_count, describe, refuse

_WHERE = "plan_prompts"

Lengths = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class ContextPart:
    """Consecutive rows of the step's contexts, R requests, T new tokens.

    Attributes:
        num_keys: rows of the part. max_key_len: the most of them that belong to one request.
        key_start_loc: [R + 1] int32, the rows of each request. workspace_starts: [R] int32, the row of each request's first
            position, which is negative where an earlier part has it.
        first_positions: [T] int32, for each token the position of the part's first key of its request.
    """

    num_keys: int
    max_key_len: int
    key_start_loc: Tensor
    workspace_starts: Tensor
    first_positions: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PromptPlan:
    """What every layer of a step does for its R prompts with T new tokens. The tensors are the plan's own.

    Attributes:
        num_tokens: T. max_query_len: new tokens of the longest request.
        masked: tokens attend to their selection; else to all that they see, as the selection is all of that.
        query_start_loc: [R + 1] int32. context_lens: [R] int32. block_table: [R, columns] int32.
        first_positions: [T] int32, the position of the first new token of each token's request; None where all are 0.
        context: the parts of the context, in order; () without one.
    """

    num_tokens: int
    max_query_len: int
    masked: bool
    query_start_loc: Tensor
    context_lens: Tensor
    block_table: Tensor
    first_positions: Tensor | None
    context: tuple[ContextPart, ...]


def plan_prompts(query_lens: Lengths, seq_lens: Lengths, block_table: Tensor, *, topk: int, context_rows: int) -> PromptPlan:
    """Plan the prompts of one step. One copy to the device of `block_table`, from page-locked memory where there is such.

    Args:
        query_lens: [R] int32 on the host, new tokens. seq_lens: [R] int32 on the host, context and new tokens.
        block_table: [R or more, columns] int32, of the cache that has the context.
        topk: keys that a token selects. context_rows: rows of context that are projected at a time.
    Raises: InvalidArgument.
    """
    check_count(_WHERE, "topk", topk, 1, INT32_MAX)
    check_count(_WHERE, "context_rows", context_rows, 1, INT32_MAX)
    num_reqs = _check_lengths(query_lens, seq_lens)
    rows, columns = shape_of(_WHERE, "block_table", block_table, 2, "[R or more, columns]")
    shape = max(rows, num_reqs), columns
    check_tensor(_WHERE, "block_table", block_table, torch.int32, shape, block_table.device, "[R or more, columns]")

    context_lens = seq_lens - query_lens
    ends = np.cumsum(context_lens, dtype=np.int64)
    begins, total = ends - context_lens, int(ends[-1]) if num_reqs else 0
    words = _Words()
    query_start_loc = words.add(_starts(query_lens))
    contexts = words.add(context_lens)
    first_positions = words.add(np.repeat(context_lens, query_lens)) if total else None
    parts: list[tuple[int, int, slice, slice, slice]] = []
    for begin in range(0, total, context_rows):
        end = min(begin + context_rows, total)
        key_starts = np.clip(np.concatenate((begins, ends[-1:])), begin, end) - begin
        first = np.clip(begin - begins, 0, context_lens)
        places = words.add(key_starts), words.add(begins - begin), words.add(np.repeat(first, query_lens))
        parts.append((end - begin, int((key_starts[1:] - key_starts[:-1]).max()), *places))
    sent = words.send(block_table.device)
    return PromptPlan(
        num_tokens=int(query_lens.sum()),
        max_query_len=int(query_lens.max(initial=0)),
        masked=bool(seq_lens.max(initial=0) > topk),
        query_start_loc=sent[query_start_loc],
        context_lens=sent[contexts],
        block_table=block_table[:num_reqs],
        first_positions=None if first_positions is None else sent[first_positions],
        context=tuple(ContextPart(keys, longest, *(sent[place] for place in places)) for keys, longest, *places in parts),
    )


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
        host = torch.empty(self._end, dtype=torch.int32, device="cpu", pin_memory=accelerator(device).can_pin())
        np.concatenate(self._arrays, out=host.numpy())
        return host.to(device, non_blocking=True)


def _starts(lengths: Lengths) -> Lengths:
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _check_lengths(query_lens: Lengths, seq_lens: Lengths) -> int:
    for name, values in (("query_lens", query_lens), ("seq_lens", seq_lens)):
        if not isinstance(values, np.ndarray) or values.dtype != np.int32 or values.ndim != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse(_WHERE, name, describe(values), "a numpy array [R] of int32")
    if len(query_lens) != len(seq_lens):
        refuse(_WHERE, "seq_lens", f"{len(seq_lens)} requests", f"{len(query_lens)}, as query_lens has")
    if len(query_lens) and (query_lens.min() < 0 or (seq_lens < query_lens).any()):
        got = f"query_lens from {query_lens.min()}, seq_lens less by up to {(query_lens - seq_lens).max()}"
        refuse(_WHERE, "seq_lens", got, "query_lens of at least 0, seq_lens of at least the query_lens")
    if int(seq_lens.sum(dtype=np.int64)) > INT32_MAX:
        refuse(_WHERE, "seq_lens", int(seq_lens.sum(dtype=np.int64)), f"at most {INT32_MAX} tokens in all")
    return len(query_lens)
