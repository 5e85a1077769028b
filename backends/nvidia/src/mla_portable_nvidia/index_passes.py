# SPDX-License-Identifier: Apache-2.0
"""The passes around DeepGEMM's scores that give them this project's one meaning, in plain torch.

Before: what each token sees, and a length and a table of blocks for each row of the kernel. DeepGEMM reads a row of its own for
each token, follows any entry of a table and takes lengths as they are. After: -inf wherever a token sees nothing.
The same passes as one Triton kernel each, for GPUs: `index_pass_kernels`.
"""

from __future__ import annotations

import math
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
        # DeepGEMM's scheduler looks at the length behind the last one
        lens = torch.empty(tokens + tokens_a_row, dtype=torch.int32, device=device)[:tokens].view(-1, tokens_a_row)
        return cls(starts, ends, owners, lens, torch.empty((lens.shape[0], columns), dtype=torch.int32, device=device))


class IndexPasses(Protocol):
    """The passes; none synchronises."""

    def describe(self, rows: Rows, pages: Pages, first: int) -> None:
        """Write `rows` of the tokens from `first` on. More than one token a row: for a single request alone."""
        ...

    def finish(self, out: Tensor, logits: Tensor, rows: Rows, pages: Pages) -> None:
        """Copy logits [n, width] float32 to out [n, N]: what a token sees and has a block in the cache; -inf elsewhere."""
        ...

    def erase(self, logits: Tensor, rows: Rows, pages: Pages) -> None:
        """Write -inf to positions of logits [n, width] that a token sees and that have no block in the cache.

        What it does not see may be overwritten as well.
        """
        ...

    def window(self, out: Tensor, logits: Tensor, row_starts: Tensor, row_ends: Tensor, relative: bool) -> None:
        """Copy logits [n, N] float32 to out [n, N]: columns from row_starts to row_ends, [n] int32; -inf elsewhere.

        relative: column 0 of logits is column max(row_start, 0) of `out`.
        """
        ...


class TorchIndexPasses:
    """The passes in torch operations; any device."""

    def describe(self, rows: Rows, pages: Pages, first: int) -> None:
        """See IndexPasses."""
        count, (_, tokens_a_row), table = rows.ends.shape[0], rows.lens.shape, pages.block_table
        token = torch.arange(first, first + count, dtype=torch.int64, device=table.device)
        starts, stops = pages.query_start_loc[:-1].long(), pages.query_start_loc[1:].long()
        request = torch.searchsorted(stops, token, right=True)
        owner = request.clamp(max=stops.shape[0] - 1)
        owned = (request < stops.shape[0]) & (starts[owner] <= token) & (token < stops[owner])
        length = pages.seq_lens.long()[owner].clamp(0, table.shape[1] * PAGE)
        seen = torch.where(owned, length - (stops[owner] - token) + 1, 0).clamp(0, pages.width)
        rows.starts.zero_()
        rows.ends.copy_(seen)
        rows.owners.copy_(owner)
        rows.lens.copy_(seen.view(-1, tokens_a_row).amax(dim=1, keepdim=True).clamp(min=1).expand_as(rows.lens))
        blocks = table[owner[::tokens_a_row], : rows.table.shape[1]]
        rows.table.copy_(blocks.masked_fill((blocks < 0) | (blocks >= pages.num_blocks), 0))

    def finish(self, out: Tensor, logits: Tensor, rows: Rows, pages: Pages) -> None:
        """See IndexPasses."""
        out.fill_(-math.inf)
        seen, there = self._seen(rows, pages)
        out[:, : pages.width].copy_(logits.masked_fill(~(seen & there), -math.inf))

    def erase(self, logits: Tensor, rows: Rows, pages: Pages) -> None:
        """See IndexPasses."""
        seen, there = self._seen(rows, pages)
        logits.masked_fill_(seen & ~there, -math.inf)

    def window(self, out: Tensor, logits: Tensor, row_starts: Tensor, row_ends: Tensor, relative: bool) -> None:
        """See IndexPasses."""
        column = torch.arange(out.shape[1], dtype=torch.int64, device=out.device)
        starts = row_starts.long().clamp(min=0).unsqueeze(1)  # [n, 1]
        inside = (column >= starts) & (column < row_ends.unsqueeze(1))
        if relative:
            logits = logits.gather(1, torch.where(inside, column - starts, 0))
        out.copy_(logits.masked_fill(~inside, -math.inf))

    def _seen(self, rows: Rows, pages: Pages) -> tuple[Tensor, Tensor]:
        """[n, width] each: what a token sees; what has a block."""
        position = torch.arange(pages.width, dtype=torch.int64, device=rows.ends.device)
        block = pages.block_table[rows.owners.long()][:, position // PAGE]
        return position < rows.ends.unsqueeze(1), (block >= 0) & (block < pages.num_blocks)


def passes_for(device_type: str) -> IndexPasses:
    """One Triton kernel for each pass on a GPU where triton is importable; torch operations elsewhere."""
    if device_type == "cuda":
        try:
            from mla_portable_nvidia.index_pass_kernels import TritonIndexPasses
        except ImportError:
            return TorchIndexPasses()
        return TritonIndexPasses()
    return TorchIndexPasses()
