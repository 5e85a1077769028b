# SPDX-License-Identifier: Apache-2.0
"""sparse_prefill: attention of T query tokens over chosen rows of a workspace, or of the paged cache itself."""

from __future__ import annotations

from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import Primitive
from mla_portable.contracts.values import check_scale, rounded_rows
from mla_portable.dispatch import find, opaque
from mla_portable.kit.results import head_results
from mla_portable.kit.rules import CacheFacts, check_cache, check_dense, check_flat_rows, facts_of_rows, shape_of
from mla_portable.kit.second_cache import check_second_cache, is_nope, second_cache
from mla_portable.kit.tensor_scales import check_kv_scale, query_dtype, tensor_scales
from mla_portable.kit.tensor_table import Axes, Checked, TensorTable
from mla_portable.layouts import KV, Cache, layout_of
from mla_portable.primitives._attention import Keys, attend
from mla_portable.primitives._reference import CacheRows, isolated

__all__ = ["SPARSE_PREFILL", "SparsePrefill", "sparse_prefill"]

TENSORS: Final = TensorTable(
    "sparse_prefill",
    {
        "q": Axes("T H key", not_empty="H"),
        "kv": Checked(),
        "indices": Axes("T K", torch.int32, not_empty="K"),
        "lengths": Axes("T", torch.int32, optional=True),
        "attn_sink": Axes("H", torch.float32, optional=True),
        "extra_kv_cache": Checked(optional=True),
        "extra_indices": Axes("T E", torch.int32, optional=True, not_empty="E"),
        "extra_lengths": Axes("T", torch.int32, optional=True),
        "out": Axes("T H value", torch.bfloat16, optional=True, written=True),
        "lse_out": Axes("T H", torch.float32, optional=True, written=True),
    },
    given="key value",
)


