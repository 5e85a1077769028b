# SPDX-License-Identifier: Apache-2.0
"""indexer_logits_blocks: scores of the keys in candidate blocks of each query token, of MXFP8 or MXFP4 numbers."""

from __future__ import annotations

import math
from functools import partial
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import Primitive
from mla_portable.contracts.values import INT32_MAX, check_count, refuse, rounded_rows
from mla_portable.dispatch import find, opaque
from mla_portable.kit.rules import check_dense
from mla_portable.kit.tensor_table import Axes, TensorTable
from mla_portable.layouts import INDEX_HEAD_SIZE
from mla_portable.models import DEEPSEEK_V41
from mla_portable.primitives._reference import isolated, products

__all__ = ["INDEXER_LOGITS_BLOCKS", "IndexerLogitsBlocks", "indexer_logits_blocks"]

MX_WIDTHS: Final = {torch.float8_e4m3fn: INDEX_HEAD_SIZE, torch.int8: INDEX_HEAD_SIZE // 2}
"""The dtype of MXFP8 and MXFP4 numbers, and elements of a row: an int8 has two e2m1 numbers, the first in its lower half."""
_CHUNK_ELEMENTS: Final = 1 << 21
"""Of the keys, and of the scores of all heads, that are held at a time: 16 MiB in float64."""

TENSORS: Final = TensorTable(
    "indexer_logits_blocks",
    {
        "q": Axes("T H width", not_empty="H"),
        "q_scales": Axes("T H", torch.int32),
        "weights": Axes("T H", torch.bfloat16),
        "keys": Axes("P page width"),  # of the dtype of q
        "key_scales": Axes("P page", torch.int32),
        "starts": Axes("T B", torch.int32),
        "lengths": Axes("T B", torch.int32),
        "out": Axes("T N", torch.bfloat16, written=True),
    },
    given="width N",
)


class IndexerLogitsBlocks(Protocol):
    """Scores of the keys in candidate blocks of each query token, of MXFP8 or MXFP4 numbers.

    q [T, H, 128] float8_e4m3fn and keys [P, page, 128], or q [T, H, 64] int8 and keys [P, page, 64], two e2m1 numbers in each
    byte, the first in its lower half. q_scales [T, H] and key_scales [P, page] int32: the four e8m0 scales of a row, one for 32
    numbers, the first in the lowest byte. weights [T, H] bf16; starts, lengths [T, B] int32: the first slot of each block,
    page number * page + offset, and how many of its `block_tokens` keys the token sees; absent where either is negative.
    Returns out [T, B * block_tokens] bf16: column b * block_tokens + o is sum_h weights[t, h] * max(q[t, h] . k, 0) for the key
    in slot starts[t, b] + o; -inf for o >= lengths[t, b], for slots that are none of the keys', and where the score is NaN.
    """

    def __call__(
        self,
        q: Tensor,
        q_scales: Tensor,
        weights: Tensor,
        keys: Tensor,
        key_scales: Tensor,
        starts: Tensor,
        lengths: Tensor,
        *,
        block_tokens: int,
        out: Tensor,
    ) -> Tensor: ...


@opaque
def indexer_logits_blocks(
    q: Tensor,
    q_scales: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scales: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    block_tokens: int,
    out: Tensor,
    backend: str | None = None,
) -> Tensor:
    """Score the keys in candidate blocks of each query token, of MXFP8 or MXFP4 numbers.

    Args:
        q: [T, H, 128] float8_e4m3fn; or [T, H, 64] int8, two e2m1 numbers in each, the first in the lower half.
        q_scales: [T, H] int32, four e8m0 scales each, of 32 numbers, the first in the lowest byte. weights: [T, H] bf16, of
            either sign.
        keys: [P, page, 128 or 64] of the dtype of q: pages of a cache, which may lie apart, or [1, N, ..] gathered keys.
        key_scales: [P, page] int32, like q_scales.
        starts: [T, B] int32, the slot of the first key of each block: page number * page + offset. lengths: [T, B] int32, the
            keys of the block that the token sees, from the first on. A block with a negative start or length is absent.
        block_tokens: keys of a block, at least 1. out: [T, B * block_tokens] bf16, written.
        backend: see `mla_portable.primitives`.
    Returns: `out` = sum over heads of weights * max(q.k, 0), -inf for what is absent, and where the score is NaN. Keys are
        scored as bf16 products of number and scale: scales below 2**-120 and above 2**120 may be lost.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe.
    """
    facts = check(q, q_scales, weights, keys, key_scales, starts, lengths, block_tokens, out)
    call = find(INDEXER_LOGITS_BLOCKS, backend, q, facts).call
    return call(q, q_scales, weights, keys, key_scales, starts, lengths, block_tokens=block_tokens, out=out)


class Facts(NamedTuple):
    """The fields of a Request that a call's arguments decide."""

    num_heads: int
    rows: int


def check(
    q: Tensor,
    q_scales: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scales: Tensor,
    starts: Tensor,
    lengths: Tensor,
    block_tokens: int,
    out: Tensor,
) -> Facts:
    """Raise InvalidArgument, or return the facts."""
    where = TENSORS.where
    check_dense(where, "q", q, "[T, H, width]")
    width = MX_WIDTHS.get(q.dtype)
    if width is None:
        refuse(where, "q", q.dtype, " or ".join(map(str, MX_WIDTHS)))
    check_count(where, "block_tokens", block_tokens, 1, INT32_MAX)
    check_dense(where, "starts", starts, "[T, B]")
    sizes = {"width": width, "N": starts.shape[-1] * block_tokens if starts.dim() else 0}
    TENSORS.check((q, q_scales, weights, keys, key_scales, starts, lengths, out), sizes, q.dtype)
    return Facts(sizes["H"], rounded_rows(sizes["T"]))


@isolated
def reference(
    q: Tensor,
    q_scales: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scales: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    block_tokens: int,
    out: Tensor,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Weighted sums over heads of the positive part of q.k, of gathered keys. `dtype` is that of the arithmetic."""
    (num_tokens, num_columns), (pages, page, _) = out.shape, keys.shape
    if not pages * page:
        return out.fill_(-math.inf)
    offset = torch.arange(block_tokens, dtype=torch.int64, device=q.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, num_columns * max(q.shape[1], INDEX_HEAD_SIZE)))
    for begin in range(0, num_tokens if num_columns else 0, step):
        rows = slice(begin, begin + step)
        first = starts[rows].to(torch.int64).unsqueeze(2)  # [n, B, 1]
        slot = first + offset  # [n, B, block_tokens]
        seen = (offset < lengths[rows].unsqueeze(2)) & (first >= 0) & (slot < pages * page)
        slot, seen = slot.masked_fill(~seen, 0).flatten(1), seen.flatten(1)  # [n, N]
        at = slot // page, slot % page
        values = _numbers(keys.view(torch.uint8)[at], key_scales[at], q.dtype, dtype)  # [n, N, 128]
        queries = _numbers(q[rows].view(torch.uint8), q_scales[rows], q.dtype, dtype)  # [n, H, 128]
        each = products(queries, values).relu_()  # [n, H, N]
        found = each.mul_(weights[rows].to(dtype).unsqueeze(-1)).sum(dim=1)
        out[rows] = found.masked_fill_(~seen | found.isnan(), -math.inf).to(out.dtype)
    return out


def _numbers(codes: Tensor, scales: Tensor, stored: torch.dtype, dtype: torch.dtype) -> Tensor:
    """[..., 128] of `dtype`: bytes [..., 128 or 64] of numbers in `stored` times scales [...] int32, four bytes each."""
    if stored == torch.int8:
        halves = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).long()
        sizes = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=dtype, device=codes.device)
        values = torch.cat([sizes, -sizes])[halves]
    else:
        values = codes.view(stored).float().to(dtype)
    exponents = scales.contiguous().view(torch.uint8).view(*scales.shape, 4).to(dtype) - 127
    factors = torch.exp2(exponents).masked_fill(exponents == 128, math.nan)  # [..., 4]
    return (values.unflatten(-1, (4, -1)) * factors.unsqueeze(-1)).flatten(-2)


INDEXER_LOGITS_BLOCKS: Final = Primitive[IndexerLogitsBlocks](
    "indexer_logits_blocks",
    module=__name__,
    facts=Facts._fields,
    results=("out",),
    typical={"num_heads": DEEPSEEK_V41.index_heads},
    reference=reference,
    reference_float32=partial(reference, dtype=torch.float32),
)
