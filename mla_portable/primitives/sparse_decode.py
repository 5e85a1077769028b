# SPDX-License-Identifier: Apache-2.0
"""sparse_decode: attention of B x S query tokens over chosen slots of the paged cache."""

from __future__ import annotations

from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import DecodeSchedule, PlanMismatch, Primitive
from mla_portable.contracts.values import check_scale, describe, refuse, rounded_rows
from mla_portable.dispatch import find, opaque
from mla_portable.kit.results import head_results
from mla_portable.kit.rules import check_cache, check_dense, check_disjoint, named_tensors
from mla_portable.kit.second_cache import check_second_cache, is_nope, second_cache
from mla_portable.kit.tensor_scales import check_kv_scale, query_dtype, tensor_scales
from mla_portable.kit.tensor_table import Axes, Checked, TensorTable
from mla_portable.layouts import KV, Cache
from mla_portable.primitives._attention import Keys, attend
from mla_portable.primitives._reference import CacheRows, isolated

__all__ = ["SPARSE_DECODE", "SparseDecode", "sparse_decode"]

TENSORS: Final = TensorTable(
    "sparse_decode",
    {
        "q": Axes("B S H key", not_empty="S H"),
        "kv_cache": Checked(),
        "indices": Axes("B S K", torch.int32, not_empty="K"),
        "lengths": Axes("B S", torch.int32, optional=True),
        "attn_sink": Axes("H", torch.float32, optional=True),
        "extra_kv_cache": Checked(optional=True),
        "extra_indices": Axes("B S E", torch.int32, optional=True, not_empty="E"),
        "extra_lengths": Axes("B S", torch.int32, optional=True),
        "out": Axes("B S H value", torch.bfloat16, optional=True, written=True),
        "lse_out": Axes("B S H", torch.float32, optional=True, written=True),
    },
    given="key value",
)


