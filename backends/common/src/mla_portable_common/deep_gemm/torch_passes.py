# SPDX-License-Identifier: Apache-2.0
"""The passes around DeepGEMM's scores in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mla_portable_common.deep_gemm.pages import PAGE, IndexPasses, Pages, Rows


class TorchIndexPasses(IndexPasses):
    """Small kernels of torch's, for devices without Triton; see IndexPasses."""

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
        out[:, : pages.width].copy_(logits.masked_fill(logits.isnan(), -math.inf))
        self.erase(out[:, : pages.width], rows, pages)

    def erase(self, logits: Tensor, rows: Rows, pages: Pages) -> None:
        """See IndexPasses."""
        position = torch.arange(pages.width, dtype=torch.int64, device=rows.ends.device)
        block = pages.block_table[rows.owners.long()][:, position // PAGE]
        logits.masked_fill_((position >= rows.ends.unsqueeze(1)) | (block < 0) | (block >= pages.num_blocks), -math.inf)

    def window(self, out: Tensor, logits: Tensor, row_starts: Tensor, row_ends: Tensor, relative: bool) -> None:
        """See IndexPasses."""
        column = torch.arange(out.shape[1], dtype=torch.int64, device=out.device)
        starts = row_starts.long().clamp(min=0).unsqueeze(1)  # [n, 1]
        inside = (column >= starts) & (column < row_ends.unsqueeze(1))
        if relative:
            logits = logits.gather(1, torch.where(inside, column - starts, 0))
        out.copy_(logits.masked_fill(~inside | logits.isnan(), -math.inf))
