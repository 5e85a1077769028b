# SPDX-License-Identifier: Apache-2.0
"""The passes around vendors' kernels in torch: on a CPU Triton's interpreter is slow, and cuts bf16 off instead of rounding.

The kernels themselves have tests of their own.
"""

from __future__ import annotations

import math

import torch

from mla_portable_nvidia.fa3 import page_lists, prompt_lse
from mla_portable_nvidia.flashmla import row_parts

LN2 = math.log(2.0)


class TorchPromptLse(prompt_lse.PromptLse):
    def __call__(self, out, lse, query_start_loc):
        first, last = int(query_start_loc[0]), int(query_start_loc[-1])
        out[first:last] = lse.T[first:last].masked_fill(lse.T[first:last] == math.inf, -math.inf)


class TorchPageLists(page_lists.PageLists):
    def __call__(self, pages, counts, indices, lengths, num_rows):
        absent = (indices < 0) | (indices.long() >= num_rows)
        if lengths is not None:
            absent |= torch.arange(indices.shape[1], device=indices.device) >= lengths.unsqueeze(1)
        pages.copy_(indices.gather(1, absent.to(torch.uint8).argsort(dim=1, stable=True)))
        counts.copy_((~absent).sum(dim=1))


class TorchRowParts(row_parts.RowParts):
    def spread(self, queries, limits, q, lengths, part):
        num_tokens, _, num_heads, _ = q.shape
        by_token = queries.unflatten(0, (num_tokens, -1))
        by_token[:, :, :num_heads] = q
        by_token[:, :, num_heads:] = 0
        if limits is not None and lengths is not None:
            starts = part * torch.arange(by_token.shape[1], device=limits.device)
            limits.copy_((lengths - starts).clamp(0, part).flatten())

    def merge(self, out, lse_out, parts, lses, attn_sink, base_2):
        num_tokens, _, num_heads, _ = out.shape
        lses, parts = (each[:, :num_heads].unflatten(0, (num_tokens, -1)) for each in (lses, parts))
        natural = (lses * LN2 if base_2 else lses).masked_fill(lses.isinf(), -math.inf)
        lse = natural.logsumexp(dim=1)  # [T, H]
        weights = torch.exp(natural - lse.unsqueeze(1)).masked_fill(lses.isinf(), 0.0).unsqueeze(-1)
        merged = (weights * parts.float().masked_fill(weights == 0, 0.0)).sum(dim=1)
        if attn_sink is not None:
            merged *= torch.sigmoid(lse - attn_sink).masked_fill(lse.isinf(), 0.0).unsqueeze(-1)
        out.copy_(merged.unsqueeze(1))
        if lse_out is not None:
            lse_out.copy_(lse.unsqueeze(1))
