# SPDX-License-Identifier: Apache-2.0
"""indexer_logits_ragged: scores of gathered keys, of a range of them for each query token."""

from __future__ import annotations

from functools import partial
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import Primitive
from mla_portable.contracts.values import refuse, rounded_rows
from mla_portable.dispatch import find, opaque
from mla_portable.kit.rules import check_dense
from mla_portable.kit.tensor_table import Axes, TensorTable
from mla_portable.layouts import INDEX, INDEX_BF16, INDEX_FP8, INDEX_HEAD_SIZE
from mla_portable.models import DEEPSEEK_V32
from mla_portable.primitives._indexer import QUERIES, query_dtype, scores
from mla_portable.primitives._reference import isolated

__all__ = ["INDEXER_LOGITS_RAGGED", "IndexerLogitsRagged", "indexer_logits_ragged"]

_CHUNK_ELEMENTS: Final = 1 << 25
"""Of the scores of all heads that are held at a time: 256 MiB in float64."""

TENSORS: Final = TensorTable(
    "indexer_logits_ragged",
    {
        **QUERIES,
        "keys": Axes("N width"),  # of the dtype of q
        "key_scales": Axes("N", torch.float32, optional=True),
        "row_starts": Axes("T", torch.int32),
        "row_ends": Axes("T", torch.int32),
        "out": Axes("T N", torch.float32, written=True),
    },
    given="width",
)


class IndexerLogitsRagged(Protocol):
    """Scores of gathered keys, a range of them for each query token.

    q [T, H, 128] and weights [T, H] float32; keys [N, 128] bf16 with q in bf16 and key_scales None, or keys in e4m3 with
    key_scales [N] float32 and q in e4m3, its scales in `weights`; row_starts, row_ends [T] int32, clamped to [0, N].
    Returns out [T, N] float32: out[t, s] = sum_h weights[t, h] * max(q[t, h] . k[s], 0), where k[s] is multiplied by its scale,
    for row_starts[t] <= s < row_ends[t]; -inf elsewhere, and where the score is NaN, as in `IndexerLogits`.
    """

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
    ) -> Tensor: ...


@opaque
def indexer_logits_ragged(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scales: Tensor | None,
    row_starts: Tensor,
    row_ends: Tensor,
    *,
    out: Tensor,
    kv_layout: str | None = None,
    backend: str | None = None,
) -> Tensor:
    """Score gathered keys, of a range of them for each query token.

    Args:
        q: [T, H, 128] bf16 for bf16 keys, float8_e4m3fn for e4m3 keys. weights: [T, H] float32, of either sign; scales of q
            are multiplied into them.
        keys: [N, 128] bf16 or float8_e4m3fn. key_scales: [N] float32 for e4m3 keys, else None.
        row_starts, row_ends: [T] int32, the keys that each token sees, clamped to [0, N].
        out: [T, N] float32, written. kv_layout, backend: see `mla_portable.primitives`.
    Returns: `out` = sum over heads of weights * max(q.k, 0) for keys of the token's range, -inf elsewhere.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe.
    """
    facts = check(q, weights, keys, key_scales, row_starts, row_ends, out, kv_layout)
    return find(INDEXER_LOGITS_RAGGED, backend, q, facts).call(q, weights, keys, key_scales, row_starts, row_ends, out=out)


class Facts(NamedTuple):
    """The fields of a Request that a call's arguments decide."""

    kv_layout: str
    num_heads: int
    rows: int


def check(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scales: Tensor | None,
    row_starts: Tensor,
    row_ends: Tensor,
    out: Tensor,
    kv_layout: str | None = None,
) -> Facts:
    """Raise InvalidArgument, or return the facts."""
    where = TENSORS.where
    check_dense(where, "q", q, "[T, H, 128]")
    check_dense(where, "keys", keys, "[N, 128]")
    if keys.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        refuse(where, "keys", keys.dtype, "torch.bfloat16 or torch.float8_e4m3fn")
    layout = INDEX_BF16 if keys.dtype == torch.bfloat16 else INDEX_FP8
    if kv_layout is not None and kv_layout != layout.name:
        refuse(where, "kv_layout", repr(kv_layout), f"{layout.name!r} for {keys.dtype} keys")
    if (key_scales is not None) is not layout.is_quantized:
        got = "None" if key_scales is None else "a tensor"
        refuse(where, "key_scales", got, "[N] float32 for e4m3 keys, None for bf16 keys")
    tensors = q, weights, keys, key_scales, row_starts, row_ends, out
    sizes = TENSORS.check(tensors, {"width": INDEX_HEAD_SIZE}, query_dtype(where, q, layout))
    return Facts(layout.name, sizes["H"], rounded_rows(sizes["T"]))


@isolated
def reference(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scales: Tensor | None,
    row_starts: Tensor,
    row_ends: Tensor,
    *,
    out: Tensor,
    kv_layout: str | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Weighted sums over heads of the positive part of q.k. `dtype` is that of the arithmetic; keys tell the layout."""
    values = keys.float().to(dtype)
    if key_scales is not None:
        values.mul_(key_scales.to(dtype).unsqueeze(1))
    column = torch.arange(keys.shape[0], dtype=torch.int64, device=q.device)
    step = max(1, _CHUNK_ELEMENTS // max(q.shape[1] * keys.shape[0], 1))
    for begin in range(0, q.shape[0], step):
        rows = slice(begin, begin + step)
        seen = (column >= row_starts[rows].unsqueeze(1)) & (column < row_ends[rows].unsqueeze(1))
        out[rows] = scores(q[rows], weights[rows], values, seen)
    return out


INDEXER_LOGITS_RAGGED: Final = Primitive[IndexerLogitsRagged](
    "indexer_logits_ragged",
    module=__name__,
    facts=Facts._fields,
    results=("out",),
    cache=INDEX,
    typical={"num_heads": DEEPSEEK_V32.index_heads, "kv_layout": "index_fp8"},
    reference=reference,
    reference_float32=partial(reference, dtype=torch.float32),
)
