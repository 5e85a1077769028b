# SPDX-License-Identifier: Apache-2.0
"""indexer_logits and indexer_logits_ragged through AITER's `deepgemm_fp8_paged_mqa_logits` and `fp8_mqa_logits`.

What the source of the operations at e4048607 says, and what follows:

- The paged one takes requests that have the same number of tokens. Where that is not promised, each token is passed as a
  request of its own, with a copy of its request's row of the block table. Without `Preshuffle` pages hold one key;
  with it, tiles.
- It reaches 2 GiB of pages: those that are named are copied where there are more. It writes the positions that a token sees
  alone, and reads every entry of the block table up to there.
- max(NaN, 0) is 0, so a key or a query of NaN has a finite score: `nan_keys=False`. Scales of NaN are looked for.
- e4m3 is OCP's on gfx950 and fnuz on gfx942, where the ragged one converts OCP's keys and queries, exactly. The paged one
  reads pages as they are: there queries are converted here, and pages are of `amd.index_fnuz`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from mla_portable.contracts import Request
from mla_portable.kit.parameters import parameter_names
from mla_portable.layouts import CacheLayout
from mla_portable_amd.layouts import pages_of
from mla_portable_amd.library import Op

HEADS: Final = (32, 64)
"""Those of AITER's own tests. The paged kernel deals q out to threads by 32 heads."""
_PART: Final = 1 << 24
"""Scores, or entries of a block table, that are held at a time: 64 MiB."""
_REACH: Final = 2**31 - 1
"""Bytes of pages that the paged operation addresses."""