class SparsePrefill(Protocol):
    """Attention of T query tokens over chosen rows of a workspace, or of the paged cache itself.

    q [T, H, 576] bf16; kv [W, 576] bf16 (a workspace or a flattened BF16 cache) or the paged FP8 cache itself
    [blocks, block_size, 656] uint8; indices [T, K] int32 rows of kv (slots of a paged cache), those past W are absent;
    lengths [T] int32; attn_sink [H] float32. Returns out [T, H, 512] bf16 and lse [T, H] float32, which are `out` and
    `lse_out` where given.

    An implementation that declares `Support.extra_cache` takes three more keywords, which are passed where there is a second
    cache: extra_kv_cache, of the layout of kv and flat or paged as that is, extra_indices [T, E] int32 and extra_lengths [T]
    int32 or None. A row attends to the union of both. kv_scale and q_scale as of SparseDecode.
    """

    def __call__(
        self,
        q: Tensor,
        kv: Any,
        indices: Tensor,
        *,
        softmax_scale: float,
        lengths: Tensor | None = None,
        attn_sink: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


@opaque
def sparse_prefill(
    q: Tensor,
    kv: Cache,
    indices: Tensor,
    *,
    softmax_scale: float,
    lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_kv_cache: Cache | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    out: Tensor | None = None,
    lse_out: Tensor | None = None,
    kv_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_layout: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of T query tokens over chosen rows of a workspace, of a flat bf16 cache, or of the paged FP8 cache.

    Args:
        q: [T, H, key width] bf16, as in `sparse_decode`. kv: flat rows [W, 576 or 512] bf16, or a paged cache
            [blocks, block_size, 656 or 584] uint8.
        indices: [T, K] int32, rows of kv or slots of the cache; negative or past the end = absent.
        softmax_scale, lengths [T] int32, attn_sink [H] float32: as in `sparse_decode`.
        extra_kv_cache, extra_indices [T, E] int32, extra_lengths [T] int32: likewise; the second one is flat or paged as kv is.
        out: [T, H, 512] bf16, lse_out: [T, H] float32, written; they overlap no input.
        kv_scale: float32, one element, by which the numbers of the cache, and of a second one, count; for layouts with
            `tensor_scale` and no others. q_scale: likewise of queries, which are e4m3 where it is given.
        kv_layout, backend: see `mla_portable.primitives`.
    Returns: (out, lse) as in `sparse_decode`.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe with `out` and `lse_out`.
    """
    extra = (extra_kv_cache, extra_indices, extra_lengths)
    facts = check(q, kv, indices, softmax_scale, lengths, attn_sink, *extra, out, lse_out, kv_scale, q_scale, kv_layout)
    return find(SPARSE_PREFILL, backend, q, facts).call(
        q,
        kv,
        indices,
        softmax_scale=softmax_scale,
        lengths=lengths,
        attn_sink=attn_sink,
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
    lengths: bool
    attn_sink: bool
    lse: bool
    rows: int
    extra_topk: int | None
    extra_block_size: int | None
    extra_lengths: bool
    nope: bool
    q_scale: bool


def check(
    q: Tensor,
    kv: Cache,
    indices: Tensor,
    softmax_scale: float,
    lengths: Tensor | None,
    attn_sink: Tensor | None,
    extra_kv_cache: Cache | None,
    extra_indices: Tensor | None,
    extra_lengths: Tensor | None,
    out: Tensor | None,
    lse_out: Tensor | None,
    kv_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_layout: str | None = None,
) -> Facts:
    """Raise InvalidArgument, or return the facts; block_size is None for bfloat16 rows, which are flat."""
    where = TENSORS.where
    check_dense(where, "q", q, "[T, H, key width]")
    first = _check_rows("kv", kv, q.device, kv_layout=kv_layout)
    extra = (extra_kv_cache, extra_indices, extra_lengths)
    extra_size, caches = check_second_cache(where, first, q.device, *extra, read=_check_rows)
    layout = first.layout
    check_kv_scale(where, layout, kv_scale, q.device)
    nope = is_nope(q, layout)
    sizes = {"key": layout.value_width if nope else layout.key_width, "value": layout.value_width}
    TENSORS.check((q, kv, indices, lengths, attn_sink, *extra, out, lse_out), sizes, query_dtype(where, q, q_scale))
    check_scale(where, "softmax_scale", softmax_scale)
    return Facts(
        *caches,
        sizes["H"],
        sizes["K"],
        lengths is not None,
        attn_sink is not None,
        True,
        rounded_rows(sizes["T"]),
        None if extra_indices is None else sizes["E"],
        extra_size,
        extra_lengths is not None,
        nope,
        q_scale is not None,
    )


def _check_rows(argument: str, kv: Cache, device: torch.device, *, kv_layout: str | None) -> CacheFacts:
    """As `check_cache`, of flat rows as well; block_size is None for these."""
    where = TENSORS.where
    if isinstance(kv, tuple):
        return check_cache(where, argument, kv, device, kv_layout=kv_layout)
    check_dense(where, argument, kv, "[W, row width] or [blocks, block_size, row width]")
    layout = layout_of(kv, name=kv_layout, where=where, argument=argument)
    width = layout.row_width
    if layout.is_quantized:
        remedy = "Pass the paged cache itself: FP8 rows are read in place."
        shape_of(where, argument, kv, 3, f"[blocks, block_size, {width}]", remedy)
        return check_cache(where, argument, kv, device, kv_layout=layout.name)
    shape_of(where, argument, kv, 2, f"[W, {width}]", f"Flatten a bfloat16 cache: kv_cache.view(-1, {width}).")
    check_flat_rows(where, argument, kv, layout, device)
    return facts_of_rows(kv, layout)


@isolated
def reference(
    q: Tensor,
    kv: Cache,
    indices: Tensor,
    *,
    softmax_scale: float,
    lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_kv_cache: Cache | None = None,
    extra_indices: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    out: Tensor | None = None,
    lse_out: Tensor | None = None,
    kv_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_layout: str | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention of T query tokens over rows of a workspace or slots of a paged cache.

    `dtype` is that of the arithmetic. Allocates about `chunk_bytes` beyond the outputs, whatever T. Not graph-safe.
    """
    rows = CacheRows(kv, kv_layout=kv_layout)
    out, lse_out = head_results(q, rows.layout.value_width, out, lse_out)
    lists = [Keys(rows, indices, lengths, kv_scale)]
    if extra_kv_cache is not None and extra_indices is not None:
        lists.append(Keys(CacheRows(extra_kv_cache, kv_layout=rows.layout.name), extra_indices, extra_lengths, kv_scale))
    attend(q, lists, softmax_scale, attn_sink, out, lse_out, dtype, q_scale)
    return out, lse_out


SPARSE_PREFILL: Final = Primitive[SparsePrefill](
    "sparse_prefill",
    module=__name__,
    facts=Facts._fields,
    results=("out", "lse"),
    cache=KV,
    stated=("scale_format", "batch_invariant"),
    reference=reference,
    reference_float32=partial(reference, dtype=torch.float32),
)
