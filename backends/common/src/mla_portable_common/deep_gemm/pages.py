# SPDX-License-Identifier: Apache-2.0
"""The passes around DeepGEMM's scores, and what they read and write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

PAGE: Final = 64
"""Tokens of a page: the size that every build of DeepGEMM reads on every architecture."""


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """A batch over paged keys, as indexer_logits gets it.

    Attributes:
        query_start_loc: [R + 1] int32. seq_lens: [R] int32. block_table: [R, columns] int32; R at least 1.
        num_blocks: of the cache, at least 1. width: positions from there on are not scored; at most 64 * columns.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    num_blocks: int
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What the first pass writes about some tokens, S of them in each of B rows of the kernel. All int32, contiguous.

    Attributes:
        starts: [B * S], zeros. ends: [B * S], how many positions each token sees.
        owners: [B * S], the request of each; any where it sees none.
        lens: [B, S], the longest of a row's `ends`, at least 1. table: [B, columns], blocks of the cache in front of that
            length; an entry that names no block became 0.
    """

    starts: Tensor
    ends: Tensor
    owners: Tensor
    lens: Tensor
    table: Tensor

    @classmethod
    def empty(cls, tokens: int, tokens_a_row: int, columns: int, device: torch.device) -> Rows:
        """Memory for B * S = `tokens`."""
        starts, ends, owners = torch.empty((3, tokens), dtype=torch.int32, device=device)
        lens = _empty_lengths(tokens, tokens_a_row, device)
        return cls(starts, ends, owners, lens, torch.empty((lens.shape[0], columns), dtype=torch.int32, device=device))


def _empty_lengths(tokens: int, tokens_a_row: int, device: torch.device) -> Tensor:
    """[tokens / tokens_a_row, tokens_a_row] int32: DeepGEMM's scheduler looks at the length behind the last one."""
    return torch.empty(tokens + tokens_a_row, dtype=torch.int32, device=device)[:tokens].view(-1, tokens_a_row)


def row_lengths(seen: Tensor, query_len: int) -> Tensor:
    """`Rows.lens` of a batch whose requests have `query_len` tokens each and see `seen` [R] int32 keys at their last one."""
    tokens, tokens_a_row = len(seen) * query_len, tokens_of_row(len(seen), len(seen) * query_len)
    lens = _empty_lengths(tokens, tokens_a_row, seen.device)
    before_last = torch.arange(1 - query_len, 1, dtype=torch.int32, device=seen.device)
    each = (seen.unsqueeze(1) + before_last).clamp_(min=1).view(-1, tokens_a_row)  # a row counts as long as its last token's
    return lens.copy_(each[:, -1:])


def tokens_of_row(num_requests: int, tokens: int) -> int:
    """Tokens of a row of the kernel: 2 where all are of one request and their number is even, so that keys are read once."""
    return 2 if num_requests == 1 and tokens % 2 == 0 else 1


class IndexPasses(Protocol):
    """The passes around DeepGEMM's scores that give them this project's one meaning, of at least one row; none synchronises."""

    def describe(self, rows: Rows, pages: Pages, first: int) -> None:
        """Write `rows` of the tokens from `first` on. More than one token a row: for a single request alone."""
        ...

    def finish(self, out: Tensor, logits: Tensor, rows: Rows, pages: Pages) -> None:
        """Copy logits [n, width] float32 to out [n, N]: what a token sees and has a block; else, and for NaN, -inf."""
        ...

    def erase(self, logits: Tensor, rows: Rows, pages: Pages) -> None:
        """Write -inf to positions of logits [n, width] that a token sees and that have no block in the cache.

        What it does not see may be overwritten as well.
        """
        ...

    def window(self, out: Tensor, logits: Tensor, row_starts: Tensor, row_ends: Tensor, relative: bool) -> None:
        """Copy logits [n, N] float32 to out [n, N]: columns row_starts to row_ends, [n] int32; else, and for NaN, -inf.

        relative: column 0 of logits is column max(row_start, 0) of `out`.
        """
        ...