class SparseDecode(Protocol):
    """Attention of B x S query tokens over chosen slots of the paged cache.

    q [B, S, H, 576] bf16; kv_cache [blocks, block_size, 576] bf16 or [.., 656] uint8; indices [B, S, K] int32 global slots;
    lengths [B, S] int32; attn_sink [H] float32; schedule made for B * S rows, H heads and this K. Returns out
    [B, S, H, 512] bf16 and lse [B, S, H] float32, which are `out` and `lse_out` where given.

    An implementation that declares `Support.extra_cache` takes three more keywords, which are passed where there is a second
    cache: extra_kv_cache of the same layout, extra_indices [B, S, E] int32, its slots, and extra_lengths [B, S] int32 or None.
    A row attends to the union of both.

    One that declares a layout with `tensor_scale` is given kv_scale as well, float32 of one element, by which the numbers of
    both caches count. One that declares `Support.q_scale` is given q_scale, likewise, with q in e4m3 where the request says so.
    """

    def __call__(
        self,
        q: Tensor,
        kv_cache: Any,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        schedule: DecodeSchedule | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


@opaque
def sparse_decode(
    q: Tensor,
    kv_cache: Cache,
    indices: Tensor,
    *,
    softmax_scale: float,
    lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_kv_cache: Cache | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    schedule: DecodeSchedule | None = None,
    out: Tensor | None = None,
    lse_out: Tensor | None = None,
    kv_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_layout: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of B x S query tokens over chosen slots of the paged cache.

    Args:
        q: [B, S, H, key width] bf16: 576, or 512 for layouts without a rotary part; 512 over quantised rows with one, too,
            which is then not read. kv_cache: [blocks, block_size, row width] of a layout: 576 or 512 bf16, 656 or 584 uint8.
            Blocks of one bf16 row may overlap: rows that begin every few elements of other memory are read in place.
        indices: [B, S, K] int32, global slots; negative or past the cache = absent; duplicates count each time.
        softmax_scale: factor on q.k. lengths: [B, S] int32, only that many leading entries of a row are read.
        attn_sink: [H] float32; out is multiplied by exp(lse) / (exp(lse) + exp(sink)).
        extra_kv_cache, extra_indices, extra_lengths: a second paged cache of the same layout, whose blocks may be of another
            size, [B, S, E] int32 slots of it, and [B, S] int32 as `lengths`. A row attends to what both lists name; either
            may be empty by its lengths.
        schedule: from a planner, for B * S rows of H heads and width K; its scratch is used instead of fresh memory.
        out: [B, S, H, 512] bf16, lse_out: [B, S, H] float32, written; they overlap no input.
        kv_scale: float32, one element, by which the numbers of the cache, and of a second one, count; for layouts with
            `tensor_scale` and no others. q_scale: likewise of queries, which are e4m3 where it is given.
        kv_layout, backend: see `mla_portable.primitives`.
    Returns: (out, lse): lse is the natural logarithm, without the sink; a row without a valid index has 0 and -inf.
    Raises: InvalidArgument, PlanMismatch (a schedule made for other shapes or another kind of kernel), UnknownBackend,
        UnsupportedRequest. Graph-safe with `out`, `lse_out` and, where the kernel takes one, `schedule`.
    """
    extra = (extra_kv_cache, extra_indices, extra_lengths)
    facts = check(
        q, kv_cache, indices, softmax_scale, lengths, attn_sink, *extra, schedule, out, lse_out, kv_scale, q_scale, kv_layout
    )
    served = find(SPARSE_DECODE, backend, q, facts)
    if schedule is not None:
        served.check_schedule(TENSORS.where, schedule)
    return served.call(
        q,
        kv_cache,
        indices,
        softmax_scale=softmax_scale,
        lengths=lengths,
        attn_sink=attn_sink,
        schedule=schedule,
        out=out,
        lse_out=lse_out,
        **second_cache(*extra),
        **tensor_scales(kv_scale, q_scale),
    )


class Facts(NamedTuple):
    """The fields of a Request that a call's arguments decide."""

    kv_layout: str
    block_size: int | None
    cache_alignment: int
    uneven_blocks: bool
    num_heads: int
    topk: int
    query_len: int
    lengths: bool
    attn_sink: bool
    lse: bool
    rows: int | None
    extra_topk: int | None
    extra_block_size: int | None
    extra_lengths: bool
    nope: bool
    q_scale: bool


def check(
    q: Tensor,
    kv_cache: Cache,
    indices: Tensor,
    softmax_scale: float,
    lengths: Tensor | None,
    attn_sink: Tensor | None,
    extra_kv_cache: Cache | None,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
    schedule: DecodeSchedule | None,
    out: Tensor | None,
    lse_out: Tensor | None,
    kv_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_layout: str | None = None,
) -> Facts:
    """Raise InvalidArgument, or return the facts.

    Raises: PlanMismatch when `schedule` was made for other shapes.
    """
    where = TENSORS.where
    check_dense(where, "q", q, "[B, S, H, key width]")
    first = check_cache(where, "kv_cache", kv_cache, q.device, kv_layout=kv_layout, may_overlap=True)
    extra_size, caches = check_second_cache(where, first, q.device, extra_kv_cache, extra_indices, extra_lengths)
    layout = first.layout
    check_kv_scale(where, layout, kv_scale, q.device)
    nope = is_nope(q, layout)
    sizes = {"key": layout.value_width if nope else layout.key_width, "value": layout.value_width}
    extra = (extra_kv_cache, extra_indices, extra_lengths)
    TENSORS.check((q, kv_cache, indices, lengths, attn_sink, *extra, out, lse_out), sizes, query_dtype(where, q, q_scale))
    check_scale(where, "softmax_scale", softmax_scale)
    extra_topk = None if extra_indices is None else sizes["E"]
    query_len, num_heads, topk = sizes["S"], sizes["H"], sizes["K"]
    if schedule is not None:
        if not isinstance(schedule, DecodeSchedule):  # pyright: ignore[reportUnnecessaryIsInstance]
            refuse(where, "schedule", describe(schedule), "a schedule from a planner, or None")
        schedule.check(where, sizes["B"], query_len, num_heads, topk, q.device)
        if schedule.extra_topk != (extra_topk or 0):
            raise PlanMismatch(
                f"{where}: the call has extra_topk {extra_topk or 0}, its schedule was made for {schedule.extra_topk}. "
                "Plan with the extra_topk of the calls."
            )
        scratch = schedule.scratch(where, layout.value_width)
        if scratch:
            read = {"q": q, "indices": indices, "lengths": lengths, "attn_sink": attn_sink}
            read |= {"extra_indices": extra_indices, "extra_lengths": extra_lengths}
            read |= named_tensors("kv_cache", kv_cache) | named_tensors("extra_kv_cache", extra_kv_cache)
            check_disjoint(where, {"out": out, "lse_out": lse_out}, read, scratch)
    return Facts(
        *caches,
        num_heads,
        topk,
        query_len,
        lengths is not None,
        attn_sink is not None,
        True,
        # a schedule was planned for the implementation that serves every number of rows
        None if schedule is not None else rounded_rows(sizes["B"] * query_len),
        extra_topk,
        extra_size,
        extra_lengths is not None,
        nope,
        q_scale is not None,
    )


@isolated
def reference(
    q: Tensor,
    kv_cache: Cache,
    indices: Tensor,
    *,
    softmax_scale: float,
    lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_kv_cache: Cache | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    schedule: DecodeSchedule | None = None,
    out: Tensor | None = None,
    lse_out: Tensor | None = None,
    kv_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_layout: str | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention of B x S query tokens over chosen slots of the paged cache.

    `schedule` is not used. `dtype` is that of the arithmetic. Allocates about `chunk_bytes` beyond the outputs, whatever B
    and S. Not graph-safe.
    """
    rows = CacheRows(kv_cache, kv_layout=kv_layout)
    out, lse_out = head_results(q, rows.layout.value_width, out, lse_out)
    lists = [Keys(rows, indices, lengths, kv_scale)]
    if extra_kv_cache is not None and extra_indices is not None:
        lists.append(Keys(CacheRows(extra_kv_cache, kv_layout=rows.layout.name), extra_indices, extra_lengths, kv_scale))
    for s in range(q.shape[1]):  # [:, s] is a view for any strides; flattening [B, S] might be a copy
        attend(
            q[:, s],
            [each.of(s) for each in lists],
            softmax_scale,
            attn_sink,
            out[:, s],
            lse_out[:, s],
            dtype,
            q_scale,
        )
    return out, lse_out


SPARSE_DECODE: Final = Primitive[SparseDecode](
    "sparse_decode",
    module=__name__,
    facts=Facts._fields,
    results=("out", "lse"),
    cache=KV,
    stated=("scale_format", "batch_invariant"),
    reference=reference,
    reference_float32=partial(reference, dtype=torch.float32),
)
