# SPDX-License-Identifier: Apache-2.0
"""ContextShare: which tokens of every sequence are in the cache of one rank of decode context parallelism (DCP).

Sequences are dealt out in runs of `interleave` tokens: position t belongs to rank (t // interleave) % size, where it is
position t // (interleave * size) * interleave + t % interleave among the rank's own. A block table names blocks of own
positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mla_portable.contracts.values import INT32_MAX, check_count, refuse


@dataclass(frozen=True, slots=True)
class ContextShare:
    """The share of one rank; the default is the whole context.

    Attributes:
        size: ranks that share each sequence. rank: this one, 0 to size - 1. interleave: consecutive tokens on one rank.
    Raises: InvalidArgument for a rank outside of the group, and for runs whose round passes int32.
    """

    size: int = 1
    rank: int = 0
    interleave: int = 1

    def __post_init__(self) -> None:
        check_share("ContextShare", self.size, self.rank, self.interleave, names=("size", "rank", "interleave"))

    @property
    def arguments(self) -> dict[str, int]:
        """Keyword arguments of a primitive; none where the context is whole, so that any implementation may be called."""
        if self.size == 1:
            return {}
        return {"dcp_size": self.size, "dcp_rank": self.rank, "interleave": self.interleave}

    def lengths(self, lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Own tokens among the first `lengths` of sequences, int32 of any shape."""
        if self.size == 1:
            return lengths
        rounds, rest = np.divmod(lengths, self.size * self.interleave)
        return rounds * self.interleave + np.clip(rest - self.rank * self.interleave, 0, self.interleave)

    def length(self, length: int) -> int:
        """Own tokens among the first `length` of a sequence."""
        rounds, rest = divmod(length, self.size * self.interleave)
        return rounds * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)

    def own(self, positions: Tensor) -> Tensor:
        """Positions among the own ones, -1 for those of other ranks and for negative ones; int64 of any shape."""
        if self.size == 1:
            return positions
        run, place = positions.div(self.interleave, rounding_mode="floor"), positions.remainder(self.interleave)
        owned = (positions >= 0) & (run.remainder(self.size) == self.rank)
        return torch.where(owned, run.div(self.size, rounding_mode="floor") * self.interleave + place, -1)

    def positions(self, own: Tensor) -> Tensor:
        """The inverse of `own`: positions in the sequence of non-negative own positions; negative ones stay as they are."""
        if self.size == 1:
            return own
        run, place = own.div(self.interleave, rounding_mode="floor"), own.remainder(self.interleave)
        return torch.where(own < 0, own, (run * self.size + self.rank) * self.interleave + place)


def check_share(
    where: str, size: int, rank: int, interleave: int, *, names: tuple[str, str, str] = ("dcp_size", "dcp_rank", "interleave")
) -> None:
    """Raise InvalidArgument unless these make a ContextShare."""
    check_count(where, names[0], size, 1, INT32_MAX)
    check_count(where, names[1], rank, 0, INT32_MAX)
    check_count(where, names[2], interleave, 1, INT32_MAX)
    if rank >= size:
        refuse(where, names[1], str(rank), f"0 to {size - 1}, below {names[0]}")
    if size * interleave > INT32_MAX:
        refuse(where, names[2], str(interleave), f"at most {INT32_MAX // size}: a round of {names[0]} runs fits int32")


WHOLE: Final = ContextShare()
