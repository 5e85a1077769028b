# SPDX-License-Identifier: Apache-2.0
"""The passes around vendors' kernels in torch: on a CPU Triton's interpreter is slow, and cuts bf16 off instead of rounding.

The kernels themselves have tests of their own.
"""

from __future__ import annotations

import math

import torch

from mla_portable_common.deep_gemm import index_pass_kernels
from mla_portable_common.deep_gemm.pages import PAGE
from mla_portable_nvidia.fa3 import page_lists, prompt_lse
from mla_portable_nvidia.flashmla import row_parts
from mla_portable_nvidia.passes import boundary

LN2 = math.log(2.0)


class TorchBoundary(boundary.Boundary):
    def sanitise(self, out, indices, lengths, num_slots):
        topk = indices.shape[-1]
        absent = (indices < 0) | (indices.long() >= num_slots)
        if lengths is not None:
            absent |= torch.arange(topk, device=indices.device) >= lengths.unsqueeze(-1)
        out[..., topk:] = -1
        out[..., :topk] = indices.masked_fill(absent, -1)

    def finish(self, out, lse_out, result, lse, attn_sink, base_2, *, early):
        num_heads = out.shape[2]
        lse = lse[:, :num_heads].transpose(1, 2)
        empty = lse.isinf()
        natural = (lse * LN2 if base_2 else lse).masked_fill(empty, -math.inf)
        value = out if result is None else result[:, :, :num_heads]
        if attn_sink is not None:
            value = value * torch.sigmoid(natural - attn_sink).unsqueeze(-1)
        out.copy_(value.masked_fill(empty.unsqueeze(-1), 0.0))
        lse_out.copy_(natural)


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


class TorchIndexPasses(index_pass_kernels.TritonIndexPasses):
    def describe(self, rows, pages, first):
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

    def finish(self, out, logits, rows, pages):
        out.fill_(-math.inf)
        out[:, : pages.width].copy_(logits.masked_fill(logits.isnan(), -math.inf))
        self.erase(out[:, : pages.width], rows, pages)

    def erase(self, logits, rows, pages):
        position = torch.arange(pages.width, dtype=torch.int64, device=rows.ends.device)
        block = pages.block_table[rows.owners.long()][:, position // PAGE]
        logits.masked_fill_((position >= rows.ends.unsqueeze(1)) | (block < 0) | (block >= pages.num_blocks), -math.inf)

    def window(self, out, logits, row_starts, row_ends, relative):
        column = torch.arange(out.shape[1], dtype=torch.int64, device=out.device)
        starts = row_starts.long().clamp(min=0).unsqueeze(1)  # [n, 1]
        inside = (column >= starts) & (column < row_ends.unsqueeze(1))
        if relative:
            logits = logits.gather(1, torch.where(inside, column - starts, 0))
        out.copy_(logits.masked_fill(~inside | logits.isnan(), -math.inf))
