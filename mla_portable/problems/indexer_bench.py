# SPDX-License-Identifier: Apache-2.0
"""The indexer's selection as it is timed: decode rows with contexts of their own, or one request's chunk of prefill."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final

import torch
from torch import Tensor

from mla_portable.layouts import INDEX_FP8, INDEX_HEAD_SIZE, LAYOUTS, index_query_dtype
from mla_portable.problems.bench import BLOCK_SIZE, BenchProblem, KernelCase, Workshop, spread
from mla_portable.problems.compare import Finding
from mla_portable.problems.indexer_pages import format_of, scored
from mla_portable.problems.stage import Results

PREFILL_ROWS: Final = 256
"""From here on the rows of a case are tokens of one request, else requests of one token."""


def shape_of_case(case: KernelCase) -> str:
    """The sizes in words."""
    kind = "T" if case.rows >= PREFILL_ROWS else "batch"
    return f"{kind} {case.rows}, context {case.width}, H {case.num_heads}, K {case.topk}"


def make_select(workshop: Workshop, case: KernelCase) -> BenchProblem:
    """A case of indexer_select."""
    from mla_portable.problems.indexer_select import findings

    layout, device = LAYOUTS[case.kv_layout or INDEX_FP8.name], workshop.device
    tokens, heads, topk, context = case.rows, case.num_heads or 1, case.topk or 1, case.width
    requests = 1 if tokens >= PREFILL_ROWS else tokens
    columns = -(-context // BLOCK_SIZE)
    index_cache = workshop.index_pages(case, requests * columns)
    int32 = torch.int32
    single = torch.tensor([0, tokens], device=device, dtype=int32)
    q, weights = workshop.normal(tokens, heads, INDEX_HEAD_SIZE).to(index_query_dtype(layout)), workshop.normal(tokens, heads)
    table = workshop.permutation(requests * columns).view(requests, columns).to(int32)
    out = workshop.empty(tokens, topk, dtype=int32)
    arguments = {
        "q": q,
        "weights": weights.float(),
        "index_cache": index_cache,
        "query_start_loc": single if requests == 1 else torch.arange(tokens + 1, device=device, dtype=int32),
        "seq_lens": torch.full((requests,), context, device=device, dtype=int32),
        "block_table": table,
        "topk": topk,
        "out": out,
    }
    judged = spread(tokens, workshop.check_rows, device)

    @cache
    def wanted() -> tuple[Tensor, Tensor]:
        """[n, N] float64: each judged token as a request of its own; what the sums add."""
        count = judged.shape[0]
        owner = judged if requests > 1 else torch.zeros_like(judged)
        own = torch.full_like(judged, context) if requests > 1 else context - (tokens - 1 - judged)
        starts = torch.arange(count + 1, dtype=int32)
        return scored(q[judged], weights[judged].float(), index_cache, starts, own, table[owner], columns * BLOCK_SIZE)

    def judge(results: Results) -> Iterator[Finding]:
        expected = dict[str, Tensor](zip(("out", "terms"), wanted(), strict=True))
        yield from findings(format_of(q), {"out": results["out"][judged]}, expected)

    seen = tokens * context - (tokens * (tokens - 1) // 2 if requests == 1 else 0)
    flops = 2 * heads * INDEX_HEAD_SIZE * seen
    moved = requests * context * layout.row_bytes + q.nbytes + out.nbytes
    request = workshop.request(case, block_size=BLOCK_SIZE)
    # matrix units multiply e4m3 twice as fast as the bfloat16 that the roofline bound is measured with
    flops = flops // 2 if layout.is_quantized else flops
    return BenchProblem(case, request, arguments, 6, {"out": out}, moved, flops, judge)
