# SPDX-License-Identifier: Apache-2.0
"""The attention problems that are timed: decode rows with contexts of their own, prefill rows that share what a case says."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mla_portable.judge.problems.attention import SOFTMAX_SCALE, attend, findings
from mla_portable.judge.problems.bench import BenchProblem, KernelCase, Workshop, spread
from mla_portable.judge.problems.compare import Finding
from mla_portable.judge.problems.draw import taken_rows
from mla_portable.judge.problems.stage import Results
from mla_portable.layouts import BF16, LAYOUTS
from mla_portable.primitives import SPARSE_DECODE


def make_attention(workshop: Workshop, case: KernelCase) -> BenchProblem:
    """A case of sparse_decode or sparse_prefill."""
    decode, layout = case.primitive is SPARSE_DECODE, LAYOUTS[case.kv_layout or BF16.name]
    rows, heads, topk = _tokens(case), case.num_heads or 1, case.topk or 1
    batch = (case.rows, case.query_len) if decode else (rows,)
    kv = workshop.cache(case, case.width)
    flat = kv.flatten(0, 1)
    indices = (_decode_indices if decode else _prefill_indices)(workshop, case)  # [rows, K] int32
    q = workshop.normal(rows, heads, layout.key_width)
    out = workshop.empty(rows, heads, layout.value_width, dtype=torch.bfloat16)
    lse = workshop.empty(rows, heads, dtype=torch.float32)
    paged = decode or layout.is_quantized
    arguments: dict[str, Any] = {
        "q": q.unflatten(0, batch),
        "kv_cache" if decode else "kv": kv if paged else flat,
        "indices": indices.unflatten(0, batch),
        "softmax_scale": SOFTMAX_SCALE,
        "out": out.unflatten(0, batch),
        "lse_out": lse.unflatten(0, batch),
    }
    request = workshop.request(
        case, block_size=workshop.block_size if paged else None, query_len=case.query_len if decode else None, lse=True
    )  # fmt: skip
    judged = spread(rows, workshop.check_rows, workshop.device)

    @cache
    def wanted() -> tuple[Tensor, Tensor]:
        """out [n, H, 512] and lse [n, H], float64."""
        slots = indices[judged].long().flatten()
        named = (taken_rows(layout, kv, slots.clamp(min=0)) if paged else flat[slots.clamp(min=0)]).cpu()  # [n * K, row]
        own = torch.arange(named.shape[0]).masked_fill(slots.cpu() < 0, -1).view(-1, topk)
        return attend(q[judged], named, own, softmax_scale=SOFTMAX_SCALE, kv_layout=layout.name)

    def judge(results: Results) -> Iterator[Finding]:
        got = {name: value.reshape(rows, heads, *value.shape[decode + 2 :])[judged] for name, value in results.items()}
        yield from findings(case.storage, got, dict[str, Tensor](zip(("out", "lse"), wanted(), strict=True)), rows=judged.cpu())

    named_tokens = int(indices[indices >= 0].unique().numel())
    moved = named_tokens * layout.row_bytes + q.nbytes + out.nbytes + lse.nbytes + indices.nbytes
    flops = 2 * heads * int((indices >= 0).sum()) * (layout.key_width + layout.value_width)
    return BenchProblem(case, request, arguments, 3, {"out": out, "lse": lse}, moved, flops, judge)


def _tokens(case: KernelCase) -> int:
    """Query tokens."""
    return case.rows * case.query_len


def _decode_indices(workshop: Workshop, case: KernelCase) -> Tensor:
    """[B x S, K] int32, distinct in a row: each from a context of its own where the cache has room, else from all of it."""
    topk, tokens = case.topk or 1, _tokens(case)
    context = case.width // tokens
    own = context >= topk
    lists = workshop.of_requests(case, context if own else case.width)
    if lists is not None:
        return lists + (context * torch.arange(tokens, device=workshop.device, dtype=torch.int32).unsqueeze(1) if own else 0)
    chosen = workshop.scores(tokens, context if own else case.width).topk(topk, dim=1).indices
    if own:
        chosen += context * torch.arange(tokens, device=workshop.device).unsqueeze(1)
    return chosen.to(torch.int32)


def _prefill_indices(workshop: Workshop, case: KernelCase) -> Tensor:
    """[T, K] int32: windows of one permutation of the rows, each moved on by what is not shared, in random order."""
    topk, device = case.topk or 1, workshop.device
    lists = workshop.neighbours(case, torch.arange(case.width - case.rows + 1, case.width + 1))
    if lists is not None:
        return lists[0]
    step = topk * (100 - case.overlap) // 100
    starts = step * torch.arange(case.rows, device=device).unsqueeze(1)
    window = workshop.permutation(case.width)[(starts + torch.arange(topk, device=device)) % case.width]
    order = workshop.scores(case.rows, topk).argsort(dim=1)
    return window.gather(1, order).to(torch.int32)
