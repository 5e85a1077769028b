# SPDX-License-Identifier: Apache-2.0
"""Probe problems of sparse_decode and sparse_prefill: rows with every kind of absent entry, lengths, sinks of every size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from mla_portable.contracts import Request, Support
from mla_portable.layouts import BF16
from mla_portable.primitives import SPARSE_DECODE
from mla_portable.registry.tiny_parts import (
    Call,
    cache_rows,
    call_layout,
    generator_of,
    int32,
    normal,
    num_blocks_of,
    poison_of,
    with_slack,
)

__all__ = ["SOFTMAX_SCALE", "attention_call", "attention_requests"]

SOFTMAX_SCALE: Final = 192**-0.5
"""DeepSeek-V3's: one over the square root of its 128 + 64 query dimensions."""
INFINITE: Final = "infinite sinks"
_CPU: Final = torch.device("cpu")


def attention_requests(request: Request, support: Support) -> Iterator[tuple[str, Request]]:
    """What to try: a plain call, every feature at once, sinks without bounds, and the call that `SparseMLAAttention` binds."""
    plain = request.but(lse=support.lse)
    yield "holes", plain
    features = {"lengths": support.lengths, "sink": support.attn_sink}
    if any(features.values()):
        asked = plain.but(lengths=support.lengths, attn_sink=support.attn_sink)
        yield " and ".join(word for word, on in features.items() if on), asked
        if support.attn_sink:
            yield INFINITE, asked
    yield "promises", request.but(lengths=support.lengths, clean_indices=True, clean_lengths=support.lengths)


def attention_call(request: Request, name: str, device: torch.device, *, rows: int) -> Call:
    """sparse_decode on a paged cache; sparse_prefill on a bf16 workspace or the paged FP8 cache. `rows`: query rows."""
    heads, topk, query_len = request.num_heads or 1, request.topk or 1, request.query_len or 1
    decode, layout = request.primitive is SPARSE_DECODE, call_layout(request, BF16)
    paged = decode or layout.is_quantized
    block_size = request.block_size or 16
    num_slots = num_blocks_of(block_size) * block_size
    lead = (rows // query_len, query_len) if decode else (rows,)
    generator = generator_of(request, name)
    cache, used = cache_rows(generator, layout, num_slots, request.scale_format or "amax")
    kv, _ = with_slack(cache.view(-1, block_size, layout.row_width) if paged else cache, device, poison_of(layout))
    indices, lengths = _indices(generator, request, used, num_slots, _row_kinds(rows, topk))
    kwargs: dict[str, Any] = {"softmax_scale": SOFTMAX_SCALE}
    if lengths is not None:
        kwargs["lengths"] = lengths.view(lead).to(device)
    if request.attn_sink:
        kwargs["attn_sink"] = _sink(name, heads).to(device)
    kwargs["out"] = torch.full((*lead, heads, layout.value_width), float("nan"), dtype=torch.bfloat16, device=device)
    kwargs["lse_out"] = torch.full((*lead, heads), float("nan"), dtype=torch.float32, device=device)
    q = normal(generator, *lead, heads, layout.key_width).to(device)
    args = {"q": q, "kv_cache" if decode else "kv": kv, "indices": indices.view(*lead, topk).to(device)}
    outputs = frozenset({"out", "lse_out"})
    return Call(args, kwargs, written=outputs, optional=outputs)


def _row_kinds(rows: int, topk: int) -> list[str]:
    """What each row is about. A row of a few entries has no room for holes."""
    kinds = ["full", "holes", "empty", "single"] if rows % 4 == 0 else ["holes", "empty", "single"]
    kinds = kinds if topk >= 8 else ["full", "empty"]
    return [kinds[row % len(kinds)] for row in range(rows)]


def _indices(
    generator: torch.Generator, request: Request, used: Tensor, num_slots: int, kinds: list[str]
) -> tuple[Tensor, Tensor | None]:
    """[rows, K] int32 slots and, where the request has lengths, [rows] int32 of them.

    Absent entries are of every kind, and past a length stand slots whose rows are NaN, unless the request promises better:
    with `clean_indices` absent is -1, and lengths are the counts of compacted rows.
    """
    k = request.topk or 1
    indices = used[torch.randint(len(used), (len(kinds), k), generator=generator, device=_CPU)].to(torch.int32)
    lengths = int32([k] * len(kinds))
    for row, kind in enumerate(kinds):
        if kind == "full":
            lengths[row] = -(-k // 2)
        elif kind == "holes":
            indices[row, 0], indices[row, k // 2], indices[row, -1], indices[row, k // 3] = -1, num_slots, -2, num_slots + 1
            lengths[row] = k - k // 4
        elif kind == "empty":
            indices[row] = -1
            indices[row, k // 2] = num_slots
        else:
            indices[row, :-1] = -1
    if request.clean_indices:
        indices = indices.masked_fill((indices < 0) | (indices >= num_slots), -1)
        order = (indices < 0).to(torch.uint8).argsort(dim=1, stable=True)
        indices, lengths = (indices.gather(1, order) if request.lengths else indices), (indices >= 0).sum(1, dtype=torch.int32)
    elif request.lengths:
        unused = torch.ones(num_slots, dtype=torch.bool, device=_CPU).index_fill_(0, used, False).nonzero()[0, 0]
        past = torch.arange(k, device=_CPU) >= lengths[:, None]
        indices = indices.masked_fill(past, int(unused))
    return indices, lengths if request.lengths else None


def _sink(name: str, heads: int) -> Tensor:
    """[H] float32: moderate ones, with infinite ones among four heads or more; or infinite ones alone."""
    infinite = torch.tensor([float("inf"), float("-inf")], dtype=torch.float32, device=_CPU)
    if name == INFINITE:
        return infinite.repeat(-(-heads // 2))[:heads]
    sink = torch.linspace(-1.0, 2.0, heads, dtype=torch.float32, device=_CPU)
    if heads >= 4:
        sink[[1, -2]] = infinite
    return sink