def _parts(count: int, width: int) -> Iterator[slice]:
    """Tokens whose rows of `width` numbers are held at a time."""
    step = max(1, _PART // max(width, 1))
    return (slice(first, min(first + step, count)) for first in range(0, count, step))


class Pages:
    """The pages of an index cache as the operation takes them.

    numbers: of 4 bytes that `named` holds for each position, at least 1.
    """

    __slots__ = ("_cache", "_far", "_scales", "numbers")

    def __init__(self, cache: Tensor, layout: CacheLayout) -> None:
        """cache: [blocks, block_size, 132] uint8 of `layout`."""
        self._cache, self._far = cache, cache.shape[0] * cache.stride(0) > _REACH
        self._scales = layout.parts(cache)[-1].view(torch.float32).squeeze(2)  # [blocks, block_size]
        self.numbers = cache.shape[2] // 4 if self._far else 1

    def named(self, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a block table [n, columns] int32 of blocks that are there names.

        Returns: pages [.., block_size, 1, 132], the cache or copies of those that are named; the table of them, contiguous; and
            [n, columns, block_size], which keys have a scale that is a number.
        """
        scored = ~self._scales[table].isnan()
        if not self._far:
            return self._cache.unsqueeze(2), table, scored
        copies = self._cache[table].flatten(0, 1).unsqueeze(2)
        return copies, torch.arange(table.numel(), dtype=torch.int32, device=table.device).view_as(table), scored


def bind_indexer_logits(op: Op, request: Request[Any]) -> Callable[..., Tensor]:
    """indexer_logits over pages of one key, or of tiles."""
    uniform, (layout, code, tiles) = request.uniform_query_len, pages_of(request.kv_layout)
    halved = code != torch.float8_e4m3fn  # fnuz ends at 240 where OCP's e4m3 ends at 448; halves are exact

    def indexer_logits(
        q: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        out: Tensor,
    ) -> Tensor:
        num_blocks, block_size, _ = index_cache.shape
        num_reqs, columns = block_table.shape
        capacity = columns * block_size
        out[:, capacity:] = -math.inf
        if 0 in (q.shape[0], num_reqs, num_blocks, capacity, out.shape[1]):
            return out.fill_(-math.inf)
        pages = Pages(index_cache, layout)
        if halved:
            q, weights = (q.float() * 0.5).to(code), weights * 2
        lengths = seq_lens.clamp(0, capacity)
        given = whole_requests(q.shape[0], lengths) if uniform else single_tokens(q.shape[0], query_start_loc, lengths)
        each, width = given.sees.shape[1], min(capacity, out.shape[1])  # tokens of a request as the operation takes it
        position = torch.arange(width, device=q.device)
        for part in _parts(given.sees.shape[0], each * capacity * pages.numbers):
            tokens = slice(part.start * each, part.stop * each)
            table = block_table[given.owner[part]]  # [B, columns]
            present = (table >= 0) & (table < num_blocks)
            cache, table, scored = pages.named(torch.where(present, table, 0))
            rows = out[tokens]
            scores = rows if rows.shape[1] >= capacity else rows.new_empty((rows.shape[0], capacity))
            op(
                q[tokens].unflatten(0, (-1, each)), cache, weights[tokens].contiguous(), scores, given.lengths[part],
                table, scores.shape[1], Preshuffle=tiles, KVBlockSize=block_size,
            )  # fmt: skip
            held = (present.unsqueeze(2) & scored).flatten(1)[:, :width]  # [B, width]
            seen = (position < given.sees[part].unsqueeze(2)) & held.unsqueeze(1)
            rows[:, :width] = scores[:, :width].masked_fill(~seen.flatten(0, 1) | scores[:, :width].isnan(), -math.inf)
        return out

    return indexer_logits


class Batch(NamedTuple):
    """What the operation takes for B requests of n tokens each, the tokens of the call in order.

    Attributes:
        lengths: [B] int32. owner: [B], the row of the block table of each. sees: [B, n], positions that each token sees.
    """

    lengths: Tensor
    owner: Tensor
    sees: Tensor


def whole_requests(num_tokens: int, lengths: Tensor) -> Batch:
    """Requests of the same number of tokens as they are. lengths: [R] int32."""
    each = num_tokens // lengths.shape[0]
    behind = torch.arange(each - 1, -1, -1, device=lengths.device)
    owner = torch.arange(lengths.shape[0], device=lengths.device)
    return Batch(lengths, owner, (lengths.unsqueeze(1) - behind).clamp(min=0))


def single_tokens(num_tokens: int, query_start_loc: Tensor, lengths: Tensor) -> Batch:
    """Each token as a request that is as long as the token sees; one that belongs to none sees nothing."""
    begins, ends = query_start_loc[:-1].contiguous(), query_start_loc[1:].contiguous()
    token = torch.arange(num_tokens, device=lengths.device)
    owner = torch.searchsorted(ends, token, right=True).clamp(max=lengths.shape[0] - 1)
    owned = (begins[owner] <= token) & (token < ends[owner])
    sees = torch.where(owned, lengths[owner] - (ends[owner] - token) + 1, 0).clamp(min=0)
    return Batch(sees.to(torch.int32), owner, sees.unsqueeze(1))


def bind_indexer_logits_ragged(op: Op, request: Request[Any]) -> Callable[..., Tensor]:
    """indexer_logits_ragged over gathered e4m3 keys with their scales."""
    names = parameter_names(op) or ()
    uncleaned = {"clean_logits": False} if "clean_logits" in names else {}

    def indexer_logits_ragged(
        q: Tensor,
        weights: Tensor,
        keys: Tensor,
        key_scales: Tensor | None,
        row_starts: Tensor,
        row_ends: Tensor,
        *,
        out: Tensor,
    ) -> Tensor:
        num_keys = keys.shape[0]
        if 0 in (q.shape[0], num_keys):
            return out
        starts, ends = row_starts.clamp(0, num_keys), row_ends.clamp(0, num_keys)
        column = torch.arange(num_keys, device=q.device)
        scored = True if key_scales is None else ~key_scales.isnan()
        for part in _parts(q.shape[0], num_keys):
            first, last = starts[part], ends[part]
            scores = op(q[part], keys, key_scales, weights[part], first, last, **uncleaned)
            seen = (column >= first.unsqueeze(1)) & (column < last.unsqueeze(1)) & scored
            out[part] = torch.where(seen & ~scores.isnan(), scores, -math.inf)
        return out

    return indexer_logits_ragged
