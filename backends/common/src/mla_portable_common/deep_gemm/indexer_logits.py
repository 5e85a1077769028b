# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM behind indexer_logits and indexer_logits_ragged: this adapter adds what DeepGEMM requires and does not guarantee.

It allocates its result, so a call takes some tokens at a time, and one pass brings their scores to `out`.

paged    which request a token belongs to is known on the device alone, so each token is a row of the kernel with a table of its
         own (next_n 1). Tokens of a batch of one request go two a row, which reads each key once for both. DeepGEMM's schedule
         is made in the call, unless the step's planner made it (`schedules`).
ragged   ranges are clamped first: one that ends before it starts would wrap around.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from mla_portable.contracts import DEFAULT_SCRATCH_BYTES, InvalidArgument
from mla_portable_common.deep_gemm.conventions import Scores
from mla_portable_common.deep_gemm.pages import PAGE, IndexPasses, Pages, Rows, tokens_of_row
from mla_portable_common.deep_gemm.schedules import IndexSchedule

_ALIGNED: Final = 256
"""DeepGEMM pads rows of scores to a multiple of this."""
_MOST_ROWS: Final = 512
"""Of one paged call: DeepGEMM compiles its planner again for every 32 rows, so 16 times at most."""
_QUERY_ROWS: Final = 128
"""Tokens times heads that one multiprocessor scores at a time."""


def packed(tensor: Tensor) -> Tensor:
    """`tensor` without gaps, from a multiple of 16 bytes on, as DeepGEMM's descriptors want it. A copy only where it is not."""
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class PagedScores:
    """Scores of some tokens at a time, in memory that DeepGEMM allocates. Graph-safe once a call of the size was made."""

    def __init__(self, kernel: Scores, passes: IndexPasses) -> None:
        self._kernel, self._passes = kernel, passes

    def calls(self, num_tokens: int, pages: Pages, scratch_bytes: int, beside: int = 0) -> Iterator[tuple[int, int]]:
        """(first token, how many) of each call, about as many in each: as few calls as `scratch_bytes` allow.

        beside: bytes for each token.
        """
        columns = -(-pages.width // PAGE)
        each = 4 * (-(-pages.width // _ALIGNED) * _ALIGNED + columns + 4)  # scores, a table, what `Rows` has else
        tokens_a_row = 2 if pages.seq_lens.shape[0] == 1 else 1
        most = min(max(scratch_bytes // (each + beside), 1), _MOST_ROWS * tokens_a_row)
        alike = -(-num_tokens // -(-num_tokens // most))
        most = min(alike + alike % tokens_a_row, most)
        first = 0
        while first < num_tokens:
            count = min(most, num_tokens - first)
            if tokens_a_row == 2 and count > 1:
                count -= count % 2
            yield first, count
            first += count

    def __call__(
        self,
        q: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        pages: Pages,
        first: int,
        count: int,
        planned: IndexSchedule | None = None,
    ) -> tuple[Tensor, Rows]:
        """Scores [count, width] of the tokens from `first` on, anything where a token sees nothing; and what it sees.

        Args:
            q: [T, H, 128] e4m3 and weights [T, H] float32, packed. index_cache: [blocks, 64, 132] uint8.
            first, count: as `calls` says. planned: for all tokens; None, or of other lengths: a schedule is made here.
        """
        blocks, _, width = index_cache.shape
        if blocks == 1:  # its stride means nothing, and DeepGEMM looks at it
            cache = index_cache.as_strided((1, PAGE, 1, width), (PAGE * width, width, width, 1))
        else:
            cache = index_cache.unsqueeze(2)
        tokens_a_row = tokens_of_row(pages.seq_lens.shape[0], count)
        rows = Rows.empty(count, tokens_a_row, -(-pages.width // PAGE), q.device)
        self._passes.describe(rows, pages, first)
        some = slice(first, first + count)
        queries = q[some].view(-1, tokens_a_row, *q.shape[1:])
        schedule = None
        if planned is not None and count == q.shape[0]:
            schedule = planned.metadata_for(pages.width, pages.block_table.shape[1] * PAGE, self._kernel.num_sms())
        if schedule is None:
            schedule = self._kernel.schedule(rows.lens)
        logits = self._kernel.paged(queries, cache, weights[some], rows.lens, rows.table, schedule, pages.width)
        return logits, rows


class PagedLogits:
    """The callable; see `mla_portable.primitives.IndexerLogits`."""

    def __init__(self, kernel: Scores, passes: IndexPasses, *, scratch_bytes: int = DEFAULT_SCRATCH_BYTES) -> None:
        self._scores, self._passes, self._scratch_bytes = PagedScores(kernel, passes), passes, scratch_bytes

    def __call__(
        self,
        q: Tensor,
        weights: Tensor,
        index_cache: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        *,
        schedule: IndexSchedule | None = None,
        out: Tensor,
    ) -> Tensor:
        num_tokens, num_logits = out.shape
        width = min(num_logits, block_table.shape[1] * PAGE)
        if num_tokens == 0 or num_logits == 0:
            return out
        if width == 0 or index_cache.shape[0] == 0 or seq_lens.shape[0] == 0:
            return out.fill_(-math.inf)
        pages = Pages(query_start_loc, seq_lens, block_table, index_cache.shape[0], width)
        q, weights = packed(q), packed(weights)
        for first, count in self._scores.calls(num_tokens, pages, self._scratch_bytes):
            self._finish(
                out[first : first + count], pages, *self._scores(q, weights, index_cache, pages, first, count, schedule)
            )
        return out

    def _finish(self, out: Tensor, pages: Pages, logits: Tensor, rows: Rows) -> None:
        """A function of its own: what it was given is free again when it returns."""
        self._passes.finish(out, logits, rows, pages)


class RaggedLogits:
    """The callable; see `mla_portable.primitives.IndexerLogitsRagged`. Graph-safe once a call of the size was made."""

    def __init__(
        self, kernel: Scores, passes: IndexPasses, num_sms: int, *, scratch_bytes: int = DEFAULT_SCRATCH_BYTES
    ) -> None:
        self._kernel, self._passes, self._num_sms, self._scratch_bytes = kernel, passes, num_sms, scratch_bytes

    def __call__(
        self,
        q: Tensor,
        weights: Tensor,
        keys: Tensor,
        key_scales: Tensor | None,
        row_starts: Tensor,
        row_ends: Tensor,
        *,
        out: Tensor,
    ) -> Tensor:
        num_tokens, num_keys = out.shape
        if key_scales is None:
            expected = "[N] float32: the keys are e4m3"
            raise InvalidArgument("indexer_logits_ragged", "key_scales", got="None", expected=expected)
        if num_tokens == 0 or num_keys == 0:
            return out
        q, weights, keys, key_scales = packed(q), packed(weights), packed(keys), packed(key_scales)
        starts = row_starts.clamp(0, num_keys)
        ends = torch.maximum(row_ends.clamp(max=num_keys), starts)
        # a multiprocessor takes so many tokens at a time: a call has work for all of them, again and again
        wave = max(self._num_sms, 1) * max(_QUERY_ROWS // q.shape[1], 1)
        tokens = max(self._scratch_bytes // (4 * (num_keys + 2 * _ALIGNED)) // wave, 1) * wave
        for first in range(0, num_tokens, tokens):
            some = slice(first, first + tokens)
            self._passes.window(
                out[some],
                self._kernel.ragged(q[some], keys, key_scales, weights[some], starts[some], ends[some]),
                row_starts[some],
                row_ends[some],
                self._kernel.relative,
            )
        return out
