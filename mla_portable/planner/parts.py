# SPDX-License-Identifier: Apache-2.0
"""How a batch is split: leading decodes, prefills, and prefill chunks that fit the workspace. Host arrays only."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_sum, _sums = np.add.reduce, np.add.accumulate
"""`ndarray.sum` and `ndarray.cumsum` without their detours."""


class BatchSplit(NamedTuple):
    """Which requests of a batch decode, and which prefill.

    Attributes:
        query_len: S, the decodes' common query length; 0 where nothing decodes.
        first_prefill, end_prefill: the requests that prefill, equal where none does.
    """

    query_len: int
    first_prefill: int
    end_prefill: int


def split_decodes_and_prefills(query_lens: npt.NDArray[np.int32], threshold: int, few_tokens: int = 0) -> BatchSplit:
    """Split requests into leading decodes and later prefills, by [R] query lengths, R >= 1.

    The first request that is not empty sets S. If S is at most `threshold`, all requests up to the first that has another
    length are decodes; if it is more, they are where they have at most `few_tokens` tokens together. The prefills run from
    there (from the first request that is not empty, if nothing decodes) to the last request that is not empty. Empty requests
    have no token: they do not end a run of decodes.
    """
    query_len = int(query_lens[0])
    if 0 < query_len <= threshold and query_lens[-1] not in (0, query_len):
        run = int((query_lens != query_len).argmax())
        if query_lens[run]:  # as batches mostly are: nothing empty where the decodes end
            return BatchSplit(query_len, run, len(query_lens))
    present = query_lens != 0
    first = 0 if present[0] else int(present.argmax())
    query_len = int(query_lens[first])
    if query_len == 0:
        return BatchSplit(0, 0, 0)
    end = len(query_lens) if present[-1] else len(query_lens) - int(present[::-1].argmax())
    if query_len > max(threshold, few_tokens):
        return BatchSplit(0, first, end)
    other = present & (query_lens != query_len)
    run = int(other.argmax())
    if not other[run]:
        run = end
    if query_len > threshold and int(query_lens[:run].sum()) > few_tokens:
        return BatchSplit(0, first, end)
    return BatchSplit(query_len, run, end)


def fill_chunks(
    lens: npt.NDArray[np.int32], workspace_tokens: int, *, out: npt.NDArray[np.int32]
) -> tuple[list[int], list[int]]:
    """Lay sequences out in a workspace, in order; a sequence that no longer fits opens the next chunk.

    One that is longer than the workspace is a chunk of its own.

    Args:
        lens: [P] sequence lengths, P >= 1.
        out: [P], written: the first workspace row of each sequence, counted within its chunk.
    Returns: (bounds, rows): chunk c holds sequences bounds[c] to bounds[c + 1] and fills rows[c] rows. One row where all are
        empty, as shares of short sequences are: kernels are not called on none.
    """
    num_seqs, total = len(lens), int(_sum(lens))
    if total <= workspace_tokens:
        out[0] = 0
        _sums(lens[:-1], out=out[1:])
        return [0, num_seqs], [max(total, 1)]
    ends = lens.cumsum(dtype=np.int64)
    starts, known = ends - lens, ends.tolist()
    bounds, rows = [0], list[int]()
    base = end = 0
    while end < num_seqs:
        begin, end = end, max(bisect_right(known, base + workspace_tokens), end + 1)
        out[begin:end] = starts[begin:end] - base if base else starts[begin:end]
        bounds.append(end)
        rows.append(known[end - 1] - base)
        base = known[end - 1]
    return bounds, rows
