# SPDX-License-Identifier: Apache-2.0
"""topk_select: the positions of the K largest scores of each row, of a range of its columns."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import Primitive
from mla_portable.contracts.values import INT32_MAX, check_count, check_flag, refuse, rounded_rows
from mla_portable.dispatch import find, opaque
from mla_portable.kit.tensor_table import Axes, TensorTable
from mla_portable.primitives._reference import isolated

__all__ = ["TOPK_SELECT", "TopkSelect", "topk_select"]

_CHUNK_ELEMENTS: Final = 1 << 20
"""Scores that are sorted at a time: about 40 MiB with their positions and temporaries."""

TENSORS: Final = TensorTable(
    "topk_select",
    {
        "logits": Axes("T N", torch.float32),
        "row_starts": Axes("T", torch.int32),
        "row_ends": Axes("T", torch.int32),
        "out": Axes("T K", torch.int32, optional=True, written=True),
    },
    given="K",
)


class TopkSelect(Protocol):
    """The positions of the K largest scores of each row, in ascending order; in any where the request does not ask for it.

    logits [T, N] float32; row t is searched from column row_starts[t] to row_ends[t], [T] int32, clamped to [0, N]; the
    range is empty where the end is not past the start. Returns out [T, topk] int32, which is `out` where given: positions
    relative to the clamped start, then -1. Of equal scores (0.0 equals -0.0) the lower positions are chosen; -inf and NaN
    never are. What is bound for a request without `Request.ordered` may list them in any order, in front of -1; which ones are
    chosen stays the same.
    Graph-safe with `out`; scratch of at most 64 MiB may be allocated on the current stream.
    """

    def __call__(
        self, logits: Tensor, row_starts: Tensor, row_ends: Tensor, *, topk: int, out: Tensor | None = None
    ) -> Tensor: ...


@opaque
def topk_select(
    logits: Tensor,
    row_starts: Tensor,
    row_ends: Tensor,
    *,
    topk: int,
    ordered: bool = True,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The positions of the K largest scores of each row, in ascending order.

    Args:
        logits: [T, N] float32. row_starts, row_ends: [T] int32, the columns of each row that count, clamped to [0, N].
        topk: K, at least 1; T * K is less than 2**31 where no `out` is given. out: [T, K] int32, written; it overlaps no input.
        ordered: False allows any order of the positions, still in front of -1, which may differ from call to call.
        backend: see `mla_portable.primitives`.
    Returns: [T, K] int32, positions relative to the row's start, then -1 where fewer than K scores are greater than -inf. Of
        equal scores the lower positions are chosen; -inf and NaN never are.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe with `out`.
    """
    facts = check(logits, row_starts, row_ends, topk, ordered, out)
    return find(TOPK_SELECT, backend, logits, facts).call(logits, row_starts, row_ends, topk=topk, out=out)


class Facts(NamedTuple):
    """The fields of a Request that a call's arguments decide."""

    topk: int
    ordered: bool
    rows: int


def check(logits: Tensor, row_starts: Tensor, row_ends: Tensor, topk: int, ordered: bool, out: Tensor | None) -> Facts:
    """Raise InvalidArgument, or return the facts."""
    check_count(TENSORS.where, "topk", topk, 1, INT32_MAX)
    check_flag(TENSORS.where, "ordered", ordered)
    sizes = TENSORS.check((logits, row_starts, row_ends, out), {"K": topk})
    check_result_size(TENSORS.where, topk, sizes["T"], out)
    return Facts(topk, ordered, rounded_rows(sizes["T"]))


def check_result_size(where: str, topk: int, num_rows: int, out: Tensor | None) -> None:
    """Without `out` the result [T, K] of a selection is allocated: it has at most 2**31 - 1 entries."""
    if out is None and num_rows * topk > INT32_MAX:
        most = f"at most {INT32_MAX // num_rows} for {num_rows} rows, as no `out` is given"
        refuse(where, "topk", topk, most, "Pass `out`, or fewer rows.")


@isolated
def reference(logits: Tensor, row_starts: Tensor, row_ends: Tensor, *, topk: int, out: Tensor | None = None) -> Tensor:
    """A stable sort of each row. Allocates at most 64 MiB beyond the output, except where one row takes more."""
    num_rows, num_logits = logits.shape
    if out is None:
        out = torch.empty((num_rows, topk), dtype=torch.int32, device=logits.device)
    out.fill_(-1)
    column = torch.arange(num_logits, dtype=torch.int64, device=logits.device)
    step = max(1, _CHUNK_ELEMENTS // max(num_logits, 1))
    for begin in range(0, num_rows, step):
        rows = slice(begin, begin + step)
        starts = row_starts[rows].long().clamp(min=0).unsqueeze(1)  # [C, 1]
        inside = (column >= starts) & (column < row_ends[rows].unsqueeze(1))
        scores = torch.where(inside & (logits[rows] > -torch.inf), logits[rows] + 0.0, -torch.inf)  # [C, N]; NaN is not greater
        best, order = scores.sort(dim=1, descending=True, stable=True)
        best, order = best[:, :topk], order[:, :topk]
        chosen = torch.where(best > -torch.inf, order - starts, num_logits).sort(dim=1).values
        out[rows, : chosen.shape[1]] = torch.where(chosen < num_logits, chosen, -1).to(torch.int32)
    return out


TOPK_SELECT: Final = Primitive[TopkSelect](
    "topk_select",
    module=__name__,
    facts=Facts._fields,
    results=("out",),
    reference=reference,
)
