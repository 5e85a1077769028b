# SPDX-License-Identifier: Apache-2.0
"""StepViews: the parts of a step's plan, each with its rows of the buffers that the layers share.

Creating tensor views costs host time comparable to a kernel launch, so they are created once per step and shared by all layers.
V and R are the widths of the cache layout's latent and rotary part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_portable.contracts import PrefillChunk, StepPlan

JoinQuery = Callable[[Tensor, Tensor, Tensor], None]
"""Writes the halves of a query, ql_nope [T, H, V] and q_pe [T, H, R], side by side into the third argument, [T, H, V + R]."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenRange:
    """The tokens of one call.

    Attributes:
        begin, end: the step's tokens. shape: how the call wants them, (B, S) for sparse_decode, (T,) for sparse_prefill.
        indices: [*shape, K] int32. lengths: [*shape] int32. kept: tensors of all tokens, each with its rows of this part.
        gathered: what is gathered beforehand, and into which rows [W, V + R]; None where the cache itself is read.
    """

    begin: int
    end: int
    shape: tuple[int, ...]
    indices: Tensor
    lengths: Tensor
    kept: tuple[tuple[Tensor, Tensor], ...]
    gathered: tuple[PrefillChunk, Tensor] | None = None

    def rows(self, tensor: Tensor) -> Tensor:
        """A tensor [T, ...] of the step's tokens, as far as they are this part's: [*shape, ...]."""
        for whole, rows in self.kept:
            if whole is tensor:
                return rows
        return rows_of(tensor, self.begin, self.end, self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class StepViews:
    """A plan's parts, as views of the buffers.

    Attributes:
        plan: as given. indices: [T, K], counts: [T], lse: [T, H], query: [T, H, V + R]: the buffers' rows of all tokens.
        decodes: sparse_decode serves what the plan says it does; else sparse_prefill serves that too.
        decode: the leading tokens, None where nothing decodes. prefills: what follows, in order.
        end: tokens that the parts serve. kept: nothing but convert_indices writes `indices` and `counts`, from layer to layer.
    """

    plan: StepPlan
    decodes: bool
    indices: Tensor
    counts: Tensor
    lse: Tensor | None
    query: Tensor | None
    decode: TokenRange | None
    prefills: tuple[TokenRange, ...]
    end: int
    kept: bool

    def join_query(self, pair: tuple[Tensor, Tensor], join: JoinQuery) -> Tensor:
        """(ql_nope [T, H, V], q_pe [T, H, R]) -> [T, H, V + R] at a stable address; the last pair is overwritten."""
        assert self.query is not None  # StepCheck refuses a pair where the buffers have no room for it
        join(*pair, self.query)
        return self.query


def join_halves(ql_nope: Tensor, q_pe: Tensor, out: Tensor) -> None:
    """Write ql_nope [T, H, V] and q_pe [T, H, R] side by side into out [T, H, V + R]."""
    torch.cat((ql_nope, q_pe), dim=-1, out=out)


def rows_of(tensor: Tensor, begin: int, end: int, shape: tuple[int, ...]) -> Tensor:
    """Rows begin to end of a tensor [T, ...] as [*shape, ...]; the tensor itself where that is all of it."""
    part = tensor if begin == 0 and end == tensor.shape[0] else tensor[begin:end]
    return part if len(shape) == 1 else part.view(*shape, *part.shape[1:])
