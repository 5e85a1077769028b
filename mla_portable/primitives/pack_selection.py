# SPDX-License-Identifier: Apache-2.0
"""pack_selection: the positions that each token selects, as a bit mask."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from mla_portable.contracts import Primitive
from mla_portable.contracts.values import INT32_MAX, check_count, rounded_rows
from mla_portable.dispatch import find, opaque
from mla_portable.kit.tensor_table import Axes, TensorTable
from mla_portable.primitives._reference import isolated

__all__ = ["PACK_SELECTION", "PackSelection", "pack_selection"]

_CHUNK_BYTES: Final = 64 << 20
"""Of int64 temporaries, that are held at a time."""

TENSORS: Final = TensorTable(
    "pack_selection",
    {
        "topk_indices": Axes("T K", torch.int32, not_empty="K"),
        "starts": Axes("T", torch.int32, optional=True),
        "out": Axes("T W", torch.int32, optional=True, written=True),
    },
    given="W",
)


class PackSelection(Protocol):
    """The positions that each token selects, as a bit mask.

    topk_indices [T, K] int32 positions in the request, negative = absent, in any order, repeated or not; starts [T] int32.
    Returns int32 [T, W] with W = ceil(width / 32), which is `out` where given: bit j of word w says that position
    starts[t] + 32 w + j is selected. Positions outside of [starts[t], starts[t] + width) are left out. Graph-safe with `out`.
    """

    def __call__(
        self, topk_indices: Tensor, *, width: int, starts: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor: ...


@opaque
def pack_selection(
    topk_indices: Tensor,
    *,
    width: int,
    starts: Tensor | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The positions that each token selects, as a bit mask.

    Args:
        topk_indices: [T, K] int32, positions in the token's request; negative = absent, in any order, repeated or not.
        width: positions of a row, at least 1; W = ceil(width / 32) words. starts: [T] int32, the position of each row's first
            bit; None: 0.
        out: [T, W] int32, written; it overlaps no input. backend: see `mla_portable.primitives`.
    Returns: [T, W] int32; bit j of word w (the lowest is 0): position starts[t] + 32 w + j is selected. Positions outside of
        [starts[t], starts[t] + width) are left out, and bits from `width` on are 0.
    Raises: InvalidArgument, UnknownBackend, UnsupportedRequest. Graph-safe with `out`.
    """
    facts = check(topk_indices, width, starts, out)
    return find(PACK_SELECTION, backend, topk_indices, facts).call(topk_indices, width=width, starts=starts, out=out)


class Facts(NamedTuple):
    """The fields of a Request that a call's arguments decide."""

    topk: int
    rows: int


def check(topk_indices: Tensor, width: int, starts: Tensor | None, out: Tensor | None) -> Facts:
    """Raise InvalidArgument, or return the facts."""
    check_count(TENSORS.where, "width", width, 1, INT32_MAX)
    sizes = TENSORS.check((topk_indices, starts, out), {"W": num_words(width)})
    return Facts(sizes["K"], rounded_rows(sizes["T"]))


def num_words(width: int) -> int:
    """Words of 32 bits that hold `width` bits."""
    return -(-width // 32)


@isolated
def reference(topk_indices: Tensor, *, width: int, starts: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Sums of powers of two, one for each position of a row. Allocates about 64 MiB beyond the output, or what one row takes.

    What a row takes is counted by K: `width` adds nothing but words of the output.
    """
    num_tokens, topk = topk_indices.shape
    if out is None:
        out = torch.empty((num_tokens, num_words(width)), dtype=torch.int32, device=topk_indices.device)
    step = max(1, _CHUNK_BYTES // (64 * topk))
    for begin in range(0, num_tokens, step):
        rows = slice(begin, begin + step)
        position = topk_indices[rows].long().sort(dim=1).values  # [C, K]
        offset = position if starts is None else position - starts[rows].long().unsqueeze(1)
        selected = (position >= 0) & (offset >= 0) & (offset < width)
        selected[:, 1:] &= position[:, 1:] != position[:, :-1]  # a position that is repeated counts once
        offset = offset.masked_fill(~selected, 0)
        bit = selected.long() << offset % 32  # [C, K], below 2**32
        signed = torch.where(bit > INT32_MAX, bit - (1 << 32), bit).to(torch.int32)
        out[rows].zero_().scatter_add_(1, offset // 32, signed)
    return out


PACK_SELECTION: Final = Primitive[PackSelection](
    "pack_selection",
    module=__name__,
    facts=Facts._fields,
    results=("out",),
    reference=reference,
)
